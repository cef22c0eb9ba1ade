"""Start from the networks and normalizers of another run. No code that it names is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rank0rl.agent import Agent
from rank0rl.mpi import weights
from rank0rl.options import OptionError
from rank0rl.run import checkpoint

Shapes = Mapping[str, tuple[int, ...]]


def read(run: Path) -> dict[str, Tensor]:
    """Return the weights of a run's last checkpoint, by name.

    Args:
        run: the run's folder, or one of its checkpoints.

    Raises:
        ValueError: if there is none, or it holds no weights.
    """
    path = checkpoint.latest(run)
    saved: Any = checkpoint.read(path)
    found = saved.get("weights") if isinstance(saved, dict) else None
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"checkpoint {path} holds no run: it has no weights")
    return found


def shapes(named: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in named.items()}


def check(agent: Agent, found: Shapes, source: str) -> None:
    """Check that an agent can take these weights.

    Raises:
        OptionError: naming the first that differs.
    """
    mine = shapes(weights.named_tensors(agent.modules()))
    for name in {**mine, **found}:
        if mine.get(name) != found.get(name):
            here, there = (_in_words(of.get(name)) for of in (mine, found))
            raise OptionError(
                f"--init-from {source}: {name!r} is {there} there and {here} here; give this run the "
                f"network sizes and the kind of actions of that one"
            )


def load(agent: Agent, named: Mapping[str, Tensor]) -> None:
    """Give an agent weights that it can take. Rank 0 only: its weights are broadcast."""
    for name, tensor in weights.named_tensors(agent.modules()).items():
        tensor.copy_(named[name])
    agent.modules_loaded()


def _in_words(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {shape}"
