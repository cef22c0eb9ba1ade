"""The loop: collect, process, gather, update on rank 0, broadcast."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl import batch as batches
from rank0rl import checkpoint, comm, seeding, weights
from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.config import RunOptions
from rank0rl.interrupt import Interrupted, Interrupts
from rank0rl.logger import Logger
from rank0rl.rollout import Rollout, Unfinished
from rank0rl.threads import set_threads
from rank0rl.timing import Phases

Array = npt.NDArray[Any]

_PHASES = ("collect", "process", "gather", "update", "broadcast", "wait")
_LAST = 100  # episodes that a mean return is taken over


@dataclass
class Progress:
    """How far a run has come; complete on rank 0 only, but for the iteration."""

    iteration: int = 0
    steps: int = 0
    episodes: int = 0
    seconds: float = 0.0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST))

    def add(self, steps: Array, ended: Batch) -> None:
        """Count what an iteration has gathered."""
        self.iteration += 1
        self.steps += int(steps.sum())
        self.episodes += len(ended["return"])
        self.returns.extend(ended["return"].tolist())
        self.lengths.extend(ended["length"].tolist())

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return dict(vars(self), returns=list(self.returns), lengths=list(self.lengths))

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        for name in ("iteration", "steps", "episodes", "seconds"):
            setattr(self, name, state[name])
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])


class Run:
    """What rank 0 alone keeps of a run: its progress, the state of the last boundary, its files.

    Args:
        agent: whose state it is.
        options: of the run.
        about: what the summary says besides: env_id, algo, seed, nprocs, num_envs.
        logger: where it is written.
    """

    def __init__(
        self, agent: Agent, options: RunOptions, about: Mapping[str, Any], logger: Logger
    ) -> None:
        """Begin, or go on once `load` is called."""
        self.progress = Progress()
        self.unfinished = Unfinished()
        self.phases = Phases()
        self._agent, self._options, self._about, self._logger = agent, options, about, logger
        self._boundary: dict[str, Any] = {}
        self._sha256 = ""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.progress.load(state["progress"])
        if state["lanes"]:
            self.unfinished.load({name: t.numpy() for name, t in state["lanes"].items()})
        for name, t in weights.named_tensors(self._agent.modules()).items():
            t.copy_(state["weights"][name])
        self._agent.load(state["agent"])
        self._logger.go_on_after(self.progress.iteration)

    def keep(self) -> None:
        """Make this the boundary that `save` writes. Cheap: copies of arrays."""
        self._boundary = checkpoint.snapshot(
            {
                "progress": self.progress.state(),
                "lanes": self.unfinished.all(),
                "weights": weights.named_tensors(self._agent.modules()),
                "agent": self._agent.state(),
            }
        )

    def save(self) -> None:
        """Write checkpoint and summary of the last boundary."""
        if not self._boundary:
            return
        checkpoint.write(self._logger.folder / checkpoint.NAME, self._boundary)
        self._logger.summary(self.summary())

    def summary(self) -> dict[str, Any]:
        """The last boundary in a few numbers, so that two runs are compared at a glance."""
        progress = self._boundary["progress"]
        seconds = progress["seconds"]
        return {
            **self._about,
            "iterations": progress["iteration"],
            "steps": progress["steps"],
            "episodes": progress["episodes"],
            "seconds": round(seconds, 3),
            "steps_per_s": round(progress["steps"] / seconds, 1) if seconds else 0.0,
            "return_mean": _mean(progress["returns"]) if progress["returns"] else None,
            "weights_sha256": weights.sha256(self._boundary["weights"]),
        }

    def record(self, seconds: float, steps: int, metrics: Mapping[str, float]) -> None:
        """Write the iteration that has just ended to the CSV, the console and, now and then, disk."""
        progress = self.progress
        progress.seconds += seconds
        self.keep()
        phases = self.phases.take()
        row: dict[str, Any] = {
            "iteration": progress.iteration,
            "steps": progress.steps,
            "episodes": progress.episodes,
            "seconds": progress.seconds,
            "return_mean": _mean(progress.returns),
            "length_mean": _mean(progress.lengths),
            "steps_per_s": steps / seconds,
            **{f"{phase}_s": phases.get(phase, 0.0) for phase in _PHASES},
            **metrics,
        }
        self._logger.row(row)
        share = self._options.progress(progress.steps, progress.episodes)
        self._logger.show(
            f"iteration {progress.iteration}  steps {progress.steps:,} ({min(share, 1):.0%})  "
            f"return {row['return_mean']:.1f}  {row['steps_per_s']:,.0f} steps/s  "
            + "  ".join(f"{phase} {phases.get(phase, 0.0) / seconds:.0%}" for phase in _PHASES)
        )
        if progress.iteration % self._options.checkpoint_every == 0:
            self.save()

    def over(self) -> bool:
        """Whether all steps or episodes are made."""
        return self._options.progress(self.progress.steps, self.progress.episodes) >= 1

    def print(self, line: str) -> None:
        """Print a line that stays."""
        self._logger.print(line)


def train(agent: Agent, rollout: Rollout, options: RunOptions, run: Run | None) -> None:
    """Iterate until the run is over.

    Collective: every rank calls this.

    Args:
        agent: of the same class and options on every rank; rank 0's weights count.
        rollout: this rank's lanes.
        options: of the run, the same on every rank.
        run: on rank 0 what it keeps, None on the others.

    Raises:
        Interrupted: on rank 0 after SIGINT or SIGTERM, when the last boundary's state is on disk.
    """
    set_threads(1)
    iteration = _begin(rollout, run)
    with Interrupts(ignore=run is None) as interrupts:
        try:
            while True:
                iteration += 1
                start = time.perf_counter()
                phases = run.phases if run else Phases()
                with phases("broadcast"):
                    go_on = _broadcast(agent, run)
                if not go_on:
                    break
                with phases("collect"):
                    fragments, ended = rollout.collect(agent, iteration)
                with phases("process"):
                    rows = _process(agent, fragments)
                with phases("wait"):
                    comm.barrier()
                with phases("gather"):
                    batch, ended, lanes, steps = _gather(rows, ended, rollout, fragments)
                if run is None:
                    continue
                with phases("update"):
                    metrics = _update(agent, batch, options, run.progress)
                with interrupts.held():
                    run.progress.add(steps, ended)
                    run.unfinished.add(lanes)
                    run.record(time.perf_counter() - start, int(steps.sum()), metrics)
        except BaseException:
            if run:
                run.save()
            raise
        if run:
            with interrupts.held():
                run.save()


def _begin(rollout: Rollout, run: Run | None) -> int:
    """Bring all ranks to where rank 0 is: the number of iterations made."""
    if run:
        run.keep()
    iteration = comm.share(run.progress.iteration if run else None)
    if iteration:
        mine = run.unfinished.all() if run else {}
        names = comm.share(list(mine))
        for lane in rollout.restore({name: comm.bcast(mine.get(name)) for name in names}):
            print(
                f"lane {lane}: the environment does not repeat an episode from its seed and "
                f"actions; a new episode begins there, and the curve is another one"
            )
    return int(iteration)


def _broadcast(agent: Agent, run: Run | None) -> bool:
    """Rank 0's weights, and whether there is another iteration, to every rank."""
    weights.rank0_bcast_wts(agent.modules())
    go_on = np.array([run is not None and not run.over()])
    comm.bcast_(go_on)
    return bool(go_on[0])


def _process(agent: Agent, fragments: list[Any]) -> Batch:
    """The rows of this rank's fragments, and the unit of each."""
    rows = []
    for fragment in fragments:
        part = agent.process(fragment)
        rows.append({**part, "unit": np.full(batches.count(part), fragment.unit, np.int64)})
    return batches.concatenate(rows)


def _gather(
    rows: Batch, ended: Batch, rollout: Rollout, fragments: list[Any]
) -> tuple[Batch, Batch, Batch, Array]:
    """On rank 0, in order of units: rows, ended episodes, lanes, and the steps of each fragment."""
    parts = {
        "rows": rows,
        "ended": ended,
        "lanes": rollout.unfinished(),
        "fragments": {"steps": np.array([len(fragment.rew) for fragment in fragments], np.int64)},
    }
    flat = comm.rank0_accum_batches(
        {f"{part}/{name}": array for part, batch in parts.items() for name, array in batch.items()}
    )
    of = {part: {name: flat[f"{part}/{name}"] for name in batch} for part, batch in parts.items()}
    in_order = batches.in_order
    return (
        in_order(of["rows"], of["rows"]["unit"]),
        in_order(of["ended"], of["ended"]["unit"]),
        of["lanes"],
        of["fragments"]["steps"],
    )


def _update(
    agent: Agent, batch: Batch, options: RunOptions, progress: Progress
) -> dict[str, float]:
    """The agent's update, with the threads that the run gives it."""
    rng = seeding.stream(options.seed, "update", progress.iteration + 1)
    if options.learner_threads != 1:
        set_threads(options.learner_threads)
    try:
        return agent.update(batch, rng, options.progress(progress.steps, progress.episodes))
    finally:
        if options.learner_threads != 1:
            set_threads(1)


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


__all__ = ["Interrupted", "Progress", "Run", "train"]
