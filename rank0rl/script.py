"""What a script of one's own needs besides the collectives."""

from __future__ import annotations

import random

import numpy as np
import torch

from rank0rl import comm, seeding


def set_global_seeds(i: int) -> None:
    """Seed Python's, NumPy's and torch's global random numbers, with a stream of each rank's own.

    Pass the run's seed, the same on every rank. (`i + rank`, as older recipes have it, would let
    neighbouring runs share streams.)

    Args:
        i: the run's seed, at least 0.
    """
    rng = seeding.stream(i, "script", comm.get_rank())
    random.seed(int(rng.integers(2**63)))
    np.random.seed(rng.integers(2**32, size=4, dtype=np.uint32))  # noqa: NPY002 - scripts use it
    torch.manual_seed(int(rng.integers(2**63)))
