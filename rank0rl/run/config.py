"""The settings of a run: dataclass defaults, under a TOML file, under the command line."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w
import tyro

from rank0rl.agent import check_ranges
from rank0rl.mpi import job, launch


def _pairs(words: list[str]) -> dict[str, Any]:
    """["a=1", "b=x"] -> {"a": 1, "b": "x"}: values are JSON, or else plain strings."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"expected NAME=VALUE, got {word!r}")
        try:
            pairs[name] = json.loads(value)
        except json.JSONDecodeError:
            pairs[name] = value
        if pairs[name] is None:
            raise ValueError(f"{name} cannot be null: leave it out for its default")
    return pairs


Pairs = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE ...",
        instance_from_str=_pairs,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda pairs: [f"{k}={json.dumps(v)}" for k, v in pairs.items()],
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """What every run has, whatever the agent."""

    env_id: tyro.conf.Positional[str] = ""
    """Environment: Walker2d (newest version), Walker2d-v4, module:EnvId-v0, or module:function."""
    algo: str = "ppo"
    """Agent: a name in algos/, file.py:Class, or package.module:Class."""
    nprocs: int | None = None
    """Ranks. Changes how long a run takes, and nothing else. None: the launcher's; else the slots of all hosts, else 1."""
    hosts: str | None = None
    """Where the ranks are, such as a:8,b:8, by ssh; this host comes first. None: here."""
    hostfile: str | None = None
    """File of the hosts in place of that, a line each: a:8, or a slots=8."""
    mpiexec: str | None = None
    """Command line of a launcher of your own, given -n and the ranks' command. None: that of the environment."""
    bind_to_core: bool = False
    """Keep every rank on a core of its own; rank 0's update then has one core too."""
    collective_timeout: float | None = None
    """Seconds that a rank may wait for the others. None: no limit."""
    max_restarts: int = 0
    """How often to go on from the last checkpoint when a rank has failed."""
    num_envs: int = 32
    """Environments over all ranks, at least one a rank. Part of the experiment: never derived from nprocs."""
    seed: int = 0
    """Of all random numbers, 0 or more."""
    total_steps: int = 1_000_000
    """Environment steps of the whole run, over all ranks; also what schedules run over."""
    num_episodes: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Episodes of the whole run, in place of total-steps."""
    steps_per_batch: int | None = None
    """Fixed-step batches: steps per iteration over all environments, a multiple of num-envs. None: 64 per environment."""
    episodes_per_batch: int | None = None
    """Whole-episode batches, in place of steps-per-batch: episodes per iteration, at least one a rank."""
    learner_threads: int = 1
    """Cores that rank 0's update uses; the other ranks sleep meanwhile. Changes the last bits of the weights."""
    update: Literal["rank0", "allreduce"] = "rank0"
    """Who updates: rank 0 on the whole batch, or every rank on its share, with gradients averaged over ranks, which makes another curve for every nprocs."""
    device: str = "cpu"
    """Where rank 0's update computes: cpu, cuda or cuda:1. All else is on CPUs."""
    overlap: bool = False
    """Let rank 0 update on a batch while the others collect the next one, with weights that are one update older: another curve, the same for every nprocs."""
    rank0_envs: int | None = None
    """Environments of rank 0, fewer where overlap leaves it less time to step them, 0 where many ranks do; in whole-episode batches, its share of the episodes. Never changes the data. None: an equal share."""
    gather_parts: int = 1
    """In how many parts a rank collects its share and sends it: all but the last travel while the next are collected. For links that take long, between hosts. Never changes the data."""
    stop_after_iterations: int | None = None
    """End early, when so many iterations of the whole run are made; schedules stay those of total-steps."""
    stop_after_seconds: float | None = None
    """End early, with the iteration in which so many seconds of this start, or restart, are over."""
    eval_every: int | None = None
    """Iterations between evaluations, on episodes that training does not see, the same ones every time. None: none."""
    eval_episodes: int = 10
    """Episodes of an evaluation, over all ranks; no rank has more than 16 environments for them."""
    eval_deterministic: bool = True
    """Evaluate with the mean of normal actions. Choices are drawn as ever."""
    checkpoint_every: int = 10
    """Iterations between checkpoints on disk; one is always written at the end."""
    keep_checkpoints: int = 3
    """How many of the last checkpoints stay on disk."""
    max_replay_steps: int = 10_000
    """Resume repeats an unfinished episode of up to so many steps; the environment of a longer one begins a new one."""
    drift_check_every: int = 100
    """Iterations between checks that all ranks have the same weights, bit for bit."""
    wrappers: tuple[str, ...] = ()
    """Of gymnasium.wrappers, or module:Class, the innermost first, such as TimeAwareObservation or "FrameStackObservation(stack_size=4)"."""
    env_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the environment, such as healthy_reward=0.5; values are JSON."""
    config: str | None = None
    """TOML file of settings. None: the one in configs/ that names agent and environment, if there is one."""
    video_every: int | None = None
    """Iterations between films of one episode, as evaluated, in the run's folder; all other ranks wait meanwhile. None: none."""
    quiet: bool = False
    """Print nothing but errors."""
    tensorboard: bool = False
    """Write an events file for TensorBoard too (pip install tensorboard)."""
    wandb: str | None = None
    """Project of Weights & Biases to send the record to (pip install wandb)."""
    run_dir: str | None = None
    """Folder of the run's files. None: a new one under runs/."""
    resume: str | None = None
    """Folder of a run to go on with, with its own settings."""

    def __post_init__(self) -> None:
        """Check each number alone."""
        check_ranges(
            self,
            nprocs="[1, inf)",
            collective_timeout="(0, inf)",
            max_restarts="[0, inf)",
            num_envs="[1, inf)",
            seed="[0, inf)",
            total_steps="[1, inf)",
            num_episodes="[1, inf)",
            steps_per_batch="[1, inf)",
            episodes_per_batch="[1, inf)",
            learner_threads="[1, inf)",
            rank0_envs="[0, inf)",
            gather_parts="[1, inf)",
            stop_after_iterations="[1, inf)",
            stop_after_seconds="(0, inf)",
            eval_every="[1, inf)",
            eval_episodes="[1, inf)",
            video_every="[1, inf)",
            checkpoint_every="[1, inf)",
            keep_checkpoints="[1, inf)",
            max_replay_steps="[0, inf)",
            drift_check_every="[1, inf)",
        )

    @property
    def steps_per_env(self) -> int:
        """T: steps of one environment in one iteration; 0 in whole-episode batches."""
        if self.episodes_per_batch:
            return 0
        return self.steps_per_batch // self.num_envs if self.steps_per_batch else 64

    def progress(self, steps: int, episodes: int) -> float:
        """Share of the run that is over after so many steps and episodes; 1 or more at its end."""
        if self.num_episodes is not None:
            return episodes / self.num_episodes
        return steps / self.total_steps

    def check(self, nworkers: int) -> None:
        """Check what depends on several settings, and on the number of ranks.

        Raises:
            ValueError: if they do not fit together, or a rank would have nothing to do.
        """
        if self.nprocs not in (None, nworkers) and not job.supervised():
            raise ValueError(f"nprocs is {self.nprocs} in a job of {nworkers}; leave --nprocs out")
        if self.num_envs < nworkers:
            raise ValueError(launch.too_many_ranks(nworkers, self.num_envs))
        most = self.num_envs - (nworkers - 1)
        if self.rank0_envs is not None and nworkers > 1 and self.rank0_envs > most:
            raise ValueError(
                f"rank0_envs must leave an environment for every other rank: got "
                f"{self.rank0_envs} of num_envs={self.num_envs} with {nworkers} ranks; at most "
                f"--rank0-envs {most}"
            )
        self._check_update(nworkers)
        if self.steps_per_batch and self.episodes_per_batch:
            raise ValueError(
                "a batch is either a number of steps or a number of episodes: got both; leave out "
                "--steps-per-batch or --episodes-per-batch"
            )
        if self.steps_per_batch and self.steps_per_batch % self.num_envs:
            nearest = self.num_envs * max(1, round(self.steps_per_batch / self.num_envs))
            raise ValueError(
                f"steps_per_batch must be a multiple of num_envs, so that every environment makes "
                f"the same number of steps: got {self.steps_per_batch} and {self.num_envs}; the "
                f"nearest is --steps-per-batch {nearest}"
            )
        if self.episodes_per_batch and self.episodes_per_batch < nworkers:
            raise ValueError(
                f"episodes_per_batch must be at least nprocs so that every rank has an episode: "
                f"got episodes_per_batch={self.episodes_per_batch}, nprocs={nworkers}; raise "
                f"--episodes-per-batch or lower --nprocs"
            )

    def _check_update(self, nworkers: int) -> None:
        """Check what every rank's updating on its share asks for."""
        if self.update == "rank0":
            return
        if self.num_envs % nworkers:
            raise ValueError(
                f"num_envs must be a multiple of nprocs with --update allreduce, so that all ranks "
                f"have equal shares of the batch: got {self.num_envs} and {nworkers}; the nearest is "
                f"--num-envs {nworkers * max(1, round(self.num_envs / nworkers))}"
            )
        wrong = {
            "--episodes-per-batch": self.episodes_per_batch,
            "--overlap": self.overlap,
            "--rank0-envs": self.rank0_envs is not None,
            "--gather-parts": self.gather_parts > 1,
            "--learner-threads": self.learner_threads > 1,
            "--device": self.device != "cpu",
        }
        given = [name for name, is_given in wrong.items() if is_given]
        if given:
            raise ValueError(
                f"with --update allreduce all ranks have equal shares of steps and update at the "
                f"same time, on one core each: leave {' and '.join(given)} out"
            )


# Settings that leave the curve of a run what it is.
SAME_CURVE = {
    *("checkpoint_every", "keep_checkpoints", "drift_check_every", "rank0_envs"),
    "gather_parts",
    *("eval_every", "eval_episodes", "eval_deterministic", "video_every", "tensorboard", "wandb"),
}

# What a file may not set: where, on how many ranks and how far is said when a run is started.
_NOT_IN_FILES = (
    *("nprocs", "hosts", "hostfile"),
    *("mpiexec", "bind_to_core", "collective_timeout", "max_restarts"),
    *("config", "run_dir", "resume", "stop_after_iterations", "stop_after_seconds", "quiet"),
)


def find(folder: Path | None, agent: str, env: str) -> Path | None:
    """The file that names agent and environment, else the agent's, else None.

    Args:
        folder: configs/, with <agent>-<environment>.toml and <agent>.toml.
        agent: the agent's name, as `short` gives it.
        env: the environment's name without module and version.
    """
    if folder is None:
        return None
    name = env.replace("/", "-")
    candidates = [folder / f"{agent}-{name}.toml", folder / f"{agent}.toml"]
    return next((path for path in candidates if path.is_file()), None)


def short(algo: str) -> str:
    """The agent's name for files: the last part of its module, "algos.ppo:PPO" -> "ppo"."""
    where = algo.partition(":")[0]
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]


def load(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Tables [[record]], as in a run's config.toml, are left out.

    Raises:
        ValueError: if there is no such file, or it is no TOML.
    """
    try:
        with path.open("rb") as file:
            settings = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"cannot read config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path} is no TOML: {error}") from None
    settings.pop("record", None)
    return settings


def apply(settings: Mapping[str, Any], *options: Any, source: str) -> tuple[Any, ...]:
    """Options dataclasses with the settings of a file over their values.

    Raises:
        ValueError: for a key that none of them has, naming the nearest one, or a value of another
            type.
    """
    known = {f.name for o in options for f in dataclasses.fields(o)} - {*_NOT_IN_FILES}
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            why = "is given on the command line only" if key in _NOT_IN_FILES else "does not exist"
            raise ValueError(
                f"{source}: setting {key!r} {why}"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )
    changed = []
    for o in options:
        kinds = get_type_hints(type(o))
        values = {name: settings[name] for name in kinds if name in settings}
        for name, value in values.items():
            if not _fits(value, kinds[name]):
                raise ValueError(f"{source}: {name} must be {_words(kinds[name])}: got {value!r}")
            values[name] = tuple(value) if isinstance(value, list) else value
            values[name] = float(value) if kinds[name] is float else values[name]
        changed.append(dataclasses.replace(o, **values))
    return tuple(changed)


def settings(*options: Any) -> dict[str, Any]:
    """All fields of options dataclasses that belong to a run, and not to one start of it."""
    values: dict[str, Any] = {}
    for o in options:
        values |= dataclasses.asdict(o)
    return {name: value for name, value in values.items() if name not in _NOT_IN_FILES}


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of a TOML file is of a field's type: a list for a tuple, 1 for 1.0."""
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, k) for k in arguments)
    if get_origin(kind) is Literal:
        return value in arguments
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict)
    return type(value) is kind or (kind is float and type(value) is int)


def _words(kind: Any) -> str:
    """A type as a user would say it."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def write(
    path: Path, options: tuple[Any, ...], record: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Write all settings that are not None, as a file that `--config` takes, and what else was so.

    That is a table [[record]] for every start of the run, the first one first.

    Returns:
        The records of all starts, this one the last.
    """
    kept = {k: v for k, v in settings(*options).items() if v is not None}  # TOML has no None
    before = tomllib.loads(path.read_text())["record"] if path.exists() else []
    records = [*before, record]
    temporary = path.with_suffix(".tmp")
    temporary.write_text(tomli_w.dumps({**kept, "record": records}))
    temporary.replace(path)
    return records
