"""List the files that one iteration of PPO passes through, from its first step to the new weights.

    python benchmarks/trace_iteration.py            # print the list
    python benchmarks/trace_iteration.py --write    # and write it into docs/architecture.md

This trains PPO on Hopper for two iterations in one process, and watches every call of the second one:
collect, process, gather, update, broadcast. What is recorded afterwards does not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- written by: python benchmarks/trace_iteration.py --write -->"
END = "<!-- end of what is written -->"
TRAIN = "Hopper --num-envs 4 --steps-per-batch 256 --stop-after-iterations 2 --quiet"


def main() -> None:
    """Print the list; with `--write`, put it into the page too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="Update docs/architecture.md.")
    args = parser.parse_args()
    text = as_text(trace())
    print(text)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


class Watch:
    """Collects the calls of the last iteration, as a profile function."""

    def __init__(self) -> None:
        """Begin before the first iteration."""
        self.calls: dict[str, dict[str, int]] = {}
        """File, from the root -> its functions, in the order of their first calls -> their lines."""
        self._on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Take a call: from `Collector.batch` to the end of the broadcast that follows."""
        name = frame.f_code.co_qualname
        if event == "return" and name == "rank0_bcast_wts":
            self._on = False
        if event != "call":
            return
        if name == "Collector.batch":
            self.calls, self._on = {}, True
            self._add(frame.f_back)  # the loop
        if self._on:
            self._add(frame)

    def _add(self, frame: FrameType | None) -> None:
        assert frame is not None
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT) or path.parts[len(ROOT.parts)] not in ("rank0rl", "algos"):
            return
        name = frame.f_code.co_qualname
        if "<" not in name:  # what lies within a function is counted with it
            self.calls.setdefault(str(path.relative_to(ROOT)), {})[name] = lines(frame.f_code)


def lines(code: CodeType) -> int:
    """Return the number of lines of a function, docstring included."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    ends = [const.co_firstlineno + lines(const) - 1 for const in inner]
    return max([*ends, *(line for *_, line in code.co_lines() if line)]) - code.co_firstlineno + 1


def trace() -> dict[str, dict[str, int]]:
    """Train for two iterations; return file -> functions that the second one called -> lines."""
    from rank0rl.start import start

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        argv = [*TRAIN.split(), "--run-dir", f"{folder}/run"]
        sys.setprofile(watch)
        try:
            start(argv, None, check=lambda options: None, make_hooks=lambda options, folder: ())
        finally:
            sys.setprofile(None)
    return watch.calls


def as_text(calls: dict[str, dict[str, int]]) -> str:
    """Return the list as Markdown: lines of each file, those of the functions called, and totals."""
    of_file = {path: len((ROOT / path).read_text().splitlines()) for path in calls}
    of_functions = {path: sum(functions.values()) for path, functions in calls.items()}
    rows = [
        f"| `{path}` | {of_file[path]} | {of_functions[path]} | {', '.join(calls[path])} |"
        for path in calls
    ]
    total, called = sum(of_file.values()), sum(of_functions.values())
    return "\n".join(
        [
            f"{len(calls)} files with {total:,} lines; the functions that are called have {called:,}.",
            "",
            "| file | lines | called | functions, in the order of their first calls |",
            "|---|---|---|---|",
            *rows,
        ]
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
