"""python -m rank0rl export RUN: write the policy of a run's last checkpoint for PyTorch alone.

The exported program takes the environment's own observations and returns the environment's own
actions. It contains the scaling of observations, the bounds of actions and the numbering of
choices.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from rank0rl import env_spaces, envs
from rank0rl.agent import Agent, Space, Spaces
from rank0rl.mpi.threads import set_threads
from rank0rl.policy import load
from rank0rl.tools.evaluate import RunToLoad


@dataclass(frozen=True)
class Options(RunToLoad):
    """Write a run's policy, without its noise, to a file that PyTorch loads without rank0rl."""

    out: Path = Path("policy.pt2")
    """File to write; its name must end in .pt2."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl export")
    set_threads(1)
    try:
        print(export(given.run, given.out, given.trust))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def export(run: Path, out: Path, trust: bool = False) -> str:
    """Write a program of torch.export that returns the most probable actions of a run's policy.

    Args:
        run: the run's folder, or one of its checkpoints.
        out: file to write; its name must end in .pt2.
        trust: import all code that the run names.

    Returns:
        Text for the user: what the file contains, and the lines that load it.

    Raises:
        ValueError: if the agent has nothing to export, or the file cannot be written; else as
            `policy.load`.
    """
    if out.suffix != ".pt2":
        raise ValueError(f"the name of the file must end in .pt2: got {out}")
    policy = load(run, trust)
    agent, options = policy.agent, policy.options
    env = envs.make(options.env_id, options.wrappers, **options.env_kwargs)
    try:
        masked = "mask" in inspect.signature(agent.act).parameters and _gives_masks(env)
        program = exported(agent, env, masked)
    finally:
        env.close()
    try:
        torch.export.save(program, out)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a missing folder
        raise ValueError(f"cannot write {out}: {error}") from None
    spaces = env_spaces.describe(env)
    size, keys = _seen(agent, spaces)
    seen = f" of the keys {', '.join(keys)}" if keys else ""
    shape = _shape(dataclasses.replace(spaces.obs, shape=(size,)) if keys else spaces.obs)
    notes = [
        f"{out} holds the policy for {options.env_id}: from observations {shape}{seen} to "
        f"the most probable actions {_shape(spaces.act)}"
    ]
    if options.wrappers:
        notes.append(
            f"observations and actions are those of the wrappers {', '.join(options.wrappers)}"
        )
    if keys:
        notes.append("flatten these keys of each observation, one behind the other, in this order")
    elif envs.is_flattened(env):
        notes.append(
            "flatten each observation: gymnasium.spaces.flatten(env.observation_space, obs)"
        )
    if envs.nested_actions(env):
        notes.append(
            "each action is a row of numbers: those of all parts of env.action_space, one behind the "
            "other, in its order"
        )
    act, more, end = ("act, memory", ", memory", "") if agent.memory else ("act", "", ".numpy()")
    if masked:
        more += ", torch.as_tensor(mask, dtype=torch.bool)"
    lines = [
        "import torch",
        f'policy = torch.export.load("{out}").module()',
        f"{act} = policy(torch.as_tensor(obs, dtype=torch.{spaces.obs.dtype}){more}){end}",
    ]
    if agent.memory:
        lines.insert(2, f"memory = torch.zeros(N, {agent.memory})  # where an episode begins")
    return "\n".join([*notes, "load it without rank0rl:", *(f"    {line}" for line in lines)])


def exported(agent: Agent, env: Any, masked: bool = False) -> torch.export.ExportedProgram:
    """Export a program that returns an agent's most probable actions.

    Args:
        agent: the agent, which is not changed.
        env: an environment with the agent's spaces.
        masked: the program also takes masks, shape (N, all choices), bool.

    Returns:
        A program from observations (N, *obs) to actions (N, *act), for any N. Of an agent with a
        memory: from observations and memory (N, m) to actions and memory.

    Raises:
        ValueError: if the agent's `mode` is missing or returns another shape.
    """
    spaces = env_spaces.describe(env)
    mode = _copy(agent.mode())
    more = {}
    if agent.memory:
        more["memory"] = torch.zeros(2, agent.memory)
    if masked:
        more["mask"] = torch.ones(2, spaces.act.size, dtype=torch.bool)
    size, keys = _seen(agent, spaces)
    out = mode(torch.zeros(2, size), *more.values())
    shape = tuple(out[0].shape if agent.memory else out.shape)
    if shape != (2, *spaces.act.shape):
        raise ValueError(
            f"mode of {type(agent).__name__} must return actions of shape {(2, *spaces.act.shape)} "
            f"for 2 observations: got {shape}"
        )
    rows_of = (size,) if keys else spaces.obs.shape
    obs = torch.zeros(2, *rows_of, dtype=getattr(torch, spaces.obs.dtype))
    module = _ForEnvironment(mode, spaces.act, env_spaces.first_choice(env))
    rows = {0: torch.export.Dim("N")}
    shapes: dict[str, Any] = {"obs": rows}
    if more:
        shapes["more"] = tuple(rows for _ in more)
    return torch.export.export(module, (obs, *more.values()), dynamic_shapes=shapes)


def _seen(agent: Agent, spaces: Spaces) -> tuple[int, tuple[str, ...]]:
    """Return the numbers that an agent's `mode` takes, and the keys of a Dict that they are, if not all."""
    parts = [spaces.obs.parts[key] for key in agent.mode_obs]
    return sum(p.stop - p.start for p in parts) or spaces.obs.size, agent.mode_obs


class _ForEnvironment(nn.Module):
    """A module from an environment's observations to the actions that it takes.

    Args:
        mode: a module that returns an agent's most probable actions.
        space: the space of actions.
        first: the environment's number for choice 0, or one number for each choice of an action.
    """

    low: Tensor
    high: Tensor
    first: Tensor

    def __init__(self, mode: nn.Module, space: Space, first: Any) -> None:
        super().__init__()
        self.mode, self.bounded = mode, not space.choices
        if self.bounded:
            self.register_buffer("low", torch.from_numpy(space.low))
            self.register_buffer("high", torch.from_numpy(space.high))
        else:
            self.register_buffer(
                "first", torch.from_numpy(np.asarray(0 if first is None else first, np.int64))
            )

    def forward(self, obs: Tensor, *more: Tensor) -> Any:
        """Return actions, (N, *act); and memory, if the agent has one."""
        obs = obs.reshape(obs.shape[0], -1).to(torch.float32)
        out = self.mode(obs, *more)
        act, *memory = out if isinstance(out, tuple) else (out,)
        act = act.clamp(self.low, self.high) if self.bounded else act + self.first
        return (act, *memory) if memory else act


def _copy(module: nn.Module) -> nn.Module:
    """Return a frozen copy without shared memory: torch would save the whole buffer behind a view."""
    module = copy.deepcopy(module).requires_grad_(False)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
    return module


def _gives_masks(env: Any) -> bool:
    """Return True if an environment's info says which choices are allowed."""
    _, info = env.reset(seed=0)
    return bool(env_spaces.describe(env).act.choices) and "action_mask" in info


def _shape(space: Space) -> str:
    """Return a shape and dtype as text, such as "(N, 17) float32"."""
    return f"({', '.join(map(str, ('N', *space.shape)))}) {space.dtype}"
