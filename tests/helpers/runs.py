"""Runs through the command line or in this process, and what they leave."""

import csv
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import tomli_w
from helpers import forks
from helpers.ranks import HERE, LIMIT_S, on_ranks

from rank0rl import seeding, start
from rank0rl.collector import Collector
from rank0rl.envs.make import resolve
from rank0rl.launch import job
from rank0rl.learner import Learner
from rank0rl.mpi.threads import set_threads
from rank0rl.run.launch_options import Words
from rank0rl.run.logger import Logger
from rank0rl.run.options import RunOptions
from rank0rl.run.record import Recorder
from rank0rl.run.run import Run
from rank0rl.run.shares import make_rollout
from rank0rl.run.state import State
from rank0rl.run.usage import Phases
from rank0rl.tools import video
from rank0rl.trainer import train as train_loop


def needs_onnx():
    """Return ONNX Runtime; skip a test where it is missing, or what writes its files."""
    return [pytest.importorskip(name) for name in ("onnx", "onnxscript", "onnxruntime")][-1]


def train_here(agent_class, agent_options, folder, **options):
    """Return the agent and rank 0's recorder after a run."""
    run_options = RunOptions(**options)
    run_options = RunOptions(**{**options, "env_id": resolve(run_options.env_id)})
    set_threads(1)
    rollout = make_rollout(run_options, 0, 1)
    agent = agent_class(rollout.spaces, agent_options, seeding.stream(run_options.seed, "init"))
    phases = Phases()
    collector = Collector(agent, rollout, run_options, phases)
    state = State(agent, collector, run_options, {})
    recorder = Recorder(state, run_options, phases, {}, Logger(folder, quiet=True))
    run = Run(phases, recorder)
    learner = Learner(agent, run_options, phases, state.share_over)
    learner.prepare()
    train_loop(agent, collector, learner, run)
    return agent, recorder


def mean_return(recorder):
    return float(np.mean(recorder.state.progress.returns))


TIMES = ("seconds", "steps_per_s", "memory_mb", "mpi_loaded")
SMALL = ["CartPole", "--num-envs", "4", "--steps-per-batch", "64", "--minibatch-size", "32"]


def train_on_ranks(folder, *args, nprocs):
    """Train on ranks that live on between tests: soon, but with no supervisor and no output to read."""
    _start_on_ranks(["--run-dir", str(folder), *args], nprocs)


def resume_on_ranks(folder, *args, nprocs):
    _start_on_ranks(["--resume", str(folder), *args], nprocs)


def _start_on_ranks(args, nprocs):
    if nprocs == 1:
        done = forks.run("train.py", *args)
        assert done.returncode == 0, done.stderr
    else:
        codes = on_ranks(nprocs, "helpers.runs:on_rank_start", args, {**os.environ})
        assert codes == [0] * nprocs, codes


def on_rank_start(args, env):
    before, path = {**os.environ}, sys.path[:]
    os.environ.update(env)
    sys.path += env.get("PYTHONPATH", "").split(os.pathsep)
    job.rows_are_on_rank0 = False
    try:
        code = start.start(Words.read(args), HERE.parent / "configs", video.check, video.hooks)
        assert not job.rows_are_on_rank0  # else the report of a later error would blame this call
        return code
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.path[:] = path


def train(folder, *args, nprocs=1, expect=0):
    done = _train([*args, "--run-dir", str(folder)], nprocs)
    assert done.returncode == expect, done.stdout + done.stderr
    assert "\x1b" not in done.stdout  # no terminal to move the cursor of
    return done


def resume(folder, *args, nprocs=1, expect=0):
    done = _train(["--resume", str(folder), *args], nprocs)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def _train(args, nprocs):
    ranks = ["--nprocs", str(nprocs)] if nprocs > 1 else []
    return forks.run("train.py", *args, *ranks)


def replay(folder, iteration, *, env=None, episode=None, expect=0):
    """Repeat an env, or an episode, of an iteration of a run."""
    given = {"--env": env, "--episode": episode}
    which = [word for name, n in given.items() if n is not None for word in (name, str(n))]
    done = forks.run("-m", "rank0rl", "replay", str(folder), "--iteration", str(iteration), *which)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def write_run(folder, returns, seconds=3600.0, nprocs=1, columns=None, **settings):
    """Write the folder of a run that was never made, with 1000 steps per iteration."""
    settings = {"env_id": "Walker2d-v5", "algo": "ppo", "seed": 0, "total_steps": 9000, **settings}
    start = {"nprocs": nprocs, "command": "python train.py", "versions": {"numpy": "2.4.6"}}
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps({**settings, "record": [start]}))
    rows = [
        {
            "iteration": i,
            "steps": 1000 * i,
            "episodes": 10 * i,
            "seconds": i * seconds,
            "return_mean": ret,
            "length_mean": 5,
            "steps_per_s": 1000 / seconds,
            "collect_s": seconds / 4,
            "update_s": seconds / 2,
            "wait_s": 0.0,
            **{name: values[i - 1] for name, values in (columns or {}).items()},
            "batch_sha256": "ab",
            "weights_sha256": "cd",
            "kl": 0.125 / i,
        }
        for i, ret in enumerate(returns, 1)
    ]
    with (folder / "progress.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["iteration"])
        writer.writeheader()
        writer.writerows(rows)
    return folder


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


def interrupt(folder, args, nprocs, signum, after):
    """Start a run, send it a signal once it has made some iterations, and wait for its end."""
    command = [sys.executable, "train.py", *args, "--run-dir", str(folder), "--nprocs", str(nprocs)]
    process = subprocess.Popen(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True)
    wait_for_rows(process, folder, after)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signum, out
    assert "--resume" in out
    return out


def wait_for_rows(process, folder, count):
    end = time.monotonic() + LIMIT_S
    while not (folder / "progress.csv").exists() or len(table(folder)) < count:
        assert time.monotonic() < end, "no progress"
        assert process.poll() is None
        time.sleep(0.05)
