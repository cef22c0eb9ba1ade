"""python -m rank0rl replay RUN --iteration I --env E: repeat one environment of one iteration, alone.

The run's seed keys everything that an environment does, so one process repeats what any rank did.
This is how an environment that fails on one of many ranks is brought under a debugger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from rank0rl import seeding
from rank0rl.agent import Agent
from rank0rl.batch import take
from rank0rl.collector import Collector
from rank0rl.envs.resume import restore
from rank0rl.launch import usage_error
from rank0rl.learner import Learner, Overlap
from rank0rl.mpi import weights
from rank0rl.mpi.threads import set_threads
from rank0rl.run import checkpoint, code
from rank0rl.run.agents import load_function, make_agent
from rank0rl.run.hooks import Coefficients, Curriculum, Hook
from rank0rl.run.logger import read_rows
from rank0rl.run.machine import check_device
from rank0rl.run.options import RunOptions
from rank0rl.run.settings import of_file, read_saved, starts
from rank0rl.run.shares import make_rollout
from rank0rl.run.state import State
from rank0rl.run.usage import Phases
from rank0rl.tools.evaluate import RunToLoad


@dataclass(frozen=True)
class Options(RunToLoad):
    """Repeat one environment, or one episode, of an iteration of a run; compare it with the record."""

    run: tyro.conf.Positional[Path]
    """Folder of the run. Nothing in it is changed."""
    iteration: int
    """Iteration of the run, from 1."""
    env: int | None = None
    """Index of the environment, from 0, in a run with --steps-per-batch."""
    episode: int | None = None
    """Number of the episode within the iteration, from 0, in a run with --episodes-per-batch."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0 if the data are the same, 1 if not, 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl replay")
    set_threads(1)
    try:
        same = _replay(given)
    except _CannotReplayError as error:  # other errors are the run's own and keep their traceback
        return usage_error(str(error))
    return 0 if same else 1


class _CannotReplayError(Exception):
    """An error for a run, iteration, environment or episode that cannot be repeated."""


def _replay(given: Options) -> bool:
    """Repeat one environment of one iteration, first alone, then among all others; print the results.

    The iterations between the last checkpoint and this one are trained again, in memory. Return True
    if the fragment has the same rows alone as among all others, and if the batch is the one that the
    run recorded (or the run has not recorded this iteration).
    """
    iteration = given.iteration
    try:
        start = _find_start(given.run, iteration, given.trust)
        _check_starts(start, iteration)
        check_device(start.options.device)
        rows = read_rows(given.run)
    except ValueError as error:
        raise _CannotReplayError(error) from None
    what, fragment_id = _fragment(start.options, given.env, given.episode)
    _check_iteration(start, iteration, len(rows))
    collector, state = _go_to(start, iteration, rows)

    alone = make_rollout(start.options, 0, 1, only=fragment_id)
    unfinished = collector.state()
    _refuse(restore(alone.block, unfinished["envs"], unfinished["settings"]))
    _before(state.hooks, iteration, ahead=iteration - 1 - start.boundary)
    alone.block.settings = collector.rollout.block.settings
    fragments, ended = alone.collect(state.agent, iteration)
    fragment = next((one for one in fragments if one.fragment_id == fragment_id), None)
    if fragment is None:
        raise _CannotReplayError(
            f"env {fragment_id} is an agent that is gone in all of iteration {iteration}"
        )
    alone_rows = state.agent.process(fragment)
    its = ended["return"][ended["fragment_id"] == fragment_id]
    returns = ", ".join(f"{value:.6g}" for value in its) or "none"
    print(
        f"iteration {iteration}, {what} {fragment_id}, alone: {len(fragment.rew)} steps; returns "
        f"of finished episodes: {returns}; sha256 {weights.sha256_arrays(alone_rows)[:16]}"
    )
    collector.roll(iteration)
    collector.gather()
    gathered = collector.batch(iteration)
    among = take(gathered.rows, gathered.rows["fragment_id"] == fragment_id)
    among.pop("fragment_id")
    same_rows = weights.sha256_arrays(alone_rows) == weights.sha256_arrays(among)
    print(f"among all {what}s: {'the same data' if same_rows else 'DIFFERENT data'}")
    return same_rows and _is_recorded(rows, iteration, gathered.sha256)


@dataclass(frozen=True)
class _Start:
    """The checkpoint and the boundary from which a replay trains again."""

    run: Path
    boundary: int  # iterations to make before the one that is repeated is collected
    file: Path | None  # the last checkpoint not after the boundary; None: the run's beginning
    saved: Mapping[str, Any]  # contents of that checkpoint, or else of the run's last one
    options: RunOptions
    agent_options: Any


def _find_start(run: Path, iteration: int, trust: bool) -> _Start:
    saved = read_saved(checkpoint.latest(run), trust=trust)
    options, agent_options = of_file(saved["settings"], str(run))
    boundary = max(iteration - 1 - options.overlap, 0)
    end = checkpoint.before(run, iteration - 1)
    if options.overlap and end and int(end.stem) == iteration - 1:
        begun = read_saved(end, trust=trust)
        if not begun["collector"].get("ahead"):  # the run ended here once, and was continued later
            boundary = iteration - 1
    file = checkpoint.before(run, boundary)
    if file:
        saved = read_saved(file, trust=trust)
        options, agent_options = of_file(saved["settings"], str(run))
    return _Start(run, boundary, file, saved, options, agent_options)


def _fragment(options: RunOptions, env: int | None, episode: int | None) -> tuple[str, int]:
    """Return "env" or "episode", as the run's kind of batch needs it, and the fragment's id."""
    if options.episodes_per_batch:
        what, number, other, count = "episode", episode, env, options.episodes_per_batch
    else:
        what, number, other, count = "env", env, episode, options.num_envs
    if number is None or other is not None:
        kind = "whole-episode" if what == "episode" else "fixed-step"
        got = {"--env": env, "--episode": episode}
        given = " and ".join(f"{name} {n}" for name, n in got.items() if n is not None)
        raise _CannotReplayError(
            f"this run has {kind} batches: expected --{what} alone, got {given or 'neither'}; give "
            f"--{what} with a number from 0 to {count - 1}"
        )
    if not 0 <= number < count:
        raise _CannotReplayError(
            f"--{what} must be a number from 0 to {count - 1} in this run: got {number}"
        )
    return what, number


def _check_iteration(start: _Start, iteration: int, made: int) -> None:
    if iteration < 1:
        raise _CannotReplayError(f"--iteration must be at least 1: got {iteration}")
    last = made + 1 + start.options.overlap
    if iteration > last:
        raise _CannotReplayError(
            f"the run has made {made} iterations, so --iteration must be at most {last}: got "
            f"{iteration}"
        )


def _check_starts(start: _Start, iteration: int) -> None:
    """Refuse to train again across a resume that has changed settings or code."""
    kept = starts(start.run / "config.toml", that_count=True)
    begun = int(start.file.stem) if start.file else 0
    used = [one for one in kept if start.file is None or one["iteration"] <= begun][-1:]
    if not used:
        raise _CannotReplayError(
            f"{start.run / 'config.toml'} has no [[record]] of the start that made iteration {iteration}, so its settings are "
            f"not known"
        )
    ends = [*(one["iteration"] for one in kept[1:]), start.boundary]
    for one, end in zip(kept, ends, strict=False):
        begin = one["iteration"]
        same = _which(one) == _which(used[0])
        if not same and begin < start.boundary and end > begun:
            raise _CannotReplayError(
                f"settings or code of the run were changed after iteration {max(begin, used[0]['iteration'])}, and "
                f"no checkpoint is left from which iteration {iteration} could be repeated as it was"
            )


def _which(start: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the settings and the code of a start."""
    return start["settings"], code.recorded(start)


def _by_iteration(rows: Sequence[dict[str, str]]) -> dict[int, dict[str, str]]:
    return {int(row["iteration"]): row for row in rows}


class _Recorded(Curriculum):
    """The settings of a curriculum as a run has recorded them."""

    def __init__(self, name: str, collector: Collector, rows: list[dict[str, str]]) -> None:
        super().__init__(load_function(name), collector.begin_with, lambda: 0.0)
        self._rows = _by_iteration(rows)
        self.last = 0  # iteration whose settings the checkpoint holds, if the record does not

    def before(self, iteration: int) -> None:
        """Let episodes begin with the settings of an iteration's batch."""
        if iteration in self._rows:
            self.follow(self._rows[iteration]["settings"])
        elif iteration != self.last:
            raise _CannotReplayError(
                f"the settings of iteration {iteration} are not recorded, and the last checkpoint is "
                f"from before iteration {self.last}: resume the run, which makes it again"
            )
        super().before(iteration)


class _RecordedCoefficients(Coefficients):
    """Coefficients that hooks have changed, as a run has recorded them."""

    def __init__(self, agent: Agent, rows: list[dict[str, str]]) -> None:
        super().__init__(agent)
        self._rows = _by_iteration(rows)

    def before(self, iteration: int) -> None:
        """Give the agent what it had in an iteration."""
        if iteration - 1 in self._rows:
            self.load(json.loads(self._rows[iteration - 1]["coefficients"]))
        super().before(iteration)


def _before(hooks: Sequence[Hook], iteration: int, ahead: int = 0) -> None:
    """Prepare an iteration, whose batch is collected so many iterations ahead of its update."""
    for hook in hooks:
        hook.before(iteration - ahead if isinstance(hook, Coefficients) else iteration)


def _go_to(start: _Start, iteration: int, rows: list[dict[str, str]]) -> tuple[Collector, State]:
    """Train to where the iteration was collected; return what collects it."""
    options, phases = start.options, Phases()
    rollout = make_rollout(options, 0, 1)
    seeding.seed_globals(options.seed, "init", 1)
    agent = make_agent(options, start.agent_options, rollout.spaces)
    collector = Collector(agent, rollout, options, phases)
    state = State(agent, collector, options, start.saved["settings"])
    curriculum = _Recorded(options.curriculum, collector, rows) if options.curriculum else None
    coefficients = _RecordedCoefficients(agent, rows) if options.hook else None
    state.hooks += [hook for hook in (curriculum, coefficients) if hook]
    if start.file:
        try:
            state.load(start.saved)
        except ValueError as error:
            raise _CannotReplayError(error) from None
        _refuse(collector.restore())
    elif options.init_from:
        try:
            init = checkpoint.read_weights(Path(options.init_from))
            checkpoint.load_weights(agent, init, options.init_from)
            agent.modules_loaded()
        except ValueError as error:
            raise _CannotReplayError(
                f"this run began with another one's weights: {error}"
            ) from None
    first = state.progress.iteration + 1
    if curriculum:
        curriculum.last = first + options.overlap * bool(start.file)
    _train(start, iteration, collector, state, phases)
    return collector, state


def _train(
    start: _Start, iteration: int, collector: Collector, state: State, phases: Phases
) -> None:
    """Train from the checkpoint to the boundary."""
    options, agent, first = start.options, state.agent, state.progress.iteration + 1
    print(
        f"from {start.file or 'the beginning of the run'}: training "
        f"{start.boundary + 1 - first} iterations again"
    )
    alone = Learner(agent, options, phases, state.share_over)
    overlapping = Overlap(alone, collector, phases, state.share_over)
    learner = overlapping if options.overlap else alone
    if first <= start.boundary:
        alone.prepare()
    for number in range(first, start.boundary + 1):
        _before(state.hooks, number)
        batch = collector.batch(number)
        _before(state.hooks, number + options.overlap, ahead=options.overlap)
        learner.update(batch, number)
        state.progress.add(batch.steps, batch.ended)
    if start.boundary < iteration - 1 and not collector.state()["ahead"]:
        _before(state.hooks, iteration - 1)
        collector.batch(iteration - 1)  # with the same weights as the iteration itself


def _refuse(strays: Mapping[int, str]) -> None:
    for env, why in strays.items():
        raise _CannotReplayError(f"cannot repeat this run: env {env}: {why}")


def _is_recorded(rows: list[dict[str, str]], iteration: int, sha256: str) -> bool:
    """Print whether a batch's hash is the recorded one; return False if it is another."""
    row = next((row for row in rows if row.get("iteration") == str(iteration)), None)
    if not row:
        print("the run has not recorded this iteration, so there is no batch to compare with")
        return True
    recorded = row.get("batch_sha256") or "nothing"
    same = sha256.startswith(recorded)
    print(
        f"whole batch: sha256 {sha256[:16]}, recorded {recorded}: "
        f"{'the same data' if same else 'DIFFERENT data'}"
    )
    return same
