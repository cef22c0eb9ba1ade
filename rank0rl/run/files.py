"""Read and write the files of a run, which may come from someone else.

Only regular files are read, up to a size: a FIFO would keep the reader waiting, a device would fill
its memory. Files are written in full or not at all, and never through a link, which may lead out of
the run's folder.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

_TEXT = 1 << 24  # bytes
_CONFIG = 1 << 22  # bytes of a TOML file: the records of some thousand starts
_PARTS = 64  # of a name, and levels of what a TOML file holds
_NAMES = 1 << 20  # parts of all names, each squared: the parser's time grows with that
_UNNAMED = re.compile(  # texts and comments, whose dots are no parts of names
    r""""{3}(?s:\\.|[^\\])*?(?:"{3,5}|\Z)|'{3}(?s:.*?)(?:'{3,5}|\Z)|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?|#.*"""
)
_NAME = re.compile(r"[^\n={}\[\],]+")
_COLUMN = 1000  # characters of a column's name
_FILES = (".csv", ".json", ".toml", ".txt")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines
_TABLE, _LINES, _COMMAS = 1 << 28, 1 << 20, 1 << 24  # of a CSV file: 400,000 iterations
csv.field_size_limit(_TABLE)  # a curriculum's options may be long


def read(
    path: Path, what: str, most: int, first: int | None = None, last: int | None = None
) -> bytes:
    """Return the contents of a regular file, or of one that a link leads to.

    Args:
        path: the file.
        what: kind of the file, for messages, such as "checkpoint".
        most: largest size that is read, in bytes.
        first: number of bytes to return, from the beginning. None: all.
        last: number of bytes to return, from the end. None: all.

    Raises:
        ValueError: if there is no such file, it is not a regular one, or it is larger.
    """
    try:
        # Without O_NONBLOCK, to open a FIFO is to wait for its writer.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"cannot read {what} {path}: it is not a regular file")
            if found.st_size > most:
                raise ValueError(
                    f"cannot read {what} {path}: expected at most {most:,} bytes, got "
                    f"{found.st_size:,}"
                )
            if last is not None:
                file.seek(max(0, found.st_size - last))
            wanted = (number for number in (first, last, found.st_size) if number is not None)
            return file.read(min(wanted))
    except OSError as error:
        raise ValueError(f"cannot read {what} {path}: {error.strerror}") from None


def _read_text(path: Path, what: str, most: int = _TEXT) -> str:
    """Return the text of a regular file.

    Args:
        path: the file.
        what: kind of the file, for messages, such as "checkpoint".
        most: largest size that is read, in bytes.

    Raises:
        ValueError: if it cannot be read, or is not UTF-8.
    """
    return _decoded(read(path, what, most), path, what)


def _decoded(data: bytes, path: Path, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {what} {path}: it is not UTF-8 text ({error})") from None


def read_table(path: Path, what: str) -> list[dict[str, str]]:
    """Return the complete rows of a CSV file, column -> text. A line without its end was cut short.

    Raises:
        ValueError: if it cannot be read.
    """
    data = read(path, what, _TABLE)
    for sign, most, found in ((b"\n", _LINES, "lines"), (b",", _COMMAS, "commas")):
        if (count := data.count(sign)) > most:
            raise ValueError(
                f"cannot read {what} {path}: expected at most {most:,} {found}, got {count:,}"
            )
    lines = (_decoded(line, path, what) for line in io.BytesIO(data) if line.endswith(b"\n"))
    table = csv.DictReader(lines)
    try:
        rows = [row for row in table if None not in row and None not in row.values()]
    except csv.Error as error:
        raise ValueError(f"cannot read {what} {path}: {error}") from None
    if odd := [
        name for name in table.fieldnames or () if not name.isprintable() or len(name) > _COLUMN
    ]:
        raise ValueError(f"cannot read {what} {path}: no column of a run is called {odd[0]!r:.200}")
    return rows


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the contents of a TOML file.

    Raises:
        ValueError: if it cannot be read, or for the reasons of `parse_toml`.
    """
    return parse_toml(_read_text(path, what, _CONFIG), path, what)


def parse_toml(text: str, path: Path, what: str) -> dict[str, Any]:
    """Return what the text of a TOML file says.

    Raises:
        ValueError: if it is not TOML, has names or levels of very many parts, or texts that would write to a
            terminal.
    """
    parts = [name[0].count(".") for name in _NAME.finditer(_UNNAMED.sub("_", text))]
    if max(parts, default=0) > _PARTS:
        raise ValueError(f"cannot read {what} {path}: a name has more than {_PARTS} parts")
    if (squares := sum(number**2 for number in parts)) > _NAMES:
        raise ValueError(
            f"cannot read {what} {path}: expected at most {_NAMES:,} squared parts of names, got {squares:,}; "
            f"write tables in place of dotted names"
        )
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} {path} is not TOML: {error}") from None
    left: list[tuple[Any, int]] = [(found, 0)]
    for value, level in left:  # which grows meanwhile
        if level > _PARTS:
            raise ValueError(f"cannot read {what} {path}: it has more than {_PARTS} levels")
        if isinstance(value, dict):
            left += [(one, level + 1) for one in (*value, *value.values())]
        elif isinstance(value, list):
            left += [(one, level + 1) for one in value if isinstance(one, dict | list | str)]
        elif isinstance(value, str) and _CONTROL.search(value):
            raise ValueError(
                f"cannot read {what} {path}: it holds control characters: {value!r:.200}"
            )
    return found


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the contents of a JSON file.

    Raises:
        ValueError: if it cannot be read, or does not hold one object.
    """
    try:
        found = json.loads(_read_text(path, what))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"cannot read {what} {path}: it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"cannot read {what} {path}: expected names and values")
    return found


def write(path: Path, data: bytes) -> None:
    """Write a file to a temporary name, flush it, then rename it over the file that was there. It outlasts a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a process that was killed
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()  # a full disk needs the room
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would be there after a power cut."""
    if os.name == "posix":
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def append(path: Path) -> BinaryIO:
    """Open a file to append to it; it is made if there is none.

    Raises:
        OSError: if it cannot be opened, is a link, or is not a regular file.
    """
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    how |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a FIFO may have no reader
    file = open(os.open(path, how, 0o666), "ab")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def lock(path: Path) -> int | None:
    """Lock a file for this process, at most while it lives; it is made if there is none.

    A file system that machines share knows the locks of files that are open for writing, and not those of folders.

    Returns:
        Its descriptor: to close it is to give the lock up. None if another process has the lock.

    Raises:
        OSError: as `append` does, or without a filename if the file system has no locks.
    """
    with append(path) as opened:
        file = os.dup(opened.fileno())
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                return None
            raise
    return file


def check_folder(folder: Path) -> None:
    """Check that a folder holds nothing through which a run would write elsewhere, or not at all.

    Raises:
        ValueError: naming a link, or what should be a file.
    """
    for path in folder.iterdir():
        if path.is_symlink():
            raise ValueError(
                f"{path} is a link, and a run writes into its own folder only: remove it"
            )
        if not path.is_file() and (path.suffix in _FILES or not path.is_dir()):
            raise ValueError(f"{path} is not a regular file: remove it")


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name as an .npz file, complete or not at all. `numpy.load` reads it."""
    import numpy as np  # here, because the process that starts ranks does not load NumPy

    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    write(path, content.getvalue())
