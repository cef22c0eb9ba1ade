"""Fault and place: the exit code, one report, an end within seconds, and no process left behind."""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from on_ranks import HERE, mpiexec, run

from rank0rl.mpi import job, supervisor

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
LIMIT_S = 10


def processes(token):
    """Those whose environment holds the token."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token.encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def kill_one_rank(token, rank, signum):
    """Whether there was this rank, of the job whose processes have the token."""
    for process_id in processes(token):
        with contextlib.suppress(OSError, ValueError, KeyError):
            environ = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
            folder = dict(pair.split(b"=", 1) for pair in environ if b"=" in pair)[
                job.FOLDER.encode()
            ]
            os.kill(int(Path(folder.decode(), f"rank.{rank}").read_text()), signum)
            return True
    return False


def start(*command):
    """A command with a token in the environment of all its processes, in a session of its own."""
    token = f"RANK0RL_TEST={uuid.uuid4()}"
    name, _, value = token.partition("=")
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(HERE.parent), name: value},
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return process, token


def faulty(*args, limit_s=LIMIT_S):
    """Exit code, stderr and seconds of faulty.py, of which nothing may be left."""
    process, token = start("tests/faulty.py", *args)
    begin = time.monotonic()
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        for process_id in processes(token):
            os.kill(process_id, signal.SIGKILL)
        raise
    took = time.monotonic() - begin
    assert processes(token) == []
    assert took < limit_s
    return process.returncode, err


def reports(err):
    """How many reports there are: each begins with a rank, or with the place of all of them."""
    return sum(
        line.startswith("the ranks cannot go on:")
        or (line.startswith("rank ") and "waits" not in line)
        for line in err.splitlines()
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_once(fault):
    code, err = faulty("3", fault, "between", "1")
    expected, said = FAULTS[fault]
    assert code == expected, err
    assert said in err
    assert reports(err) == 1
    assert "BAD TERMINATION" not in err


def test_a_deadlock_names_the_place_of_each_rank():
    _, err = faulty("3", "skip", "between", "1")
    assert "rank 0 waits in its collective 16, rank0_accum_batches, called at faulty.py:" in err
    assert "rank 1 waits in its collective 16, share, called at faulty.py:" in err


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


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2, None])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_whole_table(fault, place, rank):
    if fault == "skip" and (place != "between" or rank is None):
        pytest.skip("a collective is left out by one rank, at its place")
    if place == "update" and rank == 2:
        pytest.skip("only rank 0 updates")
    code, err = faulty("3", fault, place, *([] if rank is None else [str(rank)]))
    expected = FAULTS[fault][0]
    if fault == "sys.exit(0)" and (place == "end" or (rank is None and place != "update")):
        expected = 0  # all end together, which is what scripts do
    assert code == expected, err
    assert reports(err) == (0 if expected == 0 else 1), err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP])
def test_no_rank_outlives_its_supervisor(signum):
    process, token = start("tests/recipe.py", "--nprocs", "2", "--end", "hang")
    end = time.monotonic() + 30
    while (
        len(processes(token)) < 6
    ):  # supervisor, mpiexec and its proxy or not, two shells, two ranks
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signum)
    process.wait(timeout=30)
    end = time.monotonic() + 12
    while processes(token):
        assert time.monotonic() < end, "ranks are still there"
        time.sleep(0.1)


SLEEPER = """
import sys, time, rank0rl, rank0rl.mpi.comm
if "parent" == rank0rl.mpi_fork(2, collective_timeout=float(sys.argv[1])): sys.exit()
time.sleep(4 * rank0rl.mpi.comm.rank)
rank0rl.mpi.comm.barrier()
"""


def test_how_long_a_rank_may_work_is_limited_only_if_asked(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    process, _ = start(str(tmp_path / "sleeper.py"), "60")
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 0
    process, _ = start(str(tmp_path / "sleeper.py"), "1")
    assert "barrier: the other ranks did not come within 1 s" in process.communicate(timeout=30)[1]
    assert process.returncode == 1
    command = [mpiexec(), "-n", "2", sys.executable, str(tmp_path / "sleeper.py"), "1"]
    done = run(command, env={"PYTHONPATH": str(HERE.parent)})  # where nobody else watches
    assert "barrier: the other ranks did not come within 1 s" in done.stderr


def script(tmp_path, text):
    (tmp_path / "script.py").write_text(
        "import sys, time, os, rank0rl, rank0rl.mpi.comm, rank0rl.mpi.job\n"
        f"if 'parent' == rank0rl.mpi_fork(2): sys.exit()\n{text}\n"
    )
    return start(str(tmp_path / "script.py"))


def test_ranks_that_only_use_mpi4py_themselves_end_well(tmp_path):
    process, _ = script(tmp_path, "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.split() in (["2", "2"], ["22"])  # launchers mix the lines of ranks


def test_a_rank_that_ends_before_it_meets_the_others(tmp_path):
    text = "if rank0rl.mpi.job.world_rank() == 1: sys.exit()\nrank0rl.mpi.comm.barrier()"
    process, token = script(tmp_path, text)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "rank 1 ended before the others, which wait for it" in err
    assert processes(token) == []


def test_a_code_is_kept_where_another_collective_would_meet_the_end(tmp_path):
    text = "if rank0rl.mpi.comm.rank == 1: sys.exit(3)\nrank0rl.mpi.comm.barrier()"
    process, _ = script(tmp_path, text)
    _, err = process.communicate(timeout=30)
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
    process, _ = script(tmp_path, text)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.count("said slowly") == 1


def test_a_flood_of_words_does_not_drown_a_signal(tmp_path):
    text = "while True: sys.stderr.write('word ' * 1000 + '\\n')"
    process, token = script(tmp_path, text)
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert processes(token) == []


def test_a_signal_before_there_are_ranks(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time, rank0rl, os\n"
        "if os.environ.get('RANK0RL_JOB'): time.sleep(20)\n"
        "rank0rl.mpi_fork(2)\n"
    )
    process, token = start(str(tmp_path / "slow.py"))
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert processes(token) == []


def test_ctrl_c_of_a_script_is_no_traceback(tmp_path):
    process, token = script(tmp_path, "time.sleep(30)")
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert err.split() == ["interrupted"]
    assert processes(token) == []


def orphans():
    """Files of MPI in shared memory that no process uses."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    files = Path("/dev/shm").glob("*")
    return {file.name for file in files if "mpi" in file.name and str(file) not in mapped}


def test_no_shared_memory_is_left():
    before = orphans()
    faulty("3", "SIGKILL", "process", "1")
    end = time.monotonic() + 5
    while orphans() - before:  # other tests' jobs begin and end
        assert time.monotonic() < end
        time.sleep(0.1)


def test_nohup_is_respected(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys, time, rank0rl\nif 'parent' == rank0rl.mpi_fork(2): sys.exit()\ntime.sleep(4)\n"
    )
    code = (
        "import os, runpy, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        f"os.execv(sys.executable, [sys.executable, {str(tmp_path / 'script.py')!r}])"
    )
    process, _ = start("-c", code)
    time.sleep(2)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    text = "import subprocess; subprocess.Popen(['sleep', '47'], env={}); os._exit(3)"
    process, _ = script(tmp_path, text)
    process.communicate(timeout=20)
    assert process.returncode == 3
    left = subprocess.run(["pgrep", "-f", "^sleep 47$"], capture_output=True, check=False)
    assert left.stdout == b""


def place(count, name="gather", waits=True, before=()):
    names = {count: name, **dict(before)}
    return job.Place(count, waits, names, "")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([place(3), place(3)], False),  # bytes are on their way
        ([place(3), place(3, waits=False)], False),  # one still works
        ([place(3), None], False),  # one has not come to a collective, or is on another host
        ([place(3), place(3, "share")], True),
        ([place(3), place(4, "share", before={3: "gather"})], False),  # it is ahead
        ([place(3), place(4, "gather", before={3: "share"})], True),
        ([place(3), place(90, "gather")], False),  # too far ahead to be remembered
    ],
)
def test_who_is_stuck(places, expected):
    assert job.stuck(places) is expected


def test_a_report_is_made_once_and_has_the_code_of_who_makes_it(tmp_path, capsys):
    def wrong(reporter, failed):
        for file in tmp_path.iterdir():
            file.unlink()
        for name, text in (("reporter", reporter), ("failed", failed)):
            if text:
                assert job.write_once(tmp_path / name, text)
        watcher = supervisor.Supervisor(tmp_path, 2)
        watcher._listen = lambda _: False
        watcher._wrong(137, "rank 1 was ended")
        return watcher._code, capsys.readouterr().err

    assert wrong("", "") == (137, "rank 1 was ended\nthe job ends\n")
    assert wrong("0", "3") == (3, "")
    assert wrong("0", "") == (137, "rank 1 was ended\nthe job ends\n")  # it died before its words
    assert not job.write_once(tmp_path / "failed", "77")
    assert (tmp_path / "failed").read_text() == "137"


def test_only_mpis_shared_memory_is_removed(tmp_path):
    mine = tmp_path / "sm_segment.of.mine"
    mine.write_bytes(bytes(4096))
    with mine.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert str(mine) in Path("/proc/self/maps").read_text()
        assert job.shared_memory(os.getpid()) == set()
