"""What rank 0 alone keeps of a run: its progress, the state of the last boundary, its files."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rank0rl import checkpoint, weights
from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.config import RunOptions
from rank0rl.logger import Logger
from rank0rl.rollout import Unfinished
from rank0rl.timing import Phases

_PHASES = ("collect", "process", "gather", "update", "broadcast", "wait")
_LAST = 100  # episodes that a mean return is taken over
_HASH = 16  # digits of a hash in the CSV: 64 bits tell any two apart


@dataclass
class Progress:
    """How far a run has come."""

    iteration: int = 0
    steps: int = 0
    episodes: int = 0
    seconds: float = 0.0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    """Of the last episodes, in order of iterations, then units."""
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST))
    """The same for their steps."""

    def add(self, steps: int, ended: Batch) -> None:
        """Count what an iteration has gathered."""
        self.iteration += 1
        self.steps += steps
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
    """The record and the state of a run. Rank 0 only.

    Args:
        agent: whose state it is.
        options: of the run.
        about: what the summary begins with, such as env_id, algo and seed.
        logger: where it is written.
    """

    def __init__(
        self, agent: Agent, options: RunOptions, about: Mapping[str, Any], logger: Logger
    ) -> None:
        """Begin; to go on with a run, call `load`."""
        self.progress = Progress()
        self.unfinished = Unfinished(options.max_replay_steps)
        self.phases = Phases()
        self._agent, self._options, self._about, self._logger = agent, options, about, logger
        self.saved: int | None = None
        """The iteration of the last checkpoint."""
        self._boundary: dict[str, Any] = {}
        self._tried: int | None = None
        self._steps_before = 0

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: if its weights are not those of this agent.
        """
        mine = weights.named_tensors(self._agent.modules())
        saved = state["weights"]
        if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in saved.items()}:
            raise ValueError(
                "the checkpoint holds weights of other names or shapes than this agent's: resume "
                "with the run's own --algo and network sizes"
            )
        for name, t in mine.items():
            t.copy_(saved[name])
        self._agent.load(state["agent"])
        self.progress.load(state["progress"])
        self._steps_before = self.progress.steps
        if state["lanes"]:
            self.unfinished.load({name: t.numpy() for name, t in state["lanes"].items()})
        self._logger.go_on_after(self.progress.iteration)

    def share_over(self) -> float:
        """Share of the run that is over, 1 or more at its end."""
        return self._options.progress(self.progress.steps, self.progress.episodes)

    def over(self) -> bool:
        """Whether all steps or episodes are made, or as many iterations as were asked for."""
        stop = self._options.stop_after_iterations
        return self.share_over() >= 1 or (stop is not None and self.progress.iteration >= stop)

    def record(self, seconds: float, batch_sha256: str, metrics: Mapping[str, float]) -> None:
        """Keep the iteration that has just ended, as a boundary, in the CSV and on the console."""
        progress, phases = self.progress, self.phases.take()
        steps_per_s = (progress.steps - self._steps_before) / seconds
        self._steps_before = progress.steps
        progress.seconds += seconds
        self.keep()
        weights_sha256 = weights.sha256(self._boundary["weights"])
        return_mean = _mean(progress.returns)
        self._logger.row(
            {
                "iteration": progress.iteration,
                "steps": progress.steps,
                "episodes": progress.episodes,
                "seconds": progress.seconds,
                "return_mean": return_mean,
                "length_mean": _mean(progress.lengths),
                "steps_per_s": steps_per_s,
                **{f"{phase}_s": phases.get(phase, 0.0) for phase in _PHASES},
                "batch_sha256": batch_sha256[:_HASH],
                "weights_sha256": weights_sha256[:_HASH],
                **metrics,
            }
        )
        shares = {phase: phases.get(phase, 0.0) / seconds for phase in _PHASES}
        line = (
            f"{progress.iteration}: {progress.steps:,} steps ({min(self.share_over(), 1):.0%})  "
            f"return {return_mean:.1f}  {steps_per_s:,.0f} steps/s  "
            + " ".join(f"{phase} {share:.0%}" for phase, share in shares.items() if share >= 0.005)
        )
        checkpoint_now = progress.iteration % self._options.checkpoint_every == 0
        self._logger.show(line, stays=checkpoint_now)
        if checkpoint_now:
            self.save()

    def keep(self) -> None:
        """Make this the boundary that `save` writes: copies of arrays, a fraction of a millisecond."""
        self._boundary = checkpoint.snapshot(
            {
                "progress": self.progress.state(),
                "lanes": self.unfinished.all(),
                "weights": weights.named_tensors(self._agent.modules()),
                "agent": self._agent.state(),
            }
        )

    def save(self) -> None:
        """Write checkpoint and summary of the last boundary, whatever is half done since.

        Once per boundary: what has failed, as on a full disk, is not tried again.

        Raises:
            OSError: if the checkpoint cannot be written, saying what there still is.
        """
        iteration = self._boundary["progress"]["iteration"]
        if self._tried == iteration:
            return
        self._tried = iteration
        keep = self._options.keep_checkpoints
        checkpoint.save(self._logger.folder, iteration, self._boundary, keep)
        self.saved = iteration
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


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
