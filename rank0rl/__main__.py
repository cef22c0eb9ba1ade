"""Training and the tools beside it: `python -m rank0rl train Walker2d`, `python -m rank0rl plot RUN`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rank0rl import cli
from rank0rl.launch import exit_code_after, usage_error
from rank0rl.launch.streams import outlast_readers
from rank0rl.run.launch_options import limit_cpu_as

TOOLS = {
    "train": "train an agent on N ranks",
    "sbatch": "print a batch script for Slurm that goes on after a preemption or a time limit",
    "doctor": "check that ranks can start here, and say what to fix",
    "check": "test that an environment, or an agent, gives the same curve for every number of ranks",
    "study": "train many runs on all cores, and compare them",
    "evaluate": "print the mean return of a run's policy over new episodes",
    "speedup": "measure steps per second for several numbers of ranks, and what limits them",
    "plot": "draw the learning curves of runs",
    "report": "write a run or a study as one HTML page",
    "play": "show a run's policy in a window, or film it",
    "export": "write a run's policy to a file for PyTorch or ONNX that works without rank0rl",
    "record": "write episodes of a run's policy as a Minari dataset",
    "replay": "repeat one environment of one iteration of a run in this process",
    "verify": "train a run again, and compare every row with its record",
}


def main() -> int:
    """Run the tool named on the command line; return its exit code, or 2 if there is no such tool."""
    outlast_readers()
    # The working folder may be anybody's: `import_own` looks there, for code that is named, and nothing else.
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    name, *argv = sys.argv[1:] or ["--help"]
    if name == "train":
        cli.main(argv)
        return 0
    if name in TOOLS:
        limit_cpu_as(argv)
        try:
            from rank0rl.run.signals import Interrupted, Interrupts

            tool = module_of(name)
        except ModuleNotFoundError as error:
            return usage_error(cli.MISSING.format(sys.executable, error.name))
        try:
            with Interrupts(keep=False):
                return int(tool.main(argv))
        except Interrupted as stop:
            print("interrupted", file=sys.stderr)
            return exit_code_after(stop.signum)
    is_help = name in ("-h", "--help")
    out = sys.stdout if is_help else sys.stderr
    if not is_help:
        print(f"error: unknown tool {name!r}: expected one of {', '.join(TOOLS)}", file=out)
    print(
        "usage: rank0rl TOOL ...   (rank0rl TOOL --help for more; python -m rank0rl is the same)",
        file=out,
    )
    for tool, purpose in TOOLS.items():
        print(f"  {tool:8} {purpose}", file=out)
    return 0 if is_help else 2


def module_of(tool: str) -> Any:
    """Return the module of a tool, with its `Options` and its `main`."""
    place = {"speedup": "speedup.speedup", "study": "study.study"}.get(tool, tool)
    return importlib.import_module(f"rank0rl.tools.{place}")


if __name__ == "__main__":
    sys.exit(main())
