"""Each fault at each place: the exit code, one report, and no process left behind."""

import contextlib
import itertools
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers.jobs import (
    end,
    folder_of,
    mpi_files,
    processes,
    reports,
    start,
    start_script,
    unused_mpi_files,
    wait_for_ranks,
    wait_until,
)
from helpers.ranks import HERE, LIMIT_S, mpiexec, run

from rank0rl.launch import job
from rank0rl.launch.mpiexec import _rank_command

# fault -> exit code, and what the report says
FAULTS = {
    "raise": (1, "ZeroDivisionError: on purpose"),
    "sys.exit(3)": (3, "waits in its collective"),
    "sys.exit(0)": (1, "waits in its collective"),
    "os._exit(3)": (3, "ended with exit code 3 before the other ranks"),
    "os._exit(0)": (1, "ended with exit code 0 before the other ranks"),
    "SIGKILL": (137, "was ended by signal 9, SIGKILL"),
    "SIGSTOP": (128 + signal.SIGSTOP, "was stopped by a signal"),
    "skip": (1, "waits in its collective"),
}


def faulty(*args):
    """Return exit code and stderr of failing_job.py."""
    process, token = start("tests/helpers/failing_job.py", *args)
    _, err = end(process, token)
    return process.returncode, err


SLOW = {"sys.exit(3)", "os._exit(3)", "SIGSTOP"}  # each like one of the others


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.slow if f in SLOW else []) for f in FAULTS]
)
def test_each_fault_once(fault):
    code, err = faulty("3", fault, "between", "1")
    expected, said = FAULTS[fault]
    assert code == expected, err
    assert said in err
    assert reports(err) == 1
    assert "BAD TERMINATION" not in err


def test_a_deadlock_names_the_place_of_each_rank():
    _, err = faulty("3", "skip", "between", "1")
    assert (
        "rank 0 waits in its collective 17, rank0_accum_batches, called at failing_job.py:" in err
    )
    assert "rank 1 waits in its collective 17, bcast_obj, called at failing_job.py:" in err


def test_ranks_that_fail_alike_are_reported_once():
    code, err = faulty("3", "raise", "import")
    assert code == 1
    assert err.count("ZeroDivisionError: on purpose") == 1


def test_ranks_that_end_together_with_a_code_are_no_deadlock():
    code, err = faulty("3", "sys.exit(3)", "end")
    assert code == 3
    assert reports(err) == 1


def test_no_fault():
    assert faulty("3", "none", "nowhere") == (0, "")


PLACES = ("import", "constructor", "reset", "step", "act", "process", "between", "update", "end")
RANKS = (0, 2, None)  # None: all of them


def table():
    """Yield every fault at every place, on each rank in turn: every two of the three meet."""
    for (i, fault), (j, place) in itertools.product(enumerate(FAULTS), enumerate(PLACES)):
        rank = RANKS[(i + j) % 3]
        if fault != "skip":
            yield (
                fault,
                place,
                0 if place == "update" and rank == 2 else rank,
            )  # rank 0 updates alone
    yield from (("skip", "between", rank) for rank in (0, 2))  # one leaves out a collective


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "place", "rank"), [*table()])
def test_the_table(fault, place, rank):
    code, err = faulty("3", fault, place, *([] if rank is None else [str(rank)]))
    expected = FAULTS[fault][0]
    if fault == "sys.exit(0)" and (place == "end" or (rank is None and place != "update")):
        expected = 0  # all end together, as scripts do
    assert code == expected, err
    assert reports(err) == (0 if expected == 0 else 1), err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP])
def test_no_rank_outlives_its_supervisor(signum):
    process, token = start("tests/helpers/recipe.py", "--nprocs", "2", "--end", "hang")
    wait_for_ranks(token, 2)
    process.send_signal(signum)
    process.wait(timeout=LIMIT_S)
    wait_until(lambda: not processes(token))


SLEEPER = """
import sys, time, rank0rl, rank0rl.mpi.comm
if "parent" == rank0rl.mpi_fork(2, collective_timeout=float(sys.argv[1])): sys.exit()
time.sleep(4 * rank0rl.mpi.comm.rank)
rank0rl.mpi.comm.barrier()
"""


@pytest.mark.slow
def test_how_long_a_rank_may_work_is_limited_only_if_asked(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    process, token = start(str(tmp_path / "sleeper.py"), "600")
    assert end(process, token)[1] == ""
    assert process.returncode == 0
    process, token = start(str(tmp_path / "sleeper.py"), "1")
    assert "barrier: the other ranks did not come within 1 s" in end(process, token)[1]
    assert process.returncode == 1
    command = [mpiexec(), "-n", "2", sys.executable, str(tmp_path / "sleeper.py"), "1"]
    done = run(command, env={"PYTHONPATH": str(HERE.parent)})  # without a supervisor
    assert "barrier: the other ranks did not come within 1 s" in done.stderr


def test_ranks_that_only_use_mpi4py_themselves_end_well(tmp_path):
    text = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))"
    process, token = start_script(tmp_path, text)
    out, err = end(process, token)
    assert (process.returncode, err) == (0, "")
    assert out.split() in (["2", "2"], ["22"])  # launchers mix the lines of ranks


@pytest.mark.slow
def test_a_rank_that_ends_before_it_meets_the_others(tmp_path):
    text = "if rank0rl.launch.job.world_rank() == 1: sys.exit()\nrank0rl.mpi.comm.barrier()"
    process, token = start_script(tmp_path, text)
    _, err = end(process, token)
    assert process.returncode == 1
    assert "rank 1 ended before the others, which wait for it" in err


@pytest.mark.slow
def test_a_first_broadcast_that_meets_another_collective_is_reported(tmp_path):
    text = "rank0rl.bcast([1]) if rank0rl.rank == 0 else rank0rl.all_sum(1.0)"
    process, token = start_script(tmp_path, text)
    _, err = end(process, token)
    assert process.returncode == 1
    assert re.search(r"rank 1 waits in its collective \d, all_sum", err)  # which: MPIs differ


@pytest.mark.slow
def test_a_code_is_kept_where_another_collective_would_meet_the_end(tmp_path):
    text = "if rank0rl.mpi.comm.rank == 1: sys.exit(3)\nrank0rl.mpi.comm.barrier()"
    process, token = start_script(tmp_path, text)
    _, err = end(process, token)
    assert process.returncode == 3
    assert "rank 1 waits in its collective 1, the end of the script" in err


def test_a_report_that_takes_its_time_is_not_lost(tmp_path):
    text = """
class Slow(Exception):
    def __str__(self):
        time.sleep(0.2)
        return "said slowly"
raise Slow
"""
    process, token = start_script(tmp_path, text)
    _, err = end(process, token)
    assert process.returncode == 1
    assert err.count("said slowly") == 1


def test_a_flood_of_words_does_not_drown_a_signal(tmp_path):
    process, token = start_script(tmp_path, "while True: sys.stderr.write('word ' * 1000 + '\\n')")
    wait_for_ranks(token, 2)
    process.send_signal(signal.SIGTERM)
    end(process, token)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_signal_before_there_are_ranks(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time, rank0rl, os\n"
        "if os.environ.get('RANK0RL_JOB'): time.sleep(600)\n"
        "rank0rl.mpi_fork(2)\n"
    )
    process, token = start(str(tmp_path / "slow.py"))
    wait_until(lambda: folder_of(token))
    process.send_signal(signal.SIGINT)
    end(process, token)
    assert process.returncode == 128 + signal.SIGINT


def test_ctrl_c_of_a_script_is_no_traceback(tmp_path):
    process, token = start_script(tmp_path, "time.sleep(600)")
    wait_for_ranks(token, 2)
    process.send_signal(signal.SIGINT)
    _, err = end(process, token)
    assert process.returncode == 128 + signal.SIGINT
    assert err.split() == ["interrupted"]


def test_no_shared_memory_is_left():
    before = mpi_files()
    faulty("3", "SIGKILL", "process", "1")
    wait_until(lambda: not unused_mpi_files() - before)  # other tests' jobs begin and end


@pytest.mark.slow
def test_nohup_is_respected(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys, time, rank0rl\nif 'parent' == rank0rl.mpi_fork(2): sys.exit()\ntime.sleep(4)\n"
    )
    code = (
        "import os, runpy, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        f"os.execv(sys.executable, [sys.executable, {str(tmp_path / 'script.py')!r}])"
    )
    process, token = start("-c", code)
    wait_for_ranks(token, 2)
    process.send_signal(signal.SIGHUP)
    end(process, token)
    assert process.returncode == 0


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    text = "import subprocess; subprocess.Popen(['sleep', '47'], env={}); os._exit(3)"
    process, token = start_script(tmp_path, text)
    end(process, token)
    assert process.returncode == 3
    left = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            left.append(path.read_bytes())
    assert b"sleep\x0047\x00" not in left


@pytest.mark.slow
def test_ranks_that_do_not_reach_their_launcher_leave_no_file(tmp_path, monkeypatch):
    """Open MPI's take themselves for a job of one."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    text = """
launcher = int((rank0rl.launch.job.my_folder() / "launcher").read_text())
if rank0rl.launch.job.world_rank() == 1:
    os.kill(launcher, 19)
while open(f"/proc/{launcher}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
rank0rl.mpi.comm.barrier()
"""
    process, token = start_script(tmp_path, text)
    _, err = end(process, token)
    assert process.returncode == 128 + signal.SIGSTOP, err
    assert [*(tmp_path / "tmp").iterdir()] == []


LAUNCHER = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"


def test_no_shell_waits_for_a_launcher_that_is_a_zombie(tmp_path, monkeypatch):
    """As in a container without an init process, where nobody waits for what has no parent."""
    monkeypatch.setenv(job.FOLDER, str(tmp_path))
    monkeypatch.setenv("PMI_RANK", "0")
    job.create(tmp_path, 1)
    process, token = start("-c", LAUNCHER, *_rank_command(["-c", "import os; os._exit(3)"]))
    wait_until((tmp_path / "status.0").exists)
    process.kill()
    end_s = time.monotonic() + 10
    while processes(token) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert processes(token) == []
    process.wait()


EARLY = """
import os, signal, sys, time
rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
if rank == "1":
    {fault}
import rank0rl
if "parent" == rank0rl.mpi_fork(2, start_timeout={timeout}): sys.exit()
rank0rl.rank0_accum_batches({{}})
"""


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("os._exit(3)", 3, "rank 1 ended with exit code 3 before the other ranks"),
        pytest.param("sys.exit()", 1, "rank 1 ended with exit code 0", marks=pytest.mark.slow),
        pytest.param("raise KeyError", 1, "rank 1 ended with exit code 1", marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), 9)", 137, "SIGKILL", marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), 19)", 147, "was stopped", marks=pytest.mark.slow),
    ],
)
def test_a_fault_before_a_rank_knows_of_the_job(fault, code, said, tmp_path):
    """The other rank waits in MPI's own start, where it would never be told."""
    (tmp_path / "early.py").write_text(EARLY.format(fault=fault, timeout=300))
    process, token = start(str(tmp_path / "early.py"))
    _, err = end(process, token)
    assert process.returncode == code, err
    assert said in err
    assert reports(err) == 1


@pytest.mark.slow
def test_a_rank_that_does_not_start_is_named_after_a_limit(tmp_path):
    (tmp_path / "early.py").write_text(EARLY.format(fault="time.sleep(600)", timeout=2))
    process, token = start(str(tmp_path / "early.py"))
    _, err = end(process, token)
    assert process.returncode == 1
    assert re.search(r"^rank 1 on \S+ did not come within 2 s", err)


ELSEWHERE = """#!/bin/sh
shift 2
exec {mpiexec} -n 2 sh -c '
[ "${{PMI_RANK:-$OMPI_COMM_WORLD_RANK}}" = 1 ] && export RANK0RL_JOB=/elsewhere/${{RANK0RL_JOB##*/}}
exec "$@"' sh "$@"
"""


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("pass", 0, ""),
        ("os.kill(os.getpid(), 19)", 147, r"^rank 1, on \S+, was stopped by a signal\n"),
        pytest.param("os._exit(3)", 3, r"^rank 1, on \S+, ended with ", marks=pytest.mark.slow),
        pytest.param("raise KeyError", 1, r"^rank 1 of 2, on \S+, failed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_does_not_see_the_folder_is_heard(fault, code, said, tmp_path):
    """As on another host. Nothing of what it says to the supervisor is seen."""
    launcher = tmp_path / "launcher"
    launcher.write_text(ELSEWHERE.format(mpiexec=mpiexec()))
    launcher.chmod(0o755)
    (tmp_path / "script.py").write_text(
        "import os, rank0rl, sys\n"
        f"if rank0rl.mpi_fork(2, mpiexec={str(launcher)!r}) == 'parent': sys.exit()\n"
        "rank0rl.rank0_accum_batches({})\n"
        f"if rank0rl.rank == 1: {fault}\n"
        "rank0rl.rank0_accum_batches({})\n"
    )
    process, token = start(str(tmp_path / "script.py"))
    _, err = end(process, token, patience_s=5.0)
    assert process.returncode == code, err
    assert re.search(said, err)
    assert "\x1e" not in err
    assert (reports(err) == 1) if said else err == ""
