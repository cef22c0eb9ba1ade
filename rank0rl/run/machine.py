"""The machine of a run: cores, memory, versions, and which of them can change the last bits."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.agent import Space
from rank0rl.nets.normalize import is_image
from rank0rl.options import flag
from rank0rl.run.options import RunOptions


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


def of_machine() -> int:
    """Return the size of this machine's memory, in bytes."""
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(options: RunOptions, agent: Any, obs: Space) -> None:
    """Refuse what this machine's memory surely cannot hold, before it is built.

    This is a lower bound: of one batch's observations, and of one network for each of the agent's
    options `hidden`, `value_hidden` and the like, the sizes of each hidden layer.

    Args:
        options: options of the run.
        agent: options of the agent.
        obs: space of the observations.

    Raises:
        ValueError: naming the option.
    """
    steps = options.steps_per_batch or options.steps_per_env * options.num_envs
    needed = {
        f"a batch of {steps} steps": steps * obs.size * np.dtype(obs.dtype).itemsize,
        **{
            f"a network with {flag(name)} {' '.join(map(str, sizes))}": _bytes(sizes, obs)
            for name, sizes in vars(agent).items()
            if name.endswith("hidden") and isinstance(sizes, tuple)
        },
    }
    for what, size in needed.items():
        if size > of_machine():
            raise ValueError(
                f"{what} needs more memory than there is: at least {size / 2**30:,.1f} GB of "
                f"{of_machine() / 2**30:,.1f} GB; make it smaller"
            )


def _bytes(sizes: tuple[int, ...], obs: Space) -> int:
    """Return the size of weights and biases, their gradients, and Adam's two moments, in float32."""
    inputs = 1 if is_image(obs.shape, obs.dtype) else obs.size  # convolutions make an image small
    return 4 * 4 * sum((n + 1) * m for n, m in pairwise((inputs, *sizes, 1)))


_PACKAGES = ("rank0rl", "numpy", "torch", "gymnasium", "mujoco", "mpi4py", "numba", "scipy", "cma")


def describe() -> dict[str, Any]:
    """Return this host's name, and what can change the last bits of a result: CPU and versions."""
    return {
        "host": platform.node(),
        "cpu": _cpu(),
        "versions": {"python": platform.python_version(), **dict(_versions())},
    }


def provenance(machines: Sequence[Mapping[str, Any]], mpi: str, blas: str) -> dict[str, Any]:
    """Return the record of one start of a run, for its config.toml.

    Args:
        machines: what `machine` returned on every rank, rank 0 first.
        mpi: name and version of the MPI library.
        blas: what `threads.blas` returned on rank 0.
    """
    return {
        "nprocs": len(machines),
        "command": shlex.join(sys.orig_argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **machines[0],
        "hosts": list({each["host"]: None for each in machines}),
        "machine": platform.machine(),
        "mpi": mpi,
        "blas": blas,
        "commit": _commit(),
    }


def key(folder: Path, first_start: Mapping[str, Any]) -> str:
    """Return a unique id of a run, made from its folder and the record of its first start."""
    what = f"{first_start['host']} {folder.resolve()} {first_start['started']}"
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], how: str = "{name} {before} is now {now}"
) -> list[str]:
    """List the differences of two records, or machines, that can change the last bits of a result.

    Args:
        before: what `record` or `machine` returned earlier, or on the first host.
        now: the same for now, or for another host.
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


def host_differences(machines: Sequence[Mapping[str, Any]]) -> list[str]:
    """List how each host differs from the first one."""
    hosts = {each["host"]: each for each in reversed(machines)}
    return [
        line
        for host, each in reversed(hosts.items())
        for line in differences(machines[0], each, f"{{name}} {{before}} is {{now}} on {host}")
    ]


def program() -> list[str]:
    """Return the words with which training is called here: a script, or rank0rl's own command."""
    script = Path(sys.argv[0])
    if script.name in ("__main__.py", "rank0rl"):
        return ["python", "-m", "rank0rl", "train"]
    return ["python", str(script)]


def _commit() -> str:
    """Return the commit of the running script, "-dirty" with uncommitted changes, "unknown" outside git."""
    where = Path(sys.argv[0]).resolve().parent
    try:
        done = subprocess.run(
            [
                "git",
                "-C",
                str(where),
                "describe",
                "--always",
                "--dirty",
                "--abbrev=40",
                "--exclude=*",
            ],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _versions() -> list[tuple[str, str]]:
    found = []
    for package in _PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    """Return the CPU's model name; BLAS chooses its kernels by CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
