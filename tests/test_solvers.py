"""Solvers: programs of environments, on ranks of their own, which end in every case."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.jobs import mpi_files, mpi_files_of_others, unused_mpi_files, wait_until
from helpers.ranks import HERE, LIMIT_S, mpiexec
from helpers.runs import SMALL, sha, table, train
from helpers.simulators import SOLVER

from rank0rl import Solver, SolverError
from rank0rl.launch import tree
from rank0rl.launch.mpiexec import vendor

TALKS = [sys.executable, SOLVER]
SOLVED = "helpers.simulators:Solved"
ARGS = [*SMALL[1:], "--total-steps", "192"]


@pytest.fixture(autouse=True, scope="module")
def _helpers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        yield


def marked(mark):
    """Return id -> command of the processes with a mark in their command line."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().split(b"\0")
            if str(mark).encode() in words and tree.state(int(file.parent.name)) != "Z":
                found[int(file.parent.name)] = words
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_solver_answers_and_ends(tmp_path, ranks):
    solver = Solver([*TALKS, str(tmp_path)], ranks, tmp_path)
    for number in (1.5, 2):
        solver.write(f"sum {number}\n")
        assert float(solver.readline()) == number * ranks
    assert len(marked(tmp_path)) > ranks
    solver.close()
    assert marked(tmp_path) == {}
    solver.close()
    with pytest.raises(SolverError, match="is closed: make a new one"):
        solver.write("sum 1\n")
    assert os.listdir(tmp_path) == ["solver.log"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_crash_is_an_error_with_the_last_lines(tmp_path, ranks):
    solver = Solver([*TALKS, str(tmp_path)], ranks)
    solver.write("crash\n")
    with pytest.raises(SolverError, match=r"ended with exit code 3\n(.*\n)*on purpose"):
        solver.readline()
    assert marked(tmp_path) == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_a_signal_ends_is_an_error(ranks):
    solver = Solver([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], ranks)
    with pytest.raises(SolverError, match=r"exit code (11|139)\n|SIGSEGV"):
        solver.readline()


def test_what_mpiexec_prints_in_pieces_is_no_line_of_the_solver(monkeypatch):
    monkeypatch.setattr("rank0rl.envs.solver.vendor", lambda launcher: "MPICH")
    pieces = ["\n", "=" * 30, "=" * 30 + "\n=   BAD ", "TERMINATION\n"]
    program = f"import time\nfor piece in {pieces}: print(piece, end='', flush=True), time.sleep(0.1)\nexit(139)"
    solver = Solver(["-"], 2, launcher=[sys.executable, "-c", program])
    with pytest.raises(SolverError, match="SIGSEGV"):
        solver.readline()


@pytest.mark.fast(2)
@pytest.mark.parametrize("call", ["readline", "wait", "wait_for", "write"])
def test_a_hang_is_an_error_after_the_time_limit(tmp_path, call):
    ranks = 1 if call == "write" else 2  # MPICH's mpiexec fails if its input is not read
    solver = Solver([*TALKS, str(tmp_path)], ranks, timeout=1)
    solver.write("hang\n")
    args = {"wait_for": [(tmp_path / "never").exists], "write": ["sum 1\n" * 100_000]}
    with pytest.raises(SolverError, match=r"did not .* within 1 s, and was ended"):
        getattr(solver, call)(*args.get(call, []))
    assert marked(tmp_path) == {}


@pytest.mark.skipif(
    vendor(mpiexec()) == "Open MPI", reason="it does not pass on the end of the input"
)
def test_a_late_end_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("rank0rl.envs.solver._CLOSE_S", 0.5)
    solver = Solver([*TALKS, str(tmp_path)], 2)
    solver.write("late\n")
    solver.readline()
    with pytest.raises(SolverError, match="did not end within 0.5 s after its input was closed"):
        solver.close()
    assert marked(tmp_path) == {}


def test_a_solver_that_is_forgotten_ends(tmp_path):
    solver = Solver([*TALKS, str(tmp_path)], 2)
    solver.write("sum 1\n")
    solver.readline()
    del solver
    wait_until(lambda: marked(tmp_path) == {})


def test_a_program_of_the_present_folder_is_found_from_another_one(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    for folder in ("here", "there"):
        (tmp_path / folder / "says").write_text(f"#!/bin/sh\necho {folder}\n")
        (tmp_path / folder / "says").chmod(0o755)
    monkeypatch.chdir(tmp_path / "here")
    solver = Solver(["./says"], 1, tmp_path / "there")
    assert solver.readline() == "here"
    solver.close()
    (tmp_path / "here" / "says").unlink()
    solver = Solver(["./says"], 1, tmp_path / "there")
    assert solver.readline() == "there"
    solver.close()


def test_a_program_that_is_not_there():
    with pytest.raises(SolverError, match="code 127\n/no/program cannot be run: No such file"):
        Solver("/no/program 'with words'").readline()
    with pytest.raises(FileNotFoundError):
        Solver("true", folder="/no/folder")


def test_a_solver_that_talks_by_files(tmp_path):
    text = "sleep 0.3; echo in the log; touch ready; sleep 0.3; echo and more >&2; exit $1"
    solver = Solver(["sh", "-c", text, "sh", "0"], folder=tmp_path, pipes=False)
    solver.wait_for((tmp_path / "ready").exists)
    solver.wait()
    solver.close()
    assert (tmp_path / "solver.log").read_text() == "in the log\nand more\n"
    with pytest.raises(SolverError, match="ended with exit code 4\n(.*\n)*in the log\nand more"):
        Solver(["sh", "-c", text, "sh", "4"], folder=tmp_path, pipes=False).wait()
    endless = Solver(["sleep", "60"], pipes=False)
    for talk in (endless.readline, lambda: endless.write("step\n")):
        with pytest.raises(ValueError, match="pipes=False is neither written to nor read"):
            talk()
    begun = time.monotonic()
    endless.close()
    assert time.monotonic() - begun < 4


def test_lines_that_look_like_those_of_mpiexec(tmp_path):
    solver = Solver(["sh", "-c", "echo; printf '=%.0s' $(seq 80); echo; echo ready; read x"])
    assert [solver.readline() for _ in range(3)] == ["", "=" * 80, "ready"]
    solver.close()


def test_a_solver_has_the_signals_of_a_new_program():
    """Python ignores two of them; what else is ignored here comes from whoever started the tests."""
    ignored = Solver(["sh", "-c", "grep SigIgn /proc/self/status"]).readline().split()[1]
    of_python = (signal.SIGPIPE, signal.SIGXFSZ)
    assert [each for each in of_python if int(ignored, 16) >> (each - 1) & 1] == []


def test_output_that_nobody_reads(monkeypatch):
    monkeypatch.setattr("rank0rl.envs.solver._MOST_UNREAD", 10_000)
    with pytest.raises(SolverError, match="10,000 bytes that nobody reads: use pipes=False"):
        Solver("yes").wait()


def test_a_solver_is_no_rank_and_has_all_cores(monkeypatch):
    for name in (
        "PMI_RANK",
        "PMIX_RANK",
        "OMPI_COMM_WORLD_RANK",
        "HYDI_CONTROL_FD",
        "RANK0RL_GROUP",
    ):
        monkeypatch.setenv(name, "1")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        text = "import os; print(len(os.sched_getaffinity(0)), *os.environ)"
        there, *names = Solver([sys.executable, "-c", text]).readline().split()
    finally:
        os.sched_setaffinity(0, cores)
    assert int(there) == len(cores)
    assert not [name for name in names if name.startswith(("PMI", "OMPI_COMM", "HYDI", "RANK0RL"))]


def test_an_own_launcher():
    solver = Solver(TALKS, launcher=[mpiexec(), "-n", "3"])
    solver.write("sum 1\n")
    assert float(solver.readline()) == 3
    solver.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, SOLVED, *ARGS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--env-processes"]])
def test_one_hash_for_any_number_of_ranks(undisturbed, tmp_path, more):
    train(tmp_path, SOLVED, *ARGS, *more, nprocs=2)
    assert sha(tmp_path) == sha(undisturbed)


@pytest.mark.parametrize("how", ["crash", "hang"])
@pytest.mark.slow
def test_a_failure_is_repeated(undisturbed, tmp_path, how):
    env = ["--env-kwargs", f'how="{how}"', "fails=3", f'once="{tmp_path / "once"}"', "timeout=5.0"]
    train(tmp_path / "run", SOLVED, *env, *ARGS, "--env-retries", "2", nprocs=2)
    assert sha(tmp_path / "run") == sha(undisturbed)
    assert sum(int(row["env_mended"]) for row in table(tmp_path / "run")) == 1


ENDLESS = [*SMALL[1:], "--total-steps", "10000000", "--quiet", "--env-retries", "3"]
KINDS = {b"envs import process": "environment", b"launch import reaper": "reaper"}


def kind(process_id, words, first, processes):
    """Return the kind of a process of a run."""
    joined = b" ".join(words)
    if process_id == first:
        return "supervisor" if processes > 1 else "rank"
    found = next((name for text, name in KINDS.items() if text in joined), "")
    if found:
        return found
    if str(SOLVER).encode() in joined:
        return "solver's mpiexec" if b"mpiexec" in words[0] else "solver"
    return "rank" if b"python" in words[0] else "launcher"


def of_job(first, mark):
    """Return id -> command of the processes of a run: below the first one, or with a mark in their command line."""
    found = marked(mark)
    for process_id in [first, *tree.below(first)]:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
            if tree.state(process_id) not in ("", "Z"):
                found[process_id] = words
    return found


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.slow
def test_nothing_is_left(tmp_path, seed):
    """A signal to a process of a run at some instant, and nothing is left, of solvers that hide either."""
    rng = random.Random(seed)
    nprocs, group = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
    signum = rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT])
    more = ["--env-processes", "--step-timeout", "10"] * (group == 1 and rng.random() < 0.5)
    words = [sys.executable, HERE.parent / "train.py", "helpers.simulators:Solved", *ENDLESS, *more]
    words += ["--env-kwargs", f'mark="{tmp_path}"', "timeout=5.0", "--run-dir", tmp_path / "run"]
    words += ["--nprocs", nprocs, "--ranks-per-env", group]
    (tmp_path / "tmp").mkdir()
    before = mpi_files()
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [*map(str, words)],
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
            start_new_session=True,
        )
    with mpi_files_of_others(before, lambda: of_job(job.pid, tmp_path)) as others:
        if rng.random() < 0.8:  # else it is started
            wait_until((tmp_path / "run" / "progress.csv").exists)
        time.sleep(rng.uniform(0, 3))
        kinds = {}
        for process_id, words in sorted(of_job(job.pid, tmp_path).items()):
            kinds.setdefault(kind(process_id, words, job.pid, nprocs * group), []).append(
                process_id
            )
        hit = rng.choice(sorted(kinds))
        process_id = rng.choice(kinds[hit])
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signum)
            if signum == signal.SIGSTOP and process_id == job.pid:
                time.sleep(3)
                os.kill(process_id, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on, perhaps after a retry
            job.wait(8)
        end = time.monotonic() + LIMIT_S
        while job.poll() is None and time.monotonic() < end:
            job.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(8)
    said = (tmp_path / "log").read_text()
    about = f"{signum.name} to {hit} of {nprocs} x {group} {more}: {job.returncode}\n{said}"
    print(about)
    assert job.returncode in right_codes(hit, signum), about
    wait_until(lambda: not of_job(job.pid, tmp_path))
    if (hit, signum) != ("supervisor", signal.SIGKILL):  # else the next start removes them
        assert not list((tmp_path / "tmp").iterdir()), about
        wait_until(lambda: not unused_mpi_files() - before - others)


def right_codes(hit, signum):
    """Return the exit codes that are right after a signal to a process of this kind; 143 if the run has gone on."""
    if signum == signal.SIGSTOP and hit == "rank":
        return {147, 143}
    if hit in ("supervisor", "rank", "launcher"):
        return {-signum, 128 + signum, 143, *[1] * (hit == "launcher")}
    return {143, 1} if signum == signal.SIGSTOP else {143}
