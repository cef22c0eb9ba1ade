"""A replay is part of an agent's state: sampled by the update's generator, saved in parts, restored exactly."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import forks
from helpers.runs import curve, resume_on_ranks, sha, train, train_on_ranks

from rank0rl.batch import Replay
from rank0rl.policy import load
from rank0rl.run import checkpoint, files

SMALL = ["Pendulum", "--algo", "examples/sac.py", "--hidden", "8", "--num-envs", "2"]
SMALL += ["--steps-per-batch", "16", "--total-steps", "96", "--minibatch-size", "8"]
SMALL += ["--checkpoint-every", "2"]


def numbered(first, end):
    x = np.arange(first, end)
    return {"x": x.astype(np.float32), "y": np.stack([x, -x], axis=1)}


def saved(folder, *replays, name="a.pt"):
    """Write a checkpoint of replays; return what is read from it."""
    state = checkpoint.snapshot({"replays": [*replays]})
    checkpoint.write(folder / name, state)
    return checkpoint.read(folder / name)["replays"]


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3, 3], [10], [1, 25, 2], [4, 9, 1, 1]])
def test_the_last_rows_are_sampled_and_no_others(sizes):
    replay, end = Replay(10), 0
    for size in sizes:
        replay.add(numbered(end, end + size))
        end += size
    rows = replay.sample(2000, np.random.default_rng(0))
    assert set(rows["x"]) == {*range(max(0, end - 10), end)}
    np.testing.assert_array_equal(rows["y"][:, 1], -rows["x"])
    assert len(replay) == min(end, 10)
    again = replay.sample(2000, np.random.default_rng(0))
    np.testing.assert_array_equal(again["x"], rows["x"])


def test_rows_of_the_boundary_stay_while_others_come(tmp_path):
    replay = Replay(10)
    replay.add(numbered(0, 14))
    state = checkpoint.snapshot({"replay": replay})
    for first in (14, 20, 40):
        replay.add(numbered(first, first + 6 if first < 20 else first + 20))
    checkpoint.write(tmp_path / "a.pt", state)  # as after a signal in the middle of an iteration
    other = Replay(10)
    other.load(checkpoint.read(tmp_path / "a.pt")["replay"])
    assert other.added == 14
    np.testing.assert_array_equal(other.rows(4, 14)["x"], np.arange(4, 14))


def test_a_checkpoint_writes_what_is_new_and_reads_all(tmp_path):
    replay, second = Replay(10), Replay(4)
    second.add(numbered(0, 1))
    sizes = {}
    for i, end in enumerate((6, 8, 30, 31, 32)):
        replay.add(numbered(replay.added, end))
        found, other = saved(tmp_path, replay, second, name=f"{i}.pt")
        sizes[end] = [part["end"] - part["first"] for part in found.parts]
        again = Replay(10)
        again.load(found)
        assert (again.added, len(again)) == (end, min(end, 10))
        np.testing.assert_array_equal(
            again.rows(max(0, end - 10), end)["x"], np.arange(max(0, end - 10), end)
        )
        assert len(other.parts) == 1
    assert sizes == {6: [6], 8: [6, 2], 30: [10], 31: [10, 1], 32: [10, 1, 1]}
    assert saved(tmp_path, Replay(3))[0].parts == []


def test_what_does_not_fit_is_refused(tmp_path):
    replay = Replay(10)
    with pytest.raises(ValueError, match="cannot be sampled: add some first"):
        replay.sample(1, np.random.default_rng(0))
    replay.add(numbered(0, 3))
    with pytest.raises(ValueError, match="must be alike: got .*float64"):
        replay.add({name: x.astype(np.float64) for name, x in numbered(0, 1).items()})
    [found] = saved(tmp_path, replay)
    with pytest.raises(ValueError, match="has 9 rows, and the saved one 10"):
        Replay(9).load(found)
    [part] = tmp_path.glob("replay-*")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="damaged: its contents do not match"):
        Replay(10).load(found)
    part.unlink()
    with pytest.raises(ValueError, match="cannot read replay"):
        Replay(10).load(found)


def test_files_that_no_checkpoint_needs_are_removed(tmp_path):
    replay = Replay(10)
    for i in range(1, 9):
        replay.add(numbered(replay.added, replay.added + 5))
        checkpoint.save(tmp_path, i, checkpoint.snapshot({"replay": replay}), 2)
        if i == 4:
            checkpoint.save_best(tmp_path, checkpoint.snapshot({"replay": replay}))
    ends = sorted(int(path.stem.split("-")[3]) for path in tmp_path.glob("checkpoints/replay-*"))
    assert ends == [15, 20, 30, 35, 40]  # 15 and 20 are those of best.pt


def test_an_end_between_the_rows_and_their_checkpoint_loses_nothing(tmp_path, monkeypatch):
    replay = Replay(10)
    replay.add(numbered(0, 5))
    checkpoint.save(tmp_path, 1, checkpoint.snapshot({"replay": replay}), 1)
    replay.add(numbered(5, 9))
    write = files.write

    def killed(path, data):
        if path.suffix == ".pt":
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(files, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, checkpoint.snapshot({"replay": replay}), 1)
    monkeypatch.undo()
    again = Replay(10)
    again.load(checkpoint.read(checkpoint.latest(tmp_path))["replay"])
    assert again.rows(0, 5)["x"].tolist() == [*range(5)]
    again.add(numbered(5, 9))
    checkpoint.save(tmp_path, 2, checkpoint.snapshot({"replay": again}), 1)
    assert checkpoint.read(checkpoint.latest(tmp_path))["replay"].rows()["x"].tolist() == [
        *range(9)
    ]
    assert len([*tmp_path.glob("checkpoints/*")]) == 3


def test_rows_of_the_same_numbers_after_a_resume_leave_those_of_best(tmp_path):
    for name, factor in (("best.pt", 1), ("a.pt", 2)):
        replay = Replay(10)
        replay.add({n: factor * x for n, x in numbered(0, 5).items()})
        saved(tmp_path, replay, name=name)
    for name, factor in (("best.pt", 1), ("a.pt", 2)):
        [found] = checkpoint.read(tmp_path / name)["replays"]
        assert found.rows()["x"].tolist() == [factor * i for i in range(5)]


def test_a_damaged_checkpoint_stops_no_run(tmp_path):
    replay = Replay(10)
    for i in range(1, 5):
        replay.add(numbered(replay.added, replay.added + 5))
        state = checkpoint.snapshot({"replay": replay})
        if i == 1:
            checkpoint.save_best(tmp_path, state)
            (tmp_path / "checkpoints" / "best.pt").write_text("x")
        checkpoint.save(tmp_path, i, state, 1)
    assert len([*tmp_path.glob("checkpoints/replay-*")]) == 4  # who knows which ones best.pt needs


@pytest.mark.parametrize(
    "forged",
    [
        {"added": 9},
        {"added": 10**18},
        {"added": "6"},
        {"parts": []},
        {"first": -1},
        {"end": 7},
        {"first": 3},
    ],
)
def test_a_forged_replay_is_an_error_and_no_memory_that_was_never_written(forged, tmp_path):
    replay = Replay(10)
    replay.add(numbered(0, 6))
    [found] = saved(tmp_path, replay)
    for name in forged.keys() & {"first", "end"}:
        found.parts[0][name] = forged[name]
    changed = replace(found, **{n: x for n, x in forged.items() if n not in ("first", "end")})
    with pytest.raises(ValueError, match="rows"):
        Replay(10).load(changed)


@pytest.mark.parametrize("x", [["text"], [None], [1j], np.zeros(1, ">f4"), np.zeros(1, "g")])
def test_what_no_checkpoint_can_hold_is_refused_at_once(x):
    with pytest.raises(ValueError, match="real numbers that a checkpoint can hold: got 'x' of"):
        Replay(10).add({"x": np.asarray(x)})


def test_a_copy_of_a_checkpoint_has_the_rows_of_its_replays_and_no_other_file(tmp_path):
    replay = Replay(10)
    replay.add(numbered(0, 6))
    saved(tmp_path, replay)
    (tmp_path / "replay-0-0-1.safetensors").symlink_to("/dev/zero")
    (tmp_path / "copy").mkdir()
    checkpoint.copy(tmp_path / "a.pt", tmp_path / "copy")
    [found] = checkpoint.read(tmp_path / "copy" / "a.pt")["replays"]
    assert found.rows()["x"].tolist() == [*range(6)]
    assert len([*(tmp_path / "copy").iterdir()]) == 2


@pytest.mark.slow
def test_sac_has_one_hash_on_one_rank_and_stopped_and_resumed_on_two(tmp_path):
    train(tmp_path / "1", *SMALL, "--capacity", "40")
    train_on_ranks(
        tmp_path / "2", *SMALL, "--capacity", "40", "--stop-after-iterations", "5", nprocs=2
    )
    resume_on_ranks(tmp_path / "2", nprocs=2)
    assert curve(tmp_path / "1") == curve(tmp_path / "2")
    assert sha(tmp_path / "1") == sha(tmp_path / "2")
    done = forks.run("-m", "rank0rl", "verify", str(tmp_path / "1"), "--trust", "--sample")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("seed", range(3))
def test_sac_learns_pendulum(seed, tmp_path):
    sizes = ["--num-envs", "4", "--steps-per-batch", "64", "--total-steps", "12000"]
    train(tmp_path / "r", "Pendulum", "--algo", "examples/sac.py", *sizes, "--seed", str(seed))
    returns = load(tmp_path / "r", trust=True).evaluate(20, deterministic=True)["return"]
    assert returns.mean() > -250  # -1,200 at first
