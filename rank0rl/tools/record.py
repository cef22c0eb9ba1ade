"""python -m rank0rl record RUN --minari NAME: write episodes of a run's policy as a Minari dataset.

Ranks play the episodes, and rank 0 writes them. The content is the same for every number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro

from rank0rl.launch import fork, job, usage_error
from rank0rl.options import check as check_options
from rank0rl.options import option, read_some
from rank0rl.run import files
from rank0rl.tools import evaluate

if TYPE_CHECKING:
    from rank0rl.policy import Policy

_ROUND = 64  # episodes between two gathers


@dataclass(frozen=True, kw_only=True)
class Options(evaluate.Options):
    """Write episodes of a run's policy as a Minari dataset (pip install "minari[hdf5]")."""

    minari: str
    """Name of the dataset, such as walker2d/ppo-v0. It is made where MINARI_DATASETS_PATH says, or in ~/.minari/datasets."""
    seed: int | None = option(None, "[0, inf)")
    """Seed of the episodes, >= 0. None: the run's seed. Training and evaluation see none of these episodes."""
    nprocs: int = option(1, "[1, inf)")
    """Number of ranks that play."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl record")
    try:
        check_options(given)
        if fork.mpi_fork(read_some(argv, Options, ["nprocs"]).get("nprocs")) == "parent":
            return 0
        policy = _load(given)
    except ValueError as error:
        return 2 if job.world_rank() else usage_error(str(error))
    _record(given, policy)
    return 0


def _load(given: Options) -> Policy:
    """Load the policy. Collective: every rank calls this.

    Raises:
        ValueError: if the run cannot be loaded, or there can be no such dataset.
    """
    from rank0rl.mpi import comm
    from rank0rl.mpi.threads import set_threads
    from rank0rl.policy import load
    from rank0rl.run.agents import share_refusal

    set_threads(1)
    refusal = "" if comm.get_rank() else _refused(given.minari)
    try:
        policy = load(given.run, given.trust)
    except ValueError as error:
        refusal = refusal or str(error)
    share_refusal(refusal)
    return policy


def _record(given: Options, policy: Policy) -> None:
    """Play and write on the ranks. Collective: every rank calls this."""
    from rank0rl import evaluation, seeding
    from rank0rl.envs.block import make_block
    from rank0rl.mpi import comm
    from rank0rl.mpi.comm import Counter
    from rank0rl.rollout import WholeEpisodes
    from rank0rl.run.shares import env_maker

    agent, options = policy.agent, policy.options
    seed = seeding.integer(options.seed if given.seed is None else given.seed, "record", 0, 0)
    counter, left = Counter(_ROUND), given.episodes

    def numbers() -> Iterator[int]:
        return (number for number in counter.round() if number < left)

    first = evaluation.MAX_ENVS * comm.get_rank()
    indices = range(first, first + evaluation.MAX_ENVS)
    make_env = env_maker(options, evaluation=True)
    block = make_block(make_env, indices, seed)
    rollout = WholeEpisodes(block, numbers)
    acting = evaluation.Deterministic.of(agent, given.deterministic)
    episodes: list[dict[str, Any]] = []
    with contextlib.closing(rollout):
        for number in range(-(-given.episodes // _ROUND)):
            left = given.episodes - number * _ROUND
            episodes += _gathered(rollout, rollout.collect(acting, number + 1)[0], agent.info)
    if comm.get_rank() == 0:
        space = rollout.envs[0].gym.action_space
        _write(given.minari, episodes, rollout.spaces.obs, space, options, agent.info)


def _gathered(rollout: Any, fragments: Sequence[Any], info: Sequence[str]) -> list[dict[str, Any]]:
    """Return the episodes of all ranks on rank 0, in order, name -> array each; none elsewhere.

    Items of the info that the agent reads have names such as "info/cost".
    """
    from rank0rl.batch import concatenate, in_order
    from rank0rl.mpi import comm
    from rank0rl.mpi.gather import rank0_accum_batches

    each = [
        {
            "act": np.asarray(rollout.block.to_env(one.act)),
            **{name: getattr(one, name) for name in ("obs", "rew", "terminated", "truncated")},
            **{f"info/{name}": one.extras[name] for name in info},
            "fragment_id": np.full(len(one.rew), one.fragment_id),
        }
        for one in fragments
    ]
    ends = [
        {"end_obs": one.end_obs, "fragment_id": np.array([one.fragment_id])} for one in fragments
    ]
    mine = {"steps": concatenate(each), "ends": concatenate(ends)}
    gathered = rank0_accum_batches(mine if fragments else {})
    if comm.get_rank():
        return []
    steps, last = (
        in_order(gathered[name], gathered[name]["fragment_id"]) for name in ("steps", "ends")
    )
    cuts = np.flatnonzero(np.diff(steps.pop("fragment_id"))) + 1
    split = {name: np.split(array, cuts) for name, array in steps.items()}
    split["obs"] = [
        np.concatenate([obs, end_obs[None]])
        for obs, end_obs in zip(split["obs"], last["end_obs"], strict=True)
    ]
    return [dict(zip(split, arrays, strict=True)) for arrays in zip(*split.values(), strict=True)]


def _refused(name: str) -> str:
    """Return why there can be no new dataset of this name; "" if there can be one."""
    try:
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.storage import get_dataset_path
    except ModuleNotFoundError as error:
        return f"this tool needs Minari ({error.name!r} is missing): pip install 'minari[hdf5]'"
    try:
        parse_dataset_id(name)
    except Exception as error:  # whatever Minari raises for it
        return f"--minari must be a name and a version, such as walker2d/ppo-v0: got {name!r} ({error})"
    try:
        is_there = get_dataset_path(name).exists()
    except OSError as error:
        return f"MINARI_DATASETS_PATH is no folder to write to: {error}"
    if is_there:
        return (
            f"there is a dataset {name!r} in {get_dataset_path()} already: choose another name or "
            f"version, or remove it with: minari delete {name}"
        )
    return ""


@contextlib.contextmanager
def _complete_or_absent(name: str) -> Iterator[None]:
    """Let Minari write into a folder beside its datasets; move what it has written when it is done."""
    from minari.storage import get_dataset_path

    variable = "MINARI_DATASETS_PATH"
    root, before = Path(get_dataset_path()), os.environ.get(variable)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".rank0rl-") as folder:
        os.environ[variable] = folder
        try:
            yield
        finally:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before
        made, dataset = Path(folder, name), root / name
        dataset.parent.mkdir(parents=True, exist_ok=True)
        for about in made.parent.glob("*.json"):  # of the namespace
            if not (dataset.parent / about.name).exists():
                shutil.copy(about, dataset.parent)
        for written in [*made.rglob("*"), made]:
            files.sync(written)
        made.rename(dataset)
        files.sync(dataset.parent)


def _write(
    name: str,
    episodes: Sequence[dict[str, Any]],
    obs: Any,
    act_space: Any,
    options: Any,
    info: Sequence[str],
) -> None:
    """Write the episodes, and say what they are. Rank 0 only."""
    import minari
    from gymnasium.spaces import Box
    from minari.data_collector.episode_buffer import EpisodeBuffer

    from rank0rl.mpi import weights
    from rank0rl.run.agents import short_name

    arrays = {f"{i}.{name}": array for i, one in enumerate(episodes) for name, array in one.items()}
    sha256 = weights.sha256_arrays(arrays)
    buffers = [
        EpisodeBuffer(
            observations=one["obs"],
            actions=one["act"],
            rewards=one["rew"],
            terminations=one["terminated"],
            truncations=one["truncated"],
            infos={name: one[f"info/{name}"] for name in info},
        )
        for one in episodes
    ]
    is_known = ":" not in options.env_id and not options.env_kwargs and not options.wrappers
    with _complete_or_absent(name), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Minari asks for an author and the like
        minari.create_dataset_from_buffers(
            name,
            buffers,
            env=options.env_id if is_known else None,
            observation_space=Box(obs.low, obs.high, obs.shape, np.dtype(obs.dtype)),
            action_space=act_space,
            algorithm_name=short_name(options.algo),
            description=f"{options.env_id}, by rank0rl; SHA-256 of the content: {sha256}",
            jpeg_encoding=False,
        )
    ret = np.array([one["rew"].sum() for one in episodes])
    steps = sum(len(one["rew"]) for one in episodes)
    print(
        f"{name}: {len(ret)} episodes, {steps:,} steps, return {ret.mean():.6g} (standard deviation "
        f"{ret.std():.4g}); sha256 {sha256}"
    )
