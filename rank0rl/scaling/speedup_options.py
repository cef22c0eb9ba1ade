"""Options of python -m rank0rl speedup."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rank0rl import options
from rank0rl.options import option


@dataclass(frozen=True)
class Options:
    """Train with several numbers of ranks in turn, and print what limits the speedup. All other arguments, such as the environment, go to the training script."""

    nprocs: tuple[int, ...] = option((1, 2), "[1, inf)")
    """Numbers of ranks. The smallest one is what the others are compared with."""
    repeats: int = option(3, "[1, inf)")
    """Number of runs with each number of ranks."""
    iterations: int = option(10, "[1, inf)")
    """Iterations of each run that are timed. One more iteration comes first and is not timed."""
    seconds: float | None = option(None, "(0, inf)")
    """Length of each run in seconds, instead of --iterations. Only iterations that all runs have made are timed."""
    script: Path | None = None
    """Training script of your own, which calls rank0rl.cli.main. None: rank0rl's."""
    out: Path | None = None
    """Folder of the study: speedup.md, .csv, .json, .png and its runs. None: a new folder under runs/."""
    predict: tuple[int, ...] = option((), "[1, inf)")
    """Numbers of ranks whose steps per second are predicted from the measurements. The model is in docs/scaling.md."""
    nodes: int = option(1, "[1, inf)")
    """Prediction: nodes over which the ranks are spread evenly."""
    node_cores: int | None = option(None, "[1, inf)")
    """Prediction: cores of a node. None: one for each of its ranks."""
    link_gbit: float = option(10.0, "(0, inf)")
    """Prediction: bandwidth of a node's link each way, in Gbit/s."""
    latency_us: float = option(50.0, "[0, inf)")
    """Prediction: latency between nodes, in microseconds."""

    @property
    def folder(self) -> Path:
        """Folder in which modules of the user's are found."""
        return self.script.resolve().parent if self.script else Path.cwd()


def check(given: Options) -> None:
    """Check the options.

    Raises:
        ValueError: if a number is out of its range, or a node would have no rank.
    """
    options.check(given)
    if given.predict and min(given.predict) < given.nodes:
        raise ValueError(
            f"every node needs at least one rank: got --nodes {given.nodes} and --predict "
            f"{min(given.predict)}; use fewer nodes or more ranks"
        )
