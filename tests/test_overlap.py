"""Rank 0 updates while the others collect: one update older weights, and the same curve as ever."""

import signal

import pytest
from helpers.ranks import HERE
from helpers.runs import (
    SMALL,
    curve,
    interrupt,
    replay,
    resume,
    resume_on_ranks,
    sha,
    table,
    train,
    train_on_ranks,
)

from rank0rl.envs.block import envs_of
from rank0rl.run import checkpoint
from rank0rl.run.launch_options import Words
from rank0rl.run.plan import prepare

SIZES = {
    "steps": ["--steps-per-batch", "64", "--total-steps", "640"],
    "episodes": ["--episodes-per-batch", "4", "--num-episodes", "40"],
}
SLOW = ["--algo", f"{HERE}/helpers/agents.py:SlowPPO"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", SIZES)
def test_the_same_curve_for_every_number_and_share_of_ranks_and_resumed(mode, tmp_path):
    args = ["CartPole", "--num-envs", "4", "--minibatch-size", "32", *SIZES[mode], "--overlap"]
    train(tmp_path / "1", *args)
    train_on_ranks(tmp_path / "3", *args, nprocs=3)
    train_on_ranks(tmp_path / "share", *args, "--rank0-envs", "1", nprocs=2)
    train_on_ranks(tmp_path / "none", *args, "--rank0-envs", "0", nprocs=2)
    train_on_ranks(tmp_path / "parts", *args, "--stop-after-iterations", "4", nprocs=2)
    resume_on_ranks(tmp_path / "parts", "--rank0-envs", "2", nprocs=3)
    train(tmp_path / "off", *args[:-1])
    one = curve(tmp_path / "1")
    assert len(one) == 10
    for other in ("3", "share", "none", "parts"):
        assert curve(tmp_path / other) == one
        assert sha(tmp_path / other) == sha(tmp_path / "1")
    off = curve(tmp_path / "off")
    assert off[0] == one[0]
    assert off[1]["batch_sha256"] != one[1]["batch_sha256"]


@pytest.mark.slow
def test_interrupted_in_mid_overlap(tmp_path):
    args = [*SMALL, "--total-steps", "640", "--overlap", *SLOW]
    train(tmp_path / "whole", *args)
    interrupt(tmp_path / "parts", [*args, "--gather-parts", "2"], 2, signal.SIGTERM, after=4)
    resume(tmp_path / "parts", nprocs=3)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


VERSIONS = """
import numpy as np
from helpers.envs import NoiseAgent
class Versions(NoiseAgent):
    def __init__(self, *args):
        super().__init__(*args)
        self.version = np.zeros(1)
    def process(self, fragment):
        return {"version": np.repeat(self.version, len(fragment.rew))}
    def update(self, batch, rng, progress):
        self.version += 1
        return {"rows": len(batch["version"]), "by": batch["version"].mean(), "progress": progress}
    def modules(self):
        return {"version": self.version}
"""


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_batch_is_collected_with_the_weights_before_the_last_update(
    nprocs, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    (tmp_path / "versions.py").write_text(VERSIONS)
    algo = ["--algo", f"{tmp_path / 'versions.py'}:Versions", "--num-envs", "4"]
    args = ["helpers.envs:Count-v0", *algo, "--steps-per-batch", "20", "--total-steps", "100"]
    train_on_ranks(tmp_path / "r", *args, "--overlap", nprocs=nprocs)
    rows = table(tmp_path / "r")
    assert [row["by"] for row in rows] == ["0", "0", "1", "2", "3"]
    assert [row["progress"] for row in rows] == ["0", "0.2", "0.4", "0.6", "0.8"]
    assert {row["rows"] for row in rows} == {"20"}
    assert [row["steps"] for row in rows] == ["20", "40", "60", "80", "100"]
    last = checkpoint.read(checkpoint.latest(tmp_path / "r"))
    assert last["collector"]["ahead"] == {}  # the schedule needs no other batch


SLOW_TOO = [pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 7)]


@pytest.mark.parametrize("iteration", [3, *SLOW_TOO])
def test_an_env_is_replayed(iteration, tmp_path):
    stop = ["--stop-after-iterations", "6", "--checkpoint-every", "3"]
    train_on_ranks(tmp_path, *SMALL, "--overlap", *stop, nprocs=2)
    same = 2 if iteration < 7 else 1  # the seventh is gathered, and not recorded yet
    assert replay(tmp_path, iteration, env=1).stdout.count("the same data") == same


def test_shares_of_envs():
    assert [envs_of(r, 3, 10, 2) for r in range(3)] == [range(2), range(2, 6), range(6, 10)]
    assert [envs_of(r, 2, 4, 3) for r in range(2)] == [range(3), range(3, 4)]
    assert envs_of(0, 1, 10, 2) == range(10)


@pytest.mark.parametrize(("share", "nworkers"), [("-1", 1), ("3", 3)])
def test_wrong_shares(share, nworkers):
    with pytest.raises(ValueError, match="rank0_envs must"):
        prepare(Words.read([*SMALL, "--rank0-envs", share]), None, nworkers)


@pytest.mark.slow
def test_a_failure_ahead_is_replayed_by_the_command_of_its_report(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["helpers.envs:Breaks-v0", "--num-envs", "3", "--steps-per-batch", "30", "--overlap"]
    failed = train(tmp_path / "r", *args, nprocs=2, expect=1)
    assert "--iteration 4 --env 1" in failed.stderr  # of which only 2 iterations are recorded
    assert len(table(tmp_path / "r")) == 2
    assert "ZeroDivisionError" in replay(tmp_path / "r", 4, env=1, expect=1).stderr


@pytest.mark.slow
def test_a_longer_run_is_replayed_where_the_shorter_one_ended(tmp_path):
    args = ["--total-steps", "640", "--checkpoint-every", "5", "--keep-checkpoints", "9"]
    train(tmp_path, *SMALL, *args, "--overlap")
    resume(tmp_path, "--total-steps", "960")
    for iteration in (9, 11, 12):
        assert replay(tmp_path, iteration, env=1).stdout.count("the same data") == 2


@pytest.mark.slow
def test_a_run_that_was_stopped_before_its_last_iteration_can_be_finished(tmp_path):
    args = [*SMALL, "--overlap", "--total-steps", "320"]
    train(tmp_path / "whole", *args)
    train_on_ranks(tmp_path / "r", *args, "--stop-after-iterations", "4", nprocs=2)
    resume_on_ranks(tmp_path / "r", nprocs=3)
    assert curve(tmp_path / "r") == curve(tmp_path / "whole")
    assert {row["slowest_s"] for row in table(tmp_path / "r")[3:]} != {"0"}
