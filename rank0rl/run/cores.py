"""The cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> list[tuple[int, ...]]:
    """Return the CPUs of each physical core that this process may use; threads of one core belong together.

    The affinity mask and a container's limit (cgroup version 2) count. Without affinity masks, as on
    macOS, every CPU is a core.
    """
    mine = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    found: dict[tuple[str, ...], list[int]] = {}
    for cpu in sorted(mine):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            ids = [(topology / name).read_text() for name in ("physical_package_id", "core_id")]
        except OSError:
            ids = [str(cpu)]
        found.setdefault(tuple(ids), []).append(cpu)
    each = [tuple(cpus) for cpus in found.values()]
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        limit = int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max" for no limit
        return each
    return each[: max(1, int(limit))]
