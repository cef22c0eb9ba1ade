"""Reduce the runs of a study that have ended to what is worth committing: python benchmarks/keep_study.py FOLDER.

What stays of a run are its settings, its summary with the hash of the weights, and one row in ten of
progress.csv, without the names of hosts and folders. `python -m rank0rl study FOLDER` goes on with the
other runs, and `verify` checks the rows that are left.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from rank0rl.run import trust

KEPT = {"config.toml", "summary.json", "progress.csv"}
OF_STUDY = {"study.toml"}
OF_MACHINE = ("host", "hosts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=10, help="keep one row in so many")
    args = parser.parse_args()
    if not all((args.folder / name).exists() for name in OF_STUDY):
        parser.error(f"{args.folder} is no folder of a study, which has {', '.join(OF_STUDY)}")
    for summary in sorted(args.folder.glob("*/summary.json")):
        if json.loads(summary.read_text())["ended"]:
            remove(summary.parent, KEPT)
            thin(summary.with_name("progress.csv"), args.every)
            path = summary.with_name("config.toml")
            path.write_text(tomli_w.dumps(anywhere(tomllib.loads(path.read_text()))))
    remove(args.folder, OF_STUDY | {path.parent.name for path in args.folder.glob("*/config.toml")})


def remove(folder: Path, kept: set[str]) -> None:
    """Remove everything in a folder that is not to be kept."""
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def thin(path: Path, every: int) -> None:
    """Keep the rows of every so many iterations, and the last one."""
    with path.open(newline="") as file:
        names, *rows = csv.reader(file)
    at = names.index("iteration")
    kept = [row for row in rows[:-1] if int(row[at]) % every == 0]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *kept, rows[-1]])


def anywhere(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run without what belongs to one machine: its seal, hosts and folders."""
    config = trust.without_seal(config)
    for start in config.get("record", ()):
        for name in OF_MACHINE:
            start.pop(name, None)
        start["command"] = command(start["command"])
    return config


def command(line: str) -> str:
    """Return the command of a run without the folder of Python and that of the run."""
    words = [word for word in shlex.split(line) if word != "-P"]  # of a study's own
    for option in ("--run-dir", "--resume"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return shlex.join(["python", *words[1:]])


if __name__ == "__main__":
    main()
