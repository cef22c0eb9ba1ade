"""Ranks that exchange what an iteration exchanges, for `speedup --predict`: their latency and bandwidth."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from rank0rl.launch import fork

_REPEATS = 21
_ARRAYS = 16  # about as many arrays as a rank sends in an iteration
_BYTES = 1 << 22  # bytes of a rank: more than fits into a cache that ranks share
_LATE_S = 0.02  # seconds of an update: ranks that wait that long go to sleep


def main() -> None:
    """Print what rank 0 measures as JSON. The argument is the number of ranks."""
    nprocs = int(sys.argv[1])
    if fork.mpi_fork(nprocs) == "parent":
        return
    import numpy as np

    from rank0rl.mpi import comm
    from rank0rl.mpi.agreement import check_layout
    from rank0rl.mpi.gather import rank0_accum_batches

    few, many = ({f"{i}": np.zeros((1, 4), np.float32) for i in range(n)} for n in (1, _ARRAYS))
    rows = {"0": np.zeros(_BYTES, np.uint8)}

    def exchange() -> None:
        check_layout({"a": "f4"}, "link")
        comm.bcast_(few["0"])
        comm.bcast_obj(True)
        check_layout({}, "link", numbers=[0, 0])
        rank0_accum_batches(many)

    def late() -> float:
        comm.barrier()
        if comm.get_rank() == 0:
            time.sleep(_LATE_S)
        return _timed(exchange)

    latency = _least(lambda: check_layout({"a": "f4"}, "link"))
    one = _least(lambda: rank0_accum_batches(few))
    all_ = _least(lambda: rank0_accum_batches(many))
    moved = _least(lambda: rank0_accum_batches(rows))
    exchanges = sorted(late() for _ in range(_REPEATS))
    found = {
        "latency_s": latency,
        "message_s": max(all_ - one, 0.0) / ((_ARRAYS - 1) * (nprocs - 1)),
        "bandwidth": _BYTES * (nprocs - 1) / max(moved - one, 1e-9),
        "exchange_s": exchanges[_REPEATS // 2],
        "least_exchange_s": exchanges[0],
    }
    comm.print0(json.dumps(found))


def _timed(what: Callable[[], Any]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def _least(what: Callable[[], Any]) -> float:
    """Return the seconds of a call from when all ranks are there: the fastest turn, which nothing disturbed."""
    from rank0rl.mpi import comm

    times = []
    for _ in range(_REPEATS):
        comm.barrier()
        times.append(_timed(what))
    return min(times)


if __name__ == "__main__":
    main()
