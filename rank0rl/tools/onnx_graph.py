"""ONNX graphs, which ONNX Runtime and others run without PyTorch."""

from __future__ import annotations

import importlib
import logging
import warnings
from pathlib import Path

import torch


def check_installed() -> None:
    """Import what torch needs to write ONNX.

    Raises:
        ValueError: if a package is missing.
    """
    try:
        for name in ("onnx", "onnxscript"):
            importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f'ONNX needs the extra "onnx" ({error}): run pip install -e ".[onnx]", or '
            f"pip install onnx onnxscript onnxruntime"
        ) from None


def save(program: torch.export.ExportedProgram, out: Path, more: list[str]) -> None:
    """Write a program of a policy as an ONNX graph.

    Its outputs are act and, of a policy with a memory, next_memory: an output cannot have the name
    of an input.

    Args:
        program: the program, from observations (N, *obs).
        out: file to write.
        more: names of the program's inputs besides obs, such as memory and mask.

    Raises:
        OSError: if the file cannot be written.
        RuntimeError: if ONNX lacks an operation of the program.
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
                output_names=["act", *["next_memory"] * ("memory" in more)],
                dynamic_shapes=[{0: "N"}, *[None] * len(more)],  # only names them
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise RuntimeError(f"ONNX cannot hold this policy: {_first_cause(error)}") from None
    finally:
        log.setLevel(level)
    assert graph is not None
    graph.save(out)


def lines(out: Path, dtype: str, memory: int, more: list[str]) -> list[str]:
    """Return the lines of Python that load a graph and call it.

    Args:
        out: the file.
        dtype: dtype of observations.
        memory: numbers of the policy's memory; 0 if it has none.
        more: as for `save`.
    """
    args = {
        "obs": f'np.asarray(obs, "{dtype}")',
        "memory": "memory",
        "mask": 'np.asarray(mask, "bool")',
    }
    named = ", ".join(f'"{name}": {args[name]}' for name in ("obs", *more))
    call = f"policy.run(None, {{{named}}})"
    load = ["import numpy as np", "import onnxruntime"]
    load.append(f'policy = onnxruntime.InferenceSession("{out}")')
    if not memory:
        return [*load, f"act = {call}[0]"]
    start = f'memory = np.zeros((N, {memory}), "float32")  # where an episode begins'
    return [*load, start, f"act, memory = {call}"]


def _first_cause(error: BaseException) -> BaseException:
    """Return the error that others came of: torch wraps it in advice to its own developers."""
    return _first_cause(error.__cause__) if error.__cause__ else error
