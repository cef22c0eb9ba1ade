"""The goal of a run: it ends before its last step if it is good enough, or gets no better."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.run.options import RunOptions


class Goal:
    """Judges a run by its evaluations, or by its last episodes if there are no evaluations.

    Args:
        options: options of the run.
    """

    def __init__(self, options: RunOptions) -> None:
        """Begin without a score."""
        self._options = options
        self._score: float | None = None
        self._best: float | None = None
        self._best_at = self._judged_at = 0

    def judge(
        self,
        iteration: int,
        returns: deque[float],
        ended: int,
        evaluated: npt.NDArray[Any] | None,
    ) -> None:
        """Take in an iteration. One without an evaluation, or without an episode that ended, brings no news.

        Args:
            iteration: its number.
            returns: returns of the last episodes of training. They count once there are `maxlen`.
            ended: number of those that ended in this iteration.
            evaluated: returns of an evaluation's episodes, if there was one.
        """
        if self._options.eval_every:
            episodes = evaluated
        else:
            episodes = np.array(returns) if ended and len(returns) == returns.maxlen else None
        if episodes is None:
            return
        self._score, self._judged_at = float(np.mean(episodes)), iteration
        if self._best is None or self._score > self._best:
            self._best, self._best_at = self._score, iteration

    def reached(self) -> str:
        """Return why the run ends now, "" if it goes on."""
        enough, patience = self._options.stop_at_return, self._options.patience
        if self._score is None:
            return ""
        if enough is not None and self._score >= enough:
            return f"stop_at_return {enough:g}"
        if patience is not None and self._judged_at - self._best_at >= patience:
            return f"patience {patience}"
        return ""

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        of = {"score": self._score, "best": self._best}
        return {**of, "best_at": self._best_at, "judged_at": self._judged_at}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self._score, self._best = state["score"], state["best"]
        self._best_at, self._judged_at = state["best_at"], state["judged_at"]


def goal_of(options: RunOptions) -> Goal | None:
    """Return the goal that the options set; None if the run has none."""
    return None if options.stop_at_return is options.patience is None else Goal(options)
