"""Every rank updates on its share, with gradients averaged: --update allreduce."""

import pytest
import torch
from runs import SMALL, curve, resume, sha, table, train

from rank0rl import checkpoint
from rank0rl.config import RunOptions
from rank0rl.replay import CannotReplayError, replay

TOGETHER = [*SMALL, "--update", "allreduce"]
WHOLE = ["--minibatch-size", "64", "--total-steps", "64"]  # one iteration, one minibatch an epoch
ALGOS = {
    "ppo": [*WHOLE, "--epochs", "3", "--target-kl", "1"],
    "trpo": ["--algo", "trpo", *WHOLE[2:], "--value-minibatch-size", "64", "--fisher-stride", "1"],
}
TRPO = ["CartPole", "--num-envs", "4", "--steps-per-batch", "64"]


def weights(folder):
    return checkpoint.read(checkpoint.latest(folder))["weights"]


@pytest.mark.parametrize("algo", list(ALGOS))
def test_the_step_is_that_of_the_whole_batch(algo, tmp_path):
    args = [*(TRPO if algo == "trpo" else SMALL), *ALGOS[algo]]
    train(tmp_path / "rank0", *args)
    train(tmp_path / "together", *args, "--update", "allreduce", nprocs=2)
    whole, shares = weights(tmp_path / "rank0"), weights(tmp_path / "together")
    assert whole.keys() == shares.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(shares[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    here, there = (table(tmp_path / folder)[0] for folder in ("rank0", "together"))
    for column in ("kl", "entropy"):
        assert float(there[column]) == pytest.approx(float(here[column]), rel=1e-3, abs=1e-6)
    assert here["batch_sha256"]
    assert not there["batch_sha256"]  # nobody has the whole batch


def test_one_rank_alone_is_what_rank_0_alone_is(tmp_path):
    for name, update in (("a", "rank0"), ("b", "allreduce")):
        train(tmp_path / name, *SMALL, "--update", update, "--total-steps", "192")
    assert sha(tmp_path / "a") == sha(tmp_path / "b")


def test_a_run_of_two_ranks_stays_in_step_and_is_resumed_exactly(tmp_path):
    args = [*TOGETHER, "--total-steps", "320", "--drift-check-every", "1", "--epochs", "2"]
    said = train(tmp_path / "whole", *args, nprocs=2).stdout
    assert "every number of ranks has a curve of its own" in said
    train(tmp_path / "parts", *args, "--stop-after-iterations", "2", nprocs=2)
    resume(tmp_path / "parts", nprocs=2)
    assert sha(tmp_path / "parts") == sha(tmp_path / "whole")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    with pytest.raises(CannotReplayError, match="one rank cannot repeat it"):
        replay(tmp_path / "parts", 1, 0)


AGENT = """
from algos.reinforce import Reinforce


class Apart(Reinforce):
    updates = ("rank0", "allreduce")  # but it averages nothing
"""


def test_an_agent_that_does_not_average_is_found_out(tmp_path):
    (tmp_path / "apart.py").write_text(AGENT)
    args = [*SMALL[:5], "--algo", f"{tmp_path / 'apart.py'}:Apart", "--update", "allreduce"]
    err = train(tmp_path / "run", *args, nprocs=2, expect=1).stderr
    assert "after an update of all ranks: all ranks must come with the same weights" in err
    assert "'policy." in err


def test_an_agent_that_cannot_is_refused(tmp_path):
    args = ["CartPole", "--algo", "reinforce", "--update", "allreduce"]
    err = train(tmp_path / "run", *args, expect=2).stderr
    assert "reinforce updates by rank0 only: got update 'allreduce'; leave --update out" in err


@pytest.mark.parametrize(
    ("options", "nworkers", "said"),
    [
        ({"num_envs": 32}, 3, "multiple of nprocs .* got 32 and 3; the nearest is --num-envs 33"),
        ({"episodes_per_batch": 8}, 2, "leave --episodes-per-batch out"),
        ({"overlap": True, "rank0_lanes": 0}, 2, "leave --overlap and --rank0-lanes out"),
        ({"learner_threads": 2, "device": "cuda"}, 2, "leave --learner-threads and --device out"),
    ],
)
def test_what_does_not_go_with_it(options, nworkers, said):
    RunOptions(**options).check(nworkers)
    with pytest.raises(ValueError, match=said):
        RunOptions(**options, update="allreduce").check(nworkers)
