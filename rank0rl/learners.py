"""Who updates: rank 0 alone, on the whole batch, or every rank on its share of it."""

from __future__ import annotations

from typing import Any, TypeVar

X = TypeVar("X")


class Learners:
    """One learner. An agent that updates with several averages what it takes of its rows.

    That is enough for the same step on all of them: their shares are equally large, so that the
    mean of their means is the mean of all.
    """

    count: int = 1

    def average(self, x: X) -> X:
        """Mean over all learners: of an array in place, else of a number. All call it equally often."""
        return x

    def share(self, rows: int) -> int:
        """Of so many rows of one gradient step, how many this learner takes."""
        return max(1, rows // self.count)

    def average_grads(self, flat: Any) -> None:
        """Average the gradients of a `Flat`, in place."""
        if self.count > 1:
            for vector in flat.vectors:
                self.average(vector.grad.numpy())


ALONE = Learners()
