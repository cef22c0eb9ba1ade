"""Signals as an exception, never within a record."""

import os
import signal
import sys
import threading
import time

import pytest
from helpers.runs import SMALL, train

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
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_raises_and_names_itself(signum):
    before = signal.getsignal(signum)
    with pytest.raises(Interrupted) as interrupted, Interrupts(keep=False):
        send(signum)
    assert interrupted.value.signum == signum
    assert str(interrupted.value) == signum.name
    assert signal.getsignal(signum) is (before if signum == signal.SIGINT else signal.SIG_IGN)


def test_signals_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), Interrupts(keep=False):
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_same_signal_again_does_not_cut_short_the_last_words(tmp_path):
    """A scheduler signals rank 0 and its supervisor, which passes it on: that may come while a hook is closed."""
    (tmp_path / "again.py").write_text(
        "import os, signal\n"
        "from rank0rl import Hook\n"
        "class Again(Hook):\n"
        "    def after(self, agent, iteration, record): os.kill(os.getpid(), signal.SIGTERM)\n"
        "    def close(self): os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = train(tmp_path / "r", *SMALL, "--hook", f"{tmp_path}/again.py:Again", expect=143)
    assert "SIGTERM: saved iteration 1; go on with" in done.stdout


def test_a_record_is_finished_first():
    done = []
    with pytest.raises(Interrupted), Interrupts(keep=False):
        with job.held:
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
        with job.held:
            with job.held:
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
