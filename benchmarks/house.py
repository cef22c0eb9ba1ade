"""Count the house: files, lines, names, imports, and the path of one iteration. `tests/test_house.py` lets none grow.

    python benchmarks/house.py            # print the table
    python benchmarks/house.py --json     # print the numbers for a program
    python benchmarks/house.py --path     # print the files that one iteration passes through
    python benchmarks/house.py --write    # write these files into docs/architecture.md

A line is any line of a Python file of `rank0rl/` or `algos/`. The other measures:

- Modules at the top: `.py` files directly in `rank0rl/`, `__init__` and `__main__` included.
- Public names: functions and classes at the top level of any module, without a leading underscore.
  Methods, constants and functions under an `if` do not count.
- Closure of the loop: the modules in LOOP, and what these import at module level, and so on. Imports
  under `if TYPE_CHECKING` count. Imports in functions do not, nor does the `__init__` of a package
  unless it is imported itself.
- Closure of train.py: what train.py and PPO import, imports in functions and every `__init__` on the
  way included. A run on one rank loads these modules.
- Path of an iteration: PPO trains on Hopper for two iterations, in one process. Every call of the second one
  is watched: collect, process, gather, update, broadcast. What is recorded afterwards does not count,
  nor do compiled kernels. A called line is a line of a function that is called, with decorators and docstring.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- written by: python benchmarks/house.py --write -->"
END = "<!-- end of what is written -->"

# What the code calls its parts. Whoever renames one of these changes the line here too.
FOLDERS = {"rank0rl": "rank0rl", "algos": "rank0rl.algos"}  # folder -> the package that it is
LOOP = ("rank0rl.trainer", "rank0rl.algos.ppo")
MAIN = ("rank0rl.cli", "main")  # trains, given a command line
FIRST = "Collector.batch"  # the first call of an iteration; its caller is the loop
LAST = "rank0_bcast_wts"  # the last one
TRAIN = "Hopper --num-envs 4 --steps-per-batch 256 --stop-after-iterations 2 --quiet"

FEW = 15  # a file entered for fewer lines is a stay that a reader would rather not make

# Key of --json -> the measure, in words.
WORDS = {
    "files": "files of `rank0rl/` and `algos/`",
    "lines": "their lines",
    "top_modules": "modules at the top of `rank0rl/`",
    "public_names": "public functions and classes",
    "loop_files": "import closure of the loop and PPO, files",
    "loop_lines": "its lines",
    "train_files": "import closure of train.py and PPO, imports in functions included, files",
    "train_lines": "its lines",
    "path_files": "path of one iteration, files",
    "path_lines": "its lines",
    "path_called": "its called lines",
    "path_short": f"its files entered for fewer than {FEW} called lines",
}

Calls = dict[str, dict[str, int]]
"""File, from the root -> its functions, in the order of their first calls -> their lines."""


def main() -> None:
    """Print what the options ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="Print the numbers as JSON.")
    parser.add_argument("--path", action="store_true", help="Print the path of an iteration.")
    parser.add_argument("--write", action="store_true", help="Update docs/architecture.md.")
    args = parser.parse_args()
    calls = trace()
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{path_as_text(calls)}\n{END}{after}")
    numbers = count(read_modules(ROOT), calls)
    if args.json:
        print(json.dumps(numbers, indent=2))
    elif args.path:
        print(path_as_text(calls))
    else:
        rows = [f"| {words} | {numbers[key]:,} |" for key, words in WORDS.items()]
        print("\n".join(["| measure | number |", "|---|---|", *rows]))


def count(modules: dict[str, Path], calls: Calls) -> dict[str, int]:
    """Return key of WORDS -> number."""
    top = modules["rank0rl"].parent
    loop = closure(LOOP, modules)
    command = names_in(parse(ROOT / "train.py"), modules, everywhere=True)
    train = closure([*command, *LOOP[1:]], modules, everywhere=True)
    called = [sum(functions.values()) for functions in calls.values()]
    return {
        "files": len(modules),
        "lines": lines_of(modules.values()),
        "top_modules": sum(path.parent == top for path in modules.values()),
        "public_names": sum(len(public_names(parse(path))) for path in modules.values()),
        "loop_files": len(loop),
        "loop_lines": lines_of(modules[name] for name in loop),
        "train_files": len(train),
        "train_lines": lines_of(modules[name] for name in train),
        "path_files": len(calls),
        "path_lines": lines_of(ROOT / path for path in calls),
        "path_called": sum(called),
        "path_short": sum(lines < FEW for lines in called),
    }


def read_modules(root: Path) -> dict[str, Path]:
    """Return dotted name -> file, of all Python files of the packages."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("").parts
            found[".".join([package, *inner]).removesuffix(".__init__")] = path
    return found


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def lines_of(paths: Iterable[Path]) -> int:
    """Return the number of lines of files."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def public_names(tree: ast.Module) -> list[str]:
    """Return the functions and classes at the top level of a module that have no leading underscore."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]


def closure(first: Iterable[str], modules: dict[str, Path], everywhere: bool = False) -> set[str]:
    """Return modules and all modules of the project that they import, directly or not.

    Args:
        first: names of the modules to begin with.
        modules: name -> file, of the whole project.
        everywhere: count imports in functions and the `__init__` of every package on the way too.
    """
    found: set[str] = set()
    todo = [*first]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        if name not in modules:
            raise ValueError(f"no module {name}: correct the names at the top of house.py")
        found.add(name)
        todo += names_in(parse(modules[name]), modules, everywhere)
        if everywhere and "." in name:
            todo.append(name.rpartition(".")[0])
    return found


def names_in(tree: ast.Module, modules: dict[str, Path], everywhere: bool) -> Iterator[str]:
    """Yield the modules of the project that a module imports."""
    for node in imports(tree, everywhere):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            of = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else str(node.module) for name in of]
        yield from (name for name in names if name in modules)


def imports(node: ast.AST, everywhere: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports under a node, those in functions only with `everywhere`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif everywhere or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(child, everywhere)


def trace() -> Calls:
    """Train for two iterations; return the functions that the second one called.

    Raises:
        ValueError: if no call had a watched name.
    """
    for name in LOOP:  # torch and the like, which would be slow to watch
        importlib.import_module(name)
    importlib.import_module("rank0rl.run.launch_options").limit_cpu("portable")
    run = getattr(importlib.import_module(MAIN[0]), MAIN[1])
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        thresholds = gc.get_threshold()
        gc.set_threshold(0)  # beside a profile function, another thread's collection crashes 3.11.2
        sys.setprofile(watch)
        try:
            run([*TRAIN.split(), "--run-dir", f"{folder}/run"])
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            gc.set_threshold(*thresholds)
    if not watch.ended:
        raise ValueError(f"no call of {LAST} after {FIRST}: correct the names in house.py")
    return watch.calls


class Watch:
    """Collects the calls of the last iteration, as a profile function."""

    def __init__(self) -> None:
        """Begin before the first iteration."""
        self.calls: Calls = {}
        self.ended = False
        """True after the last call of an iteration."""
        self._on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Take a call, from FIRST to the end of LAST."""
        name = frame.f_code.co_qualname
        if event == "return" and name == LAST and self._on:
            self._on, self.ended = False, True
        if event != "call":
            return
        if name == FIRST:
            self.calls, self._on, self.ended = {}, True, False
            self._add(frame.f_back)  # the loop
        if self._on:
            self._add(frame)

    def _add(self, frame: FrameType | None) -> None:
        assert frame is not None
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in FOLDERS:
            return
        if "__file__" not in frame.f_globals:
            return  # a compiled kernel: before Python 3.12, numba makes a frame for it
        lines = function_lines(parse(path)).get(frame.f_code.co_firstlineno)  # None: a class body
        if lines and "<" not in name:  # a function within a function is counted with it
            self.calls.setdefault(str(path.relative_to(ROOT)), {})[name] = lines


@functools.cache
def function_lines(tree: ast.Module) -> dict[int, int]:
    """Return first line -> number of lines, of each function of a module.

    Code objects have lines too, but which of them they list depends on Python's version.
    """
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(wrapper.lineno for wrapper in node.decorator_list)])
            found[first] = (node.end_lineno or first) - first + 1
    return found


def path_as_text(calls: Calls) -> str:
    """Return the path of an iteration as Markdown: lines of each file, called lines, and totals."""
    of_file = {path: lines_of([ROOT / path]) for path in calls}
    called = {path: sum(functions.values()) for path, functions in calls.items()}
    rows = [
        f"| `{path}` | {of_file[path]} | {called[path]} | {', '.join(calls[path])} |"
        for path in calls
    ]
    return "\n".join(
        [
            f"{len(calls)} files with {sum(of_file.values()):,} lines; the functions that are called "
            f"have {sum(called.values()):,}.",
            "",
            "| file | lines | called | functions, in the order of their first calls |",
            "|---|---|---|---|",
            *rows,
        ]
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
