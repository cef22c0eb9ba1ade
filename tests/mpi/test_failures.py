"""Why a job ends: found once, told once."""

import os
import signal
import subprocess

import pytest
from helpers.jobs import wait_until

from rank0rl import launch
from rank0rl.launch import fork, how_it_ended, job, supervisor
from rank0rl.launch.processes import Ranks
from rank0rl.launch.supervisor import Supervisor, _FailureDetector
from rank0rl.launch.tree import state


class Alone:
    """Contact to no other host."""

    def lost(self, *_):
        return {}


def write(folder, **files):
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


@pytest.mark.parametrize(
    ("reporter", "failed", "code", "err"),
    [
        ("", "", 137, "rank 1 was ended\nthe job ends\n"),
        ("0", "3", 3, ""),
        ("0", "", 137, "rank 1 was ended\nthe job ends\n"),  # rank 0 died before its report
    ],
)
def test_a_report_is_made_once_and_has_the_code_of_who_makes_it(
    reporter, failed, code, err, tmp_path, capsys
):
    for name, text in (("reporter", reporter), ("failed", failed)):
        if text:
            assert job.write_once(tmp_path / name, text)
    detector = _FailureDetector(tmp_path, 2, Alone(), lambda _: False)
    assert detector.report(137, "rank 1 was ended")
    assert (detector.code, capsys.readouterr().err) == (code, err)
    assert not job.write_once(tmp_path / "failed", "77")
    assert (tmp_path / "failed").read_text() == str(code)


ENDED = {"shell_0": "a", "ended_0": "", "shell_1": "a", "ended_1": ""}
WELL = {**ENDED, "status_0": "0", "status_1": "0"}


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return clock


def look(found, clock, seconds, launcher=None):
    """Look at a job once a second, as the supervisor does more often; return True if it has to end."""
    for _ in range(seconds):
        clock.sleep(1)
        if found.find(launcher):
            return True
    return False


@pytest.mark.parametrize(
    ("files", "launcher", "code", "said"),
    [
        ({}, None, 1, "rank 0 was not started by the launcher within 9 s"),
        ({"failed": "4"}, None, 4, ""),
        ({"status_1": "3"}, None, 3, "rank 1 ended with exit code 3 before the other ranks"),
        ({"status_1": "3", "ended_1": ""}, None, 3, "rank 1 ended with exit code 3\n"),
        ({"status_1": "2", "ended_1": ""}, None, 2, ""),  # wrong use: rank 0 has said it
        ({"status_0": "137"}, None, 137, "rank 0 was ended by signal 9, SIGKILL"),
        ({"status_0": "0"}, None, 1, "rank 0 ended with exit code 0 before the other ranks"),
        ({"status_1": "3", "shell_1": "b"}, None, 3, "rank 1, on b, ended with exit code 3"),
        ({"shell_0": "a", "shell_1": "a", "status_1": ""}, None, None, ""),  # it is being written
        ({}, 0, None, ""),  # no rank has begun: launch.py says so
        ({"shell_0": "a"}, -9, 137, "the launcher was ended by signal 9, SIGKILL"),
        ({"shell_0": "a", "shell_1": "a"}, 7, 1, "ended with exit code 7 before its ranks"),
        ({"shell_0": "a"}, 255, 1, "ended with exit code 255 before rank 1 began; "),
        (WELL, None, 0, ""),  # only a launcher that lingers is left
        (WELL, 0, 0, ""),
        (WELL, 7, 0, ""),  # each rank has said that it ended well
        ({**WELL, "status_1": "3"}, 0, 3, "rank 1, on a, ended with exit code 3\n"),
        ({**WELL, "state_1": "T"}, None, 0, ""),
        ({**ENDED, "status_0": "0"}, None, 0, ""),  # a shell on another host was stopped
        ({**ENDED, "status_0": "3"}, None, 3, "rank 0, on a, ended with exit code 3\n"),
        ({"state_1": "T", "shell_1": "b"}, None, 147, "rank 1, on b, was stopped by a signal"),
        (
            {"shell_0": "a", "rank_0": ""},
            None,
            1,
            "rank 1 was not started by the launcher within 9 s",
        ),
        (
            {"shell_0": "a", "rank_0": "", "shell_1": "b"},
            None,
            1,
            "rank 1 on b did not come within 9 s",
        ),
        ({"shell_0": "a", "shell_1": "b"}, None, None, ""),  # all of them still import
    ],
)
def test_what_the_files_of_a_job_say(files, launcher, code, said, tmp_path, capsys, clock):
    write(tmp_path, **files)
    found = _FailureDetector(tmp_path, 2, Alone(), lambda _: False, start_timeout_s=9)
    assert look(found, clock, 12, launcher) is (code is not None)
    assert found.code == code
    assert said in capsys.readouterr().err


def test_a_lost_host_is_named(tmp_path, capsys):
    class Lost(Alone):
        def lost(self, *_):
            return {"two": "timed out"}

    detector = _FailureDetector(tmp_path, 2, Lost(), lambda _: False)
    assert detector.find(None)
    assert detector.code == 1
    assert "no connection to host two: timed out" in capsys.readouterr().err


def test_the_ranks_are_heard_while_a_host_may_be_lost(tmp_path, clock):
    class Silent(Alone):
        def lost(self, patience_s, wait):
            wait(patience_s)
            return {"two": "timed out"}

    heard = []
    assert _FailureDetector(tmp_path, 2, Silent(), heard.append).find(0)
    assert heard


def test_an_exit_status_in_words():
    assert how_it_ended(128 + signal.SIGTERM, False) == "was ended by signal 15, SIGTERM"
    assert "memory" in how_it_ended(128 + signal.SIGKILL, False)
    assert how_it_ended(3, True) == "ended with exit code 3"


@pytest.fixture
def tree(tmp_path):
    """A launcher, a process of its own, a shell and a rank, and the files of the shell."""
    script = tmp_path / "shell"
    script.write_text("sleep 600 & echo $(uname -n) $PPID $$ $! > $1/shell.0; wait")
    code = f"sh {script} {tmp_path} & wait"
    # Each level waits for the one below, and ignores what becomes of it.
    launcher = subprocess.Popen(
        ["sh", "-c", f"sh -c '{code}' & wait; sleep 600"], start_new_session=True
    )
    try:
        wait_until(lambda: (each := Ranks(tmp_path, 1).shell(0)) and each.rank_id)
        write(tmp_path, launcher=str(launcher.pid), rank_0="1", rank_1="1")
        each = Ranks(tmp_path, 1).shell(0)
        yield {
            "launcher": launcher.pid,
            "between": each.parent_id,
            "shell": each.shell_id,
            "rank": each.rank_id,
        }
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


STOPPED = {
    "launcher": "the launcher, process {launcher}, was stopped by a signal",
    "between": "process {between} of the launcher, sh, was stopped by a signal",
    "shell": "the shell around rank 0 was stopped by a signal",
    "rank": "rank 0 was stopped by a signal",
}


def test_whatever_is_stopped_between_supervisor_and_rank_ends_the_job(
    tree, tmp_path, clock, capsys
):
    """Before Python has said a word, too: there is no file of the rank's own."""
    for which, said in STOPPED.items():
        found = _FailureDetector(tmp_path, 2, Alone(), lambda _: False)
        os.kill(tree[which], signal.SIGSTOP)
        wait_until(lambda: state(tree[which]) == "T")
        assert not look(found, clock, 5)  # it may go on
        clock.sleep(3600)
        assert not look(found, clock, 5)  # the supervisor was stopped too
        assert look(found, clock, 2)
        os.kill(tree[which], signal.SIGCONT)
        wait_until(lambda: state(tree[which]) != "T")
        assert found.code == 128 + signal.SIGSTOP
        assert said.format(**tree) in capsys.readouterr().err
        (tmp_path / "reporter").unlink()
        (tmp_path / "failed").unlink()


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("between", "the launcher's process that started rank 0 was ended"),
        ("shell", "the shell around rank 0 was ended"),
    ],
)
def test_a_rank_whose_end_nobody_waits_for_ends_the_job(which, said, tree, tmp_path, clock, capsys):
    found = _FailureDetector(tmp_path, 2, Alone(), lambda _: False)
    assert not look(found, clock, 3)
    os.kill(tree[which], signal.SIGKILL)
    wait_until(lambda: Ranks(tmp_path, 2).orphans())
    assert not look(found, clock, 1)  # if the launcher was ended, that comes to light first
    assert look(found, clock, 1)
    assert found.code == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "without"), [({"interrupted": "15"}, ([15], None)), ({"status_1": "143"}, ([], 143))]
)
@pytest.mark.parametrize("lost", [True, False])
def test_a_signal_of_the_launcher_is_not_why_the_job_ends(
    lost, said, without, tree, tmp_path, capsys
):
    """Open MPI's sends SIGTERM to all ranks when the shell around one of them is killed."""
    received = []
    watching = Supervisor(tmp_path, 2, (), received, 300)
    write(tmp_path, rank_0=str(tree["rank"]), **said)
    if lost:
        os.kill(tree["shell"], signal.SIGKILL)
        wait_until(lambda: Ranks(tmp_path, 2).orphans())
    watching._is_over()
    assert (received, watching._failures.code) == (([], 1) if lost else without)
    assert ("the shell around rank 0 was ended\n" in capsys.readouterr().err) == lost


def test_rank_0_may_be_interrupted_and_end_between_two_looks(tmp_path):
    write(tmp_path, interrupted="15", status_0="143")
    found = _FailureDetector(tmp_path, 1, Alone(), lambda _: False)
    assert not found.find(143)
    assert found.code is None


def test_words_are_under_way_before_the_shell_has_written_the_status(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as rank:
        write(tmp_path, shell_0=f"host {os.getppid()} {os.getpid()} {rank.pid}")
        assert not Ranks(tmp_path, 1).words_under_way()
        rank.kill()
    assert Ranks(tmp_path, 1).words_under_way()


@pytest.mark.parametrize("was_told", [False, True])
def test_signals_at_the_same_time_are_one_request(was_told, monkeypatch):
    monkeypatch.setattr(launch, "_asked", [])
    before = {
        s: signal.getsignal(s)
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    with fork._Signals() as signals:
        if was_told:
            signals.received.append(signal.SIGTERM)  # by rank 0, which received it first
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received == [signal.SIGTERM]
        signals._first_s -= 2
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(signals.received) == 2
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_a_rank_that_has_ended_has_the_time_to_close_what_is_its_own(tree, tmp_path, clock):
    write(tmp_path, ended_0="", shell_1="b", ended_1="")
    assert not look(_FailureDetector(tmp_path, 2, Alone(), lambda _: False), clock, 9)
    os.kill(tree["shell"], signal.SIGSTOP)  # it leaves the rank a zombie
    wait_until(lambda: state(tree["shell"]) == "T")
    os.kill(tree["rank"], signal.SIGKILL)
    wait_until(lambda: state(tree["rank"]) == "Z")
    found = _FailureDetector(tmp_path, 2, Alone(), lambda _: False)
    assert look(found, clock, 9)
    assert found.code == 0


def test_a_shell_that_has_said_how_its_rank_ended_may_go(tree, tmp_path, clock):
    write(tmp_path, status_0="0", ended_0="")
    os.kill(tree["shell"], signal.SIGKILL)
    wait_until(lambda: Ranks(tmp_path, 2).orphans())
    assert not look(_FailureDetector(tmp_path, 2, Alone(), lambda _: False), clock, 9)
