"""Code of a run's own: the files of its agent, environment, wrappers and functions, hashed and copied at each start.

They are the files that its settings name, and what these import from the same folders.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import resolve_name
from itertools import accumulate
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from rank0rl.envs.make import find_modules_in
from rank0rl.run import files
from rank0rl.run.agents import code_files
from rank0rl.run.options import RunOptions
from rank0rl.run.trust import FUNCTIONS, functions_of

_FOLDER = "code"  # of the copies, in a run's folder
_MOST = 1 << 20  # bytes of a file
_FILES = 200
_LINES = 30  # of differences that are shown
_HERE = Path(__file__).resolve().parents[1]
_OURS = (_HERE, _HERE.with_name("algos"))  # in a checkout


def files_of(options: RunOptions) -> list[Path]:
    """Return the files of the code that a run's settings name."""
    return [path for name in _named(options) for path in code_files(name)]


def of_run(options: RunOptions) -> dict[str, str]:
    """Return the files of a run's own code: path below their common folder -> text.

    They are the named files, and those below their folders that they import, that these import, and so on. All of
    it has been imported already.
    """
    todo = [path.resolve() for path in files_of(options)]
    folders = {path.parent for path in todo}
    packages = {path: module.__package__ for path, module in _loaded()}
    modules = {module.__name__: path for path, module in _loaded()}
    found: dict[Path, str] = {}
    while todo and len(found) < _FILES:
        path = todo.pop(0)
        if path in found or not _is_own(path, folders):
            continue
        found[path] = path.read_text(errors="replace")[:_MOST]
        todo += [modules[n] for n in _imports(found[path], packages.get(path)) if n in modules]
    if not found:
        return {}
    top = os.path.commonpath([path.parent for path in found])
    return {path.relative_to(top).as_posix(): text for path, text in sorted(found.items())}


def _loaded() -> list[tuple[Path, ModuleType]]:
    """Return all modules that come from a file, with its path."""
    each = [(getattr(module, "__file__", None), module) for module in [*sys.modules.values()]]
    return [(Path(file).resolve(), module) for file, module in each if file and os.path.isabs(file)]


def _is_own(path: Path, folders: set[Path]) -> bool:
    """Return True for a Python file below one of the folders that is no part of rank0rl or an installed package."""
    below = any(map(path.is_relative_to, folders)) and not any(map(path.is_relative_to, _OURS))
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    return path.suffix == ".py" and path.is_file() and below and not installed


def _imports(text: str, package: str | None) -> Iterator[str]:
    """Yield the names of modules that a file may import, some of which are names in modules."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            of = "." * node.level + (node.module or "")
            base = resolve_name(of, package) if node.level and package else of.lstrip(".")
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            yield from accumulate(name.split("."), lambda a, b: f"{a}.{b}")


def hashes(texts: Mapping[str, str]) -> dict[str, str]:
    """Return path -> the first 16 digits of the text's SHA-256."""
    return {path: hashlib.sha256(text.encode()).hexdigest()[:16] for path, text in texts.items()}


def recorded(start: Mapping[str, Any]) -> dict[str, str]:
    """Return path -> hash, as the record of a run's start has them; {} without code of its own."""
    found = start.get("code")
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, Mapping) else {}


def label(starts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the code of a run's last start as a setting, {"code": "1f2e3d4c"}; {} without code of its own."""
    found = recorded(starts[-1]) if starts else {}
    text = " ".join(f"{path} {its}" for path, its in sorted(found.items()))
    return {"code": hashlib.sha256(text.encode()).hexdigest()[:8]} if found else {}


def keep(
    texts: Mapping[str, str], run: Path, starts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Copy the files of a start into a run's folder, unless the start before has; return them for its record.

    Args:
        texts: what `of_run` has returned.
        run: the run's folder.
        starts: the records of earlier starts.
    """
    now, number = hashes(texts), len(starts) + 1
    if not now:
        return {}
    if starts and recorded(starts[-1]) == now:
        return {"code": now, "code_of_start": _number(starts[-1])}
    for path, text in texts.items():
        copy = _copies(run, number) / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        files.write(copy, text.encode())
    return {"code": now, "code_of_start": number}


def kept(run: Path, start: Mapping[str, Any]) -> dict[str, str]:
    """Return the copies of the files of a start: path -> text, "" for one that has gone.

    Raises:
        ValueError: if a copy cannot be read.
    """
    folder, texts = _copies(run, _number(start)), {}
    for path in recorded(start):
        copy = folder / path
        is_inside = ".." not in PurePosixPath(path).parts and not PurePosixPath(path).is_absolute()
        text = files.read(copy, "code", _MOST) if is_inside and copy.exists() else b""
        texts[path] = text.decode(errors="replace")
    return texts


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between files, path -> text, as lines of a diff."""
    lines: list[str] = []
    for path in sorted({*before, *now}):
        old, new = (each.get(path, "").splitlines() for each in (before, now))
        lines += difflib.unified_diff(
            old, new, f"{path}, recorded", f"{path}, now", n=1, lineterm=""
        )
    lines = ["".join(c for c in line if c.isprintable() or c == "\t") for line in lines]
    more = len(lines) - _LINES
    return [*lines[:_LINES], f"and {more} more lines"] if more > 0 else lines


def with_copies(settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return a run's settings with the last copies of files that have gone; modules that have gone are found there.

    Call it when the settings are trusted: what is imported then is what the run's folder has.
    """
    folders = [path for path in run.glob(f"{_FOLDER}/start-*") if path.name[6:].isdecimal()]
    if not folders:
        return {**settings}
    folder = max(folders, key=lambda path: int(path.name[6:]))

    def found(name: str) -> str:
        where, colon, of = name.partition(":")
        if where.endswith(".py"):
            copies = [] if Path(where).exists() else [*folder.rglob(Path(where).name)]
            return f"{copies[0].resolve()}{colon}{of}" if copies else name
        for copy in (
            [] if code_files(name) or not colon else folder.rglob(f"{where.replace('.', '/')}.py")
        ):
            find_modules_in(str(copy.resolve().parents[where.count(".")]))
        return name

    changed: dict[str, Any] = {}
    for name in ("algo", "env_id", "wrappers", *FUNCTIONS):
        value = settings.get(name)
        if isinstance(value, str):
            changed[name] = found(value)
        elif isinstance(value, list | tuple):
            changed[name] = type(value)(map(found, value))
    return {**settings, **changed}


def _number(start: Mapping[str, Any]) -> int:
    """Return the number of the start, from 1, that has written the copies of a start."""
    number = start.get("code_of_start")
    return number if isinstance(number, int) else 0


def _copies(run: Path, number: int) -> Path:
    return run / _FOLDER / f"start-{number}"


def _named(options: RunOptions) -> Iterator[str]:
    """Yield all names of code in the options."""
    yield from (options.algo, options.env_id, *options.wrappers)
    for name in FUNCTIONS:
        yield from functions_of(options, name)
