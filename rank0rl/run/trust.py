"""Decide whether code that a file names may be imported: the run of someone else is data, not a program.

Gymnasium's environments and wrappers and the agents of algos/ are always imported. Other code is
imported if the command line names it too or says --trust, or if this user made the run and the code has
not changed. The settings of such a run have a seal, an HMAC with a key that only this user can read. What is
said of code holds for a file that is read, for a project of Weights & Biases that is sent the record, and
for arguments that ask for much memory or time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import shlex
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence, Set, ValuesView
from itertools import chain
from pathlib import Path
from typing import Any

from rank0rl.envs.make import LARGE, are_known_wrappers, is_gymnasiums, is_modest
from rank0rl.options import apply, flag
from rank0rl.run import files
from rank0rl.run.agents import absolute, code_files, is_reference
from rank0rl.run.launch_options import Words
from rank0rl.run.options import RunOptions

FUNCTIONS = ("curriculum", "env_kwargs_of", "hook")
"""Settings that name functions or classes of the user's."""
_NAMES = ("algo", "env_id", "env_kwargs", "wrappers", *FUNCTIONS)  # settings that may name code
_MORE = ("init_from", "data", "wandb")  # files that are read, and where rows are sent
ASKED = ("env_kwargs", "wrappers", *FUNCTIONS, *_MORE)
"""Settings that somebody's file may have only where its user trusts it, besides algo and env_id."""
_MOST = 1 << 30  # bytes of a file whose contents are sealed
_SWITCHES = {field.name for field in dataclasses.fields(RunOptions) if field.type in (bool, "bool")}
_SEVERAL = {"env_kwargs", "hook", "info", "wrappers"}  # options with any number of words
_SEAL = "seal"
_KEY_BYTES = 32


def trusted(
    settings: Mapping[str, Any], source: str, words: Words | None = None, trust: bool = False
) -> dict[str, Any]:
    """Return the settings of a file without their seal, if all code that they name may be imported.

    Args:
        settings: option -> value, with a seal if a run wrote them.
        source: the file, for messages.
        words: the command line, which may name the code or say --trust. None: there is none.
        trust: True if the user trusts the code.

    Raises:
        ValueError: naming the code, and the command line to go on with.
    """
    foreign = _foreign(settings, source)
    trust = trust or bool(words and (words.given.get("trust") or _says(words, foreign)))
    if foreign and not trust:
        _check_seal(settings, source, foreign, words)
    return without_seal(settings)


def _check_seal(
    settings: Mapping[str, Any],
    source: str,
    foreign: Mapping[str, Sequence[str]],
    words: Words | None,
) -> None:
    """Raise ValueError unless a run of this user has written the settings, and their code is as it was."""
    key, seal = _key(), str(settings.get(_SEAL))
    ours = _seal(key, settings, source) if key else ""
    if ours and hmac.compare_digest(ours.encode(), seal.encode()):
        return
    again = _words(foreign)
    typed = [*map(absolute, chain(*_by_option(words.argv).values()))] if words else []
    # A word that has been typed already is no remedy.
    if words is None or not {*typed}.isdisjoint(again) or not all(map(str.isprintable, again)):
        again = [flag("trust")]
    refusal, more, what = _refusal(foreign, source), "", "it"
    if ours and hmac.compare_digest(*(one.partition(".")[0].encode() for one in (ours, seal))):
        refusal = f"files that {source} names have changed or gone since you trained this run: {_listed(foreign)}"
        what = "them"
        more = f" (which shows what has changed, and goes on with {flag('changed_code')})" * bool(
            words
        )
    raise ValueError(
        f"{refusal}; if you trust {what}, go on with: "
        f"{shlex.join(['python', *sys.orig_argv[1:], *again])}{more}"
    )


def without_seal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the seal of the run that wrote them."""
    return {name: value for name, value in settings.items() if name != _SEAL}


def sealed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings, with this user's seal if the user can have a key on this machine."""
    key = _key()
    return {**settings, _SEAL: _seal(key, settings, "")} if key else {**settings}


def words_to_go_on(settings: Mapping[str, Any]) -> str:
    """Return the code that a command line must name to resume a run whose settings have no seal."""
    words = [] if _SEAL in settings else _words(_foreign(settings, ""))
    return "".join(f" {shlex.quote(word)}" for word in words)


def _named_options(settings: Mapping[str, Any], source: str) -> RunOptions:
    named = {name: settings[name] for name in _NAMES if name in settings}
    (options,) = apply(named, RunOptions(), source=source)
    return options


def _listed(foreign: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} {values!r:.200}" for name, values in foreign.items())


def _refusal(foreign: Mapping[str, Sequence[str]], source: str) -> str:
    return (
        f"{source} is not as a run of yours has written it; it names code that is neither "
        f"Gymnasium's nor rank0rl's and would be imported and run, a file that would be read, a project that "
        f"would be sent the record, or numbers above {LARGE:,} for which memory or time may not suffice: "
        f"{_listed(foreign)}"
    )


def _foreign(settings: Mapping[str, Any], source: str) -> dict[str, list[str]]:
    """Return the options that name what is not rank0rl's or Gymnasium's, option -> words."""
    options = _named_options(settings, source)
    found: dict[str, list[str]] = {}
    kwargs = options.env_kwargs
    if not is_gymnasiums(options.env_id):
        found["env_id"] = [options.env_id]
    if kwargs and ("env_id" in found or _files_in(kwargs) or not is_modest(kwargs)):
        found["env_kwargs"] = [_pair(name, value) for name, value in kwargs.items()]
    if not are_known_wrappers(options.wrappers):
        found["wrappers"] = [*options.wrappers]
    if not is_reference(options.algo):
        found["algo"] = [options.algo]
    found |= {name: own for name in FUNCTIONS if (own := functions_of(options, name))}
    return found | {name: [str(settings[name])] for name in _MORE if settings.get(name)}


def named_code(settings: Mapping[str, Any]) -> list[str]:
    """Return all names of code in settings."""
    values = [settings.get(name) for name in ("algo", "env_id", "wrappers", *FUNCTIONS)]
    return [one for value in values for one in ([value] if isinstance(value, str) else value or ())]


def functions_of(options: RunOptions, name: str) -> list[str]:
    """Return the functions or classes that one of `FUNCTIONS` names."""
    value = getattr(options, name) or ()
    return [value] if isinstance(value, str) else [*value]


def _files_in(kwargs: Any) -> list[str]:
    """Return the texts in these arguments that are paths. MuJoCo would read any file."""
    if isinstance(kwargs, Mapping):
        kwargs = kwargs.values()
    elif isinstance(kwargs, str):
        is_path = "/" in kwargs or os.sep in kwargs or os.path.exists(kwargs)
        return [kwargs] if is_path else []
    if not isinstance(kwargs, Sequence | Set | ValuesView):
        return []
    return [path for value in kwargs for path in _files_in(value)]


def _pair(name: str, value: Any) -> str:
    """Return an argument of an environment as a word of a command line."""
    return f"{name}={json.dumps(value, default=repr)}"


def _words(foreign: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the words of a command line that name this code."""
    words: list[str] = []
    for name, values in foreign.items():
        if name != "env_id":
            words.append(flag(name))
        words += values
    return words


def _says(line: Words, foreign: Mapping[str, Sequence[str]]) -> bool:
    """Return True if a command line gives all these options these words."""
    said = _by_option(line.argv)
    pairs = said.get("env_kwargs", [])
    texts = [_pair(name, text) for name, _, text in (word.partition("=") for word in pairs)]
    said["env_kwargs"] = [*pairs, *texts]
    return all(
        {absolute(word) for word in said.get(name, [])} >= {absolute(word) for word in values}
        for name, values in foreign.items()
    )


def _by_option(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of a command line by the option whose values they are, the environment's among them."""
    found: dict[str, list[str]] = {}
    option, is_complete = "env_id", False
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            option = name.replace("-", "_")
            is_complete = bool(equals) or option.removeprefix("no_") in _SWITCHES
            if equals:
                found.setdefault(option, []).append(value)
        else:
            may_be = is_complete and option not in _SEVERAL
            found.setdefault("env_id" if may_be else option, []).append(word)
            is_complete = True
    return found


def _seal(key: bytes, settings: Mapping[str, Any], source: str) -> str:
    """Return two HMACs, of all that settings name, and of that and the contents of code and files in env_kwargs."""
    options = _named_options(settings, source)
    named = {name: getattr(options, name) for name in _NAMES}
    named |= {name: settings.get(name) for name in _MORE}
    paths = [path for reference in named_code(vars(options)) for path in code_files(reference)]
    paths += map(Path, _files_in(options.env_kwargs))
    each = [named], [named, [*map(_content, paths)]]
    texts = (json.dumps(one, sort_keys=True, default=repr).encode() for one in each)
    return ".".join(hmac.new(key, text, hashlib.sha256).hexdigest() for text in texts)


def _content(path: Path) -> str:
    """Return the SHA-256 of a file, "" if there is none."""
    try:
        return hashlib.sha256(files.read(path, "file", _MOST)).hexdigest()
    except ValueError:
        return ""


def _key() -> bytes:
    """Return this user's key, made on first use; b"" if other users could read it, or put another in its place."""
    if os.name != "posix":
        return b""
    try:
        path = _state_folder() / "key"
        if not path.exists():
            _make_key(path)
        if not all(map(_is_ours, path.resolve().parents)):
            return b""
        # Without O_NONBLOCK, to open a FIFO is to wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            is_mine = found.st_uid == os.geteuid() and not found.st_mode & 0o077
            if stat.S_ISREG(found.st_mode) and is_mine and found.st_size == _KEY_BYTES:
                return file.read(_KEY_BYTES)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        pass
    return b""


def _is_ours(folder: Path) -> bool:
    """Return True if nobody but this user and root can rename what is in a folder."""
    status = folder.stat()
    closed = not status.st_mode & 0o022 or status.st_mode & stat.S_ISVTX  # as /tmp
    return status.st_uid in (0, os.geteuid()) and bool(closed)


def _state_folder() -> Path:
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".local" / "state") / "rank0rl"


def _make_key(path: Path) -> None:
    """Write the key under another name, then link it: another process never sees a part of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, draft = tempfile.mkstemp(dir=path.parent)  # O_EXCL, O_NOFOLLOW, 0600
    try:
        with open(number, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(number)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
