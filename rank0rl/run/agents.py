"""Find an agent, or a function of the user's, by its name, and import it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rank0rl import seeding
from rank0rl.agent import Agent, Spaces
from rank0rl.envs.make import find_modules_in, import_own, why
from rank0rl.mpi import comm
from rank0rl.options import OptionError, facts
from rank0rl.run import files
from rank0rl.run.options import RunOptions

_MOST = 1 << 24  # bytes of an agent's file
_ALGOS = "rank0rl.algos"

# The methods that an agent must have, as its author writes them.
_METHODS = {
    "__init__": "__init__(self, spaces, options, rng)",
    "act": "act(self, step)",
    "process": "process(self, fragment)",
    "update": "update(self, batch, rng, progress)",
    "modules": "modules(self)",
}


_TAKEN = {
    *("obs", "act", "rew", "terminated", "truncated", "memory", "action_mask"),  # of fragments
    *("draw", "features", "mask", "logp", "val", "adv", "ret"),  # of agents
}


@cache
def load_agent(algo: str) -> type[Agent]:
    """Return an agent's class.

    Args:
        algo: "file.py:Class", "package.module:Class", or the name of a module in algos/ with one
            agent.

    Raises:
        ValueError: if there is no such agent, or it lacks a method or options.
    """
    where, _, name = algo.partition(":")
    module = _import(where, algo)
    agents = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Agent)
        and (name or value.__module__ == module.__name__)
    }
    if not agents and not name:
        raise ValueError(
            f"{algo!r} does not name one agent: no class there derives from rank0rl.Agent, as class Mine(Agent) would"
        )
    if name not in agents and (name or len(agents) != 1):
        raise ValueError(
            f"{algo!r} does not name one agent: expected file.py:Class or module:Class with one of "
            f"{sorted(agents)}"
        )
    agent = agents[name] if name else next(iter(agents.values()))
    missing = [m for m in _METHODS if getattr(agent, m) is getattr(Agent, m)]
    if missing:
        raise ValueError(
            f"agent {agent.__name__} has no {' and no '.join(missing)}: expected "
            f"{', '.join(_METHODS[m] for m in missing)}; help(rank0rl.Agent) says what each one returns"
        )
    if isinstance(agent.info, str) or {*agent.info} & _TAKEN:
        raise ValueError(
            f"{agent.__name__}.info must be a tuple of names that are none of {', '.join(sorted(_TAKEN))}: got "
            f"{agent.info!r}"
        )
    own = agent.Options
    for needed in (of.Options for of in agent.__mro__ if issubclass(of, Agent)):
        if facts(needed).keys() - facts(own).keys():
            raise ValueError(
                f"{agent.__name__}.Options must derive from {needed.__name__}, which the agent's base "
                f"class needs: got {own.__name__}; import {needed.__name__} from {needed.__module__}, "
                f"and write class {own.__name__}({needed.__name__})"
            )
    return agent


@cache
def load_function(name: str) -> Callable[..., Any]:
    """Return a function or a class of the user's.

    Args:
        name: "file.py:function" or "package.module:function".

    Raises:
        ValueError: if there is no such function.
    """
    where, _, function = name.partition(":")
    expected = "file.py:name or package.module:name"
    module = _import(where, name, "function", expected)
    found = getattr(module, function, None) if function else None
    if not callable(found):
        raise ValueError(f"{name!r} does not name a function: expected {expected}")
    return found


def make_agent(options: RunOptions, agent_options: Any, spaces: Spaces) -> Agent:
    """Return a run's agent with its initial weights.

    Raises:
        OptionError: if the agent's options do not fit the spaces or the device.
    """
    rng = seeding.stream(options.seed, "init")
    agent = load_agent(options.algo)(spaces, agent_options, rng)
    agent.device = options.device
    if options.device.partition(":")[0] not in agent.devices:
        raise OptionError(
            f"with these options, {options.algo} updates on {' or '.join(agent.devices)} only: leave "
            f"out --device {options.device}"
        )
    return agent


def share_refusal(refusal: str) -> None:
    """Raise the first refusal of a rank on every rank; "" is none.

    Collective: every rank calls this.

    Raises:
        OptionError: the same on every rank; it names the rank, if the refusal is not that of rank 0.
    """
    each = comm.allgather_obj(refusal, "a refusal")
    for rank, said in enumerate(each):
        if said:
            raise OptionError(f"on rank {rank}: {said}" if rank else said)


def _import(where: str, algo: str, what: str = "agent", expected: str = "") -> ModuleType:
    """Return the module of an agent or a function, from a file, a package or algos/.

    Raises:
        ValueError: if there is no such module, or an error or an exit ends its import.
    """
    if where.endswith(".py") and Path(where).exists():
        files.read(Path(where), what, _MOST)  # a FIFO would keep the import waiting
    try:
        if where.endswith(".py"):
            return _import_file(where)
        if ":" in algo and not is_reference(algo):
            return import_own(where)
        return importlib.import_module(where if ":" in algo else f"{_ALGOS}.{where}")
    except (Exception, SystemExit) as error:
        names = (where, f"{_ALGOS}.{where}")
        is_missing = isinstance(error, ImportError) and error.name in names
        if is_missing or (where.endswith(".py") and not Path(where).exists()):
            expected = (
                expected or f"{', '.join(_references())}, file.py:Class or package.module:Class"
            )
            raise ValueError(f"no {what} {algo!r} ({error}); expected {expected}") from None
        raise ValueError(f"the {what}'s file {where} cannot be imported: {why(error)}") from error


def _references() -> list[str]:
    """Return the names of the agents in algos/."""
    folder = Path(importlib.import_module(_ALGOS).__path__[0])
    return sorted(path.stem for path in folder.glob("[a-z]*.py"))


def is_reference(algo: str) -> bool:
    """Return True if a name means an agent in algos/, such as "ppo" or "rank0rl.algos.ppo:PPO"."""
    where, colon, _ = algo.partition(":")
    module = where if colon else f"{_ALGOS}.{where}"
    return module.removeprefix(f"{_ALGOS}.") in {*_references()} - {module}


def absolute(algo: str) -> str:
    """Return a name of code with the absolute path of its file, if it is in a file."""
    where, colon, name = algo.partition(":")
    return f"{Path(where).resolve()}{colon}{name}" if where.endswith(".py") else algo


def is_own(reference: str) -> bool:
    """Return True if a name is of code in a file or a module, and not of rank0rl's or Gymnasium's own."""
    where, colon, _ = reference.partition("(")[0].strip().partition(":")
    return where.endswith(".py") or bool(colon and not is_reference(reference))


def code_files(reference: str) -> list[Path]:
    """Return the files that an import of a name of code would run, as far as they are found. Nothing is imported."""
    where = reference.partition("(")[0].strip().partition(":")[0]
    if not is_own(reference):
        return []
    if where.endswith(".py"):
        return [Path(where)]
    found: list[Path] = []
    path: Any = [*sys.path, os.getcwd()]
    name = ""
    for part in where.split("."):
        name = f"{name}.{part}" if name else part
        finders = (of for of in sys.meta_path if hasattr(of, "find_spec"))
        found_by = (finder.find_spec(name, path) for finder in finders)
        spec = next((spec for spec in found_by if spec is not None), None)
        if spec is None:
            break
        found += [Path(spec.origin)] if spec.origin and spec.has_location else []
        path = spec.submodule_search_locations
    return found


def _import_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    find_modules_in(str(Path(path).resolve().parent))  # it may import its neighbours
    spec.loader.exec_module(module)
    return module


def short_name(algo: str) -> str:
    """Return an agent's name for names of files: "rank0rl.algos.ppo:PPO" -> "ppo"."""
    where = algo.partition(":")[0]
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
