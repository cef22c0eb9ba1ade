"""What a script of one's own needs besides the collectives: seeds, a device, and the time."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import torch

from rank0rl import seeding
from rank0rl.mpi import comm, job, reduce


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


def __getattr__(name: str) -> torch.device:
    """`tf_config`: the device of this rank. Read lazily."""
    if name == "tf_config":
        return device()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def device() -> torch.device:
    """The device of this rank, for scripts that put every rank on a GPU; the CPU where there is none.

    With several GPUs, rank r has number r modulo their number. Where `mpi_fork` was told a gpu_pct,
    this process may use no more than that share of its memory.
    """
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
        """Begin now."""
        self._steps_since = self._label_since = time.perf_counter()
        self._loop_since: float | None = None
        self._phases: dict[str, float] = {}

    def steps_sec(self, count: int) -> float:
        """Print steps of all ranks per second since the last call, on rank 0.

        Collective: every rank calls this, in the same order.

        Args:
            count: steps that this rank has made since the last call.

        Returns:
            The same number, on every rank.
        """
        now = time.perf_counter()
        took_s, self._steps_since = now - self._steps_since, now
        steps, seconds = reduce.all_sum([count, took_s if comm.get_rank() == 0 else 0.0])
        rate = float(steps / seconds)
        comm.print0(f"steps/s {rate:,.0f}")
        return rate

    def timeit(self, label: str) -> dict[str, float]:
        """Print the seconds since the last label, on rank 0.

        A label with "------" in it opens a loop, and prints the seconds of the last one as well.

        Args:
            label: of what has been done since the last one; at first, since rank0rl was loaded.

        Returns:
            Label -> seconds, of this rank's loop up to now; after "------", of the last one.
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
