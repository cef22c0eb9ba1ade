"""python -m rank0rl replay RUN --iteration I --lane L: one lane of one iteration again, alone.

All that decides what a lane does is keyed by the run's seed, so one process repeats what any rank
did. That is how an environment's failure on one of many ranks is brought under a debugger.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rank0rl import batch as batches
from rank0rl.mpi.threads import set_threads
from rank0rl.nets.cuda import check_device
from rank0rl.rollout import Rollout
from rank0rl.run import checkpoint, plan
from rank0rl.run.config import RunOptions
from rank0rl.run.logger import read_rows
from rank0rl.run.state import Gathered, State
from rank0rl.run.timing import Phases
from rank0rl.session import make_agent, make_rollout
from rank0rl.trainer import collect, update


@dataclass(frozen=True)
class Options:
    """Run one lane of one iteration of a run again, and compare it with what was recorded."""

    run: tyro.conf.Positional[Path]
    """Folder of the run; nothing in it is changed."""
    iteration: int
    """Of the run, from 1."""
    lane: Annotated[int, tyro.conf.arg(aliases=["--episode"])]
    """Lane, from 0; in whole-episode batches the episode's number within the iteration."""


def main(argv: list[str]) -> int:
    """Exit code: 0 if it is the same data, 1 if not, 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl replay")
    set_threads(1)
    try:
        return 0 if replay(given.run, given.iteration, given.lane) else 1
    except CannotReplayError as error:  # and no other one: it is the run's own, to be looked into
        print(f"error: {error}", file=sys.stderr)
        return 2


class CannotReplayError(Exception):
    """There is no such run, iteration or lane, or it cannot be repeated."""


def replay(run: Path, iteration: int, lane: int) -> bool:
    """Run one lane of one iteration again, alone, then among all lanes; say what came out.

    What lies between the last checkpoint before the iteration and it is trained again, in memory.

    Args:
        run: the run's folder.
        iteration: of the run, from 1.
        lane: lane, or number of the episode in whole-episode batches.

    Returns:
        Whether the lane alone gave the rows that it gives among all lanes, and these the batch that
        the run recorded (if it came so far).

    Raises:
        CannotReplayError: if there is no such run, iteration or lane, or it cannot be repeated.
    """
    try:
        start = checkpoint.read(checkpoint.latest(run))
        options, agent_options = plan.read([], start["settings"], str(run))
        boundary = max(iteration - 1 - options.overlap, 0)  # where it was collected from
        end = checkpoint.before(run, iteration - 1)
        if options.overlap and end and int(end.stem) == iteration - 1:
            begun = checkpoint.read(end)
            if not begun["ahead"]:  # the run ended there once, and went on later
                boundary = iteration - 1
        file = checkpoint.before(run, boundary)
        if file:
            start = checkpoint.read(file)
            options, agent_options = plan.read([], start["settings"], str(run))
        check_device(options.device)
        _check_update(run, options)
    except ValueError as error:
        raise CannotReplayError(error) from None
    units = options.episodes_per_batch or options.num_envs
    if not (iteration >= 1 and 0 <= lane < units):
        raise CannotReplayError(
            f"iterations count from 1, and this run's lanes (or episodes of an iteration) from 0 to "
            f"{units - 1}: got iteration {iteration}, lane {lane}"
        )
    rows = read_rows(run)
    if iteration > len(rows) + 1 + options.overlap:
        raise CannotReplayError(
            f"the run has made {len(rows)} iterations: got iteration {iteration}"
        )
    since = start["progress"]["same_schedule_since"]
    if file is None and since:
        raise CannotReplayError(
            f"the length of this run was changed after iteration {since}, and no checkpoint before "
            f"iteration {iteration} is left: only later ones can be repeated"
        )
    rollout = make_rollout(options, 0, 1)
    state = State(make_agent(options, agent_options, rollout.spaces), options, start["settings"])
    if file:
        state.load(start)
        _restore(rollout, state)
    print(
        f"from {file or 'the beginning of the run'}: training "
        f"{boundary - state.progress.iteration} iterations again"
    )
    _go_to(boundary, state, rollout, options)
    if options.overlap and boundary < iteration - 1 and not state.ahead:
        collect(state.agent, rollout, options, Phases(), iteration - 1, state)

    alone = make_rollout(options, 0, 1, only=lane)
    _restore(alone, state)
    [fragment], ended = alone.collect(state.agent, iteration)
    alone_rows = state.agent.process(fragment)
    returns = ", ".join(f"{value:.6g}" for value in ended["return"]) or "none"
    print(
        f"iteration {iteration}, lane {lane}, alone: {len(fragment.rew)} steps, returns of episodes "
        f"that ended: {returns}; sha256 {batches.sha256(alone_rows)[:16]}"
    )
    gathered = collect(state.agent, rollout, options, Phases(), iteration)
    among = batches.take(gathered.batch, gathered.batch["fragment_id"] == lane)
    among.pop("fragment_id")
    same_rows = batches.sha256(alone_rows) == batches.sha256(among)
    print(f"among all lanes: {'the same data' if same_rows else 'DIFFERENT data'}")
    return same_rows and _as_recorded(rows, iteration, gathered.sha256)


def _check_update(run: Path, options: RunOptions) -> None:
    if options.update == "allreduce":
        raise ValueError(
            f"{run} was trained with --update allreduce, whose curve depends on the number of "
            f"ranks: one rank cannot repeat it"
        )


def _restore(rollout: Rollout, state: State) -> None:
    if not state.unfinished.lanes:
        return
    for stray, why in rollout.restore(state.unfinished.all()).items():
        raise CannotReplayError(f"cannot repeat this run: lane {stray}: {why}")


def _go_to(iteration: int, state: State, rollout: Rollout, options: RunOptions) -> None:
    """Train to an iteration boundary."""
    ready = Gathered(**state.ahead) if state.ahead else None
    for number in range(state.progress.iteration + 1, iteration + 1):
        gathered = ready or collect(state.agent, rollout, options, Phases(), number, state)
        if options.overlap:
            ready = collect(state.agent, rollout, options, Phases(), number + 1, state)
        update(state.agent, gathered, options, Phases(), number, state.share_over())
        state.progress.add(gathered.steps, gathered.ended)
    state.ahead = {"batch": ready.batch} if ready else {}


def _as_recorded(rows: list[dict[str, str]], iteration: int, sha256: str) -> bool:
    recorded = next((row for row in rows if int(row["iteration"]) == iteration), None)
    if not recorded:
        print("the run has not recorded this iteration: nothing to compare the batch with")
        return True
    same = sha256.startswith(recorded["batch_sha256"])
    print(
        f"batch of all lanes: sha256 {sha256[:16]}, recorded {recorded['batch_sha256']}: "
        f"{'the same data' if same else 'DIFFERENT data'}"
    )
    return same
