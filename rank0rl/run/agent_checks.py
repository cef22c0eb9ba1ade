"""Detect agents whose `act` or `process` uses hidden state or global random numbers.

Their curve would not be the same for every number of ranks, with evaluations or after a resume.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rank0rl.agent import Agent, Fragment, Step
from rank0rl.batch import Batch
from rank0rl.mpi import weights
from rank0rl.nets.flat import Adam

Array = npt.NDArray[Any]

PREPARING = "rank0rl-prepare"
"""Name of the thread in which an agent prepares, and may draw."""
_SCALARS = 1000  # numbers of an array that are looked at
_CALLS = 4  # of `act` and of `process` that are repeated, and before which attributes are hashed
_GENERATORS: Mapping[str, Callable[[], Any]] = {
    "torch's": lambda: torch.get_rng_state().numpy().tobytes(),
    "NumPy's": lambda: pickle.dumps(np.random.get_state()),  # noqa: NPY002
    "Python's": random.getstate,
}


class Suspect(Agent):
    """An agent that is watched while it acts and processes, in one iteration.

    Args:
        agent: acts and processes.
        closely: repeat its first calls too, with all rows and with each row alone.
    """

    def __init__(self, agent: Agent, closely: bool) -> None:
        self._agent, self._closely = agent, closely
        self.noise, self.memory = agent.noise, agent.memory
        self.info = agent.info
        self._calls = {"act": 0, "process": 0}
        self._changed: dict[str, set[str]] = {"act": set(), "process": set()}

    def act(self, step: Step) -> tuple[Array, Batch]:
        """Act. Raise ValueError if a row depends on more than its own row of the step."""
        first = copy.deepcopy(self._watched("act", self._agent.act, step))  # of a buffer, perhaps
        if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], Mapping)):
            raise TypeError(
                f"act must return actions and a dict of extras, such as (act, {{}}): got {first!r:.100}"
            )
        act, extras = first
        if self._closely and self._calls["act"] <= _CALLS:
            self._repeat_act(step, first)
        return act, extras

    def process(self, fragment: Fragment) -> Batch:
        """Process. Raise ValueError if rows depend on more than the fragment."""
        rows: Any = self._watched("process", self._agent.process, fragment)
        if self._closely and self._calls["process"] <= _CALLS and isinstance(rows, Mapping):
            kept = {name: np.array(x) for name, x in rows.items()}
            again = self._agent.process(fragment)
            if name := _first_difference(kept, again):
                raise ValueError(
                    f"process gave other {name!r} for the same fragment the second time: its rows must "
                    f"depend on the fragment and on modules() alone"
                )
            return kept
        return rows

    def _repeat_act(self, step: Step, first: tuple[Array, Batch]) -> None:
        """Compare what `act` returned with what it returns again, and for each row alone."""
        kept = _flat(first)
        if name := _first_difference(kept, _flat(self._agent.act(step))):
            raise ValueError(
                f"act returned other {name} for the same arguments the second time: draw from `step.noise` "
                f"only, and keep nothing from one call to the next"
            )
        count = len(step.obs)
        for i in range(count if count > 1 else 0):
            row = slice(i, i + 1)
            own: dict[str, Any] = {
                name: x[row] for name, x in vars(step).items() if isinstance(x, np.ndarray)
            }
            alone = _flat(self._agent.act(dataclasses.replace(step, **own)))
            if name := _first_difference({n: x[row] for n, x in kept.items()}, alone):
                raise ValueError(
                    f"act returned other {name} for an observation alone than among {count}: "
                    f"a product of several rows rounds differently from that of one; use the layers of "
                    f"rank0rl.nets.layers, or a stack of rows: x[:, None, :] @ W in NumPy"
                )

    def _watched(self, name: str, method: Callable[[Any], Any], given: Any) -> Any:
        """Call a method; raise ValueError if it draws global random numbers or changes the agent."""
        self._calls[name] += 1
        look = self._calls[name] <= _CALLS
        before = {of: state() for of, state in _GENERATORS.items()}
        prepares = any(thread.name.startswith(PREPARING) for thread in threading.enumerate())
        attributes = _attributes(self._agent) if look else {}
        tensors = self._weights() if look else {}
        result = method(given)
        for of, state in _GENERATORS.items():
            if not prepares and state() != before[of]:
                raise ValueError(
                    f"{name} has drawn from {of} global random numbers, which differ with the number of "
                    f"ranks: draw from `step.noise` in act (Agent.noise says how much)"
                )
        if look:
            if changed := [key for key, of in self._weights().items() if tensors[key] != of]:
                raise ValueError(
                    f"{changed[0]!r} has changed, and must not: {name} may read modules(), and update "
                    f"alone may change them"
                )
            after = _attributes(self._agent)
            others = {key for key in after if attributes.get(key) != after[key]}
            # What is set once is a cache, or comes from `prepare` in another thread.
            if twice := sorted(others & self._changed[name]):
                raise ValueError(
                    f"{name} changes the agent's attribute {twice[0]!r}, so what it returns may depend "
                    f"on earlier calls: keep what an env must remember in its memory (Agent.memory), and "
                    f"change the agent in update only"
                )
            self._changed[name] |= others
        return result

    def _weights(self) -> dict[str, str]:
        return weights.sha256_each(weights.named_tensors(self._agent.modules()))


def trained(agent: Agent) -> dict[str, tuple[int, str]]:
    """Return tensors that updates may change in place: those of modules and optimizers, and all with gradients.

    Returns:
        Name -> identity of the object that holds the tensor, and its hash.
    """
    return {name: (id(holder), _sha256(tensor)) for name, holder, tensor in _trained(vars(agent))}


def check_kept(agent: Agent, before: Mapping[str, tuple[int, str]]) -> None:
    """Raise ValueError if tensors have changed that no checkpoint would have.

    Args:
        agent: after an update.
        before: what `trained` returned before it.
    """
    kept = [*weights.named_tensors(agent.modules()).values(), *_leaves(agent.state())]
    hashes = {_sha256(tensor) for tensor in kept}
    memory = {tensor.untyped_storage().data_ptr() for tensor in kept}
    lost = []
    for name, holder, tensor in _trained(vars(agent)):
        same, was = before.get(name, (0, ""))
        shares = tensor.untyped_storage().data_ptr() in memory
        if same == id(holder) and not shares and _sha256(tensor) not in {was, *hashes}:
            lost.append(name)
    if lost:
        others = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ValueError(
            f"update has changed {lost[0]}{others}, which is in neither modules() nor state(): a resumed run "
            f"would not have it, and other ranks do not; return it from modules() if act or process reads it, "
            f"else from state() (and take it back in load), or make it anew in each update"
        )


def numbers(agent: Agent) -> dict[str, list[float | None]]:
    """Return the values of each attribute that holds numbers, but for what `coefficients` names."""
    return {
        name: [
            x if x == x else None  # noqa: PLR0124 - nan, and an int of any size
            for x in islice(_scalars(value), _SCALARS)
        ]
        for name, value in vars(agent).items()
        if name not in agent.coefficients and _are_numbers(value)
    }


def lost_numbers(agent: Agent, before: Mapping[str, list[float | None]]) -> list[str]:
    """Return the names of attributes whose numbers have changed and that no checkpoint would have.

    Args:
        agent: after an update.
        before: what `numbers` returned before it.
    """
    changed = {name: of for name, of in numbers(agent).items() if before.get(name, of) != of}
    if not changed:
        return []
    kept = {*_scalars(agent.state()), *_scalars(agent.modules()), None}
    return [name for name, of in changed.items() if not kept.issuperset(of)]


def _are_numbers(value: Any, most: int | None = None) -> bool:
    """Return True for a number, for an array, of at most so many numbers, and for a list or dict of single numbers."""
    if isinstance(value, list | tuple | dict):
        return all(
            _are_numbers(x, 1) for x in (value.values() if isinstance(value, dict) else value)
        )
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and (most is None or value.numel() <= most)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf" and (most is None or value.size <= most)
    return isinstance(value, int | float | np.number)


def _scalars(value: Any) -> Iterator[float]:
    """Yield the numbers of nested containers and modules, the first ones of each array."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _scalars(item)
    elif isinstance(value, torch.Tensor):
        yield from value.detach().reshape(-1)[:_SCALARS].tolist()
    elif isinstance(value, np.ndarray | np.number):
        yield from np.asarray(value).reshape(-1)[:_SCALARS].tolist()
    elif isinstance(value, int | float):
        yield value


def _trained(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yield the name of each tensor of `trained`, the object that holds it, and itself."""
    if isinstance(value, nn.Module):
        for path, tensor in value.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                yield f"{name}.{path}", value, tensor
    elif isinstance(value, torch.optim.Optimizer | Adam):
        state = value.state() if isinstance(value, Adam) else value.state_dict()["state"]
        for i, tensor in enumerate(_leaves(state)):
            yield f"{name} ({i})", value, tensor
    elif isinstance(value, torch.Tensor) and value.requires_grad:
        yield name, value, value
    elif isinstance(value, dict | list | tuple) and depth < 4:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _trained(item, f"{name}[{key!r}]" if depth else str(key), depth + 1)


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state, and its arrays as tensors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.flags.writeable:
        yield torch.from_numpy(value)
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)


def _sha256(tensor: torch.Tensor) -> str:
    return weights.sha256_tensors({"": tensor})


def _flat(acted: Any) -> Batch:
    """Return copies of actions and extras by name."""
    act, extras = acted
    return {"actions": np.array(act), **{repr(name): np.array(x) for name, x in extras.items()}}


def _first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the name of the first array that is not the same, bit for bit; "" if there is none."""
    for name in {**a, **b}:
        x, y = (np.asarray(rows.get(name)) for rows in (a, b))
        if (x.dtype, x.shape) != (y.dtype, y.shape) or x.tobytes() != y.tobytes():
            return name
    return ""


def _attributes(agent: Agent) -> dict[str, Any]:
    """Return the hash of each attribute that holds numbers, texts or tensors, nested in containers or modules."""
    found = {}
    for name, value in [*vars(agent).items()]:
        digest = hashlib.blake2b(digest_size=16)
        if _add(digest, value, 0):
            found[name] = digest.digest()
    return found


def _add(digest: Any, value: Any, depth: int) -> bool:
    """Add a value to a digest; return False if it is of another kind than those."""
    if isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, RuntimeError):  # sparse, or of a dtype that NumPy does not have
            return False
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bool | int | float | str | bytes | np.generic | None):
        digest.update(repr(value).encode())
    elif isinstance(value, dict | list | tuple | set) and depth < 3:
        items = [*value.items()] if isinstance(value, dict) else [*value]
        digest.update(f"{len(items)}".encode())
        return all(_add(digest, item, depth + 1) for item in items)
    elif isinstance(value, nn.Module):
        return _add(digest, [*_of_module(value)], 0)
    else:
        return False
    return True


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a module, those in plain attributes too."""
    yield from module.state_dict(keep_vars=True).items()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value
