"""The loop, through the command line: the same curve for every number of ranks; stop and resume."""

import csv
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from on_ranks import HERE, run

HASHING = f"{HERE}/hashing.py:HashingPPO"
MODES = {
    "steps": ["--steps-per-batch", "192"],
    "episodes": ["--episodes-per-batch", "5", "--num-episodes", "15"],
}
SLOW = f"{HERE}/slow.py:SlowPPO"
TIMES = ("seconds", "steps_per_s", "mpi_loaded")


def train(folder, *args, nprocs=1, expect=0, limit_s=120):
    command = [sys.executable, "train.py", *args, "--run-dir", str(folder)]
    done = run([*command, *(["--nprocs", str(nprocs)] if nprocs > 1 else [])], limit_s)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def table(folder):
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def curve(folder):
    """All that does not depend on time."""
    return [
        {k: v for k, v in row.items() if k not in TIMES and not k.endswith("_s")}
        for row in table(folder)
    ]


def sha(folder):
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_batches_and_weights_for_every_number_of_ranks(mode, tmp_path):
    for n in (1, 2, 3):
        train(
            tmp_path / str(n),
            *("Walker2d", "--algo", HASHING, "--num-envs", "3", "--total-steps", "576"),
            *("--hidden", "32", "32", *MODES[mode]),
            nprocs=n,
        )
    curves = [curve(tmp_path / str(n)) for n in (1, 2, 3)]
    assert len(curves[0]) == 3
    assert len({row["batch_sha"] for row in curves[0]}) == 3
    assert curves[0] == curves[1] == curves[2]
    shas = {sha(tmp_path / str(n)) for n in (1, 2, 3)}
    assert len(shas) == 1
    assert {row["mpi_loaded"] for row in table(tmp_path / "1")} == {"0"}
    assert {row["mpi_loaded"] for row in table(tmp_path / "2")} == {"1"}


SMALL = ["CartPole", "--num-envs", "4", "--steps-per-batch", "64", "--minibatch-size", "32"]


def test_the_files_of_a_run(tmp_path):
    done = train(tmp_path, *SMALL, "--total-steps", "640", "--seed", "3", nprocs=2)
    rows = table(tmp_path)
    wanted = (
        "iteration steps episodes seconds return_mean length_mean steps_per_s collect_s process_s "
        "gather_s update_s broadcast_s wait_s"
    )
    assert list(rows[0])[:13] == wanted.split()
    assert [int(row["iteration"]) for row in rows] == list(range(1, 11))
    assert [int(row["steps"]) for row in rows] == list(range(64, 641, 64))
    for row in rows:
        phases = sum(
            float(row[f"{p}_s"])
            for p in ("collect", "process", "gather", "update", "broadcast", "wait")
        )
        assert 0 < phases * float(row["steps_per_s"]) <= 64.1  # no second is counted twice
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {k: summary[k] for k in ("env_id", "algo", "seed", "nprocs", "num_envs")} == {
        "env_id": "CartPole-v1",
        "algo": "ppo",
        "seed": 3,
        "nprocs": 2,
        "num_envs": 4,
    }
    assert (summary["iterations"], summary["steps"]) == (10, 640)
    assert summary["episodes"] == int(rows[-1]["episodes"])
    assert summary["return_mean"] == pytest.approx(float(rows[-1]["return_mean"]), rel=1e-5)
    assert summary["weights_sha256"] in done.stdout.splitlines()[-1]


def test_learner_threads_are_the_updates_alone(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import torch\n"
        "from algos.ppo import PPO\n"
        "class Threads(PPO):\n"
        "    def process(self, fragment):\n"
        "        self.collecting = torch.get_num_threads()\n"
        "        return super().process(fragment)\n"
        "    def update(self, *args):\n"
        "        n = torch.get_num_threads()\n"
        "        return {**super().update(*args), 'n': n, 'collecting': self.collecting}\n"
    )
    args = [*SMALL, "--total-steps", "128", "--algo", f"{agent}:Threads", "--learner-threads", "2"]
    train(tmp_path / "run", *args)
    assert [(row["collecting"], row["n"]) for row in table(tmp_path / "run")] == [("1", "2")] * 2


EPISODES = ["--episodes-per-batch", "4", "--num-episodes", "60"]


@pytest.mark.parametrize("mode", ["steps", "episodes"])
def test_resume_after_sigterm_is_the_run_that_was_never_stopped(tmp_path, mode):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = ["CartPole", "--num-envs", "4", "--minibatch-size", "32"]
    args += EPISODES if mode == "episodes" else ["--steps-per-batch", "64", "--total-steps", "960"]
    train(whole, *args)
    interrupt(parts, [*args, "--algo", SLOW], 2, signal.SIGTERM, after=6)
    resume = [sys.executable, "train.py", "--resume", str(parts)]
    refused = run([*resume, "--seed", "1", "--lr", "0.1"])
    assert refused.returncode == 2
    assert "another lr from 0.0003 to 0.1, seed from 0 to 1" in refused.stderr
    done = run([*resume, "--nprocs", "3"])
    assert done.returncode == 0, done.stderr
    assert curve(parts) == curve(whole)
    assert sha(parts) == sha(whole)


def test_resume_after_sigkill_goes_back_to_the_last_checkpoint_on_disk(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = [*SMALL, "--total-steps", "960", "--checkpoint-every", "4"]
    train(whole, *args)
    command = [*args, "--algo", SLOW, "--run-dir", str(parts), "--nprocs", "1"]
    process = subprocess.Popen([sys.executable, "train.py", *command], cwd=HERE.parent)
    wait_for_rows(process, parts, 6)
    process.kill()
    process.wait()
    rows = len(table(parts))
    assert rows >= 6
    kept = json.loads((parts / "summary.json").read_text())["iterations"]
    assert kept == rows - rows % 4
    done = run([sys.executable, "train.py", "--resume", str(parts), "--nprocs", "2"])
    assert done.returncode == 0, done.stderr
    assert curve(parts) == curve(whole)  # no gap, no repeated row
    assert sha(parts) == sha(whole)


def interrupt(folder, args, nprocs, signum, after):
    """Start a run, send it a signal once it has made some iterations, and wait for its end."""
    command = [sys.executable, "train.py", *args, "--run-dir", str(folder), "--nprocs", str(nprocs)]
    process = subprocess.Popen(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True)
    wait_for_rows(process, folder, after)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signum, out
    assert "--resume" in out
    return out


def wait_for_rows(process, folder, count):
    end = time.monotonic() + 60
    while not (folder / "progress.csv").exists() or len(table(folder)) < count:
        assert time.monotonic() < end, "no progress"
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_ctrl_c_leaves_a_checkpoint_and_a_summary(tmp_path, nprocs):
    args = [*SMALL, "--total-steps", "1000000", "--checkpoint-every", "1000000"]
    interrupt(tmp_path, args, nprocs, signal.SIGINT, after=5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["iterations"] == len(table(tmp_path)) >= 5
    assert (tmp_path / "checkpoint.pt").exists()


BAD = """
from algos.ppo import PPO
from rank0rl import comm
class Bad(PPO):
    calls = 0
    def process(self, fragment):
        self.calls += 1
        if comm.rank == 1 and self.calls == 9:
            {what}
        return super().process(fragment)
"""


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("raise ZeroDivisionError('on purpose')", 1, "ZeroDivisionError: on purpose"),
        ("import sys; sys.exit(3)", 3, "rank 1 called sys.exit(3)"),
    ],
)
def test_a_failing_rank_ends_the_job_with_its_reason_and_a_checkpoint(tmp_path, what, code, said):
    (tmp_path / "bad.py").write_text(BAD.format(what=what))
    args = [*SMALL, "--algo", f"{tmp_path / 'bad.py'}:Bad"]
    done = train(tmp_path / "r", *args, nprocs=3, expect=code, limit_s=60)
    assert "rank 1" in done.stderr
    assert said in done.stderr
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["iterations"] == len(table(tmp_path / "r")) > 0


OWN = """
from dataclasses import dataclass
from rank0rl import Agent
from toy_envs import NoiseAgent
@dataclass(frozen=True)
class Options:
    speed: float = 1.0
    \"\"\"How fast.\"\"\"
class Mine(NoiseAgent):
    Options = Options
    def __init__(self, spaces, options, rng):
        super().__init__(spaces, options, rng)
        self.options = options
    def update(self, batch, rng, progress):
        return {"speed": self.options.speed, "rows": len(batch["obs"])}
"""


def test_an_agent_and_an_environment_of_ones_own_on_two_ranks_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    (tmp_path / "mine.py").write_text(OWN)
    args = ["toy_envs:Count-v0", "--algo", f"{tmp_path / 'mine.py'}:Mine", "--num-envs", "4"]
    args += ["--total-steps", "512", "--speed", "3"]
    train(tmp_path / "r", *args, nprocs=2)
    assert [(row["speed"], row["rows"]) for row in table(tmp_path / "r")] == [("3", "256")] * 2
    resume = ["--resume", str(tmp_path / "r"), "--total-steps", "768", "--nprocs", "2"]
    done = run([sys.executable, "train.py", *resume])
    assert done.returncode == 0, done.stderr
    assert [row["speed"] for row in table(tmp_path / "r")] == ["3"] * 3


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


def test_whole_runs_with_two_seeds_differ(tmp_path):
    for seed in (0, 1):
        train(tmp_path / str(seed), *SMALL, "--total-steps", "64", "--seed", str(seed))
    assert curve(tmp_path / "0") != curve(tmp_path / "1")
    assert np.isfinite(float(table(tmp_path / "0")[0]["kl"]))
