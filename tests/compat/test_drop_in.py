"""Small programs in the patterns of Spinning Up, OmniSafe and stable-baselines3: two ranks do what one does.

What they learn from is a function of the iteration and the row, or the environment, so that every
number of ranks has the same rows, each rank its own part of them.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.ranks import on_ranks
from torch import nn

import rank0rl
from rank0rl.compat import mpi_pytorch, mpi_tools
from rank0rl.compat import omnisafe as distributed

ROWS, ENVS, ITERATIONS = 48, 4, 3


def rows(iteration, rank, nworkers):
    """A rank's part of an iteration's rows: observations, actions and advantages."""
    rng = np.random.default_rng(iteration)
    x = rng.normal(size=(ROWS, 5)).astype(np.float32).reshape(nworkers, -1, 5)[rank]
    obs, act, adv = torch.as_tensor(x).split([3, 1, 1], dim=1)
    return obs, act, 3 * adv[:, 0] + obs[:, 0]


class Policy(nn.Module):
    """A normal distribution around a linear function."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(3, 1)

    def logp(self, obs, act):
        return torch.distributions.Normal(self.mean(obs), 1.0).log_prob(act)[:, 0]


def seen_of(policy, ends):
    weights = torch.cat([p.detach().flatten() for p in policy.parameters()])
    return {"weights": weights.tolist(), "ends": ends}


def spinning_up():
    """Make gradient steps until the policy has changed too much, as its PPO does."""
    mpi_tools.mpi_fork(mpi_tools.num_procs())
    mpi_pytorch.setup_pytorch_for_mpi()
    torch.manual_seed(10000 * mpi_tools.proc_id())
    policy, ends = Policy(), []
    mpi_pytorch.sync_params(module=policy)
    adam = torch.optim.Adam(policy.parameters(), lr=0.05)
    for iteration in range(ITERATIONS):
        obs, act, adv = rows(iteration, mpi_tools.proc_id(), mpi_tools.num_procs())
        mean, std = mpi_tools.mpi_statistics_scalar(adv)
        adv = (adv - mean) / std
        before = policy.logp(obs, act).detach()
        for step in range(40):
            logp = policy.logp(obs, act)
            if mpi_tools.mpi_avg((before - logp).mean().item()) > 0.02:
                break
            adam.zero_grad()
            (-((logp - before).exp() * adv).mean()).backward()
            mpi_pytorch.mpi_avg_grads(module=policy)
            adam.step()
        ends.append(step)
    return seen_of(policy, ends)


def omnisafe():
    """Make natural gradient steps with a line search, as its TRPO does."""
    if distributed.fork(distributed.world_size()):
        return None
    distributed.setup_distributed()
    torch.manual_seed(1000 * distributed.get_rank())
    policy, ends = Policy(), []
    distributed.sync_params(policy)
    parameters = list(policy.parameters())
    for iteration in range(ITERATIONS):
        obs, act, adv = rows(iteration, distributed.get_rank(), distributed.world_size())
        mean, std, *_ = distributed.dist_statistics_scalar(adv, with_min_and_max=True)
        adv, before = (adv - mean) / std, policy.logp(obs, act).detach()
        policy.zero_grad()
        loss = -((policy.logp(obs, act) - before).exp() * adv).mean()
        loss.backward()
        distributed.avg_grads(policy)
        gradient = nn.utils.parameters_to_vector([p.grad for p in parameters])
        inputs = torch.cat([obs, torch.ones(len(obs), 1)], 1)
        fisher = inputs.T @ inputs / len(obs)  # of a linear mean: a row is the input and 1
        distributed.avg_tensor(fisher)
        direction = -torch.linalg.solve(fisher, gradient)
        start = nn.utils.parameters_to_vector(parameters).detach().clone()
        for step in range(10):
            nn.utils.vector_to_parameters(start + 4 * 0.5**step * direction, parameters)
            with torch.no_grad():
                change = policy.logp(obs, act) - before
                better = -(change.exp() * adv).mean() < loss
                gain = distributed.dist_avg(better.float())
            if gain == 1 and distributed.dist_avg(-change.mean()) < 0.05:
                break
        ends.append(step)
    assert distributed.is_master() == (distributed.get_rank() == 0)
    return seen_of(policy, ends)


class PPO:
    """A model as stable-baselines3's are: it fills a buffer of (steps, environments), then trains."""

    def __init__(self, n_envs):
        self.policy, self.n_envs = Policy(), n_envs
        self.adam = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.rollout_buffer = SimpleNamespace()

    def collect_rollouts(self, iteration):
        first = self.n_envs * rank0rl.rank
        each = [rows(100 * iteration + e, 0, 1) for e in range(first, first + self.n_envs)]
        arrays = [np.stack([np.asarray(x) for x in xs], 1) for xs in zip(*each, strict=True)]
        buffer = self.rollout_buffer
        buffer.observations, buffer.actions, buffer.advantages = arrays
        buffer.n_envs = self.n_envs

    def train(self):
        buffer = self.rollout_buffer
        shape = (ROWS, buffer.n_envs)
        assert buffer.observations.shape[:2] == buffer.advantages.shape == shape
        order = torch.as_tensor(np.random.default_rng(0).permutation(ROWS * buffer.n_envs))
        obs, act = (torch.as_tensor(x).flatten(0, 1) for x in (buffer.observations, buffer.actions))
        adv = torch.as_tensor(buffer.advantages).flatten()
        for some in order.split(32):
            self.adam.zero_grad()
            (-(self.policy.logp(obs[some], act[some]) * adv[some]).mean()).backward()
            self.adam.step()

    def learn(self):
        for iteration in range(ITERATIONS):
            self.collect_rollouts(iteration)
            self.train()


class RanksPPO(PPO):
    """A short form of the class in docs/drop-in.md."""

    trained = 0

    def train(self):
        buffer = self.rollout_buffer
        names = ("observations", "actions", "advantages")
        mine = {name: getattr(buffer, name).swapaxes(0, 1) for name in names}
        for name, x in rank0rl.rank0_accum_batches(mine).items():
            setattr(buffer, name, x.swapaxes(0, 1))
        if rank0rl.rank == 0:
            buffer.n_envs = self.n_envs * rank0rl.nworkers
            self.trained += 1
            super().train()
        rank0rl.rank0_bcast_wts(self.policy)


def stable_baselines3():
    torch.manual_seed(rank0rl.rank)
    model = RanksPPO(ENVS // rank0rl.nworkers)
    rank0rl.rank0_bcast_wts(model.policy)
    model.learn()
    return seen_of(model.policy, [model.trained])


PROGRAMS = {f.__name__: f for f in (spinning_up, omnisafe, stable_baselines3)}


def on_rank_programs():
    return {name: program() for name, program in PROGRAMS.items()}


@pytest.fixture(scope="module")
def alone():
    return on_ranks(1, "test_drop_in:on_rank_programs")[0]


@pytest.fixture(scope="module")
def both():
    return on_ranks(2, "test_drop_in:on_rank_programs")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spinning_up", "omnisafe"])
def test_ranks_that_average_make_the_steps_of_one_process(name, alone, both):
    first, second = both[0][name], both[1][name]
    assert first == second  # bit for bit
    assert first["ends"] == alone[name]["ends"]
    assert min(first["ends"]) > 0
    assert max(first["ends"]) < {"spinning_up": 39, "omnisafe": 9}[name]  # not the last step
    np.testing.assert_allclose(first["weights"], alone[name]["weights"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rank_0_learns_from_all_environments_the_same_bits_as_one_process(alone, both):
    name = "stable_baselines3"
    first, second = both[0][name], both[1][name]
    assert first["weights"] == second["weights"] == alone[name]["weights"]
    assert [first["ends"], second["ends"]] == [[ITERATIONS], [0]]


def test_in_one_process_the_lines_change_nothing(alone):
    torch.manual_seed(0)
    model = PPO(ENVS)
    model.learn()
    assert seen_of(model.policy, []) == alone["stable_baselines3"] | {"ends": []}
