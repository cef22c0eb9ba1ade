"""Ranks on several hosts: how they are named, and jobs on two that are namespaces of this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.jobs import wait_until
from helpers.ranks import HERE, LIMIT_S, environment, mpiexec, run
from helpers.runs import SMALL, curve, sha, table, train, wait_for_rows

from benchmarks import hosts as namespaces
from rank0rl import start
from rank0rl.launch import hosts, job
from rank0rl.launch.hosts import Host, SshSessions, count_ranks, read_hosts
from rank0rl.launch.mpiexec import _switches
from rank0rl.run.options import RunOptions

reason = namespaces.missing()
needs_hosts = [pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]
LONG = [*SMALL, "--total-steps", "3840", "--checkpoint-every", "5"]
HEATED = ["examples.heat:make", "--num-envs", "4", "--steps-per-batch", "80"]
HEATED += ["--minibatch-size", "40", "--total-steps", "160"]
SLOW = [
    "--algo",
    f"{HERE}/helpers/agents.py:SlowPPO",
]  # a tenth of a second an iteration, 60 of them


def test_hosts_are_read_in_either_syntax(tmp_path):
    listed = (Host("localhost", 8), Host("b", 2))
    file = tmp_path / "hosts"
    assert read_hosts("localhost:8,b:2", None) == listed
    for text in ("localhost:8\nb:2\n", "# of ours\n\nlocalhost slots=8 # here\nb slots = 2\n"):
        file.write_text(text)
        assert read_hosts(None, file) == listed
    assert read_hosts("localhost,b,b", None) == (Host("localhost", 1), Host("b", 2))
    several = "localhost,192.0.2.7:2,gpu-1.example.org:3,my_host"
    assert (
        hosts.listed(read_hosts(several, None))
        == "localhost:1,192.0.2.7:2,gpu-1.example.org:3,my_host:1"
    )
    assert read_hosts(None, None) == ()


@pytest.mark.parametrize(
    ("hosts", "file", "said"),
    [
        ("no-such-host:2,localhost:2", None, "the first host must be"),
        ("localhost:x", None, "got 'localhost:x'"),
        ("localhost:0", None, "got 'localhost:0'"),
        ("localhost,-Fevil:1", None, "got '-Fevil:1'"),
        ("localhost,b.-oProxyCommand=x", None, "got 'b.-oProxyCommand=x'"),
        ("localhost,b-", None, "got 'b-'"),
        ("localhost,me@b", None, "got 'me@b'"),
        ("localhost,[::1]:2", None, "IPv4.* got '\\[::1\\]:2'"),
        (None, "localhost\n-Fevil slots=1", "got '-Fevil slots=1'"),
        ("", None, "got none in --hosts"),
        (None, "localhost max_slots=3", "got 'localhost max_slots=3'"),
        (None, "# none", "expected at least one host"),
        ("localhost", "localhost", "leave one of them out"),
    ],
)
def test_hosts_that_are_wrong(hosts, file, said, tmp_path):
    if file is not None:
        (tmp_path / "hosts").write_text(file)
    with pytest.raises(ValueError, match=said):
        read_hosts(hosts, None if file is None else str(tmp_path / "hosts"))


def test_a_host_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read the host file"):
        read_hosts(None, str(tmp_path / "none"))


def test_ranks_are_as_many_as_slots_or_fewer():
    listed = (Host("a", 8), Host("b", 2))
    assert count_ranks(None, ()) == 1
    assert count_ranks(3, ()) == 3
    assert count_ranks(None, listed) == 10
    assert count_ranks(9, listed) == 9
    with pytest.raises(ValueError, match="got nprocs=11 and 10 slots"):
        count_ranks(11, listed)


def test_this_host_is_known_by_any_of_its_addresses():
    assert read_hosts("localhost", None) == (Host("localhost", 1),)
    assert read_hosts("127.0.0.1", None) == (Host("127.0.0.1", 1),)
    with pytest.raises(ValueError, match="the first host must be this one"):
        read_hosts("192.0.2.1", None)  # kept for documentation


def test_each_launcher_is_told_in_its_own_words():
    listed = (Host("a", 8), Host("b", 2))
    env = {"PATH": "x", "BASH_FUNC_f%%": "x", "OMPI_MCA_btl": "x", "RANK0RL_JOB": "x"}
    assert _switches("MPICH", listed, env) == ["-hosts", "a:8,b:2"]
    words = " ".join(_switches("Open MPI", listed, env))
    assert words == "--host a:8,b:2 --map-by slot:oversubscribe -x PATH -x RANK0RL_JOB"
    with pytest.raises(ValueError, match="MPICH or Open MPI: got Intel MPI"):
        _switches("Intel MPI", listed, env)


def fake_ssh(folder, monkeypatch, ends):
    """An ssh that takes down its words; the session with host two ends with these commands of a shell."""
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/words\ncase "$*" in *two*) {ends};; esac\nexec cat\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")


def test_a_lost_host_is_left_out_when_the_run_goes_on(tmp_path, monkeypatch):
    fake_ssh(tmp_path, monkeypatch, "echo No route >&2; exit 255")
    job.create(tmp_path, 6)
    monkeypatch.setenv(job.FOLDER, str(tmp_path))
    job.my_folder.cache_clear()
    options = RunOptions(hosts="one:1,two:2,three:3", pass_env="A,B_*")
    going_on = SimpleNamespace(options=options, folder=Path("runs/mine"))

    def where():
        return start._resume_command(going_on, 6, "").partition(" --resume runs/mine ")[2]

    try:
        with SshSessions([Host("one", 1), Host("two", 2), Host("three", 3)], tmp_path) as contact:
            assert where() == "--nprocs 6 --hosts one:1,two:2,three:3 --pass-env 'A,B_*'"
            assert contact.lost(LIMIT_S) == {"two": "No route"}
            wait_until(lambda: len((tmp_path / "words").read_text().splitlines()) == 2)
        monkeypatch.setattr(hosts, "_is_here", lambda _: True)
        assert where() == "--nprocs 4 --hosts one:1,three:3 --pass-env 'A,B_*'"
        (tmp_path / "hosts").unlink()
        monkeypatch.setenv(
            job.HOSTS, "one:1"
        )  # as after a restart, of which each is a job of its own
        assert where() == "--hosts one:1 --pass-env 'A,B_*'"
        # An environment needs two ranks of one host: those of the start are named, one of which may come back.
        going_on.options = RunOptions(hosts="one:1,two:2", ranks_per_env=2)
        assert where() == "--nprocs 6 --hosts one:1,two:2 --ranks-per-env 2"
    finally:
        job.my_folder.cache_clear()
    words = (tmp_path / "words").read_text().splitlines()
    assert sorted(line.partition(" -- ")[2] for line in words) == ["three cat", "two cat"]


def test_a_wrong_host_is_one_line():
    done = run([sys.executable, "train.py", "CartPole", "--hosts", "no-such-host:2"])
    assert done.returncode == 2
    assert done.stderr.startswith("error: the first host must be")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_ranks_on_this_host_alone_by_name(tmp_path):
    args = [*SMALL, "--total-steps", "128"]
    train(tmp_path / "one", *args)
    train(tmp_path / "two", *args, "--hosts", "localhost:2")
    assert sha(tmp_path / "two") == sha(tmp_path / "one")
    assert table(tmp_path / "two")


@pytest.fixture
def two(tmp_path):
    with namespaces.hosts(tmp_path, "one", "two") as made:
        yield made
        time.sleep(1)  # a proxy may take its time to end its ranks
        for host in made:
            left = host.left() if host.lives() else []
            # Of ranks that are killed where no supervisor is, MPICH's shared memory may stay.
            known = re.compile(r".*/run" if host is made[0] else r".*/mpich_shm_\w+")
            assert [what for what in left if not known.fullmatch(what)] == []


def command(host, folder, *args):
    """train.py on a host, and where this machine sees its run."""
    words = [sys.executable, "train.py", *args, "--run-dir", str(folder / "local" / "run")]
    return host.on(words), host.path(folder / "local" / "run")


def begin(host, folder, *args):
    """The same, begun."""
    words, where = command(host, folder, *args)
    process = subprocess.Popen(
        words,
        cwd=HERE.parent,
        env=environment(host.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_rows(process, where, 8)
    except AssertionError:
        process.kill()
        raise AssertionError(process.communicate()) from None
    return process, where


class TestTwoHosts:
    pytestmark = needs_hosts

    def test_the_curve_is_that_of_one_machine_and_the_files_are_on_the_first(self, two, tmp_path):
        args = [*SMALL, "--total-steps", "640"]
        train(tmp_path / "alone", *args)
        words, where = command(two[0], tmp_path, *args, "--hosts", "one:2,two:2")
        done = run(words, env=two[0].env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        assert curve(where) == curve(tmp_path / "alone")
        assert sha(where) == sha(tmp_path / "alone")
        assert "with ppo; 4 ranks; " in done.stdout
        assert list(two[1].path(tmp_path / "local").iterdir()) == []

    def test_groups_of_processes_are_on_one_host_each(self, two, tmp_path):
        train(tmp_path / "alone", *HEATED)
        groups = ["--hosts", "one:2,two:2", "--ranks-per-env", "2"]
        words, where = command(two[0], tmp_path, *HEATED, *groups)
        done = run(words, env=two[0].env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sha(where) == sha(tmp_path / "alone")
        words = [sys.executable, "-m", "rank0rl", "doctor", *groups]
        done = run(two[0].on(words), env=two[0].env)
        assert "2 of 2 processes, on one, two" in done.stdout, done.stdout + done.stderr
        apart = run(two[0].on([*words[:-3], "one:1,two:1", *words[-2:]]), env=two[0].env)
        assert "one is on one and two: give each host a multiple of 2 slots" in apart.stdout

    def test_a_host_file_and_fewer_ranks_than_slots(self, two, tmp_path):
        (tmp_path / "hosts.txt").write_text("one slots=1\ntwo:4\n")
        file = ["--hostfile", str(tmp_path / "hosts.txt")]
        script = tmp_path / "script.py"
        script.write_text(
            "import os, platform, rank0rl, sys\n"
            f"how = dict(hostfile={file[1]!r}, pass_env='OF_MINE')\n"
            "if rank0rl.mpi_fork(3, **how) == 'parent': sys.exit()\n"
            "from rank0rl.mpi import comm\n"
            "mine = [platform.node(), os.environ['OF_MINE'], os.environ.get('WANDB_API_KEY')]\n"
            "comm.print0(comm.allgather_obj(mine, 'where'))\n"
        )
        mine = {"OF_MINE": "a b;'c'", "WANDB_API_KEY": "secret"}
        env = {**two[0].env, **mine, "PYTHONPATH": str(HERE.parent)}
        done = run(two[0].on([sys.executable, str(script)]), env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        keys = {"one": "secret", "two": None}
        expected = [[name, "a b;'c'", keys[name]] for name in ("one", "two", "two")]
        assert done.stdout == f"{expected}\n"

    def test_an_exception_on_the_other_host_is_told_once(self, two, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import rank0rl, sys\n"
            "if rank0rl.mpi_fork(hosts='one:1,two:2') == 'parent': sys.exit()\n"
            "rank0rl.rank0_accum_batches({})\n"
            "if rank0rl.rank == 2: raise KeyError('on purpose')\n"
            "rank0rl.rank0_accum_batches({})\n"
        )
        env = {**two[0].env, "PYTHONPATH": str(HERE.parent)}
        done = run(two[0].on([sys.executable, str(script)]), env=env)
        assert done.returncode == 1, done.stdout + done.stderr
        assert done.stderr.count("KeyError: 'on purpose'") == 1
        assert done.stderr.count("rank 2 of 3, on two, failed") == 1
        assert "was ended by signal" not in done.stderr  # as ranks are that the launcher ends

    @pytest.mark.parametrize("how", ["dies", "falls_silent"])
    def test_a_host_that_goes_ends_the_job_with_its_name(self, two, how, tmp_path):
        process, _ = begin(two[0], tmp_path, *LONG, *SLOW, "--hosts", "one:2,two:2")
        getattr(two[1], how)()
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1, err
        assert err.count("no connection to host two: ") == 1
        assert two[0].ranks() == []
        if (
            how == "falls_silent"
        ):  # nothing can tell its ranks, and the launcher leaves rank 0 the time to save
            assert "--nprocs 2 --hosts one:2\n" in out
            two[1].dies()

    @pytest.mark.parametrize("how", ["dies", "falls_silent"])
    def test_a_restart_goes_on_without_it(self, two, how, tmp_path):
        train(tmp_path / "alone", *LONG)
        args = [*LONG, *SLOW, "--hosts", "one:2,two:2", "--max-restarts", "1"]
        process, where = begin(two[0], tmp_path, *args)
        getattr(two[1], how)()
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert "restart 1 of 1 in 1 s without two: 2 ranks, from the last checkpoint" in err
        assert curve(where) == curve(tmp_path / "alone")
        assert sha(where) == sha(tmp_path / "alone")
        if how == "falls_silent":
            two[1].dies()

    def test_a_signal_ends_the_ranks_of_both(self, two, tmp_path):
        process, _ = begin(two[0], tmp_path, *LONG, *SLOW, "--hosts", "one:2,two:2")
        assert len(two[1].ranks()) >= 2
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGINT)  # the supervisor, which nsenter has started
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, out + err
        assert "--resume" in out
        assert "--nprocs 4 --hosts one:2,two:2\n" in out

    def test_a_host_that_cannot_be_reached(self, two, tmp_path):
        two[1].dies()
        words, _ = command(two[0], tmp_path, *LONG, "--hosts", "one:2,two:2")
        done = run(words, env=two[0].env)
        assert done.returncode == 1
        assert done.stderr.count("no connection to host two: ssh: connect to host two") == 1

    def test_a_host_without_its_mpi_is_one_sentence_before_the_launchers(self, two, tmp_path):
        folder = Path(mpiexec()).parent
        [agent] = [
            file for name in ("hydra_pmi_proxy", "prted") if (file := folder / name).exists()
        ]
        subprocess.run(two[1].on(["mount", "--bind", "/dev/null", str(agent)]), check=True)
        words, _ = command(two[0], tmp_path, *LONG, "--hosts", "one:2,two:2")
        done = run(words, env=two[0].env)
        assert done.returncode == 1, done.stderr
        said = done.stderr.splitlines()[0]  # Open MPI starts no rank at all, and then says less
        assert "before rank 2, rank 3 began" in said or "did not start 4 ranks" in said
        assert str(agent) in done.stderr

    def test_the_doctor_looks_into_the_other_host(self, two, tmp_path):
        words = [sys.executable, "-m", "rank0rl", "doctor", "--hosts"]
        done = run(two[0].on([*words, "one:2,two:2"]), env=two[0].env)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = {line[8:23].strip(): line for line in done.stdout.splitlines()}
        assert "round trip by ssh" in lines["two"]
        assert "same bits, " in lines["two"]
        assert "GB/s" in lines["here and two"]
        two[1].dies()
        done = run(two[0].on([*words, "one:2,two:2"]), env=two[0].env)
        assert done.returncode == 1
        assert "NOT OK  two" in done.stdout
        assert "`ssh two`" in done.stdout
