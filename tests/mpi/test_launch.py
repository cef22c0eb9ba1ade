"""Start n ranks of this very command, and supervise them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import jobs
from helpers.ranks import HERE, mpiexec, run

from rank0rl.launch import FAILURE, WRONG_USE, fork, job, supervisor
from rank0rl.launch.hosts import Host
from rank0rl.launch.mpiexec import _SHELL, _rank_command

RECIPE = [sys.executable, str(HERE / "helpers/recipe.py")]


def recipe(*args, **kwargs):
    return run([*RECIPE, *args], env={"PYTHONPATH": str(HERE.parent)}, **kwargs)


def test_one_rank_is_the_child_itself():
    assert fork.mpi_fork(1) == "child"
    done = recipe("--nprocs", "1")
    assert (done.returncode, done.stdout) == (0, "rows 2 weights [0.0] ''\n")


def test_a_full_disk_during_a_job_is_no_wrong_use(monkeypatch, capsys):
    def relay(*_):
        raise OSError(28, "No space left on device")

    how = [(), {**os.environ}, [], 1.0]
    launcher = fork.Launcher(["true"], ["true"])
    monkeypatch.setattr(supervisor, "Relay", relay)
    assert fork._run_once(2, launcher, *how) == ([], FAILURE)
    assert re.search("cannot write .*: No space left", capsys.readouterr().err)
    launcher = fork.Launcher(["/no/mpiexec"], ["true"])
    assert fork._run_once(2, launcher, *how) == ([], WRONG_USE)
    assert "/no/mpiexec cannot be run: No such file" in capsys.readouterr().err


def test_the_recipe_on_three_ranks(tmp_path):
    done = recipe("--nprocs", "3", "--text", "a b 'c'", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    gathered, parent = done.stdout.splitlines()
    assert gathered == f"""rows 6 weights [12.0] {"a b 'c'"!r}"""
    assert parent == "parent [] []"  # the supervisor imports neither numpy, torch nor mpi4py


def test_a_failed_job_gives_its_exit_code_and_no_parent():
    done = recipe("--nprocs", "2", "--end", "code")
    assert done.returncode == 3
    assert "job failed with 3" in done.stdout
    assert "parent" not in done.stdout


def test_an_exception_on_one_rank_ends_the_job():
    done = recipe("--nprocs", "3", "--end", "raise")
    assert done.returncode == 1
    assert "rank 1 of 3, on " in done.stderr
    assert "KeyError: 'on purpose'" in done.stderr


def test_inside_a_job_nothing_is_started():
    done = run([mpiexec(), "-n", "2", *RECIPE], env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rows 4 weights [4.0] ''\n"


def test_another_number_than_the_launchers_is_an_error():
    command = [mpiexec(), "-n", "2", *RECIPE, "--nprocs", "4"]
    done = run(command, env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode != 0
    assert "got nprocs=4 in a job of 2" in done.stderr


def test_ranks_that_mpi_does_not_see_are_no_job():
    """If mpiexec and mpi4py belong to different MPIs, every process is rank 0 of 1."""
    code = "from rank0rl.mpi import comm; comm.world()"
    done = run([sys.executable, "-c", code], env={"OMPI_COMM_WORLD_SIZE": "2"})
    assert done.returncode == 1
    assert "MPI sees 1" in done.stderr


def test_a_start_of_mpi_that_hangs_is_ended_where_no_supervisor_sees_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time, rank0rl\n"
        "from rank0rl.launch import job\n"
        "rank0rl.mpi_fork(2, start_timeout=2)\n"
        "time.sleep(60 * job.world_rank())\n"  # the other rank begins MPI, and waits for this one
        "rank0rl.bcast(1)\n"
    )
    env = {"PYTHONPATH": str(HERE.parent)}
    done = run([mpiexec(), "-n", "2", sys.executable, script], 40, env=env)
    assert done.returncode not in (0, 124)
    assert "Timeout (0:00:02)!" in done.stderr


def test_two_signals_end_a_job_that_hangs():
    process, token = jobs.start(*RECIPE[1:], "--nprocs", "2", "--end", "hang")
    jobs.wait_for_ranks(token, 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.3)
    process.send_signal(signal.SIGTERM)
    out, err = jobs.end(process, token)
    assert process.returncode == 128 + signal.SIGTERM, out + err


def test_no_mpiexec_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as end:
        fork.mpi_fork(2)
    assert end.value.code == 2
    assert "pip install mpi4py mpich" in capsys.readouterr().err


def test_no_command_line_to_repeat():
    code = "import rank0rl; rank0rl.mpi_fork(2)"
    done = run([sys.executable, "-c", code])
    assert done.returncode == 2
    assert "put it into a script" in done.stderr


def test_no_ranks_are_one():
    assert fork.mpi_fork(0) == "child"


EARLY = """
import sys, rank0rl
if "parent" == rank0rl.mpi_fork(2): sys.exit()
from rank0rl.launch import job
if job.world_rank() == 1: raise KeyError("before MPI")
rank0rl.rank0_accum_batches({})
"""


def test_an_exception_before_the_first_collective_ends_the_job(tmp_path):
    """Rank 0 waits for rank 1 in MPI's own start; nobody there notices that rank 1 has gone."""
    (tmp_path / "early.py").write_text(EARLY)
    command = [sys.executable, str(tmp_path / "early.py")]
    done = run(command, env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 1
    assert "KeyError: 'before MPI'" in done.stderr


FAKES = {
    "slots": (
        "echo 'There are not enough slots available in the system to satisfy the 2' >&2; exit 1",
        "not enough slots available",
        "--mpiexec 'mpiexec --oversubscribe'",
    ),
    "root": (
        "echo ----- >&2; echo 'mpiexec has detected an attempt to run as root.' >&2; exit 1",
        "an attempt to run as root",
        "run as another user",
    ),
    "flag": (
        "echo 'mpiexec: Error: unknown option \"-n\"' >&2; exit 213",
        "unknown option",
        "-n N",
    ),
    "silent": ("exit 7", "it ended with code 7", "rank0rl doctor"),
    "no launcher": ("exit 0", "it ended with code 0", "rank0rl doctor"),
    "no ranks": (
        'shift 2; "$@" & "$@" & wait; exit 0',
        "does not tell its processes their rank",
        "pip install mpi4py mpich",
    ),
    "another MPI": (
        'shift 2; for r in 0 1; do OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$r "$@" & done; wait',
        "MPI sees 1",
        "pip install mpi4py mpich",
    ),
}


def run_through(body, tmp_path, max_restarts=0):
    """Run a script on two ranks, with a launcher that is a script of the shell."""
    launcher, script = tmp_path / "launcher", tmp_path / "script.py"
    launcher.write_text(f"#!/bin/sh\n{body}\n")
    launcher.chmod(0o755)
    fork = f"rank0rl.mpi_fork(2, mpiexec={str(launcher)!r}, max_restarts={max_restarts})"
    script.write_text(
        f"import rank0rl, sys\nif {fork} == 'parent': sys.exit()\nrank0rl.print0('one job')\n"
    )
    return run([sys.executable, str(script)], env={"PYTHONPATH": str(HERE.parent)})


@pytest.mark.parametrize("fake", FAKES)
def test_a_launcher_that_does_not_make_one_job_is_one_line(fake, tmp_path):
    body, said, remedy = FAKES[fake]
    done = run_through(body, tmp_path)
    unknown = "rank0rl doctor" in remedy  # another start may go well
    assert done.returncode == (1 if unknown else 2), done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert remedy in line
    assert "one job" not in done.stdout


FIRST = """if ! test -e {folder}/begun; then
    touch {folder}/begun
    echo '[mpiexec@here] control_cb: assert (!closed) failed' >&2
    exit 1
fi
exec {mpiexec} "$@"
"""


def test_a_launcher_that_loses_its_proxy_before_any_rank_has_begun_is_started_again(tmp_path):
    body = FIRST.format(folder=tmp_path, mpiexec=mpiexec())
    done = run_through(body, tmp_path, max_restarts=1)
    assert done.returncode == 0, done.stderr
    assert "did not start 2 ranks" in done.stderr
    assert "restart 1 of 1 in 1 s, from the beginning" in done.stderr
    assert "one job" in done.stdout


def test_a_launcher_of_ones_own(tmp_path):
    launcher = tmp_path / "my launcher"
    launcher.write_text(f'#!/bin/sh\nshift\nMINE=yes exec {mpiexec()} "$@"\n')
    launcher.chmod(0o755)
    own = f"'{launcher}' --my-switch"
    script = tmp_path / "script.py"
    script.write_text(
        "import os, rank0rl, sys\n"
        f"if rank0rl.mpi_fork(2, mpiexec={own!r}) == 'parent': sys.exit()\n"
        "rank0rl.print0(os.environ['MINE'], rank0rl.nworkers)\n"
    )
    done = run([sys.executable, str(script)], env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "yes 2\n"
    script.write_text("import rank0rl; rank0rl.mpi_fork(2, mpiexec='no-such-launcher -x')")
    done = run([sys.executable, str(script)], env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "'no-such-launcher'" in line


PLAIN = """
import os, sys, rank0rl
{before}
if rank0rl.mpi_fork(2, {options}) == "parent":
    sys.exit()
{after}
"""


def forked(tmp_path, options="", before="", after="", env=None, **kwargs):
    script = tmp_path / "script.py"
    script.write_text(PLAIN.format(options=options, before=before, after=after))
    return run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": str(HERE.parent), **(env or {})},
        **kwargs,
    )


def test_a_launcher_that_starts_nothing_is_not_waited_for(tmp_path):
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 600\n')
    launcher.chmod(0o755)
    done = forked(tmp_path, f"mpiexec={str(launcher)!r}, start_timeout=1", limit_s=60)
    assert done.returncode == 1
    assert (
        "rank 0 was not started by the launcher within 1 s; raise the start timeout if the launcher was waiting"
        in done.stderr
    )


def test_a_host_without_ranks_does_not_matter(tmp_path):
    done = forked(tmp_path, "hosts='localhost:2,no-such-host.invalid:8'", after="print('here')")
    assert (done.returncode, done.stdout) == (0, "here\n" * 2), done.stderr


def test_variables_of_the_user_keep_their_values(tmp_path):
    names = [*re.findall(r"\br0_(\w+)=", _SHELL), "host", "supervisor", "nprocs"]
    assert "rank" in names
    print_them = f"print(*[os.environ[name] for name in {names}], flush=True)"
    done = forked(tmp_path, after=print_them, env={name: f"my-{name}" for name in names})
    assert done.stdout.splitlines() == [" ".join(f"my-{name}" for name in names)] * 2, done.stderr


def test_a_restart_without_room_for_a_rank_is_none(monkeypatch, capsys):
    monkeypatch.setenv(job.GROUP, "4")
    monkeypatch.setattr(fork, "_run_once", lambda *_: (["b"], 1))
    assert fork._run_ranks(8, None, [Host("a", 2), Host("b", 8)], 3) == 1
    assert capsys.readouterr().err == "a:2 has no room for a rank: the job ends\n"


def test_a_stream_of_the_scripts_own_is_written_to(tmp_path):
    tee = (
        "class Tee:\n"
        "    def write(self, text): os.write(2, text.upper().encode())\n"
        "    def flush(self): pass\n"
        "if 'RANK0RL_JOB' not in os.environ: sys.stderr = sys.stdout = Tee()"
    )
    done = forked(tmp_path, before=tee, after="sys.stderr.write(f'said by {rank0rl.rank}\\n')")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == ["SAID BY 0", "SAID BY 1"]


def test_a_launcher_that_ends_before_its_ranks_has_not_ended_well(tmp_path):
    launcher = tmp_path / "launcher"
    until = 'until [ -e "$RANK0RL_JOB/rank.1" ]; do sleep 0.1; done'
    launcher.write_text(f'#!/bin/sh\n{mpiexec()} "$@" &\n{until}\n')
    launcher.chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text(
        "import rank0rl, sys, time\n"
        f"if rank0rl.mpi_fork(2, mpiexec={str(launcher)!r}) == 'parent': sys.exit()\n"
        "time.sleep(60)\n"
    )
    done = run([sys.executable, str(script)], env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the launcher ended with exit code 0 before its ranks\nthe job ends\n" in done.stderr


FORM = """
import json, os, sys
{early}
import rank0rl
if "parent" == rank0rl.mpi_fork(3):
    sys.exit()
if rank0rl.rank != 2:
    rank0rl.rank0_accum_batches({{}})
    sys.exit()
print(json.dumps([sys.argv[1:], os.getcwd(), sys.flags.optimize, sys.warnoptions, sys._xoptions,
                  __name__, rank0rl.nworkers]))
rank0rl.rank0_accum_batches({{}})
"""
FORMS = {
    "script": [],
    "flags": ["-O", "-W", "ignore", "-X", "utf8"],
    "module": ["-m"],
    "mpi4py first": [],
    "stale marker": [],
}


@pytest.mark.fast(2)
@pytest.mark.parametrize("form", FORMS)
def test_every_rank_runs_the_very_command(form, tmp_path):
    early = "from mpi4py import MPI" if form == "mpi4py first" else ""
    (tmp_path / "form.py").write_text(FORM.format(early=early))
    name = ["form"] if form == "module" else ["form.py"]
    words = ["a b", "*", "--x=$HOME", "'\"", ""]
    env = {"PYTHONPATH": str(HERE.parent)}
    if form == "stale marker":
        (tmp_path / "earlier").mkdir()
        (tmp_path / "earlier" / "begun").write_text("99999999 7")
        env |= {job.FOLDER: str(tmp_path / "earlier")}
    done = run([sys.executable, *FORMS[form], *name, *words], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    argv, cwd, optimize, warn, x, main, n = json.loads(done.stdout)
    assert (argv, cwd, main, n) == (words, str(tmp_path), "__main__", 3)
    flags = form == "flags"
    assert (optimize, warn, x) == ((1, ["ignore"], {"utf8": True}) if flags else (0, [], {}))


def test_a_notebook_is_refused(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(
        "import builtins, rank0rl\nbuiltins.__IPYTHON__ = True\nrank0rl.mpi_fork(2)\n"
    )
    for command, text in (([str(script)], None), (["-"], "import rank0rl; rank0rl.mpi_fork(2)")):
        done = subprocess.run(
            [sys.executable, *command],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )
        assert done.returncode == 2
        assert "put it into a script" in done.stderr


def test_ranks_are_bound_to_cores_only_if_asked(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, rank0rl, sys\n"
        "if rank0rl.mpi_fork(2, bind_to_core=len(sys.argv) > 1) == 'parent': sys.exit()\n"
        "os.write(1, f'{len(os.sched_getaffinity(0))}\\n'.encode())  # one write: no mixed lines\n"
    )
    for args, cores in ([[], len(os.sched_getaffinity(0))], [["bound"], 1]):
        done = run([sys.executable, str(script), *args], env={"PYTHONPATH": str(HERE.parent)})
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(cores)] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_rank_on_another_host_ends_with_the_launcher_there(tmp_path):
    """Also when the launcher there is killed, and can end nothing."""
    (tmp_path / "script.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(99)\n"
    )
    rank = _rank_command([str(tmp_path / "script.py")])
    code = "import subprocess, sys; subprocess.call(sys.argv[1:])"
    there = {**os.environ, "RANK0RL_JOB": str(tmp_path / "not-here"), "PMI_RANK": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *rank], env=there, stdout=subprocess.PIPE
    )
    rank_id = int(process.stdout.readline())
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while os.path.exists(f"/proc/{rank_id}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{rank_id}")
