"""Signals as an exception, never within a record."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers.ranks import HERE
from helpers.runs import SMALL, table, train, wait_for_rows

from rank0rl import launch
from rank0rl.launch import job
from rank0rl.run import signals
from rank0rl.run.run import Run
from rank0rl.run.signals import Interrupted, Interrupts


def send(signum):
    os.kill(os.getpid(), signum)


@pytest.fixture(autouse=True)
def _signals():
    before = {signum: signal.getsignal(signum) for signum in job.END_SIGNALS}
    yield
    launch._asked.clear()
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_raises_and_names_itself(signum):
    before = signal.getsignal(signum)
    with pytest.raises(Interrupted) as interrupted, Interrupts(keep=False):
        send(signum)
    assert interrupted.value.signum == signum
    assert str(interrupted.value) == signum.name
    assert signal.getsignal(signum) is before


def test_a_signal_that_user_code_swallows_is_left_to_the_next_exchange():
    with Interrupts(keep=False):
        for _ in range(2):  # the second one raises nothing
            with contextlib.suppress(Interrupted):
                send(signal.SIGTERM)
        assert signals.received == [signal.SIGTERM] * 2


@pytest.mark.parametrize("error", [None, KeyError(), Interrupted(signal.SIGTERM)])
def test_signals_end_no_rank_0_before_its_last_words(error, monkeypatch):
    left = threading.Event()
    monkeypatch.setattr(signals, "_LAST_S", 0.2)
    monkeypatch.setattr(signals, "end", lambda _: left.set())
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(KeyError, Interrupted), contextlib.ExitStack() as stack:
        stack.push((interrupts := Interrupts(False, stuck=lambda _: None)).give_back)
        stack.callback(lambda: left.wait(5))  # last words that take too long
        stack.callback(send, signal.SIGTERM)
        stack.enter_context(interrupts)
        if error:
            raise error
    assert left.is_set()
    is_given_back = signal.getsignal(signal.SIGTERM) is before
    assert is_given_back == (not isinstance(error, Interrupted))


# The method of a hook after an iteration -> exit code, and last words.
LAST = {
    "send(signal.SIGTERM)": (143, "SIGTERM: saved iteration 1; go on with: "),
    "raise KeyError": (1, "failed: saved iteration 0; go on with: "),
    "pass": (0, "\nfolder "),
}


@pytest.mark.parametrize("after", LAST)
def test_a_signal_does_not_cut_short_the_last_words(after, tmp_path):
    """A scheduler signals rank 0 and its supervisor, which passes it on: that may come while a hook is closed."""
    (tmp_path / "again.py").write_text(
        "import os, signal\n"
        "from rank0rl import Hook\n"
        "def send(signum): os.kill(os.getpid(), signum)\n"
        "class Again(Hook):\n"
        f"    def after(self, agent, iteration, record): {after}\n"
        "    def close(self): send(signal.SIGTERM)\n"
    )
    args = [*SMALL, "--total-steps", "128", "--hook", f"{tmp_path}/again.py:Again"]
    code, said = LAST[after]
    assert said in train(tmp_path / "r", *args, expect=code).stdout


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_hook_that_does_not_come_back_loses_no_run(tmp_path, nprocs):
    (tmp_path / "hangs.py").write_text(
        "import os, signal, time\n"
        "from rank0rl import Hook\n"
        "from rank0rl.run import signals\n"
        "signals._STUCK_S = 0.2\n"
        "class Hangs(Hook):\n"
        "    def after(self, agent, iteration, record):\n"
        "        if iteration == 3:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "            while True: time.sleep(1)\n"
    )
    args = [*SMALL, "--total-steps", "640", "--hook", f"{tmp_path}/hangs.py:Hangs"]
    done = train(tmp_path / "r", *args, nprocs=nprocs, expect=143)
    assert "SIGTERM: saved iteration 2; go on with: " in done.stdout
    assert done.stderr == (
        "rank 0 does not come back from a call or a hook: environments are not closed\n"
    )
    assert [int(row["iteration"]) for row in table(tmp_path / "r")] == [1, 2]


def test_a_hook_that_takes_its_time_is_waited_for(monkeypatch):
    stuck = []
    monkeypatch.setattr(signals, "_STUCK_S", 0.2)
    with pytest.raises(Interrupted), Interrupts(keep=False, stuck=stuck.append), launch.held:
        with launch.held.user_code():
            send(signal.SIGTERM)
        time.sleep(0.6)  # a record is written
    assert not stuck


@pytest.mark.parametrize(
    ("error", "code"), [("SystemExit(3)", 3), ("KeyboardInterrupt()", 130), ("KeyError()", 1)]
)
def test_what_does_not_close_in_time_does_not_change_the_exit_code(error, code):
    program = (
        "import time\n"
        "from rank0rl.run import signals\n"
        "signals._CLOSE_S = 0.2\n"
        "with signals.closed(lambda: time.sleep(60)):\n"
        f"    raise {error}\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (code == 1)


def test_a_second_ctrl_c_is_no_failure(tmp_path):
    (tmp_path / "again.py").write_text(
        "from rank0rl import Hook\n"
        "class Again(Hook):\n"
        "    def close(self): raise KeyboardInterrupt\n"
    )
    args = [*SMALL, "--total-steps", "128", "--hook", f"{tmp_path}/again.py:Again"]
    done = train(tmp_path / "r", *args, expect=130)
    assert "SIGINT: saved iteration 2, the last one\n" in done.stdout
    assert done.stderr == "interrupted\n"


@pytest.mark.slow
def test_output_that_nobody_reads_makes_no_run_deaf(tmp_path):
    (tmp_path / "says.py").write_text(
        "from rank0rl import Hook\n"
        "class Says(Hook):\n"
        "    def after(self, agent, iteration, record): print(30000 * '-')\n"
    )
    args = [*SMALL, "--total-steps", "64000", "--checkpoint-every", "1000"]
    command = [sys.executable, "train.py", *args, "--hook", f"{tmp_path}/says.py:Says"]
    command += ["--run-dir", str(tmp_path / "r")]
    process = subprocess.Popen(command, cwd=HERE.parent, stdout=subprocess.PIPE)
    wait_for_rows(process, tmp_path / "r", 1)
    time.sleep(3)  # the pipe is full
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert (
        len(table(tmp_path / "r"))
        == json.loads((tmp_path / "r/summary.json").read_text())["iterations"]
    )


def test_a_record_is_finished_first():
    done = []
    with pytest.raises(Interrupted), Interrupts(keep=False):
        with launch.held:
            send(signal.SIGTERM)
            done.append("record")
        done.append("never")
    assert done == ["record"]


def test_episodes_that_are_repeated_are_given_up_at_once():
    run, done = object.__new__(Run), []
    run._recorder = None

    def restore_envs():
        send(signal.SIGTERM)
        done.append("never")

    with pytest.raises(Interrupted), Interrupts(keep=False):
        run.restore(restore_envs)
    assert not done


def test_the_outer_of_two_blocks_is_finished_first():
    done = []
    with pytest.raises(Interrupted), Interrupts(keep=False):
        with launch.held:
            with launch.held:
                send(signal.SIGTERM)
            done.append("record")
        done.append("never")
    assert done == ["record"]


def test_a_second_signal_does_not_cut_short_what_the_first_began():
    done = []
    with pytest.raises(Interrupted) as interrupted, Interrupts(keep=False):
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGINT)
            done.append("saved")
    assert done == ["saved"]
    assert interrupted.value.signum == signal.SIGTERM


def test_a_signal_that_comes_in_a_del_is_not_lost():
    class Mine:
        def __del__(self):
            send(signal.SIGTERM)
            done.append("never")

    done, end = [], time.monotonic() + 5
    with pytest.raises(Interrupted), Interrupts(keep=False):
        Mine()
        time.sleep(10)  # a signal cuts it short
    assert not done
    assert time.monotonic() < end


def test_a_second_signal_during_this_is_not_the_end_of_the_first(monkeypatch):
    class Mine:
        def __del__(self):
            send(signal.SIGTERM)

    class Timer(threading.Timer):
        def start(self):
            send(signal.SIGINT)
            super().start()
            time.sleep(10 * signals._AGAIN_S)  # what is sent again now would be lost

    end = time.monotonic() + 5
    with pytest.raises(Interrupted), Interrupts(keep=False):
        monkeypatch.setattr(threading, "Timer", Timer)
        Mine()
        time.sleep(10)
    assert time.monotonic() < end


def test_other_errors_in_a_del_are_reported_as_before(monkeypatch):
    class Mine:
        def __del__(self):
            raise KeyError("mine")

    reported = []

    def hook(dropped):
        reported.append(dropped.exc_type)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    with Interrupts(keep=False):
        Mine()
    assert reported == [KeyError]
    assert sys.unraisablehook is hook
    with Interrupts(keep=False):
        sys.unraisablehook = print  # by a library, meanwhile
    assert sys.unraisablehook is print


def test_other_ranks_leave_it_to_rank_0():
    with Interrupts(keep=True):
        send(signal.SIGTERM)
        send(signal.SIGINT)


def test_user_code_does_not_swallow_it():
    assert not issubclass(Interrupted, Exception)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_another_rank_keeps_a_signal_for_rank_0(signum):
    with Interrupts(keep=True):
        send(signum)
        send(signal.SIGTERM)
        assert signals.received == [signum, signal.SIGTERM]
    with Interrupts(keep=True):
        assert signals.received == []  # of a run before
