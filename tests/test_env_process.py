"""Environments in processes of their own: the same data, and failures that the rank survives."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import envs, faults
from helpers.jobs import wait_until
from helpers.ranks import HERE, LIMIT_S
from helpers.runs import train_here

from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.envs import process as env_process
from rank0rl.envs.make import make, own_module
from rank0rl.envs.process import EnvProcess, EnvProcessError
from rank0rl.envs.spaces import name_of
from rank0rl.evaluation import Evaluation
from rank0rl.launch import held, processes
from rank0rl.mpi import weights
from rank0rl.run.hooks import Record
from rank0rl.run.options import RunOptions
from rank0rl.run.shares import env_maker

FAR_S = 60.0  # a limit that nothing here comes near


def answers(env):
    """Return all that an environment answers to the same actions in two episodes."""
    env.action_space.seed(0)
    found = []
    for seed in (5, 6):
        found.append(env.reset(seed=seed))
        for _ in range(20):
            found.append(env.step(env.action_space.sample(found[-1][-1].get("action_mask"))))
    env.close()
    return [(*rest, info.get("action_mask")) for *rest, info in found]  # nobody reads more of infos


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("CartPole-v1", {}),
        pytest.param("Walker2d-v5", {}, marks=pytest.mark.slow),
        ("helpers.envs:Spaced-v0", {"obs": "image"}),
        ("helpers.envs:Spaced-v0", {"obs": "dict", "act": "multi", "masked": True}),
    ],
)
def test_data_are_the_same_in_processes(env_id, kwargs):
    local = partial(make, env_id, **kwargs)
    got, expected = answers(EnvProcess(local)), answers(local())
    np.testing.assert_equal(got, expected)
    assert [type(each) for row in got for each in row] == [
        type(each) for row in expected for each in row
    ]


def test_spaces_and_the_name_are_the_environments_own():
    for local, name in (
        (partial(make, "CartPole-v1"), "CartPole-v1"),
        (envs.Count, "Count"),
    ):
        env = EnvProcess(local)
        assert name_of(env) == name
        assert env.observation_space == local().observation_space
        env.close()
        env.close()  # twice is no error


def test_an_observation_is_not_overwritten_by_the_next():
    env = EnvProcess(envs.Count)
    first = env.reset(seed=3)[0]
    env.step(0)
    assert first.tolist() == [3, 0]
    env.close()


ENDS = [
    ("exit", "exited with 3"),
    ("sys.exit", "exited with 4"),
    ("segfault", "SIGSEGV"),
    ("kill", "SIGKILL"),
]


@pytest.mark.parametrize(("how", "said"), ENDS)
def test_the_end_of_a_process_is_an_exception_and_the_next_process_works(how, said):
    env = EnvProcess(partial(faults.FailsAt, how))
    env.reset(seed=1)
    env.step(0)
    with pytest.raises(EnvProcessError, match=f"FailsAt .*{said} in step") as caught:
        env.step(0)
    assert ("in crash" in "".join(getattr(caught.value, "__notes__", ()))) == (how == "segfault")
    with pytest.raises(EnvProcessError, match="has ended"):
        env.step(0)
    env.close()
    again = EnvProcess(envs.Count)
    assert again.reset(seed=3)[0].tolist() == [3, 0]
    again.close()


@pytest.mark.parametrize(("step", "what"), [(2, "step"), (0, "reset"), (-2, "close")])
def test_a_process_that_hangs_is_killed(step, what):
    env = EnvProcess(partial(faults.FailsAt, "hang", step), timeout_s=0.2)
    with pytest.raises(EnvProcessError, match=rf"FailsAt .*{what} within 0\.2 s.*--step-timeout"):
        env.reset(seed=1)
        env.step(0)
        env.step(0) if step > 0 else env.close()
    assert not Path(f"/proc/{env._process_id}").exists()


def test_a_process_that_hangs_while_it_makes_the_environment_is_killed():
    hangs = partial(faults.FailsAt, "hang", -1)
    with pytest.raises(EnvProcessError, match=r"to make within 0\.2 s.*--start-timeout"):
        EnvProcess(hangs, timeout_s=FAR_S, start_timeout_s=0.2)


def test_a_step_in_time_is_not_disturbed_by_a_timeout():
    env = EnvProcess(envs.Count, timeout_s=FAR_S)
    env.reset(seed=3)
    assert env.step(0)[0].tolist() == [3, 1]
    env.close()


@pytest.mark.parametrize(
    ("how", "name", "text", "same_class"),
    [
        ("raise", "ZeroDivisionError", "on purpose", True),
        ("raise what cannot be pickled", "TwoArgumentsError", "one and two", False),
        ("raise a local class", "HereError", "on purpose", False),
    ],
)
def test_an_exception_comes_with_its_name_text_and_traceback(how, name, text, same_class):
    env = EnvProcess(partial(faults.FailsAt, how))
    env.reset(seed=1)
    env.step(0)
    for _ in range(2):  # the process lives on
        with pytest.raises(Exception, match=text) as caught:
            env.step(0)
        assert type(caught.value).__name__ == name
        assert isinstance(caught.value, ZeroDivisionError) == same_class
        assert "in fail" in caught.value.__notes__[0]
    assert env.reset(seed=3)[0].tolist() == [3, 0]
    env.close()


def test_an_error_in_making_or_closing_leaves_no_process():
    with pytest.raises(ZeroDivisionError):
        EnvProcess(partial(faults.FailsAt, "raise", -1))
    with pytest.raises(EnvProcessError, match="exited with 3 in make"):
        EnvProcess(partial(faults.FailsAt, "exit", -1))
    env = EnvProcess(partial(faults.FailsAt, "raise", -2))
    with pytest.raises(ZeroDivisionError):
        env.close()
    assert children() == []


def children():
    """Return the processes that the fork server has, zombies included."""
    server = env_process._server()._process.pid
    return Path(f"/proc/{server}/task/{server}/children").read_text().split()


@pytest.mark.parametrize(
    "answer",
    [
        (np.zeros(2), 1.0, False, {}),
        (np.zeros(2, np.float32), "1", "no", False, {"b": 1}),
        (np.zeros(1), 1.0, False, False, None),
        (300.5, 1j, False, False, {}),
        None,
    ],
)
def test_a_wrong_answer_arrives_as_it_is(answer):
    """The rank refuses it with the same words as without processes."""
    env = EnvProcess(partial(faults.Answers, answer))
    env.reset(seed=1)
    env.step(0)
    got = env.step(0)
    if answer is not None and len(answer) == 5 and answer[4]:
        answer = (*answer[:4], {})  # nobody reads more of it than the mask
    assert pickle.dumps(got) == pickle.dumps(answer)
    env.close()


def test_a_signal_in_a_step_leaves_no_answer_behind():
    """Rank 0 raises in its handler, wherever it is: the answer must not be taken for the next one."""
    env = EnvProcess(partial(faults.FailsAt, "hang"))
    env.reset(seed=1)
    env.step(0)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            env.step(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    env.close()
    assert children() == []


def test_what_the_environment_started_is_killed_with_it():
    env = EnvProcess(faults.Starts)
    started = int(env.reset(seed=1)[1]["action_mask"])
    env.close()
    wait_until(lambda: not lives(started))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_fork_server_is_started_again(signum, monkeypatch):
    env = EnvProcess(envs.Count)
    env_process._server()._process.send_signal(signum)
    if signum == signal.SIGKILL:
        with pytest.raises(EnvProcessError, match="fork server"):
            wait_until(lambda: env.reset(seed=3) is None)
    with monkeypatch.context() as patch:
        patch.setattr(env_process, "_END_S", 0.1)
        env.close()
        again = EnvProcess(envs.Count)  # a start may take longer
    assert again.reset(seed=3)[0].tolist() == [3, 0]
    again.close()
    if signum == signal.SIGSTOP:
        env_process._server()._process.send_signal(signum)
        with pytest.raises(EnvProcessError, match=r"fork server gave no answer within 0\.1 s"):
            EnvProcess(envs.Count, start_timeout_s=0.1)


def test_signals_that_are_for_ranks_end_no_environment():
    env = EnvProcess(envs.Count)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        env_process._server()._process.send_signal(signum)
        os.kill(env._process_id, signum)
    assert env.reset(seed=3)[0].tolist() == [3, 0]
    env.close()


def test_a_process_that_has_ended_may_refuse_signals(monkeypatch):
    def refuse(*_):
        raise PermissionError  # macOS

    process = subprocess.Popen(["false"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(os, "killpg", refuse)
    monkeypatch.setattr(os, "kill", refuse)
    assert env_process._kill(process.pid) == 1


def test_a_run_and_its_evaluations_have_the_same_data_in_processes(tmp_path_factory):
    found = []
    for apart in (False, True):
        options = {
            "env_id": "CartPole-v1",
            "num_envs": 2,
            "steps_per_batch": 64,
            "total_steps": 128,
            "env_processes": apart,
            "step_timeout": FAR_S if apart else None,
        }
        agent, _ = train_here(PPO, PPOOptions(), tmp_path_factory.mktemp("run"), **options)
        options = RunOptions(**options, eval_every=1, eval_episodes=2)
        evaluation = Evaluation(options, 1)
        made = env_maker(options)()
        assert isinstance(made, EnvProcess) == apart
        made.close()
        found.append([weights.sha256_each(weights.named_tensors(agent.modules()))])
        evaluation.after(agent, 1, Record())
        found[-1].append(evaluation.columns())
        evaluation.close()
    np.testing.assert_equal(*found)


def test_a_timeout_needs_processes():
    with pytest.raises(ValueError, match="--env-processes"):
        RunOptions(step_timeout=1.0).check(1)


def test_only_gymnasiums_own_modules_are_imported_by_the_server():
    assert own_module("CartPole-v1") == "gymnasium.envs.classic_control.cartpole"
    assert own_module("helpers.envs:Count-v0") == "gymnasium"
    assert own_module("Count-v0") == "gymnasium"
    assert own_module("helpers.envs:make_count") == "gymnasium"


RANK = """
import sys
from helpers import faults
from functools import partial
from rank0rl.envs.process import EnvProcess
every = [EnvProcess(partial(faults.FailsAt, how)) for how in ("", "hang")]
for env in every:
    env.reset(seed=0)
    env.step(0)
print("ready", flush=True)
if sys.argv[1] == "exit":
    sys.exit()  # no environment is closed
every[1].step(0)
"""


@pytest.mark.parametrize("how", ["kill", pytest.param("exit", marks=pytest.mark.slow)])
def test_processes_end_with_their_rank_and_belong_to_its_job(how, tmp_path):
    env = {
        **os.environ,
        "RANK0RL_JOB": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    }
    script = tmp_path / "script.py"  # a process that imported it again would start more processes
    script.write_text(RANK)
    command = [sys.executable, script, how]
    rank = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert rank.stdout.readline() == "ready\n"
    if how == "kill":
        found = processes.survivors(tmp_path)
        assert len(found) == 4, "the rank, its fork server and two environments"
        for process_id in found:
            maps = Path(f"/proc/{process_id}/maps").read_text()
            assert "/dev/shm" not in maps, "something could be left there"
            assert "torch" not in maps, "starting would take seconds"
            assert "libmpi" not in maps
        rank.kill()
    assert rank.wait(LIMIT_S) == (0 if how == "exit" else -signal.SIGKILL)
    wait_until(lambda: processes.survivors(tmp_path) == [])


SERVER = """
import os
import signal
import sys
from rank0rl.envs import process
from rank0rl.launch import tree

def kill_below():
    os.getppid = lambda: 1
    os.kill(os.getpid(), signal.SIGUSR2)
    print("ended what is below")

tree.kill_below = kill_below
process._serve(int(sys.argv[1]), os.getppid())
"""


def test_a_signal_of_the_ranks_end_does_not_cut_off_what_follows_it():
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    fds = [theirs.fileno()]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdout=pipe, text=True, pass_fds=fds, env=env)
    theirs.close()
    ours.close()  # the server sees this end before the signal comes
    assert server.communicate(timeout=LIMIT_S)[0] == "ended what is below\n"
    assert server.returncode == 0


def lives(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Stop(Exception):
    """What a signal raises."""


def test_signals_cut_no_message_in_two():
    """A signal at each of 400 instants of a step; then the environment still answers, and closes."""
    rng = np.random.default_rng(0)
    env = EnvProcess(partial(envs.Count, length=10**9), 20.0)

    def stop(*_):
        held.interrupt(Stop())

    reader, writer = os.pipe()

    def send():
        with open(reader) as pauses:
            for after_s in pauses:
                time.sleep(float(after_s))
                signal.raise_signal(signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    gc.collect()
    gc.disable()  # Python drops what a handler raises in the `__del__` of what other tests have left
    before = signal.signal(signal.SIGINT, stop)
    try:
        env.reset(seed=3)
        for after_s in rng.uniform(1e-5, 1e-3, 400):
            with contextlib.suppress(Stop):
                os.write(writer, f"{after_s}\n".encode())
                while True:
                    env.step(np.zeros(1))
                    env.rank0rl_begin_step(np.zeros(1))
                    env.step(np.zeros(1))
        assert len(env.reset(seed=3)) == 2  # the answer to this request, and not to one before
        assert [env.step(np.zeros(1))[0][1] for _ in range(2)] == [1, 2]
    finally:
        os.close(writer)
        signal.signal(signal.SIGINT, before)
        gc.enable()
        env.close()
