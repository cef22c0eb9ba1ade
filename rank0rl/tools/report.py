"""python -m rank0rl report RUN: write a run or a study as one self-contained HTML page.

Figures are SVG inside the page, in its light or dark colors. The page loads nothing and runs no
script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rank0rl.tools import report_study
from rank0rl.tools.report_run import of_run
from rank0rl.tools.report_speedup import of_speedup


@dataclass(frozen=True)
class Options:
    """Write one HTML page about a run, a study, or a speedup study."""

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
    kinds = {"speedup.csv": of_speedup, report_study.FILE: report_study.of_study}
    studies = [
        (one, of) for one in (folder, *others) for n, of in kinds.items() if (one / n).exists()
    ]
    if studies and others:
        raise ValueError(
            f"only runs can be laid over each other, and {studies[0][0]} is a study: name it alone"
        )
    return studies[0][1](folder) if studies else of_run(folder, others)
