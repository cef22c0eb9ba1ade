"""Provenance of a run: machine, versions, commit and command, and which of them can change its last bits."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("rank0rl", "numpy", "torch", "gymnasium", "mujoco", "mpi4py", "numba", "scipy", "cma")


def machine() -> dict[str, Any]:
    """Return this host's name, and what can change the last bits of a result: CPU and versions."""
    return {
        "host": platform.node(),
        "cpu": _cpu(),
        "versions": {"python": platform.python_version(), **dict(_versions())},
    }


def record(machines: Sequence[Mapping[str, Any]], mpi: str, blas: str) -> dict[str, Any]:
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
