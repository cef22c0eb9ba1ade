"""Tools beside training: python -m rank0rl check Walker2d."""

from __future__ import annotations

import importlib
import sys

_TOOLS = {
    "doctor": "whether ranks can be started here, and what to do if not",
    "check": "whether an environment gives the same curve for every number of ranks",
    "evaluate": "mean return of a run's policy over episodes of their own",
    "speedup": "steps per second for several numbers of ranks, and what bounds them",
    "plot": "learning curves of runs, their seeds together, as a picture",
    "report": "a run, or a study of speedup, as one HTML page",
    "play": "a run's policy in a window, or as an mp4",
    "export": "a run's policy in one file, for torch alone",
    "replay": "one lane of one iteration of a run again, alone",
}


def main() -> int:
    """Run the tool that the command line names; its exit code."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in _TOOLS:
        folder = "scaling" if name == "speedup" else "tools"
        return int(importlib.import_module(f"rank0rl.{folder}.{name}").main(argv))
    wanted = name in ("-h", "--help")
    out = sys.stdout if wanted else sys.stderr
    if not wanted:
        print(f"error: no tool {name!r}; expected {' or '.join(_TOOLS)}", file=out)
    print("usage: python -m rank0rl TOOL ... (TOOL --help for more)", file=out)
    for tool, what in _TOOLS.items():
        print(f"  {tool:8} {what}", file=out)
    return 0 if wanted else 2


if __name__ == "__main__":
    sys.exit(main())
