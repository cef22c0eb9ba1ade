"""Stopped and resumed is the run that was never stopped."""

import json
import signal
import subprocess
import sys

import pytest
from on_ranks import HERE, run
from runs import SMALL, curve, interrupt, resume, sha, table, train, wait_for_rows

from rank0rl import checkpoint

SLOW = ["--algo", f"{HERE}/slow.py:SlowPPO"]
SIZES = {  # 20 iterations
    "steps": ["--steps-per-batch", "64", "--total-steps", "1280"],
    "episodes": ["--episodes-per-batch", "4", "--num-episodes", "80"],
}
CASES = [
    pytest.param(env, mode, marks=[] if env == "CartPole" else pytest.mark.slow)
    for env in ("CartPole", "Walker2d")
    for mode in SIZES
]


def arguments(env, mode):
    return [env, "--num-envs", "4", "--minibatch-size", "32", *SIZES[mode]]


def assert_same(parts, whole):
    assert curve(parts) == curve(whole)  # no gap, no repeated row
    assert len(curve(parts)) == 20
    assert sha(parts) == sha(whole)


@pytest.mark.parametrize(("env", "mode"), CASES)
def test_stopped_early_on_one_rank_and_resumed_on_three(env, mode, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, *arguments(env, mode), nprocs=2)
    done = train(parts, *arguments(env, mode), "--stop-after-iterations", "10")
    assert "stopped after iteration 10, as asked; go on with --resume" in done.stdout
    assert json.loads((parts / "summary.json").read_text())["iterations"] == 10
    resume(parts, nprocs=3)
    assert_same(parts, whole)


@pytest.mark.parametrize(("env", "mode"), CASES)
def test_killed_then_ended_in_mid_update(env, mode, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, *arguments(env, mode))
    command = [*arguments(env, mode), *SLOW, "--run-dir", str(parts), "--checkpoint-every", "3"]
    process = subprocess.Popen([sys.executable, "train.py", *command], cwd=HERE.parent)
    wait_for_rows(process, parts, 7)
    process.kill()
    process.wait()
    rows = len(table(parts))
    kept = json.loads((parts / "summary.json").read_text())["iterations"]
    assert rows >= 7
    assert kept == rows - rows % 3
    monkeypatch.setenv("END_AT", "0.7")
    done = resume(parts, nprocs=3, expect=128 + signal.SIGTERM)
    assert "SIGTERM: saved iteration" in done.stdout
    iterations = json.loads((parts / "summary.json").read_text())["iterations"]
    assert 14 <= iterations < 20
    monkeypatch.delenv("END_AT")
    resume(parts, nprocs=2)
    assert_same(parts, whole)


def test_sigterm_at_any_time_and_changed_settings(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = arguments("CartPole", "steps")
    train(whole, *args)
    interrupt(parts, [*args, *SLOW], 2, signal.SIGTERM, after=6)
    refused = resume(parts, "--seed", "1", "--lr", "0.1", expect=2)
    assert "another lr from 0.0003 to 0.1, seed from 0 to 1" in refused.stderr
    resume(parts, nprocs=3)
    assert_same(parts, whole)


def test_a_larger_total_is_a_changed_schedule_and_said_so(tmp_path):
    train(tmp_path, *SMALL, "--total-steps", "128", "--keep-checkpoints", "2")
    done = resume(tmp_path, "--total-steps", "256")
    assert "the schedule changes: total_steps was 128 and is now 256" in done.stdout
    assert len(table(tmp_path)) == 4
    assert [float(row["lr"]) for row in table(tmp_path)][:3] == [3e-4, 1.5e-4, 1.5e-4]
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


def test_lanes_that_cannot_be_repeated_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["--num-envs", "2", "--steps-per-batch", "20", "--total-steps", "40"]
    for env, why in (
        ("toy_envs:Moody-v0", "Moody-v0 does not repeat an episode"),
        ("toy_envs:Endless-v0", "its episode of 10 steps is longer than max_replay_steps"),
    ):
        folder = tmp_path / env.partition(":")[2]
        stop = ["--stop-after-iterations", "1", "--max-replay-steps", "9"]
        train(folder, env, *args, *(stop if "Endless" in env else stop[:2]))
        done = resume(folder, nprocs=2)
        assert [f"lane {lane}: {why}" in done.stdout for lane in (0, 1)] == [True, True]
        assert len(table(folder)) == 2


FILLS_UP = """
import resource
from algos.ppo import PPO
class FillsUp(PPO):
    calls = 0
    def update(self, *args):
        self.calls += 1
        if self.calls == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return super().update(*args)
"""


def test_a_full_disk_is_one_clear_error_and_leaves_the_checkpoint_before(tmp_path):
    (tmp_path / "fills_up.py").write_text(FILLS_UP)
    args = [*SMALL, "--total-steps", "640", "--checkpoint-every", "1"]
    args += ["--algo", f"{tmp_path / 'fills_up.py'}:FillsUp"]
    parts = tmp_path / "parts"
    done = train(parts, *args, expect=1)
    assert "saved iteration 3; go on with" in done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith("error: cannot write checkpoint")
    assert "File too large; the last complete one is" in line
    assert checkpoint.latest(parts).name == "00000003.pt"
    assert not list(parts.rglob("*.tmp"))


@pytest.mark.parametrize("nprocs", [1, 3])
def test_ctrl_c_leaves_a_checkpoint_and_a_summary(tmp_path, nprocs):
    args = [*SMALL, "--total-steps", "1000000", "--checkpoint-every", "1000000"]
    interrupt(tmp_path, args, nprocs, signal.SIGINT, after=5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["iterations"] == len(table(tmp_path)) >= 5
    assert int(checkpoint.latest(tmp_path).stem) == summary["iterations"]


def test_a_failing_update_keeps_the_last_boundary(tmp_path):
    agent = tmp_path / "bad.py"
    agent.write_text(
        "from pathlib import Path\n"
        "from algos.ppo import PPO\n"
        "class Bad(PPO):\n"
        "    calls = 0\n"
        "    def update(self, *args):\n"
        "        self.calls += 1\n"
        "        metrics = super().update(*args)\n"
        "        if self.calls == 4 and not Path(__file__ + '.once').exists():\n"
        "            Path(__file__ + '.once').touch()\n"
        "            raise ZeroDivisionError('on purpose')\n"
        "        return metrics\n"
    )
    args = [*SMALL, "--total-steps", "640"]
    train(tmp_path / "bad", *args, "--algo", f"{agent}:Bad", nprocs=2, expect=1)
    assert json.loads((tmp_path / "bad" / "summary.json").read_text())["iterations"] == 3
    done = run([sys.executable, "train.py", "--resume", str(tmp_path / "bad")])
    assert done.returncode == 0, done.stderr
    train(tmp_path / "good", *args)
    assert curve(tmp_path / "bad") == curve(tmp_path / "good")
