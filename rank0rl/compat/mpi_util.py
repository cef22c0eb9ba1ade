"""mpi_util's names: the collectives, and the seeds, the device and the times of a script.

The collectives live in `rank0rl.mpi` and are imported when they are first used, so that a script
that has not forked yet loads neither MPI nor torch. `import rank0rl` offers all these names as
well.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rank0rl.compat import MPI_UTIL, no_attribute
from rank0rl.launch import job
from rank0rl.mpi import comm, reduce
from rank0rl.mpi.arrays import as_value

if TYPE_CHECKING:
    import torch

__all__ = sorted(MPI_UTIL)  # noqa: PLE0605 - some are imported when used

# The first number of the key of these streams. The trainer's streams have others, so that a
# script's random numbers are never those of a run with the same seed.
_SCRIPT = 4


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Return `tf_config`, `cumsum_steps` or a collective, found when it is read."""
    if name == "tf_config":
        return _device()
    if name == "cumsum_steps":
        return _laps.cumsum_steps
    if name not in MPI_UTIL:
        raise no_attribute(__name__, name)
    return getattr(importlib.import_module(f"rank0rl.{MPI_UTIL[name]}"), name)


all_sum_scalar, all_mean_scalar = reduce.all_sum, reduce.all_mean  # which take numbers too


def accum_batches(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate batches of this rank, as `rank0_accum_batches` does those of all ranks. Nothing is sent.

    Args:
        batches: one batch or more, with the same names, and the same dtype under a name.

    Returns:
        name -> the rows of all batches, in their order.

    Raises:
        ValueError: if there is no batch, or their names, dtypes or trailing shapes differ.
    """
    names = {tuple(sorted(batch)) for batch in batches}
    if len(names) != 1:
        got = " and ".join(str(each) for each in sorted(names)) or "no batch"
        raise ValueError(f"one or more batches must have the same names: got {got}")
    return {name: _together([batch[name] for batch in batches], name) for name in batches[0]}


def _together(parts: Sequence[Any], name: str) -> Any:
    kinds = {_kind(part) for part in parts}
    if len(kinds) > 1:
        got = " and ".join(sorted(kinds))
        raise ValueError(f"batches must have the same kind of values: {name!r} is {got}")
    if isinstance(parts[0], Mapping):
        return accum_batches(parts)
    if isinstance(parts[0], list):
        return [item for part in parts for item in part]
    values = [as_value(part) for part in parts]
    return values[0].restore(np.concatenate([np.atleast_1d(value.array) for value in values]))


def _kind(part: Any) -> str:
    if isinstance(part, Mapping | list):
        return "a dict" if isinstance(part, Mapping) else "a list"
    return str(part.dtype if hasattr(part, "dtype") else np.asarray(part).dtype)


def set_global_seeds(i: int) -> None:
    """Seed the global random numbers of Python, NumPy and torch, differently on every rank.

    Args:
        i: the run's seed, at least 0, the same on every rank: with `i + rank`, as in older recipes,
            neighbouring runs share streams.

    Raises:
        ValueError: if i is negative.
    """
    import torch

    if i < 0:
        raise ValueError(f"the seed must be at least 0: got {i}")
    rng = np.random.default_rng(np.random.SeedSequence(i, spawn_key=(_SCRIPT, comm.get_rank())))
    random.seed(int(rng.integers(2**63)))
    np.random.seed(rng.integers(2**32, size=4, dtype=np.uint32))  # noqa: NPY002 - scripts use it
    torch.manual_seed(int(rng.integers(2**63)))


def _device() -> torch.device:
    """Return this rank's GPU, with the share of memory of `mpi_fork`; the CPU if there is none."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpu = torch.device("cuda", comm.get_rank() % torch.cuda.device_count())
    share = float(os.environ.get(job.GPU_PCT, "0"))
    if share:
        torch.cuda.set_per_process_memory_fraction(share, gpu)
    return gpu


class Laps:
    """Steps per second, and seconds between labels, of a loop."""

    def __init__(self) -> None:
        self.cumsum_steps = 0
        """Steps that all ranks have made, of all calls of `steps_sec`."""
        self._steps_since = self._label_since = time.perf_counter()
        self._loop_since: float | None = None
        self._phases: dict[str, float] = {}

    def steps_sec(self, count: int) -> float:
        """Print, on rank 0, how many steps all ranks made per second since the last call.

        The seconds are those of rank 0.

        Collective: every rank calls this, in the same order.

        Args:
            count: steps that this rank has made since the last call.

        Returns:
            The number that is printed, on every rank.
        """
        now = time.perf_counter()
        took_s, self._steps_since = now - self._steps_since, now
        steps, seconds = reduce.all_sum([count, took_s if comm.get_rank() == 0 else 0.0])
        self.cumsum_steps += int(steps)
        rate = float(steps / seconds)
        comm.print0(f"steps/s {rate:,.0f}")
        return rate

    def timeit(self, label: str) -> dict[str, float]:
        """Print, on rank 0, the seconds since the last label.

        Args:
            label: name of what was done since the last label, or since this module was loaded. With
                "------" in it a new loop begins, and the seconds of the last loop are printed too.

        Returns:
            Label -> seconds that this rank has spent in the current loop; after "------", in the
            loop that has just ended.
        """
        now = time.perf_counter()
        took_s, self._label_since = now - self._label_since, now
        self._phases[label] = self._phases.get(label, 0.0) + took_s
        comm.print0(f"{took_s:9.4f} s {label}")
        phases = self._phases
        if "------" in label:
            if self._loop_since is not None:
                comm.print0(f"{now - self._loop_since:9.4f} s the last loop")
            self._loop_since, self._phases = now, {}
        return dict(phases)


_laps = Laps()
steps_sec, timeit = _laps.steps_sec, _laps.timeit
