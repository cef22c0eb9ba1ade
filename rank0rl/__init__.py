"""rank0rl: batch reinforcement learning with rollouts on N ranks and the update on rank 0.

Names are imported when they are first used: ``import rank0rl`` loads neither mpi4py nor torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "mpi_fork": "launch",
    "rank": "comm",
    "nworkers": "comm",
    "print0": "comm",
    "bcast": "comm",
    "rank0_accum_batches": "accumulate",
    "all_accum_batches": "accumulate",
    "all_sum": "stats",
    "all_mean": "stats",
    "all_avg_wts": "averages",
    "steps_sec": "script",
    "timeit": "script",
    "tf_config": "script",
    "rank0_bcast_wts": "weights",
    "chksum": "weights",
    "set_global_seeds": "script",
    "Agent": "agent",
    "Fragment": "agent",
    "Spaces": "agent",
    "Space": "agent",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - names of other files, imported when used


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rank0rl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rank0rl.{_HOME[name]}"), name)
