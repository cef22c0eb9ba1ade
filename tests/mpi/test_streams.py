"""A run outlasts who reads its output."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest
from helpers.jobs import wait_until
from helpers.ranks import HERE, LIMIT_S, environment, run
from helpers.ranks import mpiexec as find_mpiexec

from rank0rl import launch
from rank0rl.launch import job, mpiexec, streams, supervisor

PATHS = {"PYTHONPATH": str(HERE.parent)}

ALONE = """
import errno, os, sys
from rank0rl.launch.streams import outlast_readers
outlast_readers()
written = open(sys.argv[1], "w")
for line in range(9999):
    print(line)
sys.stdout.flush()
try:
    os.write(1, b"as a library in C does")
except OSError as error:
    if error.errno != errno.EBADF:  # libffi took the number of a closed stream, to read
        raise
written.write(f"all; {min(written.fileno(), 3)}")
"""

RANKS = """
import os, sys
from pathlib import Path
import rank0rl
import rank0rl.launch.job
if rank0rl.mpi_fork(2) == "parent":
    sys.exit()
for line in range(9999):
    print(line, flush=line % 999 == 0)
Path(sys.argv[1] + str(rank0rl.launch.job.world_rank())).write_text("all")
"""


def run_unread(command, pipes=("stdout",), close=""):
    """Run a command some of whose streams are pipes that nobody reads, and some closed.

    Returns:
        Its exit code, and what it said on its other streams.
    """
    reads, writes = os.pipe()
    os.close(reads)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **dict.fromkeys(pipes, writes)}
    shell = ["sh", "-c", f'exec "$@" {close}', "sh"]
    process = subprocess.Popen(
        [*shell, *command], cwd=HERE.parent, text=True, env=environment(PATHS), **streams
    )
    os.close(writes)
    said = process.communicate(timeout=LIMIT_S)
    return process.returncode, "".join(words or "" for words in said)


UNREAD = [
    {},
    {"pipes": ("stdout", "stderr")},
    {"close": ">&-"},
    {"close": "<&- >&- 2>&-"},
]


@pytest.mark.parametrize("flags", [[], ["-u"]])
@pytest.mark.parametrize("unread", UNREAD)
def test_a_process_goes_on_when_nobody_reads(unread, flags, tmp_path):
    file = tmp_path / "file"
    assert run_unread([sys.executable, *flags, "-c", ALONE, str(file)], **unread) == (0, "")
    assert file.read_text() == "all; 3"  # its number is no standard stream's


def test_a_full_disk_is_told_and_ends_nothing():
    code = """
import sys
from rank0rl.launch import streams
streams.outlast_readers()
for _ in range(2):
    print(1, flush=True)
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 0
    assert done.stderr.count("No space left") == 1


def test_nothing_is_lost_in_a_full_pipe_that_does_not_block():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    full = os.write(writer, bytes(1 << 20))
    later = threading.Timer(0.1, os.read, (reader, full))
    later.start()
    with streams._Lasting(writer, "w") as out:
        assert out.write(b"words") == 5
    later.join()
    assert os.read(reader, full) == b"words"
    os.close(reader)


def test_who_is_asked_to_end_does_not_wait_for_a_reader(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(launch, "_READ_S", 0.1)
    monkeypatch.setattr(launch, "_asked", [])
    later = threading.Timer(0.5, launch.hurry)
    later.start()
    with streams._Lasting(writer, "w") as out:
        assert out.write(bytes(1 << 20)) == 1 << 20
        assert not later.is_alive()
    os.close(reader)


def test_who_is_asked_to_end_does_not_wait_for_its_output_to_be_read(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    before = os.dup(1)
    os.dup2(writer, 1)
    try:
        with (tmp_path / "much").open("w+b") as source:
            source.write(bytes(1 << 20))
            source.seek(0)
            relay = streams.Relay(source, tmp_path)
            received = []
            threading.Timer(0.5, received.append, [15]).start()
            relay.close(received, 0.1)
            assert received
            assert relay._thread.is_alive()
            os.dup2(before, 1)
            os.close(writer)
            os.close(reader)
            relay._thread.join()
    finally:
        os.dup2(before, 1)


WRITES = """
import os, socket, sys
reads, writes = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
told = os.dup(1)
os.dup2(writes.fileno(), 1)
os.dup2(writes.fileno(), 2)
import rank0rl
print("rank", 1, end=" of ")
print("two", 3.5)
sys.stderr.write("seen at once")
print("kept", end="", flush=True)
each = [os.read(reads.fileno(), 999) for _ in range(3)]
os.write(told, f"{each}\\n".encode())
"""


def test_a_rank_writes_whole_lines_even_if_python_is_unbuffered(tmp_path):
    """Each write to a datagram socket is read on its own."""
    (tmp_path / "script.py").write_text(WRITES)
    command = [find_mpiexec(), "-n", "2", sys.executable, "-u", str(tmp_path / "script.py")]
    done = run(command, env=PATHS)
    each = [b"rank 1 of two 3.5\n", b"seen at once", b"kept"]
    assert done.stdout == f"{each}\n" * 2, done.stderr


@pytest.mark.parametrize("unread", UNREAD[:3])
def test_ranks_go_on_when_nobody_reads(unread, tmp_path):
    (tmp_path / "script.py").write_text(RANKS)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "rank")]
    assert run_unread(command, **unread) == (0, "")
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["all"] * 2


def test_all_that_ranks_print_arrives(tmp_path):
    (tmp_path / "script.py").write_text(RANKS)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "rank")]
    code, said = run_unread(command, pipes=())
    assert code == 0
    lines = "".join(f"{line}\n" for line in range(9999))
    assert Counter(said) == Counter(lines * 2)  # of characters: a launcher may mix lines


@pytest.mark.parametrize(
    ("command", "code"), [("-m rank0rl --help", 0), ("train.py --nprocs 0", 2)]
)
def test_commands_without_a_reader_end_quietly(command, code):
    unread = {"pipes": ("stdout", "stderr")}
    assert run_unread([sys.executable, *command.split()], **unread) == (code, "")


LAST_WORDS = """
import sys
import rank0rl
import rank0rl.mpi.comm
if rank0rl.mpi_fork(2, mpiexec=sys.argv[1]) == "parent":
    sys.exit()
if rank0rl.rank == 0:
    print("the last words", file=sys.stdout, flush=True)
    print("the reason", file=sys.stderr, flush=True)
    rank0rl.mpi.comm.abort(7)
rank0rl.mpi.comm.barrier()
"""


@pytest.mark.fast(1)
@pytest.mark.parametrize("slow", ["stdout", "stderr"])
def test_the_last_words_of_a_rank_arrive_under_a_launcher_that_delivers_late(slow, tmp_path):
    late = 'while IFS= read -r line; do sleep 0.6; echo "$line"; done'
    pipe = {"stdout": f"| {late}", "stderr": f"2>&1 >&3 3>&- | {late} >&2"}[slow]
    (tmp_path / "launcher").write_text(f'#!/bin/sh\n{{ {find_mpiexec()} "$@" {pipe}; }} 3>&1\n')
    (tmp_path / "launcher").chmod(0o755)
    (tmp_path / "script.py").write_text(LAST_WORDS)
    done = run([sys.executable, str(tmp_path / "script.py"), str(tmp_path / "launcher")], env=PATHS)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "the last words\n"
    assert "the reason\n" in done.stderr
    assert "\x1e" not in done.stdout + done.stderr


@pytest.mark.parametrize("is_read", [True, False])
def test_a_failed_rank_is_followed_by_a_line_on_both_streams(is_read, tmp_path):
    job.create(tmp_path, 1)
    reads, writes = os.pipe()
    if not is_read:
        os.close(reads)
    shell = subprocess.Popen(
        ["sh", "-c", mpiexec._SHELL, "sh", "sh", "-c", "echo words; exit 7"],
        env={**os.environ, job.FOLDER: str(tmp_path), "PMI_RANK": "0"},
        stdout=writes,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(writes)
    try:
        assert shell.stderr.readline() == f"\x1e{tmp_path.name} err.0 \n".encode()
        if is_read:
            assert os.read(reads, 999) == f"words\n\x1e{tmp_path.name} out.0 \n".encode()
        assert shell.poll() is None  # its end would let the launcher end the job
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()


def test_a_line_for_the_supervisor_may_come_in_pieces(tmp_path, capfd):
    line = f"\x1e{tmp_path.name} out.0 \n".encode()
    reads, writes = os.pipe()
    with open(reads, "rb") as source:
        relay = streams.Relay(source, tmp_path)
        for piece in (b"words" + line[:1], line[1:5], line[5:] + b"more\x1e"):
            os.write(writes, piece)
            wait_until(lambda: not select.select([source], [], [], 0)[0])
        os.close(writes)
        relay.close([], 9.0)
    assert capfd.readouterr().out == "wordsmore\x1e"
    assert (tmp_path / "out.0").exists()


@pytest.fixture
def watched(tmp_path):
    """A supervisor whose one rank has failed, and whose launcher has written to stderr and goes on."""
    with subprocess.Popen(
        ["sh", "-c", "echo words >&2; read line"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        (tmp_path / "shell.0").write_text(f"host {os.getppid()} {os.getpid()} {process.pid}")
        (tmp_path / "status.0").write_text("1\n")
        select.select([process.stderr], [], [])
        watching = supervisor.Supervisor(tmp_path, 1, [], [], 60.0)
        watching._process = process
        yield watching
        process.kill()


def test_what_has_come_is_passed_on_when_nothing_else_will(watched, tmp_path, capfd):
    for stream in ("out", "err"):
        (tmp_path / f"{stream}.0").touch()
    watched._drain()
    assert capfd.readouterr().err == "words\n"


@pytest.mark.parametrize("why", ["it takes too long", "a second signal", "no launcher"])
def test_no_words_are_waited_for_any_more(why, watched, monkeypatch):
    monkeypatch.setattr(supervisor, "_DELIVERY_S", 0.1 if why == "it takes too long" else 1e9)
    if why == "a second signal":
        watched._received += [signal.SIGINT, signal.SIGINT]
    if why == "no launcher":
        watched._process.kill()
        watched._process.wait()
    watched._drain()
