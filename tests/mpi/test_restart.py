"""A job whose rank dies goes on from the last checkpoint, and ends as if nothing had happened."""

import random
import signal
import time

import pytest
from helpers.jobs import end, kill_one_rank, start
from helpers.ranks import HERE, LIMIT_S
from helpers.runs import SMALL, curve, sha, table, train

DIES = """
import os, signal
from pathlib import Path
from rank0rl.algos.ppo import PPO
from rank0rl.launch import job
from rank0rl.mpi import comm
class Dies(PPO):
    calls = 0
    def process(self, fragment):
        type(self).calls += 1
        once = Path(__file__ + '.once')
        if comm.rank == 1 and self.calls == 7 and not once.exists():
            once.touch()
            {what}
        return super().process(fragment)
"""


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was ended by signal 9"),
        pytest.param(
            "raise ZeroDivisionError('on purpose')",
            "ZeroDivisionError: on purpose",
            marks=pytest.mark.slow,
        ),
        # The shell around rank 0, which gets a SIGTERM that nobody sent, and saves.
        (
            "os.kill(int((job.my_folder() / 'shell.0').read_text().split()[2]), signal.SIGKILL)",
            "the job ends",
        ),
    ],
)
def test_a_rank_that_dies_once_changes_nothing(what, said, tmp_path):
    (tmp_path / "dies.py").write_text(DIES.format(what=what))
    args = [*SMALL, "--total-steps", "640"]
    train(tmp_path / "whole", *args)
    algo = ["--algo", f"{tmp_path / 'dies.py'}:Dies", "--config", "configs/ppo.toml"]
    done = train(tmp_path / "r", *args, *algo, "--max-restarts", "1", nprocs=3)
    assert said in done.stderr
    assert "restart 1 of 1 in 1 s, from the last checkpoint" in done.stderr
    assert curve(tmp_path / "r") == curve(tmp_path / "whole")
    assert sha(tmp_path / "r") == sha(tmp_path / "whole")


@pytest.mark.slow
def test_restarts_come_to_an_end_and_wrong_use_is_not_tried_again(tmp_path):
    (tmp_path / "dies.py").write_text(DIES.format(what="once.unlink(); raise ZeroDivisionError"))
    args = [*SMALL, "--algo", f"{tmp_path / 'dies.py'}:Dies", "--max-restarts", "1"]
    done = train(tmp_path / "r", *args, nprocs=3, expect=1)
    assert done.stderr.count("restart 1 of 1") == 1
    done = train(tmp_path / "s", *args, "--gamma", "2", nprocs=3, expect=2)
    assert "restart" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("run", range(8))
def test_chaos(run, tmp_path):
    """A random rank of four is killed at a random time, up to three times."""
    rng = random.Random(run)
    args = [*SMALL, "--total-steps", "3840", "--checkpoint-every", "5"]
    train(tmp_path / "whole", *args)
    slow = ["--algo", f"{HERE}/helpers/agents.py:SlowPPO", "--config", "configs/ppo.toml"]
    slow += ["--max-restarts", "3", "--nprocs", "4"]
    process, token = start("train.py", *args, *slow, "--run-dir", str(tmp_path / "r"))
    killed = 0
    limit = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < limit:
        time.sleep(rng.uniform(1, 8))
        if killed < 3:
            killed += kill_one_rank(token, rng.randrange(4), signal.SIGKILL)
    out, err = end(process, token)
    assert process.returncode == 0, out + err
    assert killed
    assert len(table(tmp_path / "r")) == 60
    assert curve(tmp_path / "r") == curve(tmp_path / "whole")
    assert sha(tmp_path / "r") == sha(tmp_path / "whole")
