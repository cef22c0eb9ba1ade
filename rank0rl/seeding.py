"""Random streams: (seed, purpose, key) -> an independent stream.

Streams are keyed, never counted: they need not be saved, and no two of them meet. (seed +
rank does: seeds 0-199 on 64 ranks give 263 distinct values out of 12,800.)
"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np

_BLOCK = 64
_PURPOSES = (
    "init",
    "reset",
    "act",
    "update",
    "script",
    "evaluate",
    "record",
)  # append only: the position is the key


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return the random numbers of one purpose and key.

    Args:
        seed: the run's seed, at least 0.
        purpose: "init", "reset", "act", "update", "script", "evaluate" or "record".
        key: what else tells streams apart, such as (iteration, fragment_id); each at least 0.

    Source: `SeedSequence` with a spawn key, numpy.org/doc/stable/reference/random/parallel.html.
    """
    return np.random.default_rng(_sequence(seed, purpose, *key))


def integer(seed: int, purpose: str, *key: int) -> int:
    """Return one integer in [0, 2**31), for seeds that other libraries take.

    Integers whose last key lies in the same block of 64 come from one sequence: 0.4 us each, not 12.
    """
    *rest, last = key
    return _block(seed, purpose, *rest, last // _BLOCK)[last % _BLOCK]


def seed_globals(seed: int, purpose: str, key: int) -> None:
    """Seed the global generators of torch, NumPy and Python, for agents that draw from them."""
    import torch  # processes of environments do without it

    number = integer(seed, purpose, key, 0)
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002
    random.seed(number)


@lru_cache(maxsize=1024)
def _block(seed: int, purpose: str, *key: int) -> list[int]:
    return [int(word) for word in _sequence(seed, purpose, *key).generate_state(_BLOCK) >> 1]


def _sequence(seed: int, purpose: str, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(_PURPOSES.index(purpose), *key))
