"""The loop: collect, process, gather, update on rank 0, and broadcast.

With `--update allreduce`, rows stay where they were collected, and every rank updates on its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl import batch as batches
from rank0rl import contract, seeding
from rank0rl.agent import Agent, Fragment
from rank0rl.batch import Batch
from rank0rl.evaluation import Part, quiet
from rank0rl.mpi import comm, job, reduce, weights
from rank0rl.mpi.gather import Early, rank0_accum_batches
from rank0rl.mpi.threads import set_threads, using_threads
from rank0rl.rollout import Rollout
from rank0rl.run import memory
from rank0rl.run.config import RunOptions
from rank0rl.run.interrupt import Interrupts
from rank0rl.run.recorder import Run
from rank0rl.run.state import Gathered, State
from rank0rl.run.timing import Phases
from rank0rl.tools import video

Array = npt.NDArray[Any]


def train(
    agent: Agent,
    rollout: Rollout,
    options: RunOptions,
    run: Run | None,
    evaluation: Part | None = None,
) -> None:
    """Iterate until the run is over.

    Collective: every rank calls this.

    Args:
        agent: of the same class and options on every rank; rank 0's weights count.
        rollout: this rank's lanes.
        options: of the run, the same on every rank.
        run: on rank 0 what it keeps of the run, None on the others.
        evaluation: this rank's part of it, every `options.eval_every` iterations.

    Raises:
        Interrupted: on rank 0 after SIGINT or SIGTERM, when the last boundary's state is on disk.
    """
    set_threads(1)
    state = run.state if run else None
    with Interrupts(ignore=run is None) as interrupts:
        with interrupts.held():
            iteration = _begin(agent, rollout, options, run)
            ready = _ready(run)
        phases = run.phases if run else Phases()
        early = Early() if rollout.nparts > 1 else None
        weights.rank0_bcast_wts(agent.modules())
        last = time.perf_counter()
        try:
            while _told(run is not None and not run.over(), phases):
                iteration += 1
                gathered = ready or collect(
                    agent, rollout, options, phases, iteration, state, early
                )
                part = None
                if options.overlap and _told(
                    run is not None and not _is_last(gathered, run), phases
                ):
                    part = roll(agent, rollout, options, phases, iteration + 1, early)
                progress = run.state.share_over() if run else 0.0
                if options.update == "allreduce":
                    with phases("wait"):
                        progress = comm.bcast_obj(progress)
                    metrics = update_together(agent, gathered, options, phases, iteration, progress)
                elif run:
                    metrics = update(agent, gathered, options, phases, iteration, progress)
                ready = gather(part, phases, state, early) if part is not None else None
                with phases("broadcast"):  # the word to go on follows it, on one trip
                    weights.rank0_bcast_wts(agent.modules())
                acting = quiet(agent) if options.eval_deterministic else agent
                evaluated = None
                if evaluation and iteration % (options.eval_every or 1) == 0:
                    evaluated = evaluate(agent, acting, evaluation, phases, iteration)
                if run and options.video_every and iteration % options.video_every == 0:
                    with phases("evaluate"):
                        path = run.folder / "videos" / f"{iteration:08d}.mp4"
                        path.parent.mkdir(exist_ok=True)
                        video.film(acting, options, path, options.seed)
                if run:
                    now = time.perf_counter()  # of recording too: it is in the next row's seconds
                    with interrupts.held(), phases("record"):
                        run.state.ahead = _plain(ready)
                        run.state.progress.add(gathered.steps, gathered.ended)
                        run.record(now - last, gathered, metrics, evaluated)
                    last = now
        finally:
            if run:
                with interrupts.held():
                    run.save()


def collect(
    agent: Agent,
    rollout: Rollout,
    options: RunOptions,
    phases: Phases,
    iteration: int,
    state: State | None = None,
    early: Early | None = None,
) -> Gathered:
    """The batch of one iteration: `roll`, then `gather`.

    Collective: every rank calls this.
    """
    part = roll(agent, rollout, options, phases, iteration, early)
    mine = part.pop("rows") if options.update == "allreduce" else None
    gathered = gather(part, phases, state, early)
    return gathered if mine is None else dataclasses.replace(gathered, batch=mine)


def roll(
    agent: Agent,
    rollout: Rollout,
    options: RunOptions,
    phases: Phases,
    iteration: int,
    early: Early | None = None,
) -> dict[str, Batch]:
    """This rank's part of a batch, with the weights that were broadcast.

    Collective: every rank calls this.

    Args:
        agent: on every rank.
        rollout: this rank's lanes.
        options: of the run.
        phases: takes the seconds of "collect" and "process", and of the part as a whole.
        iteration: its number, which keys its random streams.
        early: sends the rows of all parts of the rollout but the last one.

    Returns:
        All else that rank 0 is to know, for `gather`; {} if this rank had nothing to collect.
    """
    assert early or rollout.nparts == 1, "rows of all parts but the last would be lost"
    start = time.perf_counter()
    check = (iteration - 1) % options.drift_check_every == 0
    before = weights.hashes(agent.modules()) if check else None
    steps: list[int] = []
    parts = rollout.parts(agent, iteration)
    for more in reversed(range(rollout.nparts)):
        with phases("collect"):
            fragments = next(parts)
        with phases("process"):
            rows = _process(agent, fragments, rollout, iteration)
        steps += [len(fragment.rew) for fragment in fragments]
        if early and more:
            early.begin(rows)
    phases.took_s = time.perf_counter() - start
    if check:
        with phases("wait"):
            weights.chksum(agent.modules(), label="after act and process", before=before)
    if not steps:
        return {}
    made = {"steps": np.array(steps, np.int64)}
    lanes = rollout.unfinished()
    return {"rows": rows, "ended": rollout.ended(), "lanes": lanes, "fragments": made}


def gather(
    part: dict[str, Batch],
    phases: Phases,
    state: State | None = None,
    early: Early | None = None,
) -> Gathered:
    """The batch of all ranks' parts, in one gather.

    Collective: every rank calls this.

    Args:
        part: of this rank, from `roll`.
        phases: takes the seconds of "wait", "gather" and "hash"; knows how long this rank's part took.
        state: on rank 0, takes the episodes under way.
        early: has sent the other parts' rows.
    """
    with phases("wait"):
        mine = [int(1e6 * phases.took_s), int(1e6 * memory.peak_mb())]
        of_ranks = comm.check_layout({}, "what parts took", numbers=mine) / 1e6
    with phases("gather"):
        parts = rank0_accum_batches(part)
        rows, ended = parts.get("rows", {}), parts["ended"]
        if early:
            rows = batches.concatenate([batch for batch in [*early.take(), rows] if batch])
        batch = batches.in_order(rows, rows["fragment_id"]) if rows else {}
        ended = batches.in_order(ended, ended["fragment_id"])
        steps = int(parts["fragments"]["steps"].sum())
        ranks = {"took_s": of_ranks[:, 0], "peak_mb": of_ranks[:, 1]}
    if state:
        state.unfinished.add(parts.get("lanes", {}))
    with phases("hash"):
        return Gathered(batch, ended, steps, batches.sha256(batch) if rows else "", ranks)


def update(
    agent: Agent,
    gathered: Gathered,
    options: RunOptions,
    phases: Phases,
    iteration: int,
    progress: float,
) -> Mapping[str, float]:
    """Let the agent learn from what was gathered.

    Those who update only, which is rank 0 while the others sleep, unless all of them do.

    Args:
        agent: of this rank.
        gathered: the iteration's batch, or this rank's share of it.
        options: of the run.
        phases: takes the seconds of "update".
        iteration: its number, which keys its random streams.
        progress: share of the run that is over.

    Returns:
        What the agent records.
    """
    rng = seeding.stream(options.seed, "update", iteration)
    try:
        with phases("update"), using_threads(options.learner_threads):
            metrics = agent.update(gathered.batch, rng, progress)
        contract.check_learned(agent, metrics)
    except Exception as error:
        error.add_note(f"In update, of iteration {iteration}; resuming the run repeats it.")
        raise
    return metrics


def update_together(
    agent: Agent,
    gathered: Gathered,
    options: RunOptions,
    phases: Phases,
    iteration: int,
    progress: float,
) -> Mapping[str, float]:
    """`update` on every rank, each on its share of the batch, in step with the others.

    Collective: every rank calls this.

    Returns:
        What the agents record, in the mean over ranks. Of what is no mean of rows, such as
        "explained_variance", that is the mean of what each share has, not what the whole batch has.

    Raises:
        ValueError: the same on every rank, if one has more rows than another, if their weights
            differ afterwards, or the names of what they record.
    """
    with phases("wait"):
        rows = comm.check_layout({}, "rows to update on", numbers=[batches.count(gathered.batch)])
    if len(set(rows[:, 0].tolist())) > 1:
        raise ValueError(
            f"with --update allreduce, process must give equally many rows on every rank, so that "
            f"all make as many gradient steps: got {rows[:, 0].tolist()} rows on ranks 0 to "
            f"{len(rows) - 1} in iteration {iteration}; leave --update out if it cannot"
        )
    metrics = update(agent, gathered, options, phases, iteration, progress)
    with phases("wait"):
        if (iteration - 1) % options.drift_check_every == 0:
            weights.chksum(agent.modules(), label="after an update of all ranks")
        numbers = {name: float(number) for name, number in metrics.items()}
        return reduce.reduce_many(numbers, "mean", "means of what update returns")


def evaluate(
    agent: Agent, acting: Agent, evaluation: Part, phases: Phases, iteration: int
) -> Batch:
    """Episodes of the new weights, which nobody learns from.

    Collective: every rank calls this.

    Args:
        agent: on every rank.
        acting: the agent itself, or as it acts without noise.
        evaluation: this rank's part.
        phases: takes the seconds of "evaluate".
        iteration: after which.

    Returns:
        On rank 0 "fragment_id", "return" and "length", (episodes,), in order; elsewhere no rows.

    Raises:
        ValueError: the same on every rank, if acting has changed weights.
    """
    with phases("evaluate"):
        before = weights.hashes(agent.modules())
        try:
            ended = evaluation(acting)
        except Exception as error:
            error.add_note(
                f"In evaluation, after iteration {iteration}: the unit above is one of its episodes, "
                f"and python -m rank0rl evaluate has the same ones."
            )
            raise
        weights.chksum(agent.modules(), label="after evaluation", before=before)
        ended = rank0_accum_batches(ended)
        return batches.in_order(ended, ended["fragment_id"])


def _told(yes: bool, phases: Phases) -> bool:
    """What rank 0 decides, on every rank."""
    with phases("wait"):
        return bool(comm.bcast_obj(yes))


def _begin(agent: Agent, rollout: Rollout, options: RunOptions, run: Run | None) -> int:
    """Bring all ranks to where rank 0 is: the number of iterations made."""
    if run:
        run.keep()
        run.save()  # from here on there is something to go on with, however the run ends
        job.resumable(run.folder)
    iteration = comm.bcast_obj(run.state.progress.iteration if run else None)
    if iteration and options.update == "allreduce":
        agent.load(comm.bcast_obj(agent.state()))
    if iteration:
        mine = run.state.unfinished.all() if run else {}
        names = comm.bcast_obj(list(mine))
        lanes = {name: comm.bcast(mine.get(name)) for name in names}
        for lane, why in rollout.restore(lanes).items():
            print(f"lane {lane}: {why}; a new episode begins there, and the curve is another one")
    comm.barrier()  # the first iteration's times are not those of making environments
    return int(iteration)


def _process(agent: Agent, fragments: list[Fragment], rollout: Rollout, iteration: int) -> Batch:
    """The rows of this rank's fragments, and the unit of each."""
    rows = []
    for fragment in fragments:
        try:
            part = agent.process(fragment)
            contract.check_processed(part)
        except Exception as error:
            rollout.failed_at = iteration, fragment.fragment_id
            error.add_note(f"In process, of unit {fragment.fragment_id} in iteration {iteration}.")
            raise
        rows.append(
            {**part, "fragment_id": np.full(batches.count(part), fragment.fragment_id, np.int64)}
        )
    return batches.concatenate(rows)


def _is_last(gathered: Gathered, run: Run) -> bool:
    """Whether the schedule ends with this batch, so that no other one is needed."""
    return run.state.share_over(gathered.steps, len(gathered.ended["return"])) >= 1


def _plain(ready: Gathered | None) -> dict[str, Any]:
    """A batch that waits for its update, for a checkpoint."""
    return dict(vars(ready)) if ready else {}


def _ready(run: Run | None) -> Gathered | None:
    """The batch that the last boundary left: on rank 0 with its rows, or on no rank."""
    ahead = run.state.ahead if run else {}
    if not comm.bcast_obj(bool(ahead)):
        return None
    return Gathered(**ahead) if run else Gathered({}, {}, 0)
