"""Memory of the machine, and the peak of a process, measured so that the figures of the ranks add up."""

from __future__ import annotations

import os
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.agent import Space
from rank0rl.nets.conv import is_image
from rank0rl.options import flag
from rank0rl.run.options import RunOptions


def peak_mb() -> float:
    """Return this process's peak memory in MB (2^20 bytes); 0 if the system does not tell.

    Pages that several processes share, such as torch's code, count once for all of them. The first
    call measures them, which takes 10 ms. All growth of the peak since then counts as this process's.
    """
    shared = _shared_mb()
    return max(_peak_resident_mb() - shared, 0.0)


def of_machine() -> int:
    """Return the size of this machine's memory, in bytes."""
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check(options: RunOptions, agent: Any, obs: Space) -> None:
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


@cache
def _shared_mb() -> float:
    """Return the share of the resident memory that counts for other processes, in MB, on Linux."""
    kb = _kb("/proc/self/smaps_rollup")
    return (kb["Rss"] - kb["Pss"]) / 1024 if kb else 0.0


def _peak_resident_mb() -> float:
    # getrusage only as a last resort: there a process begins with the peak of its parent.
    if kb := _kb("/proc/self/status"):
        return kb["VmHWM"] / 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def _kb(path: str) -> dict[str, int]:
    """Return name -> number of the lines "name: number kB" of a file; {} if there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    fields = [line.replace(":", " ").split() for line in lines if line.endswith(" kB")]
    return {words[0]: int(words[1]) for words in fields}
