"""The machine of a run: its cores and memory, and the types and versions that can change the last bits."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rank0rl.mpi import comm
from rank0rl.mpi.threads import blas


def available_cores() -> list[tuple[int, ...]]:
    """Return the physical cores that this process may use, each as the CPUs (hardware threads) on it.

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


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_PACKAGES = ("rank0rl", "numpy", "torch", "gymnasium", "mujoco", "mpi4py", "numba", "scipy", "cma")


def describe() -> dict[str, Any]:
    """Return this host's name, CPU and versions of packages. The last two can change the last bits of a result."""
    return {"host": platform.node(), "cpu": _cpu(), "versions": _versions()}


def provenance(machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record of one start of a run, for its config.toml. Rank 0 only.

    Args:
        machines: `describe` of every rank, rank 0 first.
    """
    return {
        "nprocs": len(machines),
        "command": shlex.join(sys.orig_argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **machines[0],
        "hosts": list({each["host"]: None for each in machines}),
        "machine": platform.machine(),
        "mpi": comm.mpi_version(),
        "blas": blas(),
        "commit": _commit(),
    }


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], how: str = "{name} {before} is now {now}"
) -> list[str]:
    """List the differences of two machines that can change the last bits of a result.

    Args:
        before: `describe` of the first host, or `provenance` of an earlier start.
        now: the same of another host, or of this start.
        how: format of a line, with {name}, {before} and {now}.
    """
    first, second = (
        {
            **{name: r.get(name) for name in ("cpu", "blas")},
            **{k: v for k, v in r.get("versions", {}).items() if k != "mpi4py"},
        }
        for r in (before, now)
    )
    return [
        how.format(name=name, before=first.get(name), now=second.get(name))
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]


def _commit() -> str:
    """Return the commit of the running script, "-dirty" with uncommitted changes, "unknown" outside git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    where = Path(sys.argv[0]).resolve().parent
    try:
        done = subprocess.run(
            describe, cwd=where, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _cpu() -> str:
    """Return the CPU's model name; BLAS chooses its kernels by CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def check_device(device: str) -> None:
    """Check that a device exists.

    Raises:
        ValueError: if it is not a CPU or CUDA device, or this machine or this torch lacks it.
    """
    import torch

    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:1: got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {device!r} needs a GPU that torch sees: torch {torch.__version__} sees none; "
            f"check nvidia-smi and that torch is a CUDA build (pytorch.org/get-started), or leave "
            f"out --device"
        )
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ValueError(
            f"there is no device {device!r}: this machine has cuda:0 to "
            f"cuda:{torch.cuda.device_count() - 1}; set --device to one of them"
        )
