"""Code of a run's own: the files of its agent, environment, wrappers and functions, hashed and copied at each start.

They are the files that its settings name, and what these import from the same folders.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import resolve_name
from itertools import accumulate, chain, islice
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from rank0rl.envs.make import find_modules_in
from rank0rl.run import files
from rank0rl.run.agents import code_files, is_own
from rank0rl.run.options import RunOptions
from rank0rl.run.trust import named_code

_FOLDER = "code"  # of the copies, in a run's folder
_MOST = 1 << 18  # characters of a file
_FILES = 200
_LINES, _LINE = 30, 200  # of differences that are shown, and characters of each
_COMPARED = 1 << 12  # lines of a file: the time to compare them grows with their square
_HERE = Path(__file__).resolve().parents[1]
_OURS = (_HERE, _HERE.with_name("algos"))  # in a checkout
_PYTHONS = tuple(Path(sysconfig.get_path(of)).resolve() for of in ("stdlib", "platstdlib"))


def files_of(options: RunOptions) -> list[Path]:
    """Return the files of the code that a run's settings name."""
    return [path for name in named_code(vars(options)) for path in code_files(name)]


def of_run(options: RunOptions) -> dict[str, str]:
    """Return the files of a run's own code: path below their common folder -> text.

    They are the named files, and those below their folders that they import, that these import, and so on. All of
    it has been imported already.
    """
    todo = [path.resolve() for path in files_of(options)]
    folders = {path.parent for path in todo}
    if not any(_is_own(path, folders) for path in todo):
        return {}
    packages = {path: module.__package__ for path, module in _loaded()}
    modules = {module.__name__: path for path, module in _loaded()}
    found: dict[Path, str] = {}
    while todo and len(found) < _FILES:
        path = todo.pop(0)
        if path in found or not _is_own(path, folders):
            continue
        found[path] = path.read_text(errors="replace")[:_MOST]
        todo += [modules[n] for n in _imports(found[path], packages.get(path)) if n in modules]
    top = os.path.commonpath([path.parent for path in found])
    return {path.relative_to(top).as_posix(): text for path, text in sorted(found.items())}


def _loaded() -> list[tuple[Path, ModuleType]]:
    """Return all modules that come from a file, with its path."""
    each = [(getattr(module, "__file__", None), module) for module in [*sys.modules.values()]]
    return [(Path(file).resolve(), module) for file, module in each if file and os.path.isabs(file)]


def _is_own(path: Path, folders: set[Path]) -> bool:
    """Return True for a Python file below one of the folders that is no part of rank0rl or an installed package."""
    is_others = any(map(path.is_relative_to, _OURS + _PYTHONS))
    below = any(map(path.is_relative_to, folders)) and not is_others
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
    """Return path -> hash, as the record of a run's start has them; {} without code of its own.

    Paths that no run writes are left out.
    """
    found = start.get("code")
    items = islice(found.items() if isinstance(found, Mapping) else (), _FILES)
    return {str(path): str(its) for path, its in items if _is_relative(str(path))}


def _is_relative(path: str) -> bool:
    """Return True for a path in its shortest form that leads out of no folder."""
    pure = PurePosixPath(path)
    is_inside = not pure.is_absolute() and ".." not in pure.parts and len(pure.parts) < _FILES
    return path.isprintable() and is_inside and pure.as_posix() == path


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

    Raises:
        ValueError: if the folder of the copies is none.
    """
    now, number = hashes(texts), len(starts) + 1
    if not now:
        return {}
    if starts and recorded(starts[-1]) == now:
        return {"code": now, "code_of_start": _number(starts[-1])}
    try:
        (run / _FOLDER).mkdir(exist_ok=True)
        while _copies(run, number).exists() or _copies(run, number).is_symlink():
            number += 1  # of a start that was killed, or of somebody's
        for path, text in texts.items():
            copy = _copies(run, number) / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            files.write(copy, text.encode())
    except FileExistsError:
        raise ValueError(
            f"{run / _FOLDER} must be a folder, for copies of code: remove it"
        ) from None
    return {"code": now, "code_of_start": number}


def kept(run: Path, start: Mapping[str, Any]) -> dict[str, str]:
    """Return the copies of the files of a start: path -> text, "" for one that has gone or that a link leads to.

    Raises:
        ValueError: if a copy cannot be read.
    """
    folder, texts = _copies(run.resolve(), _number(start)), {}
    for path in recorded(start):
        copy = folder / path
        is_there = copy.exists() and copy.resolve() == copy
        text = files.read(copy, "code", 4 * _MOST) if is_there else b""
        texts[path] = text.decode(errors="replace")
    return texts


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between files, path -> text, as lines of a diff."""
    names = sorted({*before, *now})
    each = (_difference(path, before.get(path, ""), now.get(path, "")) for path in names)
    lines = [*islice(chain.from_iterable(each), _LINES + 1)]
    lines = ["".join(c for c in line if c.isprintable() or c == "\t")[:_LINE] for line in lines]
    return [*lines[:_LINES], "and more lines"] if len(lines) > _LINES else lines


def _difference(path: str, before: str, now: str) -> Iterator[str]:
    """Yield the lines of one file's diff."""
    if before == now:
        return
    old, new = before.splitlines(), now.splitlines()
    if max(len(old), len(new)) > _COMPARED:
        yield f"{path} has changed; it is too long to be compared"
        return
    yield from difflib.unified_diff(old, new, f"{path}, recorded", f"{path}, now", n=1, lineterm="")


def with_copies(settings: Mapping[str, Any], run: Path, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the copies of files of one's own that have gone; modules that have gone are found there.

    Call it only when the user trusts the run's folder.

    Args:
        settings: of a run.
        run: its folder.
        start: the record of the start whose code it is; {} if there is none.

    Raises:
        ValueError: if there are copies that this start has not written.
    """
    own = filter(is_own, named_code(settings))
    gone = {name for name in own if not any(map(Path.exists, code_files(name)))}
    copies = recorded(start) if gone else {}
    if not copies:
        return {**settings}
    folder = _copies(run.resolve(), _number(start))
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    if there != {*copies} or hashes(kept(run, start)) != copies:
        raise ValueError(
            f"{', '.join(sorted(gone))} has gone, and the copies in {folder} are not as the run has written them: "
            f"put the files back"
        )
    changed = {name: _copy_of(name, copies, folder) for name in gone}
    return {option: _replaced(value, changed) for option, value in settings.items()}


def folders_of_modules(run: Path) -> list[str]:
    """Return the folders of a run's copies in which modules that have gone are found since `with_copies`."""
    below = (run / _FOLDER).resolve()
    return [path for path in sys.path if Path(path).is_relative_to(below)]


def _copy_of(name: str, copies: Mapping[str, str], folder: Path) -> str:
    """Return a name of code that has gone with its copy. The copy of a module is found by its name from now on."""
    where, colon, of = name.partition(":")
    if where.endswith(".py"):
        parts = Path(where).resolve().as_posix()
        found = [path for path in copies if parts.endswith(f"/{path}")]
        return f"{folder / max(found, key=len)}{colon}{of}" if found else name
    module = where.replace(".", "/")
    for path in copies:
        for ending in (f"{module}.py", f"{module}/__init__.py"):
            if f"/{path}".endswith(f"/{ending}"):
                find_modules_in(str(folder / path.removesuffix(ending)))
    return name


def _replaced(value: Any, changed: Mapping[str, str]) -> Any:
    """Return a setting's value with other names of code."""
    if isinstance(value, str):
        return changed.get(value, value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, changed) for each in value)
    return value


def _number(start: Mapping[str, Any]) -> int:
    """Return the number of the start, from 1, that has written the copies of a start."""
    number = start.get("code_of_start")
    return number if isinstance(number, int) else 0


def _copies(run: Path, number: int) -> Path:
    return run / _FOLDER / f"start-{number}"
