"""python -m rank0rl check ENV: test that an environment, or an agent, gives the same curve for every number of ranks.

One environment takes random actions. The same steps are repeated under conditions that must not
matter. The first condition that makes a difference shows what is wrong. With --algo, short runs of the
agent do the same, and functions of torch that it calls are looked up: some have other bits on other CPUs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tyro
from torch.utils._python_dispatch import TorchDispatchMode

from rank0rl.agent import Agent, Fragment, NoOptions, Space, Spaces, Step, choose
from rank0rl.batch import Batch
from rank0rl.envs.block import make_block
from rank0rl.envs.games import agents_of
from rank0rl.envs.make import make, resolve, takes_place
from rank0rl.envs.resume import restore
from rank0rl.envs.spaces import keep_float64
from rank0rl.envs.state import has_state
from rank0rl.envs.wrappers import running_statistics
from rank0rl.launch import python, usage_error
from rank0rl.launch.mpiexec import find_mpiexec
from rank0rl.options import check as check_options
from rank0rl.options import option
from rank0rl.rollout import FixedSteps
from rank0rl.run import settings
from rank0rl.run.hooks import Hook
from rank0rl.run.logger import read_rows
from rank0rl.run.options import EnvId, Pairs
from rank0rl.run.shares import place_of
from rank0rl.run.state import Unfinished
from rank0rl.run.trust import without_seal
from rank0rl.tools.study.planned import Planned

_ITERATIONS = 4
_ROUNDING = 1e-12  # of a number; what changes by less is noise of float64
_HASHES = {
    "batch_sha256": "rows differ from iteration {} on: what act and process return is not the same",
    "weights_sha256": "weights differ from iteration {} on, after the same rows: update is not repeatable, "
    "or state() and load() miss something",
}
_BY_CPU = {
    "mkldnn_rnn_layer": "nn.LSTM",
    "linalg_lstsq": "linalg.lstsq",
    "linalg_cholesky_ex": "linalg.cholesky",
    "cholesky": "cholesky",
}
"""Functions of torch that have other bits on other CPUs with --cpu portable, of 144 that were tried."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Test that an environment repeats an episode from its seed and actions, whatever runs beside it."""

    env_id: EnvId
    """Environment: Walker2d (its newest version), Walker2d-v4, module:EnvId-v0, or module:function."""
    steps: int = option(1000, "[1, inf)")
    """Environment steps of each comparison. More steps find differences that appear late."""
    others: int = option(3, "[1, inf)")
    """Further environments that run in the same process in one of the comparisons."""
    seed: int = option(0, "[0, inf)")
    """Seed of the episodes and actions, >= 0."""
    wrappers: tuple[str, ...] = ()
    """Wrappers of the environment, as in training."""
    env_kwargs: Pairs = option({})
    """Arguments of the environment, such as healthy_reward=0.5. Values are JSON."""
    algo: str | None = None
    """Test this agent too, with short runs: a name in algos/, file.py:Class, or package.module:Class. Options of training may follow."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0 if no condition matters, 1 if one does, 2 for a wrong use."""
    given, rest = tyro.cli(
        Options, args=argv, prog="python -m rank0rl check", return_unknown_args=True
    )
    try:
        check_options(given)
        if rest and not given.algo:
            raise ValueError(f"unknown options {' '.join(rest)}: options of training need --algo")
        env_id = resolve(given.env_id)
        make_env = partial(make, env_id, given.wrappers, place_of(), **given.env_kwargs)
        findings: list[tuple[str, str]] = []
        for found in _conditions(make_env, given.steps, given.others, given.seed):
            if not findings:
                print(f"{env_id}: one environment, {given.steps} steps with random actions")
            findings += _print([found])
    except ValueError as error:  # perhaps the environment's: its notes say where
        return usage_error("\n".join([str(error), *getattr(error, "__notes__", [])]))
    if lost := lost_digits(make_env, given.steps, given.seed):
        print(f"note: {lost}")
    with tempfile.TemporaryDirectory(prefix="rank0rl-check-") as folder:
        on_ranks, as_program = _check_ranks(given, make_env, Path(folder))
    findings += _print(on_ranks.items())
    if given.algo:
        print(f"{given.algo}: runs of a few iterations")
        with tempfile.TemporaryDirectory(prefix="rank0rl-check-") as folder:
            findings += _print(_check_agent(_words(given, rest), Path(folder)))
            by_cpu = "not known"
            if "trained" not in dict(findings):
                by_cpu = _by_cpu(_words(given, rest), Path(folder, "watched"))
    good = not any(finding for _, finding in findings)
    were_several = any(condition.startswith("on ") for condition, _ in findings)
    answer = "yes" if were_several else "yes, as far as one rank shows"
    print(f"the same curve for every number of ranks: {answer if good else 'NO'}")
    if as_program is not None:
        print(
            f"the same curve with --ranks-per-env 2: {f'NO, {as_program}' if as_program else 'yes'}"
        )
    if given.algo:
        print(
            f"the same curve on every x86-64 CPU: {by_cpu or 'yes, as far as functions of torch go'}"
        )
    return 0 if good else 1


def _print(findings: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Print each finding when it is known; return all."""
    known = []
    for condition, finding in findings:
        print(f"  {condition:34} {finding or 'the same'}", flush=True)
        known.append((condition, finding))
    return known


def _check_ranks(
    given: Options, make_env: Callable[[], Any], folder: Path
) -> tuple[dict[str, str], str | None]:
    """Train for two iterations with one rank and several, in an empty folder.

    Returns:
        As `check`, for ranks with environments of their own; nothing if there is no MPI here, or no short run can be
        made. And what a second process of one rank changes, for an environment that takes its place, else None.
    """
    env = make_env()
    num_envs = 2 * len(agents_of(env))
    env.close()
    brief = (
        f"--num-envs {num_envs} --steps-per-batch {50 * num_envs} --total-steps {500 * num_envs}"
    )
    words = _words(dataclasses.replace(given, algo="reinforce"), brief.split())
    if not (find_mpiexec() and importlib.util.find_spec("mpi4py")):
        return {}, None
    if failed := _trained(words, folder / "alone", 2):
        print(f"  {'on 2 ranks':34} not tried: {failed}")
        return {}, None

    def changed_by(option: str) -> str:
        run = folder / option
        failed = _trained([*words, f"--{option}", "2"], run, 2)
        return failed or _difference_of_runs(folder / "alone", run)

    as_program = changed_by("ranks-per-env") if takes_place(resolve(given.env_id)) else None
    return {"on 2 ranks": changed_by("nprocs")}, as_program


def _words(given: Options, rest: Sequence[str]) -> list[str]:
    """Return the command line of training with the agent in this environment."""
    words = [given.env_id, "--algo", str(given.algo), "--seed", str(given.seed), *rest]
    if given.wrappers:
        words += ["--wrappers", *given.wrappers]
    kwargs = [f"{name}={json.dumps(value)}" for name, value in given.env_kwargs.items()]
    return [*words, "--env-kwargs", *kwargs] if kwargs else words


def check(
    make_env: Callable[[], Any], *, steps: int = 1000, others: int = 3, seed: int = 0
) -> dict[str, str]:
    """Compare one environment with itself under conditions that must not matter, as `Options` says.

    Returns:
        Condition -> what it changes, "" if it changes nothing.

    Raises:
        ValueError: for a space that no agent can use.
    """
    return dict(_conditions(make_env, steps, others, seed))


def _conditions(
    make_env: Callable[[], Any], steps: int, others: int, seed: int
) -> Iterator[tuple[str, str]]:
    """Yield each condition of `check`, and what it changes, as soon as it is known."""

    def run(
        global_seed: int, num_envs: int = 1, made_by: Callable[[], Any] = make_env
    ) -> list[Fragment]:
        random.seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002 - some environments use it
        rollout = FixedSteps(make_block(lambda _: made_by(), range(num_envs), seed), steps)
        fragments, _ = rollout.collect(RandomAgent(rollout.spaces, NoOptions(), None), 1)
        return fragments[: len(rollout.block.groups[0])]

    def second_half(restored: bool) -> list[Fragment]:
        block = make_block(lambda _: make_env(), range(1), seed)
        rollout, agent = FixedSteps(block, half), RandomAgent(block.spaces, NoOptions(), None)
        rollout.collect(agent, 1)
        if restored:
            unfinished = Unfinished(0)
            unfinished.add(rollout.unfinished())
            rollout = FixedSteps(make_block(lambda _: make_env(), range(1), seed), half)
            restore(rollout.block, unfinished.all())
        return rollout.collect(agent, 2)[0]

    half = -(-steps // 2)
    env = make_env()
    states = has_state(env)
    first = run(0, made_by=lambda: env)
    used = _global_generators_used(0)
    by_global = _difference(first, run(1))
    if by_global and used:
        by_global += f": it draws from {used}, not from self.np_random"
    wrappers = running_statistics(env)
    yield "repeated in a new environment", _difference(first, run(0))
    yield "repeated in the same environment", _difference(first, run(0, made_by=lambda: env))
    yield "with other global random numbers", by_global
    beside = f"beside {others} other environment{'s' * (others > 1)}"
    yield beside, _difference(first, run(0, num_envs=1 + others))
    told = f"changed by the statistics of {' and '.join(wrappers)}" if wrappers else ""
    yield "after any earlier use", told
    if states:
        yield "restored from its state", _difference(second_half(False), second_half(True))


def lost_digits(make_env: Callable[[], Any], steps: int, seed: int) -> str:
    """Return a note on observations whose changes in some steps are too small for float32; "" if there are none."""

    def exact(_: int) -> Any:
        env = make_env()
        for each in agents_of(env):
            if each.observation_space.dtype == np.float64:
                keep_float64(each)
        return env

    block = make_block(exact, range(1), seed)
    rollout = FixedSteps(block, steps)
    fragments, _ = rollout.collect(RandomAgent(block.spaces, NoOptions(), None), 1)
    obs = np.concatenate([fragment.obs.reshape(len(fragment.obs), -1) for fragment in fragments])
    rollout.close()
    if obs.dtype != np.float64:
        return ""
    rounded = obs.astype(np.float32)
    changes = (abs(obs - obs[0]) > _ROUNDING * abs(obs[0])).any(axis=0)
    lost = np.flatnonzero(changes & (rounded == rounded[0]).all(axis=0))
    if not len(lost):
        return ""
    some = ", ".join(map(str, lost[:5])) + (", ..." if len(lost) > 5 else "")
    return (
        f"an observation changes at index {some}, but not in float32: set --obs-dtype float64, or let the "
        f"environment scale it"
    )


class RandomAgent(Agent):
    """An agent that acts at random within the bounds, from each environment's own stream."""

    def __init__(self, spaces: Spaces, options: NoOptions, rng: Any) -> None:
        """Take the space of actions; there is nothing to learn."""
        self.space = spaces.act
        self.noise = ("uniform", int(np.prod(self.space.shape)))

    def act(self, step: Step) -> tuple[npt.NDArray[Any], Batch]:
        """Return uniform actions between the bounds, or on [-1, 1] where there are none."""
        if self.space.kind != "hybrid":
            return _random(self.space, step.noise, step.mask), {}
        choices, numbers = self.space.halves()
        n = len(self.space.choices)
        both = [
            _random(choices, step.noise[:, :n], step.mask),
            _random(numbers, step.noise[:, n:], None),
        ]
        return np.concatenate(both, axis=1, dtype=np.float32), {}


def _random(space: Space, noise: npt.NDArray[Any], mask: Any) -> npt.NDArray[Any]:
    """Return a uniform action of a space for each row of uniform noise."""
    if space.choices:
        return choose(np.zeros((len(noise), space.size)), noise, space, mask)
    assert space.low is not None
    assert space.high is not None
    low = np.where(np.isfinite(space.low), space.low, -1).astype(np.float32)
    high = np.where(np.isfinite(space.high), space.high, 1).astype(np.float32)
    return low + (high - low) * noise.reshape(-1, *space.shape)


def _difference(all_a: Sequence[Fragment], all_b: Sequence[Fragment]) -> str:
    """Return the first array that differs and its step, or "" if none does. A game has a fragment an agent."""
    firsts: dict[str, int] = {}
    for a, b in zip(all_a, all_b, strict=True):
        for name in ("obs", "rew", "terminated", "truncated"):
            x, y = getattr(a, name), getattr(b, name)
            same = [p.tobytes() == q.tobytes() for p, q in zip(x, y, strict=False)]
            if not all(same) or len(x) != len(y):
                step = [*same, False].index(False)
                firsts[name] = min(step, firsts.get(name, step))
    if not firsts:
        return ""
    name = min(firsts, key=lambda key: firsts[key])
    return f"{name} differs from step {firsts[name]} on"


def _global_generators_used(global_seed: int) -> str:
    """Find the global generators that have drawn numbers since they were seeded."""

    def state() -> dict[str, Any]:
        numpy_state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
        return {
            "Python's global random": random.getstate(),
            "NumPy's global np.random": (numpy_state["key"].tobytes(), numpy_state["pos"]),
        }

    now = state()
    random.seed(global_seed)
    np.random.seed(global_seed)  # noqa: NPY002
    then = state()
    return " and ".join(name for name in now if now[name] != then[name])


def _check_agent(words: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Train for a few iterations under conditions that must not matter, in an empty folder.

    Yields:
        Each condition, and what it changes or why the run has failed; "" if it changes nothing. If the
        first run fails, there is only that.
    """
    if failed := _trained(words, folder / "first"):
        yield "trained", failed
        return
    conditions = {"repeated": [], "with evaluations": ["--eval-every", "1", "--eval-episodes", "2"]}
    if find_mpiexec() and importlib.util.find_spec("mpi4py"):
        run_options, _ = settings.of_file(
            without_seal(settings.load(folder / "first" / "config.toml")), ""
        )
        most = Planned("", (), run_options).most
        conditions |= {f"on {n} ranks": ["--nprocs", str(n)] for n in (2, 3) if n <= most}
    for condition, more in conditions.items():
        run = folder / condition.replace(" ", "-")
        failed = _trained([*words, *more], run)
        yield condition, failed or _difference_of_runs(folder / "first", run)
    run = folder / "resumed"
    half = _trained(words, run, _ITERATIONS // 2) or _trained(
        ["--resume", str(run), "--trust"], run
    )
    yield "stopped and resumed", half or _difference_of_runs(folder / "first", run)


def _trained(words: Sequence[str], run: Path, iterations: int = _ITERATIONS) -> str:
    """Train in a folder; return "", or why that has failed."""
    where = [] if "--resume" in words else ["--run-dir", str(run)]
    more = ["--stop-after-iterations", str(iterations), "--drift-check-every", "1", "--quiet"]
    command, env = python("-m", "rank0rl", "train", *words, *where, *more)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if not done.returncode:
        return ""
    lines = [line for line in done.stderr.splitlines() if "Error: " in line or "error: " in line]
    return (lines or done.stderr.splitlines() or [f"it ended with code {done.returncode}"])[0]


def _difference_of_runs(a: Path, b: Path) -> str:
    """Return what differs first in the records of two runs; "" if nothing does."""
    rows, others = read_rows(a), read_rows(b)
    if len(rows) != len(others):
        return f"{len(others)} iterations, not {len(rows)}"
    for i, (mine, other) in enumerate(zip(rows, others, strict=True), 1):
        for column, words in _HASHES.items():
            if mine[column] != other[column]:
                return words.format(i)
    return ""


class _Watch(Hook):
    """Writes down which functions of `_BY_CPU` rank 0 calls, from the first iteration on."""

    def __init__(self) -> None:
        self._called, self._open = _Called(), ExitStack()

    def before(self, iteration: int) -> None:
        """Begin to look."""
        if iteration == 1:
            self._open.enter_context(self._called)

    def close(self) -> None:
        """Write the names."""
        self._open.close()
        (self.folder / "by_cpu.json").write_text(json.dumps(sorted(self._called.names)))


class _Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the names of functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _BY_CPU:
            self.names.add(_BY_CPU[name])
        elif name in ("pow", "pow_") and isinstance(args[1], float) and abs(args[1]) == 0.5:
            self.names.add(f"pow({args[1]})")
        return func(*args, **(kwargs or {}))


def _by_cpu(words: Sequence[str], run: Path) -> str:
    """Return why a run differs by CPU, after some iterations of it; "" if no reason is known."""
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--hook"), len(words))
    first = [word.partition("=")[2] for word in words[at : at + 1]]
    hooks = [f"{__name__}:_Watch", *filter(None, first)]
    if _trained([*words[:at], "--hook", *hooks, *words[at + 1 :]], run, 2):
        return "not known"
    called = json.loads((run / "by_cpu.json").read_text())
    cpu = settings.load(run / "config.toml")["cpu"]
    if cpu != "portable":
        return f"NO, with --cpu {cpu}"
    return (
        f"NO: torch's {' and '.join(called)} has other last bits on other types" if called else ""
    )
