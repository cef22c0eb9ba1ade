"""Every rank updates on its share, with gradients averaged: --update allreduce."""

import os

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from runs import SMALL, curve, resume, sha, table, train

from algos.ppo import PPO, PPOOptions
from algos.trpo import TRPO, TRPOOptions
from rank0rl import checkpoint, comm, job
from rank0rl.agent import Space, Spaces
from rank0rl.averages import AllRanks
from rank0rl.config import RunOptions
from rank0rl.learners import ALONE
from rank0rl.replay import CannotReplayError, replay
from rank0rl.state import Gathered
from rank0rl.threads import set_threads
from rank0rl.timing import Phases
from rank0rl.trainer import update_together

TOGETHER = [*SMALL, "--update", "allreduce"]
WHOLE = ["--minibatch-size", "64", "--total-steps", "64"]  # one iteration, one minibatch an epoch
ALGOS = {
    "ppo": [*WHOLE, "--epochs", "3", "--target-kl", "1"],
    "trpo": ["--algo", "trpo", *WHOLE[2:], "--value-minibatch-size", "64", "--fisher-stride", "1"],
}
FOR_TRPO = ["CartPole", "--num-envs", "4", "--steps-per-batch", "64"]


def weights(folder):
    return checkpoint.read(checkpoint.latest(folder))["weights"]


@pytest.mark.parametrize("algo", list(ALGOS))
def test_the_step_is_that_of_the_whole_batch(algo, tmp_path):
    args = [*(FOR_TRPO if algo == "trpo" else SMALL), *ALGOS[algo]]
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


ROWS = 64
VECTOR = Space("box", (4,), "float32")
IMAGE = Space("box", (8, 8, 3), "uint8", low=np.zeros((8, 8, 3)), high=np.full((8, 8, 3), 255))
BOX = Space("box", (2,), "float32", low=-np.ones(2, "f"), high=np.ones(2, "f"))
STOP = {"minibatch_size": ROWS, "epochs": 3, "lr": 1e-6}
UPDATES = {
    "ppo": (PPO, VECTOR, PPOOptions(minibatch_size=ROWS, epochs=3, lr=1e-2)),
    "minibatches": (PPO, VECTOR, PPOOptions(minibatch_size=16, epochs=3)),
    "normalize": (PPO, VECTOR, PPOOptions(minibatch_size=ROWS, lr=1e-2, normalize="minibatch")),
    "image": (PPO, IMAGE, PPOOptions(minibatch_size=ROWS, epochs=3, lr=1e-2)),
    "image, normalize": (
        *(PPO, IMAGE),
        PPOOptions(minibatch_size=ROWS, epochs=3, lr=1e-2, normalize="minibatch"),
    ),
    "image, minibatches": (PPO, IMAGE, PPOOptions(minibatch_size=16, epochs=3)),
    "trpo": (TRPO, VECTOR, TRPOOptions(fisher_stride=1, damping=0.002, value_minibatch_size=ROWS)),
    "trpo, minibatches": (TRPO, VECTOR, TRPOOptions(value_minibatch_size=16)),
    "goes on": (PPO, VECTOR, PPOOptions(**STOP, target_kl=0.1)),  # last: where these two are wrong,
    "stops": (PPO, VECTOR, PPOOptions(**STOP, target_kl=0.05)),  # ranks wait for each other
}
AS_THE_WHOLE = [name for name in UPDATES if "minibatches" not in name]
MINIBATCHES = {"minibatches": 3 * 4, "image, minibatches": 3 * 4, "trpo, minibatches": 5 * 4}


def updated(name, learners=ALONE, first=0, stride=1):
    """An agent's update on every so many rows of a batch, whose odd rows differ from the even ones.

    In observations, which makes for another KL of the same step; in advantages and returns; and, of
    those that end by the KL, in how far the acting policy is: 0.149 nats on the odd ones, else 0.
    """
    kind, space, options = UPDATES[name]
    agent = kind(Spaces(space, BOX), options, np.random.default_rng(0))
    agent.learners = learners
    rng, odd = np.random.default_rng(1), (np.arange(ROWS) % 2).astype(np.float32)
    noise, adv, val, ret = rng.standard_normal((4, ROWS), dtype=np.float32)
    act = rng.standard_normal((ROWS, 2), dtype=np.float32)
    obs = rng.standard_normal((ROWS, 4), dtype=np.float32) * (0.1 + 3 * odd[:, None])
    if space is IMAGE:
        obs = rng.integers(0, 128 + 127 * odd[:, None, None, None], (ROWS, 8, 8, 3), np.uint8, True)
    logp, _, _ = agent.policy.numpy(agent.norm.numpy(obs), act)
    logp -= 0.5 * odd if name in ("goes on", "stops") else 0.1 * noise
    batch = {
        "obs": obs,
        "act": act,
        "logp": logp,
        "adv": adv + 2 * odd,
        "val": val,
        "ret": ret + odd,
    }
    share = {key: np.ascontiguousarray(x[first::stride]) for key, x in batch.items()}
    metrics = agent.update(share, np.random.default_rng(2), 0.0)
    tensors = torch.nn.ModuleDict(agent.modules()).state_dict()
    steps = agent.adam.state()["steps"][0].item()
    return {
        "weights": {key: tensor.tolist() for key, tensor in tensors.items()},
        "metrics": metrics,
        "steps": steps,
    }


class Records(PPO):
    """It learns nothing."""

    def update(self, batch, rng, progress):
        return {"x": ["0.5", np.float32(1.5)][comm.get_rank()]}


def recorded(rows):
    """What an iteration with so many rows on this rank records, or its error."""
    agent = Records(Spaces(VECTOR, BOX), PPOOptions(), np.random.default_rng(0))
    share = Gathered({"adv": np.zeros(rows)}, {}, 16)
    try:
        return update_together(agent, share, RunOptions(update="allreduce"), Phases(), 7, 0.0)
    except ValueError as error:
        return str(error)


def on_rank():
    set_threads(1)
    os.environ[job.TIMEOUT] = "10"
    rank, learners = comm.get_rank(), AllRanks()
    done = {"equal rows": recorded(8), "unequal rows": recorded(8 + 4 * rank)}
    return done | {name: updated(name, learners, rank, 2) for name in UPDATES}


@pytest.fixture(scope="module")
def shares():
    """What two ranks have after each update on every other row."""
    return on_ranks(2, "test_allreduce:on_rank", limit_s=30)


@pytest.mark.parametrize("name", AS_THE_WHOLE)
def test_an_update_on_shares_is_that_on_the_whole_batch(name, shares):
    whole = updated(name)
    for share in (rank[name] for rank in shares):
        assert share["steps"] == whole["steps"]
        for key, tensor in whole["weights"].items():
            np.testing.assert_allclose(share["weights"][key], tensor, 1e-3, 1e-4, err_msg=key)


@pytest.mark.parametrize(("name", "steps"), MINIBATCHES.items())
def test_shares_of_minibatches_make_as_many_steps(name, steps, shares):
    assert (
        [rank[name]["steps"] for rank in shares] == [steps, steps] == [updated(name)["steps"]] * 2
    )


@pytest.mark.parametrize("name", UPDATES)
def test_all_ranks_have_the_same_weights_after_it(name, shares):
    assert shares[0][name]["weights"] == shares[1][name]["weights"]


@pytest.mark.parametrize(
    ("name", "alone", "together"), [("goes on", [3, 1], 3), ("stops", [3, 1], 1)]
)
def test_an_update_ends_by_the_kl_of_all_rows(name, alone, together, shares):
    assert [updated(name, first=r, stride=2)["metrics"]["epochs"] for r in (0, 1)] == alone
    assert [rank[name]["metrics"]["epochs"] for rank in shares] == [together] * 2
    assert shares[0][name]["metrics"]["kl"] == shares[1][name]["metrics"]["kl"]
    assert shares[0][name]["metrics"]["kl"] == pytest.approx(0.149 / 2, abs=1e-3)


def test_the_line_search_takes_the_step_that_is_right_for_all_rows(shares):
    """The whole one, which is beyond the bound on the odd rows, with 0.018 nats of 0.015."""
    whole = updated("trpo")["metrics"]
    assert whole["step_taken"] == 1.0
    for share in (rank["trpo"]["metrics"] for rank in shares):
        for column in ("kl", "gain", "step_taken"):
            assert share[column] == pytest.approx(whole[column], rel=1e-3)


def test_ranks_with_unequal_numbers_of_rows_are_told(shares):
    said = {rank["unequal rows"] for rank in shares}
    assert len(said) == 1
    assert "equally many rows on every rank" in min(said)
    assert "got [8, 12] rows on ranks 0 to 1 in iteration 7" in min(said)


def test_whatever_can_be_recorded_is_averaged(shares):
    assert [rank["equal rows"] for rank in shares] == [{"x": 1.0}] * 2
