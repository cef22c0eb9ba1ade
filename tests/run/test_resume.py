"""Stopped and resumed is the run that was never stopped."""

import json
import signal
import subprocess
import sys

import pytest
from helpers import forks
from helpers.ranks import HERE, run
from helpers.runs import SMALL, curve, interrupt, resume, sha, table, train, wait_for_rows

from rank0rl.run import checkpoint

SLOW = ["--algo", f"{HERE}/helpers/agents.py:SlowPPO"]
SIZES = {  # 20 iterations
    "steps": ["--steps-per-batch", "64", "--total-steps", "1280"],
    "episodes": ["--episodes-per-batch", "4", "--num-episodes", "80"],
}
CASES = [
    pytest.param(env, mode, marks=[] if (env, mode) == ("CartPole", "steps") else pytest.mark.slow)
    for env in ("CartPole", "Walker2d")
    for mode in SIZES
]


def arguments(env, mode):
    config = str(HERE.parent / "configs" / "ppo.toml")  # not the one of an agent's file or an env
    return [env, "--config", config, "--num-envs", "4", "--minibatch-size", "32", *SIZES[mode]]


def assert_same(parts, whole):
    assert curve(parts) == curve(whole)  # no gap, no repeated row
    assert len(curve(parts)) == 20
    seconds = [float(row["seconds"]) for row in table(parts)]
    assert seconds == sorted(seconds)
    assert sha(parts) == sha(whole)


@pytest.mark.parametrize(
    ("env", "mode"),
    [pytest.param(*case.values, marks=pytest.mark.slow) for case in CASES],
)
def test_stopped_early_on_one_rank_and_resumed_on_three(env, mode, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, *arguments(env, mode), nprocs=2)
    done = train(parts, *arguments(env, mode), "--stop-after-iterations", "10")
    assert (
        "stopped after iteration 10, as asked; go on with: python train.py --resume" in done.stdout
    )
    assert json.loads((parts / "summary.json").read_text())["iterations"] == 10
    resume(parts, nprocs=3)
    assert_same(parts, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("env", "mode"), CASES)
def test_killed_then_ended_in_mid_update(env, mode, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, *arguments(env, mode))
    command = [*arguments(env, mode), *SLOW, "--run-dir", str(parts), "--checkpoint-every", "3"]
    process = subprocess.Popen([sys.executable, "train.py", *command], cwd=HERE.parent)
    wait_for_rows(process, parts, 7)
    process.kill()
    process.wait()
    assert len(table(parts)) >= 7
    with (parts / "progress.csv").open("a") as file:
        file.write("1")  # a row that was cut short
    monkeypatch.setenv("END_AT", "0.7")
    done = resume(parts, nprocs=3, expect=128 + signal.SIGTERM)
    assert "SIGTERM: saved iteration" in done.stdout
    iterations = json.loads((parts / "summary.json").read_text())["iterations"]
    assert iterations == 14
    monkeypatch.delenv("END_AT")
    resume(parts, nprocs=2)
    assert_same(parts, whole)


@pytest.mark.slow
def test_killed_before_the_first_periodic_checkpoint_with_another_agent(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = ["CartPole", "--algo", "reinforce", "--num-envs", "4", *SIZES["steps"]]
    train(whole, *args)
    train(parts, *args, "--stop-after-iterations", "5", "--checkpoint-every", "2")
    checkpoint.latest(parts).unlink()  # as if killed between the row and the checkpoint
    resume(parts, "--stop-after-iterations", "6", nprocs=2)
    assert curve(parts) == curve(whole)[:6]
    command = [*args, "--checkpoint-every", "1000", "--run-dir", str(tmp_path / "early")]
    process = subprocess.Popen([sys.executable, "train.py", *command], cwd=HERE.parent)
    wait_for_rows(process, tmp_path / "early", 1)
    process.kill()
    process.wait()
    resume(tmp_path / "early")
    assert_same(tmp_path / "early", whole)


def test_nothing_is_lost_by_a_signal_between_boundary_and_row(tmp_path):
    agent = tmp_path / "signals.py"
    agent.write_text(
        "import os, signal\n"
        "from rank0rl.algos.ppo import PPO\n"
        "class Signals(PPO):\n"
        "    calls = 0\n"
        "    def state(self):\n"
        "        type(self).calls += 1\n"
        "        if self.calls == 8 and os.environ.get('SIGNAL'):\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return super().state()\n"
    )
    args = [*SMALL, "--total-steps", "640", "--algo", f"{agent}:Signals"]
    train(tmp_path / "whole", *args)
    command = [sys.executable, "train.py", *args, "--run-dir", str(tmp_path / "r")]
    done = run(command, env={"SIGNAL": "1"})
    assert done.returncode == 128 + signal.SIGTERM
    assert "saved iteration 5;" in done.stdout
    assert len(table(tmp_path / "r")) == 5
    resume(tmp_path / "r")
    assert curve(tmp_path / "r") == curve(tmp_path / "whole")


def test_a_row_that_cannot_be_written_is_no_boundary(tmp_path):
    agent = tmp_path / "names.py"
    agent.write_text(
        "from pathlib import Path\n"
        "from rank0rl.algos.ppo import PPO\n"
        "class Names(PPO):\n"
        "    def update(self, *args):\n"
        "        metrics = super().update(*args)\n"
        "        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        if self.calls == 5 and not Path(__file__ + '.once').exists():\n"
        "            Path(__file__ + '.once').touch()\n"
        "            metrics |= {f'loss of {i}': 1.0 for i in range(1000)}\n"
        "        return metrics\n"
    )
    args = [*SMALL, "--total-steps", "640", "--algo", f"{agent}:Names"]
    failed = train(tmp_path / "r", *args, expect=1)
    assert "got 'loss of 0' too; give a metric the same name in every iteration" in failed.stderr
    assert "saved iteration 4;" in failed.stdout
    resume(tmp_path / "r")
    assert [int(row["iteration"]) for row in table(tmp_path / "r")] == list(range(1, 11))


@pytest.mark.slow
def test_a_metric_may_be_missing_and_come_late(tmp_path):
    agent = tmp_path / "late.py"
    agent.write_text(
        "from rank0rl.algos.ppo import PPO\n"
        "class Late(PPO):\n"
        "    def update(self, batch, rng, progress):\n"
        "        metrics = super().update(batch, rng, progress)\n"
        "        if round(progress * 6) % 3 == 2:\n"
        "            metrics['late'] = progress\n"
        "        return metrics\n"
    )
    args = [*SMALL, "--total-steps", "384", "--algo", f"{agent}:Late", "--checkpoint-every", "2"]
    train(tmp_path / "whole", *args)
    rows = table(tmp_path / "whole")
    assert [bool(row["late"]) for row in rows] == [False, False, True, False, False, True]
    train(tmp_path / "r", *args, "--stop-after-iterations", "4", nprocs=2)
    (tmp_path / "r" / "checkpoints" / "00000004.pt").unlink()
    resume(tmp_path / "r")  # from 2, when there was no such column
    assert curve(tmp_path / "r") == curve(tmp_path / "whole")
    done = forks.run("-m", "rank0rl", "verify", str(tmp_path / "r"), "--trust")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_settings_come_from_the_checkpoint_none_included(tmp_path):
    agent = tmp_path / "optional.py"
    agent.write_text(
        "from dataclasses import dataclass\n"
        "from rank0rl.algos.ppo import PPO, PPOOptions\n"
        "@dataclass(frozen=True)\n"
        "class Options(PPOOptions):\n"
        "    target_kl: float | None = 1e-9\n"
        "class Optional(PPO):\n"
        "    Options = Options\n"
    )
    args = [*SMALL, "--total-steps", "640", "--algo", f"{agent}:Optional", "--target-kl", "None"]
    train(tmp_path / "whole", *args)
    train(tmp_path / "r", *args, "--stop-after-iterations", "4")
    toml = tmp_path / "r" / "config.toml"
    assert 'lr = "linear:5e-4:0"' in toml.read_text()
    toml.write_text(toml.read_text().replace('lr = "linear:5e-4:0"', "lr = 0.1"))
    resume(tmp_path / "r")
    assert curve(tmp_path / "r") == curve(tmp_path / "whole")


def test_an_agent_that_does_not_take_its_state_back_is_found_out(tmp_path):
    agent = tmp_path / "forgets.py"
    agent.write_text(
        "from rank0rl.algos.ppo import PPO\nclass Forgets(PPO):\n    def load(self, state): pass\n"
    )
    args = [*SMALL, "--total-steps", "640", "--algo", f"{agent}:Forgets"]
    train(tmp_path, *args, "--stop-after-iterations", "2")
    assert "load() must take back all" in resume(tmp_path, expect=1).stderr


@pytest.mark.slow
def test_sigterm_at_any_time_and_changed_settings(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = [*arguments("CartPole", "steps"), *SLOW]
    train(whole, *args)
    interrupt(parts, args, 2, signal.SIGTERM, after=6)
    file = next((parts / "checkpoints").iterdir())
    assert "name the folder" in resume(file, expect=2).stderr
    refused = resume(parts, "--seed", "1", "--lr", "0.1", expect=2)
    assert "got lr 0.1 in place of linear:5e-4:0, seed 1 in place of 0" in refused.stderr
    resume(parts, nprocs=3)
    assert_same(parts, whole)


def test_a_larger_total_is_a_changed_schedule_and_said_so(tmp_path):
    train(tmp_path, *SMALL, "--total-steps", "128", "--keep-checkpoints", "2")
    done = resume(tmp_path, "--total-steps", "256")
    assert "the schedule changes: total_steps was 128 and is now 256" in done.stdout
    assert len(table(tmp_path)) == 4
    assert [float(row["lr"]) for row in table(tmp_path)][:3] == [5e-4, 2.5e-4, 2.5e-4]
    names = sorted(f.name for f in (tmp_path / "checkpoints").iterdir())
    assert names == ["00000002.pt", "00000004.pt"]


def test_what_may_change_the_last_bits_is_named(tmp_path):
    train(tmp_path, *SMALL, "--total-steps", "128", "--stop-after-iterations", "1")
    settings = (tmp_path / "config.toml").read_text()
    assert "cpu = " in settings
    (tmp_path / "config.toml").write_text(settings.replace('torch = "', 'torch = "0.'))
    done = resume(tmp_path)
    assert "note: torch 0." in done.stdout
    assert "the last bits of the curve may differ" in done.stdout


@pytest.mark.slow
def test_envs_that_cannot_be_repeated_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["--num-envs", "2", "--steps-per-batch", "20", "--total-steps", "40"]
    for env, why in (
        ("helpers.envs:Moody-v0", "Moody-v0 does not repeat an episode"),
        ("helpers.envs:Latent-v0", "Latent-v0 does not repeat an episode"),
        ("helpers.envs:Endless-v0", "its episode of 10 steps is longer than max_replay_steps"),
    ):
        folder = tmp_path / env.partition(":")[2]
        stop = ["--stop-after-iterations", "1", "--max-replay-steps", "9"]
        train(folder, env, *args, *(stop if "Endless" in env else stop[:2]))
        done = resume(folder, nprocs=2)
        assert [f"env {index}: {why}" in done.stdout for index in (0, 1)] == [True, True]
        assert len(table(folder)) == 2


FILLS_UP = """
import os, resource
from rank0rl.algos.ppo import PPO
class FillsUp(PPO):
    calls = 0
    def update(self, *args):
        type(self).calls += 1
        if self.calls == 4:
            size = int(os.environ["SIZE"])
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return super().update(*args)
"""


@pytest.mark.parametrize(
    ("size", "what"),
    [pytest.param("20000", "checkpoint", marks=pytest.mark.slow), ("1000", "progress.csv")],
)
def test_a_full_disk_is_one_clear_error_and_leaves_the_checkpoint_before(
    size, what, tmp_path, monkeypatch
):
    monkeypatch.setenv("SIZE", size)
    (tmp_path / "fills_up.py").write_text(FILLS_UP)
    args = [*SMALL, "--total-steps", "640", "--checkpoint-every", "1"]
    args += ["--algo", f"{tmp_path / 'fills_up.py'}:FillsUp"]
    parts = tmp_path / "parts"
    done = train(parts, *args, expect=1)
    assert "saved iteration 3; go on with" in done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith("error: cannot write ")
    assert what in line
    assert "File too large" in line
    assert checkpoint.latest(parts).name == "00000003.pt"
    assert not list(parts.rglob("checkpoints/.*.tmp"))
    monkeypatch.setenv("SIZE", "100000000")
    resume(parts)
    assert [int(row["iteration"]) for row in table(parts)] == list(range(1, 11))


@pytest.mark.fast(1)
@pytest.mark.parametrize("nprocs", [1, 3])
def test_ctrl_c_leaves_a_checkpoint_and_a_summary(tmp_path, nprocs):
    args = [*SMALL, "--total-steps", "1000000", "--checkpoint-every", "1000000"]
    interrupt(tmp_path, args, nprocs, signal.SIGINT, after=5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["iterations"] == len(table(tmp_path)) >= 5
    assert int(checkpoint.latest(tmp_path).stem) == summary["iterations"]


@pytest.mark.slow
def test_a_failing_update_keeps_the_last_boundary(tmp_path):
    agent = tmp_path / "bad.py"
    agent.write_text(
        "from pathlib import Path\n"
        "from rank0rl.algos.ppo import PPO\n"
        "class Bad(PPO):\n"
        "    calls = 0\n"
        "    def update(self, *args):\n"
        "        type(self).calls += 1\n"
        "        metrics = super().update(*args)\n"
        "        if self.calls == 4 and not Path(__file__ + '.once').exists():\n"
        "            Path(__file__ + '.once').touch()\n"
        "            raise ZeroDivisionError('on purpose')\n"
        "        return metrics\n"
    )
    args = [*SMALL, "--total-steps", "640", "--algo", f"{agent}:Bad"]
    train(tmp_path / "bad", *args, nprocs=2, expect=1)
    assert json.loads((tmp_path / "bad" / "summary.json").read_text())["iterations"] == 3
    resume(tmp_path / "bad")
    train(tmp_path / "good", *args)
    assert curve(tmp_path / "bad") == curve(tmp_path / "good")


@pytest.mark.slow
def test_a_run_is_written_by_one_process_and_stops_ahead(tmp_path):
    args = [*SMALL, *SLOW, "--run-dir", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "train.py", *args], cwd=HERE.parent)
    try:
        wait_for_rows(process, tmp_path, 2)
        assert "another process is training in" in resume(tmp_path, expect=2).stderr
    finally:
        process.terminate()
        process.wait(timeout=300)
    refused = resume(tmp_path, "--stop-after-iterations", "1", expect=2)
    assert "got 1, and the run has made" in refused.stderr
