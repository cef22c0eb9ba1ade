"""The options of a run: their meaning, and the checks of one with another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from rank0rl.envs.info import label, parse
from rank0rl.launch import job
from rank0rl.options import flag, setting
from rank0rl.run.launch_options import LaunchOptions, too_many_ranks

_NOT_MPMD = ("eval_every", "video_every", "env_processes")
_TAKEN = ("return", "return_std", "length", "fragment_id", "")  # names of the record's own columns


def _pairs(words: list[str]) -> dict[str, Any]:
    """Return {"a": 1, "b": "x"} for ["a=1", "b=x"]. A value that is not JSON stays a string."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"expected NAME=VALUE, got {word!r}")
        try:
            pairs[name] = json.loads(value)
        except json.JSONDecodeError:
            pairs[name] = value
        if _has_null(pairs[name]):
            raise ValueError(f"{name} cannot be or hold null: leave it out to use its default")
    return pairs


def _has_null(value: Any) -> bool:
    """Return True for what a file of settings cannot hold: TOML has no null."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, inner))


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
"""Type of an option with names and values, such as healthy_reward=0.5."""


EnvId = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENVIRONMENT")]
"""Type of the argument that names an environment."""


@dataclass(frozen=True)
class RunOptions(LaunchOptions):
    """The options of every run. The agent's own options come after them."""

    env_id: EnvId = setting("", changes_curve=True, resume=False)
    """Environment: Walker2d (its newest version), Walker2d-v4, module:EnvId-v0, or module:function."""
    agents: tyro.conf.Suppress[int] = setting(1, "[1, inf)", changes_curve=True, resume=False)
    """Agents of each game, as the run has found them; each of them is one of num_envs. 1: there are no games."""
    seed: int = setting(0, "[0, inf)", changes_curve=True, resume=False)
    """Seed of every random stream, >= 0."""
    total_steps: int = setting(1_000_000, "[1, inf)", changes_curve=True, resume=True)
    """Environment steps of the whole run, over all ranks. Schedules, such as a falling step size, end there too."""
    num_episodes: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = setting(
        None, "[1, inf)", changes_curve=True, resume=True
    )
    """Episodes of the whole run, in place of --total-steps."""
    init_from: str | None = setting(None, changes_curve=True, resume=False)
    """Run, or one of its checkpoints, whose networks and normalizers this run begins with. Optimizer and schedules begin anew."""
    learner_threads: int | None = setting(None, "[1, inf)", changes_curve=False, resume=True)
    """Threads of rank 0's compiled updates, and of gradients of convolutions. The curve stays the same. None: one for each core that this process may use, at most 8; with --overlap, less one for each other rank on its host."""
    device: str = setting("cpu", changes_curve=True, resume=True)
    """Device of rank 0's update: cpu, cuda or cuda:1, for agents that can, such as ppo without --recurrent. Everything else runs on CPUs."""
    overlap: bool = setting(False, changes_curve=True, resume=False)
    """Let rank 0 update on one batch while the other ranks collect the next one. Their weights are one update older, so the curve is another one. It is the same for every nprocs."""
    rank0_envs: int | None = setting(None, "[0, inf)", changes_curve=False, resume=True)
    """Environments of rank 0. Give it fewer if --overlap leaves it less time, or 0 if there are many ranks. In batches of whole episodes this sets its share of the episodes. The curve stays the same. None: an equal share."""
    gather_parts: int = setting(1, "[1, inf)", changes_curve=False, resume=True)
    """Number of parts in which a rank collects and sends its rows. Every part but the last is sent while the next one is collected, which helps on slow links between hosts. The curve stays the same."""
    stop_at_return: float | None = setting(None, "(-inf, inf)", changes_curve=False, resume=True)
    """Stop early, once the mean return of an evaluation has reached this number; without --eval-every, that of the last 100 episodes."""
    patience: int | None = setting(None, "[1, inf)", changes_curve=False, resume=True)
    """Stop early, once the mean return, as in --stop-at-return, has not become better for this many iterations."""
    eval_every: int | None = setting(None, "[1, inf)", changes_curve=False, resume=False)
    """Iterations between evaluations. Every evaluation uses the same episodes, which training does not see. None: no evaluations."""
    eval_episodes: int = setting(10, "[1, inf)", changes_curve=False, resume=False)
    """Episodes per evaluation, over all ranks. A rank runs at most 16 of them at once."""
    eval_deterministic: bool = setting(True, changes_curve=False, resume=False)
    """Evaluate the most probable actions, and draw none at random."""
    checkpoint_every: int = setting(10, "[1, inf)", changes_curve=False, resume=True)
    """Iterations between checkpoints on disk. One is always written at the end."""
    keep_checkpoints: int | str = setting(
        3, "[1, inf)", changes_curve=False, resume=True, prefix="spread:"
    )
    """Number of checkpoints to keep on disk, the newest ones. spread:10 keeps the first, the newest, and eight spread evenly between them, for verify --sample."""
    max_replay_steps: int = setting(10_000, "[0, inf)", changes_curve=True, resume=False)
    """Longest unfinished episode that a resumed run repeats, in steps. The environment of a longer one starts a new episode, so the curve changes there."""
    drift_check_every: int = setting(100, "[1, inf)", changes_curve=False, resume=True)
    """Iterations between checks that all ranks have the same weights, bit for bit."""
    wrappers: tuple[str, ...] = setting((), changes_curve=True, resume=False)
    """Wrappers from gymnasium.wrappers, or module:Class, the innermost first. Examples: TimeAwareObservation, "FrameStackObservation(stack_size=4)"."""
    obs_dtype: Literal["float32", "float64"] = setting("float32", changes_curve=True, resume=False)
    """Precision of observations that an environment gives as float64. float32 rounds them when they arrive, float64 when they are normalized. Batches are then up to twice as large."""
    env_kwargs: Pairs = setting({}, changes_curve=True, resume=False)
    """Arguments of the environment, such as healthy_reward=0.5. Values are JSON."""
    env_kwargs_of: str | None = setting(None, changes_curve=True, resume=False)
    """Function, as file.py:name or module:name, that returns more arguments for the environment with a given index, from 0: (index) -> dict. For batches of steps, in which an environment keeps its index."""
    curriculum: str | None = setting(None, changes_curve=True, resume=False)
    """Function, as file.py:name or module:name, that chooses reset options for the next episodes after every iteration: (progress, record) -> dict."""
    hook: tuple[str, ...] = setting((), changes_curve=True, resume=False)
    """Subclasses of rank0rl.Hook, as file.py:Class or module:Class, that rank 0 calls around every iteration. A hook may log the record, add columns to it, save or stop the run, and change coefficients of the agent."""
    curriculum_method: str | None = setting(None, changes_curve=True, resume=False)
    """Method of the environment that is called before every reset, with what --curriculum has returned. It takes the place of reset options."""
    info: tuple[str, ...] = setting((), changes_curve=False, resume=False)
    """Metrics of episodes from info: NAME (its last value in an episode), sum:NAME (the sum) or max:NAME (the largest). Their means over the last 100 episodes go into the record, and into evaluations."""
    env_retries: int = setting(0, "[0, inf)", changes_curve=False, resume=True)
    """Number of times that a failing step is tried again. The environment that raised is made anew, and its episode is repeated up to that step, so the curve stays the same. Episodes longer than --max-replay-steps are not repeated."""
    on_env_error: Literal["stop", "truncate"] = setting("stop", changes_curve=True, resume=True)
    """Stop the run if an environment goes on failing at the same step, or truncate its episode there."""
    changed_code: bool = setting(False, changes_curve=False, resume=True, in_file=False)
    """Go on with a run although the code of its agent, its environment or its functions has changed since its last start. The run's folder has the code of each start."""
    env_processes: bool = setting(False, changes_curve=False, resume=True)
    """Run every environment in a process of its own. If it crashes or exits, that is an error of this environment, as if it had raised, and not the end of its rank. A step takes longer."""
    step_timeout: float | None = setting(None, "(0, inf)", changes_curve=False, resume=True)
    """Seconds that a step or a reset of an environment may take, with --env-processes. After that its process is killed, and this counts as an exception of the environment. None: no limit."""
    video_every: int | None = setting(None, "[1, inf)", changes_curve=False, resume=True)
    """Iterations between videos of one evaluation episode, in the run's folder. All other ranks wait meanwhile. Needs pip install -e ".[video]". None: no videos."""
    tensorboard: bool = setting(False, changes_curve=False, resume=True)
    """Write an events file for TensorBoard too (pip install tensorboard)."""
    wandb: str | None = setting(None, changes_curve=False, resume=True)
    """Project of Weights & Biases that is sent the record (pip install wandb)."""

    @property
    def steps_per_env(self) -> int:
        """Steps of one environment in one iteration, T; 0 in batches of whole episodes."""
        if self.episodes_per_batch:
            return 0
        return self.steps_per_batch // self.num_envs if self.steps_per_batch else 64

    @property
    def survives_env_errors(self) -> bool:
        """True if a run may go on after an environment has raised."""
        return self.env_retries > 0 or self.on_env_error == "truncate"

    def check(self, nworkers: int) -> None:
        """Check the options with one another, and with the number of ranks.

        Raises:
            ValueError: if two options contradict each other, or a rank would have nothing to do.
        """
        if self.nprocs not in (None, nworkers) and not job.supervised():
            raise ValueError(f"nprocs is {self.nprocs} in a job of {nworkers}; leave --nprocs out")
        if self.num_envs < nworkers:
            raise ValueError(too_many_ranks(nworkers, self.num_envs))
        most = self.num_envs - self.agents * (nworkers - 1)
        if self.rank0_envs is not None and nworkers > 1 and self.rank0_envs > most:
            raise ValueError(
                f"rank0_envs must leave an environment for every other rank: got "
                f"{self.rank0_envs} of num_envs={self.num_envs} with {nworkers} ranks; at most "
                f"--rank0-envs {most}"
            )
        if self.step_timeout is not None and not self.env_processes:
            raise ValueError(
                f"step_timeout needs environments in processes of their own: got "
                f"{self.step_timeout:g}; add --env-processes, or leave --step-timeout out"
            )
        if self.ranks_per_env > 1 and self.env_processes:
            raise ValueError(
                "env_processes gives each environment one process of its own, and ranks_per_env several: leave "
                "out --env-processes or --ranks-per-env"
            )
        alone = [name for name in _NOT_MPMD if getattr(self, name)]
        if self.rank0_envs == 0:  # then rank 0 makes one to see its spaces
            alone.append("rank0_envs")
        if self.mpmd and alone:
            raise ValueError(
                f"with mpmd, each environment of training has a solver, and no other one has: leave out "
                f"{flag(alone[0])}"
            )
        self._check_batch(nworkers)
        self._check_episodes()

    def _check_batch(self, nworkers: int) -> None:
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

    def _check_episodes(self) -> None:
        labels = [label(name) for name in self.info]
        taken = {name for name in labels if labels.count(name) > 1 or name in _TAKEN}
        taken |= {name for name in self.info if not parse(name)[1]}
        if taken:
            raise ValueError(
                f"info must name figures that the record does not have yet, each once: got "
                f"{', '.join(map(repr, sorted(taken)))}; change --info"
            )
        if self.curriculum_method and not self.curriculum:
            raise ValueError(
                f"curriculum_method needs a curriculum: got {self.curriculum_method}; add "
                f"--curriculum, or leave --curriculum-method out"
            )
        if self.env_kwargs_of and self.episodes_per_batch:
            raise ValueError(
                f"env_kwargs_of is for batches of steps: with --episodes-per-batch any environment "
                f"runs any episode, so its arguments must be those of all; got {self.env_kwargs_of}; "
                f"vary episodes by reset options (--curriculum), or set --steps-per-batch"
            )
