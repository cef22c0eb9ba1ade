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
    shas = {
        json.loads((tmp_path / str(n) / "summary.json").read_text())["weights_sha256"]
        for n in (1, 2, 3)
    }
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
        assert phases * float(row["steps_per_s"]) == pytest.approx(64, rel=0.3)
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


@pytest.mark.parametrize("ranks", [(2, 3)])
def test_resume_goes_on_where_the_run_was_killed(tmp_path, ranks):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = [*SMALL, "--total-steps", "1280", "--checkpoint-every", "4"]
    train(whole, *args)
    slow = [*args, "--algo", f"{HERE}/slow.py:SlowPPO"]
    interrupt(parts, slow, ranks[0], signal.SIGTERM, after=9)
    summary = json.loads((parts / "summary.json").read_text())
    assert summary["iterations"] >= 9
    resume = [sys.executable, "train.py", "--resume", str(parts)]
    refused = run([*resume, "--seed", "1", "--lr", "0.1"])
    assert refused.returncode == 2
    assert "another lr from 0.0003 to 0.1, seed from 0 to 1" in refused.stderr
    done = run([*resume, "--nprocs", str(ranks[1])])
    assert done.returncode == 0, done.stderr
    assert curve(parts) == curve(whole)
    shas = [json.loads((p / "summary.json").read_text())["weights_sha256"] for p in (whole, parts)]
    assert shas[0] == shas[1]


def interrupt(folder, args, nprocs, signum, after):
    """Start a run, send it a signal once it has made some iterations, and wait for its end."""
    command = [sys.executable, "train.py", *args, "--run-dir", str(folder), "--nprocs", str(nprocs)]
    process = subprocess.Popen(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (folder / "progress.csv").exists() or len(table(folder)) < after:
        assert time.monotonic() < end, "no progress"
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signum, out
    assert "--resume" in out
    return out


@pytest.mark.parametrize("nprocs", [1, 3])
def test_ctrl_c_leaves_a_checkpoint_and_a_summary(tmp_path, nprocs):
    args = [*SMALL, "--total-steps", "1000000", "--checkpoint-every", "1000000"]
    interrupt(tmp_path, args, nprocs, signal.SIGINT, after=5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["iterations"] == len(table(tmp_path)) >= 5
    assert (tmp_path / "checkpoint.pt").exists()


def test_a_failing_rank_ends_the_job_with_its_traceback(tmp_path):
    agent = tmp_path / "bad.py"
    agent.write_text(
        "from algos.ppo import PPO\n"
        "from rank0rl import comm\n"
        "class Bad(PPO):\n"
        "    def process(self, fragment):\n"
        "        if comm.rank == 1: raise ZeroDivisionError('on purpose')\n"
        "        return super().process(fragment)\n"
    )
    start = time.monotonic()
    done = train(tmp_path / "r", *SMALL, "--algo", f"{agent}:Bad", nprocs=3, expect=1, limit_s=60)
    assert "rank 1 of 3 failed" in done.stderr
    assert "ZeroDivisionError: on purpose" in done.stderr
    assert time.monotonic() - start < 30


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
