"""rank0rl: batch reinforcement learning with rollouts on N ranks and the update on rank 0.

Names are imported when they are first used: ``import rank0rl`` loads neither mpi4py nor torch.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from rank0rl.compat import MPI_UTIL, no_attribute

__version__ = "0.3.0"


class _Checkout:
    """Finds rank0rl.algos in a checkout, where it lies beside this folder. In the wheel it lies within."""

    file = Path(__file__).parents[1] / "algos/__init__.py"

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        folder = cls.file.parent
        if name != f"{__name__}.{folder.name}" or not (folder / "ppo.py").exists():
            return None
        return spec_from_file_location(name, cls.file, submodule_search_locations=[str(folder)])


sys.meta_path.insert(0, _Checkout)  # type: ignore[arg-type] # before that of another checkout

_HOME = {
    **MPI_UTIL,
    "RunningNorm": "compat.average",
    "train": "api",
    "Run": "api",
    "evaluate": "api",
    "load": "policy",
    "Policy": "policy",
    "Agent": "agent",
    "Hook": "run.hooks",
    "Place": "envs.place",
    "Replay": "batch",
    "Solver": "envs.solver",
    "SolverError": "envs.solver",
    "group": "run.shares",
    "Fragment": "agent",
    "Step": "agent",
    "Spaces": "agent",
    "Space": "agent",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - names of other files, imported when used


if getattr(sys.stdout, "write_through", False):  # python -u
    from rank0rl.launch.streams import keep_lines_whole

    keep_lines_whole()


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise no_attribute(__name__, name)
    return getattr(importlib.import_module(f"rank0rl.{_HOME[name]}"), name)
