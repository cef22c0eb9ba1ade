"""The record of a run, on rank 0: rows, checkpoints, summary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from rank0rl.batch import Batch
from rank0rl.mpi import weights
from rank0rl.run import checkpoint
from rank0rl.run.config import RunOptions
from rank0rl.run.logger import Logger
from rank0rl.run.state import Gathered, State
from rank0rl.run.timing import PHASES, Phases

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
        self._begun, self._share_begun = time.monotonic(), state.share_over()
        logger.go_on_after(state.progress.iteration)

    def over(self) -> bool:
        """Whether all steps or episodes are made, or as many iterations or seconds as were asked for."""
        iterations, seconds = self._options.stop_after_iterations, self._options.stop_after_seconds
        return (
            self.state.share_over() >= 1
            or (iterations is not None and self.state.progress.iteration >= iterations)
            or (seconds is not None and time.monotonic() - self._begun >= seconds)
        )

    def record(
        self,
        seconds: float,
        gathered: Gathered,
        metrics: Mapping[str, float],
        evaluated: Batch | None = None,
    ) -> None:
        """Keep the iteration that has just ended, as a boundary, in the CSV and on the console.

        Args:
            seconds: that it took, with the recording of the one before it.
            gathered: what it learned from.
            metrics: what the agent records.
            evaluated: "return" and "length" of the episodes of an evaluation, (E,), if it had one.
        """
        progress, phases = self.state.progress, self.phases.take()
        steps_per_s = (progress.steps - self._steps_before) / seconds
        self._steps_before = progress.steps
        progress.seconds += seconds
        is_best = self._is_best(evaluated)
        boundary = self.state.snapshot()
        groups: dict[str, Mapping[str, float | str]] = {
            "run": {
                "iteration": progress.iteration,
                "steps": progress.steps,
                "episodes": progress.episodes,
                "seconds": progress.seconds,
            },
            "episodes": {
                **_spread("return", progress.returns),
                "length_mean": _mean(progress.lengths),
                "longest": float(max(gathered.ended["length"], default=np.nan)),
            },
            "evaluation": _evaluation(evaluated) if self._options.eval_every else {},
            "speed": {
                "steps_per_s": steps_per_s,
                **{f"{phase}_s": phases.get(phase, 0.0) for phase in PHASES},
                **_of_ranks(gathered.ranks),
            },
            "hashes": {
                "batch_sha256": gathered.sha256[:_HASH],
                "weights_sha256": weights.sha256(boundary["weights"])[:_HASH],
            },
            "update": metrics,
        }
        try:
            self._logger.row(groups, progress.steps)
        except OSError as error:
            raise checkpoint.NotSaved(
                f"cannot write {self.folder / 'progress.csv'}: {error.strerror}"
            ) from error
        self._boundary = boundary  # once its row is written: resume goes on after the last row
        if is_best:
            checkpoint.save_best(self.folder, boundary)
        checkpoint_now = progress.iteration % self._options.checkpoint_every == 0
        line = self._line(seconds, steps_per_s, phases)
        if evaluated:
            line += f"  evaluated: return {_mean(evaluated['return']):.1f}"
        self._logger.show(line, stays=checkpoint_now or evaluated is not None)
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
            **({"best_eval": progress["best_eval"]} if self._options.eval_every else {}),
            "weights_sha256": weights.sha256(self._boundary["weights"]),
        }

    def _is_best(self, evaluated: Batch | None) -> bool:
        """Whether no evaluation before was as good; then this is the one to beat."""
        if evaluated is None:
            return False
        ret, progress = _mean(evaluated["return"]), self.state.progress
        better = ret > (-np.inf if progress.best_eval is None else progress.best_eval)
        progress.best_eval = ret if better else progress.best_eval
        return bool(better)

    def _line(self, seconds: float, steps_per_s: float, phases: Mapping[str, float]) -> str:
        """The state of the run for the console."""
        progress, over = self.state.progress, min(self.state.share_over(), 1.0)
        shares = {phase: phases.get(phase, 0.0) / seconds for phase in PHASES}
        pace = (time.monotonic() - self._begun) / (over - self._share_begun or 1.0)
        return (
            f"{progress.iteration}: {progress.steps:,} steps ({over:.0%}, "
            f"{_clock((1 - over) * pace)} left)  return {_mean(progress.returns):.1f}  "
            f"{steps_per_s:,.0f} steps/s  "
            + " ".join(f"{phase} {share:.0%}" for phase, share in shares.items() if share >= 0.005)
        )


def _spread(name: str, values: Any) -> dict[str, float]:
    """Mean, standard deviation and extremes; nan of nothing."""
    some = values if len(values) else [float("nan")]
    return {
        f"{name}_mean": _mean(values),
        **{f"{name}_{of.__name__}": float(of(some)) for of in (np.std, np.min, np.max)},
    }


def _evaluation(evaluated: Batch | None) -> dict[str, float | str]:
    """Columns of an evaluation; empty ones of an iteration without."""
    if evaluated is None:
        return {"eval_return": "", "eval_return_std": "", "eval_length": ""}
    return {
        "eval_return": _mean(evaluated["return"]),
        "eval_return_std": float(np.std(evaluated["return"])),
        "eval_length": _mean(evaluated["length"]),
    }


def _of_ranks(told: Mapping[str, Any]) -> dict[str, float]:
    """What the ranks told of themselves: how unequally they work, and what they all take."""
    return {
        "slowest_s": float(told["took_s"].max()),
        "fastest_s": float(told["took_s"].min()),
        "memory_mb": float(told["peak_mb"].sum()),
    }


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
