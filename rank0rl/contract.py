"""What an agent's methods give, checked where it comes in: clear words in place of a later failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rank0rl import batch as batches
from rank0rl.agent import Agent
from rank0rl.mpi import weights


def check_processed(part: Any) -> None:
    """Make sure that `process` gave rows.

    Raises:
        TypeError: if it gave something else.
        ValueError: if its arrays disagree on how many rows there are.
    """
    wrong = part if not isinstance(part, Mapping) else None
    for name, array in {} if wrong is not None else part.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            wrong = {name: array}
            break
    if wrong is not None:
        raise TypeError(
            f"process must return a dict of name -> array with rows along its first axis: got "
            f"{wrong!r:.100}"
        )
    batches.count(part)


def check_learned(agent: Agent, metrics: Any) -> None:
    """Make sure that an update has left what the next iteration can go on with.

    Raises:
        TypeError: if what it returns cannot be recorded.
        FloatingPointError: if weights are no numbers any more: nan.
    """
    if not isinstance(metrics, Mapping) or not all(map(_is_number, metrics.values())):
        raise TypeError(
            f"update must return a dict of name -> number, for the record: got {metrics!r:.100}"
        )
    for name, tensor in weights.named_tensors(agent.modules()).items():
        if tensor.isnan().any():  # infinities may be meant, as in masks
            raise FloatingPointError(
                f"{name!r} holds nan: a lower learning rate, or rewards and observations of smaller "
                f"size, may help; the run's last checkpoint is from before it"
            )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return np.ndim(value) == 0
