"""Sinks, which take a run's numbers besides its CSV file: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """A receiver of the numbers of every iteration."""

    def row(self, values: Mapping[str, float], step: int) -> None:
        """Write the numbers of one iteration.

        Args:
            values: "group/name" -> number.
            step: environment steps so far, over all ranks.
        """

    def close(self) -> None:
        """Write everything that is not written yet."""


def check(**wanted: bool) -> None:
    """Raise ValueError if the package of a wanted sink is missing.

    Args:
        wanted: package -> True if it is wanted, such as tensorboard=True.

    Raises:
        ValueError: naming the package to install.
    """
    for package, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--{package} needs the package {package}, which is not installed: "
                f"pip install {package}, or leave --{package} out"
            )


class TensorBoard:
    """An events file in the run's folder.

    Args:
        folder: the run's folder.
        after: steps that the run has made. TensorBoard hides what an earlier start wrote after
            them.
    """

    def __init__(self, folder: Path, after: int) -> None:
        """Open the file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after + 1)  # type: ignore[no-untyped-call]

    def row(self, values: Mapping[str, float], step: int) -> None:
        """Write the numbers of one iteration."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()  # type: ignore[no-untyped-call]


class WandB:
    """A run in a Weights & Biases project.

    Args:
        project: the project's name.
        folder: the run's folder.
        settings: the run's settings.
        key: id of the W&B run. It is the same for every start of this run, and no other run has it.
    """

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any], key: str) -> None:
        """Start the W&B run, or continue it."""
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
        """Send the numbers of one iteration."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send everything that is not sent yet."""
        self._run.finish()
