"""python -m rank0rl speedup Walker2d --nprocs 1 2 4 8: how much faster a run gets with more ranks, and what limits it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from rank0rl.tools.speedup import calibration, prediction, table
from rank0rl.tools.speedup.cost_model import Machines
from rank0rl.tools.speedup.measure import FailedError, Options, Row, check_options, study


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, 1 if a run failed, 2 for a wrong use, 130 after Ctrl-C."""
    given, rest = tyro.cli(
        Options, args=argv, prog="python -m rank0rl speedup", return_unknown_args=True
    )
    try:
        _check(given, rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = given.out or Path(
        "runs",
        f"speedup-{rest[0]}-{time.strftime('%Y%m%d-%H%M%S')}".replace("/", "-").replace(":", "-"),
    )
    try:
        for rows, about in study(given, rest, out):
            table.write(out, rows, about)
        if given.predict:
            _predict(given, rows, about["settings"], out)
    except (FailedError, calibration.CannotMeasureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: the complete rounds are in {out}", file=sys.stderr)
        return 130
    files = "speedup.md, .csv, .json, .png" + ", predicted.csv, .json, .png" * bool(given.predict)
    print(f"{(out / 'speedup.md').read_text()}\nin {out}: {files}")
    return 0


def _check(given: Options, rest: Sequence[str]) -> None:
    """Raise ValueError for wrong options, or if the script or the environment is missing."""
    check_options(given)
    if given.script and not given.script.is_file():
        raise ValueError(f"no training script {given.script}: set --script, or leave it out")
    if not rest or rest[0].startswith("-"):
        raise ValueError(
            "name an environment first, such as: python -m rank0rl speedup Walker2d --nprocs 1 2"
        )


def _predict(given: Options, rows: Sequence[Row], settings: Mapping[str, Any], out: Path) -> None:
    """Append a prediction to the study.

    Raises:
        CannotMeasureError: if what it needs cannot be measured.
    """
    machines = Machines(
        *(0.0, 0.0, 1.0),  # measured there
        nodes=given.nodes,
        link_latency_s=1e-6 * given.latency_us,
        link_bandwidth=1e9 / 8 * given.link_gbit,
        cores=given.node_cores,
    )
    run = out / "runs" / f"{rows[0].nprocs}-1"
    found = prediction.predict(given.predict, rows, settings, run, machines, given.folder)
    title = f"{settings['env_id']}, {settings['algo']}, {given.nodes} node{'s' * (given.nodes > 1)}"
    prediction.write(out, found, rows, title)
