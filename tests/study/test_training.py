"""What a study reads of its runs."""

import contextlib
import dataclasses
import json
import os
import signal
import tracemalloc

import pytest

from rank0rl.tools.study import training
from rank0rl.tools.study.planned import Options, planned
from rank0rl.tools.study.training import Training, _complaint, _last_row, claim

HEAD = "steps,episodes,return_mean,x\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", None),
        (HEAD, None),
        (f"{HEAD}1,2,3,4", None),
        (f"{HEAD}1,2,3,4\n", "1,2,3,4"),
        (f"{HEAD}1,2,,4\n", "1,2,,4"),
        (f"{HEAD}1,2,3,4\n5,6,7,8\n9,", "5,6,7,8"),
        (f'{HEAD}1,2,3,"{{""x"": 1}}"\n', '1,2,3,{"x": 1}'),
        (HEAD + "1,2,3,4\n" * 40000 + "5,6,7,8\n", "5,6,7,8"),
        ("a,b\n1,2\n", None),  # what follows is of someone else
        (f"{HEAD}1,2,x,4\n", None),
        (f"{HEAD}1.5,2,3,4\n", None),
        (f"{HEAD}{'9' * 400},2,3,4\n", None),
        (f"{HEAD}1,2,3\n", None),
        (f"{HEAD}\n", None),
        (f"\n\n{HEAD}", None),
        (f"{HEAD}1,2,3,\udcff\n", None),
        (f"{HEAD}1,2,3,\0\n", "1,2,3,\0"),
    ],
)
def test_the_last_complete_row(text, expected, tmp_path):
    path = tmp_path / "progress.csv"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    row = _last_row(tmp_path)
    assert (row and ",".join(row.values())) == expected


def test_a_large_record_without_a_line_takes_no_memory(tmp_path):
    (tmp_path / "progress.csv").touch()
    os.truncate(tmp_path / "progress.csv", 3 << 30)
    tracemalloc.start()
    assert _last_row(tmp_path) is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def cores():
    return [(cpu,) for cpu in os.sched_getaffinity(0)][:1]


@pytest.mark.parametrize("name", ["progress.csv", "output.txt", ".config.toml.tmp", "claim"])
def test_a_run_in_a_folder_of_fifos_is_not_trained(name, tmp_path):
    (run,) = planned(Options(envs=("CartPole",), seeds="0"), ["--total-steps", "64"])
    (tmp_path / run.name).mkdir()
    os.mkfifo(tmp_path / run.name / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        Training(run, tmp_path, cores())
    assert not (tmp_path / run.name / "checkpoints").exists()
    for read in (_last_row, _complaint) if name != "claim" else ():
        with contextlib.suppress(ValueError, OSError):  # and no wait for a writer
            read(tmp_path / run.name)
    if name == "claim":
        with pytest.raises(OSError, match="claim"):
            claim(tmp_path, run.name)


@pytest.mark.parametrize("is_above", [False, True])
def test_a_run_is_not_trained_through_a_link(is_above, tmp_path):
    (run,) = planned(Options(envs=("CartPole",), seeds="0"), ["--total-steps", "64"])
    run = dataclasses.replace(run, name="search/0000/seed100")
    study, victim = tmp_path / "s", tmp_path / "victim"
    link = study / ("search/0000" if is_above else run.name)
    link.parent.mkdir(parents=True)
    (victim / "seed100").mkdir(parents=True)
    link.symlink_to(victim)
    for use in (lambda: Training(run, study, cores()), lambda: claim(study, run.name)):
        with pytest.raises(ValueError, match=f"{link} is a link"):
            use()
    assert [*victim.rglob("*")] == [victim / "seed100"]


def test_the_seconds_of_a_start_are_those_until_its_first_row(tmp_path, monkeypatch):
    """Also if nobody asks before the run is half over, as without a terminal."""

    class Process:
        def __init__(self, *args, **kwargs):
            pass

        def poll(self):
            return None

        def send_signal(self, signum):
            sent.append(signum)

    now, sent = [100.0], []
    monkeypatch.setattr(training.subprocess, "Popen", Process)
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    (run,) = planned(Options(envs=("CartPole",), seeds="0"), ["--total-steps", "1000"])
    one = Training(run, tmp_path, cores())
    assert one.times() is None
    for now[0], steps in ((105.0, 100), (130.0, 400), (150.0, 500)):
        (tmp_path / run.name / "progress.csv").write_text(f"{HEAD}{steps},1,2,3\n")
        assert one.poll() is None
    assert one.times() == (5.0, 50.0)
    for _ in range(
        2
    ):  # for more cores, and because the study ends: a second signal would not let it save
        one.stop()
    assert sent == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("by", "over"),
    [
        ("total_steps 1000", True),
        ("total_steps 500", False),
        ("stop_at_return 475", True),
        ("stop_at_return 400", False),
        ("patience 5", False),
        ("", False),
        (None, False),
    ],
)
def test_a_run_is_over_once_it_has_ended_by_itself(by, over, tmp_path):
    (run,) = planned(
        Options(envs=("CartPole",), seeds="0"), ["--total-steps", "1000", "--stop-at-return", "475"]
    )
    if by is not None:
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "summary.json").write_text(json.dumps({"ended": by}))
    assert run.ended(tmp_path) is over


def test_a_complaint_is_the_last_error(tmp_path):
    (tmp_path / "output.txt").write_text("1: ...\na.b.OddError: no\nTo repeat it: ...\n\n")
    assert _complaint(tmp_path) == "a.b.OddError: no"
    (tmp_path / "output.txt").write_text("1: ...\nkilled\n")
    assert _complaint(tmp_path) == "killed"
    (tmp_path / "output.txt").write_text("")
    assert _complaint(tmp_path) == "it has printed nothing"
