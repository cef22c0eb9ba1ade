"""python -m rank0rl export RUN: write the policy of a run's last checkpoint for PyTorch or ONNX.

The exported program takes the environment's own observations and returns the environment's own
actions. It contains the scaling of observations, the bounds of actions and the numbering of
choices. What is written as ONNX is that same program.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import logging
import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from rank0rl.agent import Agent, Space, Spaces
from rank0rl.envs import spaces as env_spaces
from rank0rl.launch import usage_error
from rank0rl.mpi.threads import set_threads
from rank0rl.policy import load
from rank0rl.run import files
from rank0rl.run.shares import make_shown
from rank0rl.tools.evaluate import RunToLoad


@dataclass(frozen=True)
class Options(RunToLoad):
    """Write a run's policy, without its noise, to a file that needs no rank0rl."""

    out: Path | None = None
    """File to write; its name must end in .pt2 or .onnx. None: policy.pt2, or policy.onnx."""
    format: Literal["pt2", "onnx"] | None = None
    """pt2: a program for PyTorch. onnx: a graph for ONNX Runtime (pip install -e ".[onnx]"). None: what the file's name ends in."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl export")
    set_threads(1)
    ending = f".{given.format or 'pt2'}"
    out = given.out or Path("policy" + ending)
    try:
        if given.format and out.suffix != ending:
            raise ValueError(
                f"--format {given.format} needs a file that ends in {ending}: got {out}"
            )
        print(export(given.run, out, given.trust))
    except ValueError as error:
        return usage_error(str(error))
    return 0


def export(run: Path, out: Path, trust: bool = False) -> str:
    """Write a program that returns the most probable actions of a run's policy.

    Args:
        run: the run's folder, or one of its checkpoints.
        out: file to write: .pt2, a program of torch.export, or .onnx, an ONNX graph.
        trust: import all code that the run names.

    Returns:
        Text for the user: what the file contains, and the lines that load it.

    Raises:
        ValueError: if the agent has nothing to export, the file cannot be written, or the packages
            of ONNX are missing; else as `policy.load`.
    """
    if out.suffix not in (".pt2", ".onnx"):
        raise ValueError(f"the name of the file must end in .pt2 or .onnx: got {out}")
    to_onnx = out.suffix == ".onnx"
    if to_onnx:
        _check_installed()
    policy = load(run, trust)
    agent, options = policy.agent, policy.options
    env = make_shown(options)
    try:
        spaces = env_spaces.describe(env)
        takes_masks = "mask" in inspect.signature(agent.mode().forward).parameters
        _, info = env.reset(seed=0)
        masked = takes_masks and bool(spaces.act.choices) and "action_mask" in info
        program = _exported(agent, env, masked)
    finally:
        env.close()
    more = list(_more(agent, spaces.act, masked))
    try:
        if to_onnx:
            _save_onnx(program, out, more)
        else:
            content = io.BytesIO()
            torch.export.save(program, content)
            files.write(out, content.getvalue())
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a missing folder
        raise ValueError(f"cannot write {out}: {error}") from None
    lines = _lines(out, spaces.obs.dtype, agent.memory, more)
    notes = [f"{out} holds the policy for {options.env_id}: {_about(agent, spaces)}"]
    notes += [*_notes(agent, env, options.wrappers), "load it without rank0rl:"]
    return "\n".join([*notes, *(f"    {line}" for line in lines)])


def _about(agent: Agent, spaces: Spaces) -> str:
    """Return the shapes and dtypes of observations and actions, for the user."""
    seen = f" of the keys {', '.join(agent.mode_obs)}" if agent.mode_obs else ""
    obs, act = (
        f"({', '.join(map(str, ('N', *shape)))}) {dtype}"
        for shape, dtype in (
            (_rows_seen(agent, spaces), spaces.obs.dtype),
            (spaces.act.shape, spaces.act.dtype),
        )
    )
    return f"from observations {obs}{seen} to the most probable actions {act}"


def _notes(agent: Agent, env: Any, wrappers: Sequence[str]) -> list[str]:
    """Return what the user has to know of the rows of observations and actions."""
    notes = []
    if wrappers:
        notes.append(f"observations and actions are those of the wrappers {', '.join(wrappers)}")
    if agent.mode_obs:
        notes.append("flatten these keys of each observation, one behind the other, in this order")
    elif env_spaces.is_flattened(env):
        notes.append(
            "flatten each observation: gymnasium.spaces.flatten(env.observation_space, obs)"
        )
    if env_spaces.nested_actions(env):
        notes.append(
            "each action is a row of numbers: those of all parts of env.action_space, one behind the "
            "other, in its order, but choices before floats"
        )
    return notes


def _lines(out: Path, dtype: str, memory: int, more: list[str]) -> list[str]:
    """Return the lines of Python that load a policy and call it, with memory of so many numbers, or none."""
    to_onnx = out.suffix == ".onnx"
    array = 'np.asarray({}, "{}")' if to_onnx else "torch.as_tensor({}, dtype=torch.{})"
    dtypes = {"obs": dtype, "mask": "bool"}
    args = {n: array.format(n, dtypes[n]) if n in dtypes else n for n in ("obs", *more)}
    if to_onnx:
        load = ["import numpy as np", "import onnxruntime"]
        load.append(f"policy = onnxruntime.InferenceSession({str(out)!r})")
        named = ", ".join(f'"{name}": {arg}' for name, arg in args.items())
        call, first = f"policy.run(None, {{{named}}})", "[0]"
        zeros = f'np.zeros((N, {memory}), "float32")'
    else:
        load = ["import torch", f"policy = torch.export.load({str(out)!r}).module()"]
        call, first = f"policy({', '.join(args.values())})", ".numpy()"
        zeros = f"torch.zeros(N, {memory})"
    if not memory:
        return [*load, f"act = {call}{first}"]
    return [*load, f"memory = {zeros}  # where an episode begins", f"act, memory = {call}"]


def _check_installed() -> None:
    """Raise ValueError if a package is missing that torch needs to write ONNX."""
    try:
        for name in ("onnx", "onnxscript"):
            importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f'ONNX needs the extra "onnx" ({error}): run pip install -e ".[onnx]", or '
            f"pip install onnx onnxscript onnxruntime"
        ) from None


def _save_onnx(program: torch.export.ExportedProgram, out: Path, more: list[str]) -> None:
    """Write a program of a policy as an ONNX graph. `more` names its inputs besides obs.

    Its outputs are act and, of a policy with a memory, next_memory: an output cannot have the name
    of an input. A RuntimeError names an operation that ONNX lacks.
    """
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that torchvision is missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # one part of torch warns of another
            graph = torch.onnx.export(
                program,
                input_names=["obs", *more],
                output_names=["act", "next_memory"] if "memory" in more else ["act"],
                dynamic_shapes=[{0: "N"}, *[None] * len(more)],  # only names them
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        first: BaseException = error  # torch wraps it in advice to its own developers
        while first.__cause__:
            first = first.__cause__
        raise RuntimeError(f"ONNX cannot hold this policy: {first}") from None
    finally:
        log.setLevel(level)
    assert graph is not None
    with tempfile.TemporaryDirectory() as folder:
        graph.save(Path(folder, out.name))
        files.write(out, Path(folder, out.name).read_bytes())


def _exported(agent: Agent, env: Any, masked: bool = False) -> torch.export.ExportedProgram:
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
    more = _more(agent, spaces.act, masked)
    seen = _rows_seen(agent, spaces)
    example = torch.zeros(2, math.prod(seen))
    try:
        out = mode(example, *more.values())
    except Exception as error:  # whatever the agent's module raises
        raise ValueError(
            f"mode of {type(agent).__name__} must take observations of shape {tuple(example.shape)}"
            f"{''.join(f', {name} {tuple(x.shape)}' for name, x in more.items())}: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    shape = tuple(out[0].shape if agent.memory else out.shape)
    if shape != (2, *spaces.act.shape):
        raise ValueError(
            f"mode of {type(agent).__name__} must return actions of shape {(2, *spaces.act.shape)} "
            f"for 2 observations: got {shape}"
        )
    obs = torch.zeros(2, *seen, dtype=getattr(torch, spaces.obs.dtype))
    module = _ForEnvironment(mode, spaces.act)
    rows = {0: torch.export.Dim("N", max=2**31)}  # torch 2.6 refuses one without an end
    args = (obs, *more.values())
    return torch.export.export(module, args, dynamic_shapes=(rows,) * len(args), strict=False)


def _more(agent: Agent, space: Space, masked: bool) -> dict[str, Tensor]:
    """Return what a program takes besides observations, in its order: examples for 2 rows."""
    memory = {"memory": torch.zeros(2, agent.memory)} if agent.memory else {}
    return memory | ({"mask": torch.ones(2, space.size, dtype=torch.bool)} if masked else {})


def _rows_seen(agent: Agent, spaces: Spaces) -> tuple[int, ...]:
    """Return the shape of an observation that an agent's `mode` takes: of all, or of some keys of a Dict."""
    parts = [spaces.obs.parts[key] for key in agent.mode_obs]
    return (sum(p.stop - p.start for p in parts),) if parts else spaces.obs.shape


class _ForEnvironment(nn.Module):
    """A module from an environment's observations to the actions that it takes."""

    low: Tensor
    high: Tensor
    first: Tensor

    def __init__(self, mode: nn.Module, space: Space) -> None:
        super().__init__()
        self.mode, self.bounded = mode, space.low is not None
        if self.bounded:
            self.register_buffer("low", torch.from_numpy(space.low))
            self.register_buffer("high", torch.from_numpy(space.high))
        first = np.asarray(0 if space.first is None else space.first, np.int64)
        self.register_buffer("first", torch.from_numpy(first))

    def forward(
        self, obs: Tensor, second: Tensor | None = None, third: Tensor | None = None
    ) -> Any:
        """Return actions, (N, *act), and memory if the agent has one; `_more` says what follows obs."""
        more = [x for x in (second, third) if x is not None]  # torch 2.9 fails to export *more
        obs = obs.reshape(obs.shape[0], -1)
        obs = obs if obs.dtype == torch.float64 else obs.to(torch.float32)
        out = self.mode(obs, *more)
        act, *memory = out if isinstance(out, tuple) else (out,)
        act = (act.clamp(self.low, self.high) if self.bounded else act) + self.first
        return (act, *memory) if memory else act


def _copy(module: nn.Module) -> nn.Module:
    """Return a frozen copy without shared memory: torch would save the whole buffer behind a view."""
    module = copy.deepcopy(module).requires_grad_(False)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
    return module
