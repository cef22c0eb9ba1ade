"""A file that is complete or absent, and that never runs code."""

import enum
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import torch

from rank0rl.options import OptionError
from rank0rl.run import checkpoint

STATE = {"a": {"t": torch.arange(4.0), "n": np.arange(3)}, "list": [1, 2.5, "x", None, True]}


def test_written_and_read_gives_the_same(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.write(path, checkpoint.snapshot(STATE))
    state = checkpoint.read(path)
    assert state["list"] == STATE["list"]
    assert torch.equal(state["a"]["t"], STATE["a"]["t"])
    assert state["a"]["n"].numpy().tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_snapshot_does_not_change_with_what_it_was_taken_of():
    tensor, array = torch.zeros(2), np.zeros(2)
    kept = checkpoint.snapshot({"t": tensor, "a": array})
    tensor += 1
    array += 1
    assert kept["t"].sum() == kept["a"].sum() == 0


class Phase(enum.IntEnum):
    FIRST = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, lambda: 0]}, r"got function in 'a.1'"),
        ({"phase": Phase.FIRST}, "got Phase in 'phase'"),
        ({"a": {np.int64(3): 1}}, "got int64 in 'a'"),
        ({"when": np.datetime64("2026-01-01")}, "got date in 'when'"),
        ({"long": np.longdouble(1)}, "got longdouble in 'long'"),
        ({"words": np.array(["a"])}, "got ndarray in 'words'"),
        ({"complex": np.array([1j])}, "got ndarray in 'complex'"),
        ({"complex": torch.tensor([1j])}, "got Tensor in 'complex'"),
    ],
)
def test_what_needs_code_to_load_is_not_saved(value, said):
    with pytest.raises(TypeError, match=said):
        checkpoint.snapshot(value)


def test_the_first_difference_is_named():
    a = checkpoint.snapshot(STATE)
    assert checkpoint.first_difference(a, checkpoint.snapshot(STATE)) is None
    b = checkpoint.snapshot(STATE)
    b["a"]["n"][1] = 7
    assert checkpoint.first_difference(a, b) == "a.n"
    b = {**a, "list": [1, 2.5, "y", None, True]}
    assert checkpoint.first_difference(a, b) == "list.2"
    assert checkpoint.first_difference(a, {"a": a["a"]}) == ""
    b = {**a, "list": [1, 2.5, "x", None, 1]}
    assert checkpoint.first_difference(a, b) == "list.4"


def test_a_difference_under_an_empty_key_is_found():
    a, b = ({"": {"a": 1, "": n}, "a": 2} for n in (3, 4))
    assert checkpoint.first_difference(a, a) is None
    assert checkpoint.first_difference(a, b) == "."
    assert checkpoint.first_difference(a, {**a, "": {**a[""], "a": 5}}) == ".a"


def test_200_truncations_and_a_changed_byte_are_clear_errors(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.write(path, checkpoint.snapshot(STATE))
    data = path.read_bytes()
    sizes = [*range(30), *np.random.default_rng(0).integers(30, len(data), 170)]
    for size in sizes:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="not a checkpoint|damaged"):
            checkpoint.read(path)
    path.write_bytes(data[:-5] + b"\0" + data[-4:])
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.read(path)


@pytest.mark.parametrize("other", [1, checkpoint._VERSION - 1, checkpoint._VERSION + 1])
def test_another_format_is_refused_in_one_line(tmp_path, other):
    path = tmp_path / "c.pt"
    path.write_bytes(f"rank0rl checkpoint {other}\n...".encode())
    with pytest.raises(ValueError, match="format") as error:
        checkpoint.read(path)
    said = str(error.value)
    assert "\n" not in said
    assert all(fact in said for fact in (str(path), f"format {other}", str(checkpoint._VERSION)))


def test_the_last_few_are_kept_and_the_latest_is_found(tmp_path):
    with pytest.raises(ValueError, match="none"):
        checkpoint.latest(tmp_path)
    for iteration in (9, 10, 100):
        checkpoint.save(tmp_path, iteration, {"x": iteration}, keep=2)
    (tmp_path / "checkpoints" / ".00000101.pt.tmp").write_bytes(b"half")
    assert checkpoint.read(checkpoint.latest(tmp_path)) == {"x": 100}
    assert checkpoint.before(tmp_path, 99).name == "00000010.pt"
    assert checkpoint.before(tmp_path, 9) is None


def test_a_later_file_that_a_run_has_not_gone_on_from_goes(tmp_path):
    """Its rows are lost: nothing can go on from it, and it is not the run's latest."""
    for iteration in (90, 100):
        checkpoint.save(tmp_path, iteration, {}, keep=2)
    checkpoint.save(tmp_path, 90, {}, keep=2)
    assert kept_of(tmp_path) == [90]


def kept_of(folder):
    return [int(file.stem) for file in checkpoint.numbered(folder)]


@pytest.mark.parametrize("count", [4, 5, 10])
def test_checkpoints_that_are_kept_are_spread_over_the_run(count, tmp_path):
    """At any time no gap is twice that of an even spread, whether or not all saves are even."""
    for number, iteration in enumerate([*range(0, 300, 7), 301, 302, *range(305, 500, 5)], 1):
        checkpoint.save(tmp_path, iteration, {}, keep=f"spread:{count}")
        kept = kept_of(tmp_path)
        assert len(kept) == min(number, count)
        assert (kept[0], kept[-1]) == (0, iteration)
        if number >= count:
            assert max(np.diff(kept)) <= 2 * iteration / (count - 1)


def test_a_spread_of_so_few_that_nothing_lies_between_keeps_the_ends(tmp_path):
    for count, kept in ((3, [0, 2, 9]), (2, [0, 9]), (1, [9])):
        for iteration in range(10):
            folder = tmp_path / str(count)
            folder.mkdir(exist_ok=True)
            checkpoint.save(folder, iteration, {}, keep=f"spread:{count}")
        assert kept_of(tmp_path / str(count)) == kept


SAVES = """
import sys, torch
from pathlib import Path
from rank0rl.options import OptionError
from rank0rl.run import checkpoint
state = {"t": torch.arange(300_000)}
for i in range(10**6):
    checkpoint.save(Path(sys.argv[1]), i, {"i": i, **state}, keep=3)
    print(i, flush=True)
"""


@pytest.mark.slow
def test_the_latest_loads_after_a_kill_in_the_middle_of_a_save(tmp_path):
    for pause_ms in range(0, 12, 2):
        folder = tmp_path / str(pause_ms)
        folder.mkdir()
        command = [sys.executable, "-c", SAVES, str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(5):
            said = int(process.stdout.readline())
        time.sleep(pause_ms / 1000)
        process.kill()
        process.wait()
        assert checkpoint.read(checkpoint.latest(folder))["i"] >= said


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def forge(path, payload):
    """Write a file as somebody does who can compute a SHA-256."""
    head = f"rank0rl checkpoint {checkpoint._VERSION}\n{hashlib.sha256(payload).hexdigest()}\n"
    path.write_bytes(head.encode() + payload)


def test_a_pickle_bomb_is_refused_and_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.pt"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.read(path)
    saved = io.BytesIO()
    torch.save({"bomb": Bomb()}, saved)
    for payload in (pickle.dumps(Bomb()), saved.getvalue(), b"{}\n" + saved.getvalue()):
        forge(path, payload)
        with pytest.raises(ValueError, match="holds no state"):
            checkpoint.read(path)
    assert not (tmp_path / "exploded").exists()


def safetensors_of(shape, data=b""):
    about = {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}
    head = json.dumps({"0": about}).encode()
    return len(head).to_bytes(8, "little") + head + data


TENSOR = safetensors_of([1], bytes(4))


@pytest.mark.parametrize(
    "payload",
    [
        b'{"dict": [["a", {"tensor": "0"}], ["b", {"tensor": "0"}]]}\n' + TENSOR,
        b'{"dict": [["a", {"tensor": "1"}]]}\n' + TENSOR,
        b'{"dict": [["a", {"tensor": "0"}]]}\n' + safetensors_of([1 << 40]),
        b'{"dict": [["a", {"tensor": "0"}]]}\n' + safetensors_of([1 << 32, 1 << 32]),
        b'{"dict": [["a", {"tensor": "0"}]]}\n' + (1 << 62).to_bytes(8, "little"),
        b'{"dict": [["a", ' + b"[" * 65 + b"]" * 65 + b"]]}\n" + TENSOR,
        b'{"dict": [["a", ' + b"[" * 100_000 + b"]" * 100_000 + b"]]}\n" + TENSOR,
        b'{"dict": [[["key"], 1]]}\n' + TENSOR,
        b'{"dict": [["a", ' + b"1" * 5000 + b"]]}\n" + TENSOR,
        b'{"dict": []}' + b" " * checkpoint._TREE + b"\n" + TENSOR,
        b'{"dict": []}',
        b"5\n" + TENSOR,
    ],
    ids=lambda payload: repr(payload[:60]),
)
def test_a_forged_state_is_refused_with_little_memory(tmp_path, payload):
    forge(tmp_path / "c.pt", payload)
    tracemalloc.start()
    with pytest.raises(ValueError, match="holds no state"):
        checkpoint.read(tmp_path / "c.pt")
    assert tracemalloc.get_traced_memory()[1] < 1 << 28
    tracemalloc.stop()


def test_the_deepest_state_is_read(tmp_path):
    forge(tmp_path / "c.pt", b'{"dict": [["a", ' + b"[" * 64 + b"]" * 64 + b"]]}\n" + TENSOR)
    assert checkpoint.read(tmp_path / "c.pt")["a"]


@pytest.mark.slow
def test_a_state_of_very_many_numbers_outside_of_arrays_is_refused(tmp_path):
    with pytest.raises(OptionError, match="arrays"):
        checkpoint.write(tmp_path / "c.pt", {"rows": [0.1] * (1 << 23)})


@pytest.mark.parametrize(
    "value",
    [
        *(torch.ones(3, 2).to(getattr(torch, name)) for name in ("bool", "uint8", "int64", "half")),
        torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
        torch.tensor(5, dtype=torch.int32),
        torch.empty(0, 4),
        torch.arange(4.0).expand(3, 4),
        np.array([1, 2], np.uint32),
        np.zeros(0),
        {1: "a", None: 2**127, 0.5: [], False: {}},
        [float("inf"), -0.0, 5e-324, 2**-1074, "\ud800\n"],
    ],
    ids=repr,
)
def test_every_kind_of_value_comes_back(tmp_path, value):
    state = checkpoint.snapshot({"a": value})
    checkpoint.write(tmp_path / "c.pt", state)
    read = checkpoint.read(tmp_path / "c.pt")
    assert checkpoint.first_difference(read, state) is None
    assert repr(read) == repr(state)


def test_a_failed_write_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    checkpoint.write(path, {"x": 1})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(path, {"x": 2})
    assert checkpoint.read(path) == {"x": 1}
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_large_file_that_is_no_checkpoint_is_not_read_whole(tmp_path):
    path = tmp_path / "c.pt"
    path.touch()
    os.truncate(path, 1 << 26)
    tracemalloc.start()
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.read(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="cannot read checkpoint .*No such file"):
        checkpoint.read(tmp_path / "none.pt")
