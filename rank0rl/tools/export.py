"""python -m rank0rl export RUN: the policy of a run's last checkpoint in one file, for torch alone.

It takes observations as the environment shows them to actions as the environment takes them; the
scaling of observations, the bounds of actions and the numbers of choices are in it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from rank0rl import envs
from rank0rl.agent import Agent, Space
from rank0rl.mpi.threads import set_threads
from rank0rl.tools.evaluate import last_agent


@dataclass(frozen=True)
class Options:
    """Write a run's policy, without its noise, to a file that torch loads without rank0rl."""

    run: tyro.conf.Positional[Path]
    """Folder of the run, or one of its checkpoints; nothing in it is changed."""
    out: Path = Path("policy.pt2")
    """The file."""


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl export")
    set_threads(1)
    try:
        print(export(given.run, given.out))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def export(run: Path, out: Path) -> str:
    """Write the most probable actions of a run's last checkpoint as a program of torch.export.

    Args:
        run: its folder.
        out: the file, which must end in .pt2.

    Returns:
        What is in it, and how to load it.

    Raises:
        ValueError: if there is no such run, its agent has nothing to export, or the file cannot be
            written.
    """
    if out.suffix != ".pt2":
        raise ValueError(f"the file must be named something.pt2: got {out}")
    agent, options = last_agent(run)
    env = envs.make(options.env_id, options.wrappers, **options.env_kwargs)
    try:
        masked = "mask" in inspect.signature(agent.act).parameters and _tells_masks(env)
        program = exported(agent, env, masked)
    finally:
        env.close()
    try:
        torch.export.save(program, out)
    except (OSError, RuntimeError) as error:  # the latter from torch, if there is no such folder
        raise ValueError(f"cannot write {out}: {error}") from None
    spaces = envs.describe(env)
    notes = [
        f"{out}: the most probable actions, {_shape(spaces.act)}, for observations "
        f"{_shape(spaces.obs)}, of "
        f"{options.env_id}"
    ]
    if options.wrappers:
        notes.append(f"observations and actions are those of {', '.join(options.wrappers)}")
    if envs.is_flattened(env):
        notes.append("an observation is gymnasium.spaces.flatten(env.observation_space, obs)")
    mask = ", torch.as_tensor(mask, dtype=torch.bool)" if masked else ""
    return "\n".join(
        [
            *notes,
            "without rank0rl:",
            "    import torch",
            f'    policy = torch.export.load("{out}").module()',
            f"    act = policy(torch.as_tensor(obs, dtype=torch.{spaces.obs.dtype}){mask}).numpy()",
        ]
    )


def exported(agent: Agent, env: Any, masked: bool = False) -> torch.export.ExportedProgram:
    """An agent's most probable actions as a program.

    Args:
        agent: which stays as it is.
        env: of the same spaces.
        masked: whether the program takes masks as well, (N, all choices), bool.

    Returns:
        Takes observations (N, *obs) to actions (N, *act), for any N.

    Raises:
        ValueError: if the agent has none, or they are of another shape.
    """
    spaces = envs.describe(env)
    chosen = _copy(agent.mode())
    mask = [torch.ones(2, spaces.act.size, dtype=torch.bool)] * masked
    shape = tuple(chosen(torch.zeros(2, spaces.obs.size), *mask).shape)
    if shape != (2, *spaces.act.shape):
        raise ValueError(
            f"mode of {type(agent).__name__} must give actions {(2, *spaces.act.shape)} for 2 "
            f"observations: got {shape}"
        )
    obs = torch.zeros(2, *spaces.obs.shape, dtype=getattr(torch, spaces.obs.dtype))
    module = _ForEnvironment(chosen, spaces.act, envs.first_choice(env))
    rows = {0: torch.export.Dim("N")}
    names = ("obs", "mask")[: 1 + masked]
    return torch.export.export(module, (obs, *mask), dynamic_shapes=dict.fromkeys(names, rows))


class _ForEnvironment(nn.Module):
    """From what an environment shows to what it takes.

    Args:
        chosen: an agent's most probable actions.
        space: of the actions.
        first: what the environment calls choice 0: a number, or one for each of the choices.
    """

    low: Tensor
    high: Tensor
    first: Tensor

    def __init__(self, chosen: nn.Module, space: Space, first: Any) -> None:
        super().__init__()
        self.chosen, self.bounded = chosen, not space.choices
        if self.bounded:
            self.register_buffer("low", torch.from_numpy(space.low))
            self.register_buffer("high", torch.from_numpy(space.high))
        else:
            self.register_buffer("first", torch.from_numpy(np.asarray(first, np.int64)))

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Actions (N, *act)."""
        obs = obs.reshape(obs.shape[0], -1).to(torch.float32)
        act: Tensor = self.chosen(obs) if mask is None else self.chosen(obs, mask)
        return act.clamp(self.low, self.high) if self.bounded else act + self.first


def _copy(module: nn.Module) -> nn.Module:
    """A module that learns no more and shares no memory: views would be saved with all of it."""
    module = copy.deepcopy(module).requires_grad_(False)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
    return module


def _tells_masks(env: Any) -> bool:
    """Whether an environment tells which choices may be taken."""
    _, info = env.reset(seed=0)
    return bool(envs.describe(env).act.choices) and "action_mask" in info


def _shape(space: Space) -> str:
    """Such as "(N, 17) float32"."""
    return f"({', '.join(map(str, ('N', *space.shape)))}) {space.dtype}"
