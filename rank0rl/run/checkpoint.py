"""Checkpoint files: the state of a run at an iteration boundary. They are complete or absent, and never run code.

A file has a line that names the format, a line with the SHA-256 of the rest, a line of JSON with the
nested dicts and lists of the state, and its tensors as safetensors. There is nothing in it that code
could be, and it takes no more memory than its size suggests. The name of a file is the number of its
iteration. The rows of a `Replay` lie in files beside it, which later checkpoints use too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from rank0rl.agent import Agent
from rank0rl.batch import Batch, Replay, concatenate, count
from rank0rl.launch import job
from rank0rl.mpi import weights
from rank0rl.options import OptionError
from rank0rl.run import files, machine

_FORMAT = "rank0rl checkpoint"
_VERSION = 10
_TREE = 1 << 25  # bytes of JSON
_DEEP = 64  # dicts and lists in each other


@dataclass(frozen=True, eq=False)
class _Marked:
    """A replay at an iteration boundary."""

    replay: Replay
    added: int
    """Number of its rows so far."""

    @property
    def capacity(self) -> int:
        return self.replay.capacity

    def write(self, folder: Path, number: int) -> dict[str, Any]:
        """Write the rows that no file has yet; return what a checkpoint says of the replay, which is the number-th of its state."""
        first = max(0, self.added - self.capacity)
        parts = [part for part in self.replay.parts if first < part["end"] <= self.added]
        begin = max([first, *(part["end"] for part in parts)])
        if begin < self.added:
            rows = self.replay.rows(begin, self.added)
            content = safetensors.torch.save({n: torch.from_numpy(x) for n, x in rows.items()})
            digest = hashlib.sha256(content).hexdigest()
            # best.pt may need other rows of these numbers, from before a resume of an earlier checkpoint.
            name = f"replay-{number}-{begin}-{self.added}-{digest[:8]}.safetensors"
            files.write(folder / name, content)
            parts.append({"name": name, "first": begin, "end": self.added, "sha256": digest})
        self.replay.parts = parts
        return {"added": self.added, "capacity": self.capacity, "parts": parts}


@dataclass(frozen=True, eq=False)
class _SavedReplay:
    """A replay as a checkpoint has it. Its rows are read when they are asked for."""

    folder: Path
    added: int
    capacity: int
    parts: list[dict[str, Any]]

    def rows(self) -> Batch:
        """Return the last `capacity` rows, in order.

        Raises:
            ValueError: if a file has gone or is not as it was written, or rows are missing.
        """
        ends = [number for part in self.parts for number in (part["first"], part["end"])]
        if not all(type(number) is int for number in (self.added, self.capacity, *ends)):
            raise ValueError(f"a replay in {self.folder} has no whole numbers of rows")
        at, read = max(0, self.added - self.capacity), []
        for part in self.parts:
            path = self.folder / Path(part["name"]).name
            content = files.read(path, "replay", machine.memory_bytes())
            if hashlib.sha256(content).hexdigest() != part["sha256"]:
                raise ValueError(f"{path} is damaged: its contents do not match its SHA-256")
            rows = {n: t.numpy() for n, t in safetensors.torch.load(content).items()}
            has = count(rows) if rows else 0
            if not part["first"] <= at < part["end"] == part["first"] + has:
                raise ValueError(f"{path} must have rows from number {at:,} on: got {has:,} rows")
            read.append({name: x[at - part["first"] :] for name, x in rows.items()})
            at = part["end"]
        if at != self.added:
            raise ValueError(f"a replay in {self.folder} has lost rows from number {at:,} on")
        return concatenate(read)


def snapshot(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return a copy of nested dicts and lists of tensors, arrays, numbers and strings; arrays become tensors.

    Args:
        value: what to copy.
        path: the keys that lead to it, for error messages.

    Raises:
        TypeError: for any other object, because loading it from a file would run code.
    """
    if isinstance(value, Replay | _SavedReplay):
        return _Marked(value, value.mark()) if isinstance(value, Replay) else value
    if isinstance(value, Mapping):
        return {_plain(k, path): snapshot(v, (*path, k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(each, (*path, i)) for i, each in enumerate(value)]
    if isinstance(value, Tensor) and not value.is_complex():
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    return _plain(value.item() if isinstance(value, np.generic) else value, path)


def _plain(value: Any, path: tuple[Any, ...]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"a checkpoint holds tensors, arrays, real numbers and strings, in dicts and lists: got "
        f"{type(value).__name__} in {_dotted(path) or 'its state'!r}"
    )


def first_difference(a: Any, b: Any) -> str | None:
    """Return the name of the first item in which two snapshots differ, bit for bit; None if they are equal."""
    mine, other = _comparable(a), _comparable(b)
    differ = (path for path in {**mine, **other} if mine.get(path) != other.get(path))
    return next(map(_dotted, differ), None)


def _comparable(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return, by path, the hash or the text of each leaf and the size of each dict and list."""
    if isinstance(value, Tensor):
        return {path: weights.sha256_tensors({"": value})}
    if isinstance(value, _Marked | _SavedReplay):
        return {path: f"replay of {value.added} rows, at most {value.capacity}"}
    if not isinstance(value, dict | list):
        return {path: repr(value)}
    found: dict[tuple[Any, ...], Any] = {path: len(value)}
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        found |= _comparable(child, (*path, key))
    return found


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def save(run: Path, iteration: int, state: Mapping[str, Any], keep: int | str) -> None:
    """Write the state of an iteration boundary, then drop some of the run's files.

    Args:
        run: the run's folder.
        iteration: the number of iterations made.
        state: a snapshot.
        keep: number of files to keep, this one included. A number keeps the last ones; "spread:" and a
            number keep the first one, the last one, and others between them.

    Raises:
        Failure: if it cannot be written, as on a full disk. The message names the last complete checkpoint.
    """
    _save(run, f"{iteration:08d}.pt", state)
    every = numbered(run)
    there = [path for path in every if int(path.stem) <= iteration]
    kept = there[-keep:] if isinstance(keep, int) else _spread(there, int(keep.partition(":")[2]))
    for old in {*every} - {*kept}:  # also later ones, whose rows are lost
        old.unlink()
    if parts := {*_folder(run).glob("replay-*.safetensors")}:
        each = [path for path in (*numbered(run), _folder(run) / "best.pt") if path.exists()]
        try:
            needed = {name for path in each for name in _parts(read(path))}
        except ValueError:
            return  # of a damaged checkpoint nobody knows which rows it needs: all stay
        for part in parts:
            if part.name not in needed:
                part.unlink()


def copy(path: Path, folder: Path) -> None:
    """Copy a checkpoint, and the rows of its replays, into another folder.

    Raises:
        ValueError: if one of the files cannot be read.
    """
    for name in (path.name, *_parts(read(path))):
        content = files.read(path.with_name(Path(name).name), "checkpoint", machine.memory_bytes())
        files.write(folder / Path(name).name, content)


def _parts(value: Any) -> Iterator[str]:
    """Yield the names of the files with rows of replays in a state."""
    if isinstance(value, _SavedReplay):
        yield from (part["name"] for part in value.parts)
    for each in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _parts(each)


def _spread(there: Sequence[Path], count: int) -> list[Path]:
    """Return files that are spread evenly over the iterations, with the first one and the last one.

    The file whose removal leaves the smallest gap goes first, the earliest of several. So gaps double
    as the run goes on. A resumed run keeps the same files, because only their numbers count.
    """
    kept = [*there]
    while len(kept) > count:
        around = zip(kept, kept[2:], strict=False)
        gaps = [int(after.stem) - int(before.stem) for before, after in around]
        kept.pop(1 + gaps.index(min(gaps)) if gaps else 0)
    return kept


def save_best(run: Path, state: Mapping[str, Any]) -> None:
    """Write the state of the boundary at which the run's evaluation was best so far.

    Raises:
        Failure: if it cannot be written.
    """
    _save(run, "best.pt", state)


def _save(run: Path, name: str, state: Mapping[str, Any]) -> None:
    path = _folder(run) / name
    try:
        path.parent.mkdir(exist_ok=True)
        write(path, state)
    except OSError as error:
        before = numbered(run)
        there = f"the last complete one is {before[-1]}" if before else "there is none before it"
        raise job.Failure(f"cannot write checkpoint {path}: {error.strerror}; {there}") from error


def latest(run: Path) -> Path:
    """Return a run's last checkpoint; the path itself if it is that of a checkpoint.

    Raises:
        ValueError: if the run has no checkpoint.
    """
    if run.suffix == ".pt":
        return run
    if there := numbered(run):
        return there[-1]
    raise ValueError(
        f"cannot read a checkpoint: there is none in {_folder(run)}; name the folder of a run"
    )


def before(run: Path, iteration: int) -> Path | None:
    """Return a run's last checkpoint of at most this iteration; None if there is none."""
    return next((f for f in reversed(numbered(run)) if int(f.stem) <= iteration), None)


def _folder(run: Path) -> Path:
    return run / "checkpoints"


def numbered(run: Path) -> list[Path]:
    """Return the checkpoints of a run in order of iterations, without best.pt."""
    return sorted(f for f in _folder(run).glob("*.pt") if f.stem.isdecimal())


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state, complete or not at all."""
    tensors: dict[str, Tensor] = {}
    replays: list[dict[str, Any]] = []
    tree = json.dumps(_tree(state, tensors, replays, path.parent)).encode()
    if len(tree) > _TREE:
        raise OptionError(
            f"a checkpoint holds at most {_TREE:,} bytes of numbers and strings outside of tensors and "
            f"arrays: got {len(tree):,}; return arrays from the agent's state()"
        )
    payload = tree + b"\n" + safetensors.torch.save(tensors)
    head = f"{_FORMAT} {_VERSION}\n{hashlib.sha256(payload).hexdigest()}\n"
    files.write(path, head.encode() + payload)


def _tree(
    value: Any, tensors: dict[str, Tensor], replays: list[dict[str, Any]], folder: Path
) -> Any:
    """Return dicts and lists as JSON has them, and collect the tensors, by the names that stand for them.

    Rows of replays are written into files of the folder.
    """
    if isinstance(value, _Marked):
        replays.append(value.write(folder, len(replays)))
        return {"replay": replays[-1]}
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.contiguous()
        return {"tensor": name}
    if isinstance(value, dict):  # JSON has no numbers as keys
        each = [[key, _tree(one, tensors, replays, folder)] for key, one in value.items()]
        return {"dict": each}
    if isinstance(value, list):
        return [_tree(one, tensors, replays, folder) for one in value]
    return value


def _from_tree(value: Any, tensors: dict[str, Tensor], folder: Path, depth: int = 0) -> Any:
    """Undo `_tree`. Each tensor is taken once, so that a small file has no large state."""
    if depth > _DEEP:
        raise ValueError(f"more than {_DEEP} dicts and lists in each other")
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors.pop(value["tensor"])
        if "replay" in value:
            return _SavedReplay(folder, **value["replay"])
        return {
            _plain(k, ()): _from_tree(each, tensors, folder, depth + 1) for k, each in value["dict"]
        }
    if isinstance(value, list):
        return [_from_tree(each, tensors, folder, depth + 1) for each in value]
    return value


def read(path: Path) -> dict[str, Any]:
    """Read a state. Its tensors are on the CPU.

    Raises:
        ValueError: if the file cannot be read, or is not a complete checkpoint of this format.
    """
    most = machine.memory_bytes()
    head, newline, _ = files.read(path, "checkpoint", most, first=100).partition(b"\n")
    name, _, version = head.decode(errors="replace").rpartition(" ")
    if name != _FORMAT or not version.isdecimal() or not newline:
        raise ValueError(
            f"{path} is not a checkpoint, or was cut short: expected it to begin with {_FORMAT!r}"
        )
    if int(version) != _VERSION:
        raise ValueError(
            f"checkpoint {path} has format {version}, and this version of rank0rl reads format "
            f"{_VERSION}: use the version that wrote it (config.toml names it)"
        )
    data = files.read(path, "checkpoint", most)
    _, digest, rest = data.split(b"\n", 2) if data.count(b"\n", 0, 200) > 1 else (b"", b"", b"")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise ValueError(
            f"checkpoint {path} is damaged: its contents do not match its SHA-256; remove it to "
            f"resume from the one before it"
        )
    try:
        end = rest.index(b"\n", 0, _TREE + 1)
        tensors = safetensors.torch.load(rest[end + 1 :])
        return dict(_from_tree(json.loads(rest[:end]), tensors, path.parent))
    except Exception as error:  # whatever JSON and safetensors raise for what they do not know
        raise ValueError(
            f"checkpoint {path} holds no state ({type(error).__name__}): rank0rl did not write it"
        ) from None


def read_weights(run: Path) -> dict[str, Tensor]:
    """Return the weights of a run's last checkpoint, by name.

    Args:
        run: the run's folder, or one of its checkpoints.

    Raises:
        ValueError: if there is none, or it holds no weights.
    """
    path = latest(run)
    saved: Any = read(path)
    found = saved.get("weights") if isinstance(saved, dict) else None
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"checkpoint {path} holds no run: it has no weights")
    return found


def load_weights(agent: Agent, saved: Mapping[str, Tensor], source: str) -> None:
    """Copy weights into an agent. Rank 0 only: its weights are broadcast.

    Args:
        agent: the agent.
        saved: the weights by name, as `read_weights` returns them.
        source: where they come from, for messages.

    Raises:
        OptionError: naming the first that the agent does not have, or has in another shape.
    """
    mine = weights.named_tensors(agent.modules())
    for name in {**mine, **saved}:
        here, there = (_shape(tensors.get(name)) for tensors in (mine, saved))
        if here != there:
            raise OptionError(
                f"{source}: {name!r} is {there} there and {here} here; give this run the sizes "
                f"of that one (networks, population) and its kind of actions"
            )
    for name, tensor in mine.items():
        tensor.copy_(saved[name])


def _shape(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
