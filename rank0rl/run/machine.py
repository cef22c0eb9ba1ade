"""The machine of a run: its cores and memory, and the types and versions that can change the last bits."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.mpi import comm
from rank0rl.mpi.threads import blas, one_thread


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


_PACKAGES = ("numpy", "torch", "gymnasium", "mujoco", "mpi4py", "numba", "scipy", "cma")


def describe() -> dict[str, Any]:
    """Return this host's name, CPU, versions of packages, and its `fingerprint`."""
    about = {"host": platform.node(), "cpu": _cpu(), "versions": _versions()}
    return {**about, "fingerprint": fingerprint()}


def fingerprint() -> str:
    """Return what this machine computes: four characters for each of `_primitives`, in hexadecimal.

    Where fingerprints differ, curves differ. Equal ones are no proof: they know these functions alone.
    """
    with one_thread(), np.errstate(all="ignore"):
        return "".join(_digest(compute())[:4] for compute in _primitives().values())


@functools.cache
def _primitives() -> dict[str, Callable[[], Any]]:
    """Return functions whose last bits may depend on the CPU, the C library or a version, by name.

    Each computes the same numbers on all machines.
    """
    import torch

    import rank0rl.nets  # noqa: F401  as training has torch

    rng, found = np.random.default_rng(0), dict[str, Callable[[], Any]]()
    for dtype in ("float32", "float64"):
        x, square = rng.uniform(-4, 4, 515).astype(dtype), rng.standard_normal((48, 48))
        above, square = abs(x) + np.asarray(0.001, dtype), square.astype(dtype)
        for names, of in (("exp expm1 tanh sin cbrt arctan", x), ("log log1p sqrt", above)):
            for name in names.split():
                found[f"numpy {name} of {dtype}"] = functools.partial(getattr(np, name), of)
        found |= {
            f"numpy power of {dtype}": functools.partial(np.power, above, x),
            f"numpy sum of {dtype}": functools.partial(np.sum, square, 1),
            f"numpy product of {dtype}": functools.partial(np.matmul, square, square[:, :17]),
            f"numpy qr of {dtype}": functools.partial(np.linalg.qr, square),
        }
        t, positive, matrix = torch.from_numpy(x), torch.from_numpy(above), torch.from_numpy(square)
        for names, tensor in (("exp tanh sigmoid erf sin", t), ("log log1p sqrt atan", positive)):
            for name in names.split():
                found[f"torch {name} of {dtype}"] = functools.partial(getattr(torch, name), tensor)
        found |= {
            f"torch softmax of {dtype}": functools.partial(torch.softmax, matrix, 1),
            f"torch var of {dtype}": functools.partial(torch.var, matrix, 0),
            f"torch product of {dtype}": functools.partial(torch.mm, matrix, matrix[:, :17]),
            f"torch qr of {dtype}": functools.partial(torch.linalg.qr, matrix),
        }
    for name in ("exp", "expm1", "sin", "cos", "tan", "sinh", "tanh", "erf", "atan", "asinh"):
        found[f"C {name}"] = _each(getattr(math, name), x)
    for name in ("log", "log1p", "sqrt", "lgamma", "cbrt"):
        found[f"C {name}"] = _each(getattr(math, name), above)
    return found


def _each(function: Callable[[float], float], x: Any) -> Callable[[], Any]:
    return lambda: [function(number) for number in x.tolist()]


def _digest(result: Any) -> str:
    """Return a hash of the bits of an array, a tensor, or several."""
    parts = result if isinstance(result, tuple) else (result,)
    return hashlib.sha256(b"".join(np.asarray(part).tobytes() for part in parts)).hexdigest()


def provenance(machines: Sequence[Mapping[str, Any]], own: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the record of one start of a run, for its config.toml. Rank 0 only.

    Args:
        machines: `describe` of every rank, rank 0 first.
        own: files of the run's own code.
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
        "commit": _commit(own),
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
        {name: v for name, v in each.get("versions", {}).items() if name != "mpi4py"}
        for each in (before, now)
    )
    found = [
        how.format(name=name, before=first.get(name), now=second.get(name))
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]
    one, other = (str(each.get("fingerprint", "none")) for each in (before, now))
    if one != other:
        names = unlike(one, other)
        what = f"fingerprint ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        found.append(how.format(name=what, before=short(one), now=short(other)))
    return found


def unlike(one: str, other: str) -> list[str]:
    """Return the names of the primitives in which two fingerprints differ."""
    names = [*_primitives()]
    if len(one) != len(other) or len(one) != 4 * len(names):
        return ["another set of functions"]
    return [
        name for i, name in enumerate(names) if one[4 * i : 4 * i + 4] != other[4 * i : 4 * i + 4]
    ]


def short(fingerprint: str) -> str:
    """Return a short name of a fingerprint."""
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:8] if fingerprint != "none" else "none"


def _commit(own: Sequence[Path]) -> str:
    """Return the commit of the running script, "unknown" outside git; of an installed one, of the run's own files or of rank0rl.

    "-dirty" follows it if there are uncommitted changes, or one of the run's own files there is not in git.
    """
    places = [Path(sys.argv[0]).resolve(), *(path.resolve() for path in own), Path(__file__)]
    where = next((path.parent for path in places if not _is_installed(path)), None)
    if where is None:
        return "unknown"
    commit = _git(where, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    if commit and own and not commit.endswith("-dirty"):
        untracked = (
            _git(where, "status", "--porcelain", "--", str(path.resolve())) for path in own
        )
        commit += "-dirty" if any(untracked) else ""
    return commit or "unknown"


def _is_installed(path: Path) -> bool:
    """Return True for files of installed packages: the repository around them is another project."""
    folders = (Path(sysconfig.get_path(name)).resolve() for name in ("scripts", "purelib"))
    return any(path.is_relative_to(folder) for folder in folders)


def _git(where: Path, *words: str) -> str:
    """Return what git says in a folder, "" if it fails."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *words],
            cwd=where,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    ours = sys.modules["rank0rl"].__version__  # what is installed may say that of an older checkout
    found = {"rank0rl": ours, "python": platform.python_version()}
    if library := " ".join(platform.libc_ver()).strip():
        found["libc"] = library
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
