"""python -m rank0rl report RUN: write a run, or a speedup study, as one self-contained HTML page.

Figures are SVG inside the page, in its light or dark colors. The page loads nothing and runs no
script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rank0rl.tools.report_run import of_run
from rank0rl.tools.report_study import of_study


@dataclass(frozen=True)
class Options:
    """Write one HTML page about a run, or about a speedup study."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run, or of the study."""
    others: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of other runs. Their curves are laid over those of the run."""
    out: Path | None = None
    """File to write. None: report.html in the folder."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl report")
    out = given.out or given.folder / "report.html"
    try:
        out.write_text(_page(given.folder, given.others), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


def _page(folder: Path, others: Sequence[Path]) -> str:
    studies = [one for one in (folder, *others) if (one / "speedup.csv").exists()]
    if studies and others:
        raise ValueError(
            f"only runs can be laid over each other, and {studies[0]} is a speedup study: name it alone"
        )
    return of_study(folder) if studies else of_run(folder, others)
