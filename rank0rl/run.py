"""The record of a run, on rank 0: rows, checkpoints, summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rank0rl import checkpoint, weights
from rank0rl.config import RunOptions
from rank0rl.logger import Logger
from rank0rl.state import State
from rank0rl.timing import Phases

_PHASES = ("collect", "process", "gather", "update", "broadcast", "wait")
_HASH = 16  # digits of a hash in the CSV: 64 bits tell any two apart


class Run:
    """Keeps what the last boundary was, and writes the run's files. Rank 0 only.

    Args:
        state: of the run.
        options: of the run.
        about: what the summary begins with, such as env_id, algo and seed.
        logger: where it is written.
    """

    def __init__(
        self, state: State, options: RunOptions, about: Mapping[str, Any], logger: Logger
    ) -> None:
        """Begin, or go on from where the state is."""
        self.state = state
        self.phases = Phases()
        self.saved: int | None = None
        """The iteration of the last checkpoint."""
        self.folder = logger.folder
        self._options, self._about, self._logger = options, about, logger
        self._boundary: dict[str, Any] = {}
        self._steps_before = state.progress.steps
        logger.go_on_after(state.progress.iteration)

    def over(self) -> bool:
        """Whether all steps or episodes are made, or as many iterations as were asked for."""
        stop = self._options.stop_after_iterations
        reached = stop is not None and self.state.progress.iteration >= stop
        return reached or self.state.share_over() >= 1

    def record(self, seconds: float, batch_sha256: str, metrics: Mapping[str, float]) -> None:
        """Keep the iteration that has just ended, as a boundary, in the CSV and on the console."""
        progress, phases = self.state.progress, self.phases.take()
        steps_per_s = (progress.steps - self._steps_before) / seconds
        self._steps_before = progress.steps
        progress.seconds += seconds
        boundary = self.state.snapshot()
        weights_sha256 = weights.sha256(boundary["weights"])
        return_mean = _mean(progress.returns)
        row: dict[str, float | str] = {
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
        try:
            self._logger.row(row)
        except OSError as error:
            raise checkpoint.NotSaved(
                f"cannot write {self.folder / 'progress.csv'}: {error.strerror}"
            ) from error
        self._boundary = boundary  # once its row is written: resume goes on after the last row
        shares = {phase: phases.get(phase, 0.0) / seconds for phase in _PHASES}
        line = (
            f"{progress.iteration}: {progress.steps:,} steps ({min(self.state.share_over(), 1):.0%})  "
            f"return {return_mean:.1f}  {steps_per_s:,.0f} steps/s  "
            + " ".join(f"{phase} {share:.0%}" for phase, share in shares.items() if share >= 0.005)
        )
        checkpoint_now = progress.iteration % self._options.checkpoint_every == 0
        self._logger.show(line, stays=checkpoint_now)
        if checkpoint_now:
            self.save()

    def keep(self) -> None:
        """Make this the boundary that `save` writes."""
        self._boundary = self.state.snapshot()

    def save(self) -> None:
        """Write checkpoint and summary of the last boundary, whatever is half done since.

        Raises:
            NotSaved: if the checkpoint cannot be written.
        """
        iteration = self._boundary["progress"]["iteration"]
        if self.saved == iteration:
            return
        keep = self._options.keep_checkpoints
        checkpoint.save(self.folder, iteration, self._boundary, keep)
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
