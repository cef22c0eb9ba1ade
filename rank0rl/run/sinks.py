"""Where the record of a run goes besides its folder's CSV: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Takes the numbers of an iteration."""

    def row(self, values: Mapping[str, float], step: int) -> None:
        """Write them.

        Args:
            values: "group/name" -> number.
            step: environment steps so far, over all ranks.
        """

    def close(self) -> None:
        """Write what is not written yet."""


def check(**asked: bool) -> None:
    """Refuse a sink whose package is missing: tensorboard=True, wandb=True.

    Raises:
        ValueError: naming what to install.
    """
    for package, wanted in asked.items():
        if wanted and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--{package} needs the package {package}, which is not installed: "
                f"pip install {package}, or leave --{package} out"
            )


class TensorBoard:
    """An events file in the run's folder.

    Args:
        folder: of the run.
        after: steps that the run has made: what an earlier start wrote beyond them is hidden.
    """

    def __init__(self, folder: Path, after: int) -> None:
        """Open it."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after + 1)  # type: ignore[no-untyped-call]

    def row(self, values: Mapping[str, float], step: int) -> None:
        """Write a row."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()  # type: ignore[no-untyped-call]


class WandB:
    """A run in a project of Weights & Biases.

    Args:
        project: its name.
        folder: of the run.
        settings: of the run.
        key: one and the same for every start of this run, and no other's.
    """

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any], key: str) -> None:
        """Begin the run there, or go on with it."""
        import wandb

        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=key,
            dir=str(folder),
            config=dict(settings),
            resume="allow",
        )

    def row(self, values: Mapping[str, float], step: int) -> None:
        """Send a row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is not sent yet."""
        self._run.finish()
