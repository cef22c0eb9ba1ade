"""Soft actor-critic: an agent that learns from old rows too, which it keeps in a replay.

    python train.py Pendulum --algo examples/sac.py --num-envs 4 --steps-per-batch 64 --total-steps 12000

Sources: Haarnoja et al. 2018, arXiv:1801.01290, with the temperature of arXiv:1812.05905.
"""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss, softplus

from rank0rl import Agent, Replay
from rank0rl.nets.layers import Linear  # a row of it has the same bits in every batch
from rank0rl.options import CheckedOptions, option


@dataclass(frozen=True)
class SACOptions(CheckedOptions):
    """Options of SAC."""

    hidden: int = option(64, "[1, inf)")
    """Units of both hidden layers of each network."""
    gamma: float = option(0.99, "[0, 1)")
    """Discount per step."""
    lr: float = option(1e-3, "(0, inf)")
    """Adam's step size."""
    minibatch_size: int = option(128, "[1, inf)")
    """Rows of the replay per gradient step."""
    steps_per_row: float = option(1.0, "(0, inf)")
    """Gradient steps for each row that comes."""
    capacity: int = option(100_000, "[1, inf)")
    """Rows of the replay."""
    tau: float = option(0.005, "(0, 1]")
    """Share of the networks in their targets, per gradient step."""


class SAC(Agent):
    """Soft actor-critic for box actions."""

    Options = SACOptions
    coefficients = ("gamma", "minibatch_size", "steps_per_row", "tau")

    def __init__(self, spaces, options, rng):
        if spaces.act.choices:
            raise ValueError("SAC needs actions that are floats: choose PPO for choices")
        if not (np.isfinite(spaces.act.low).all() and np.isfinite(spaces.act.high).all()):
            raise ValueError("SAC needs actions with bounds: wrap the environment, or choose PPO")
        self.options = options
        n, k = spaces.obs.size, spaces.act.size
        self.noise = ("normal", k)
        self.low, self.high, self.shape = spaces.act.low, spaces.act.high, spaces.act.shape
        self.policy = mlp(n, options.hidden, 2 * k)
        self.q = nn.ModuleList(mlp(n + k, options.hidden, 1) for _ in range(2))
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        parts = self.policy.parameters(), self.q.parameters(), [self.log_alpha]
        self.adams = [torch.optim.Adam(each, options.lr) for each in parts]
        self.replay = Replay(options.capacity)

    @torch.no_grad()
    def act(self, step):
        """Return actions, and what the networks know of them: numbers in [-1, 1]."""
        own, _ = self.draw(flat(step.obs), torch.from_numpy(step.noise))
        own = own.numpy()
        act = self.low + (own.reshape(-1, *self.shape) + 1) / 2 * (self.high - self.low)
        return act.astype(np.float32), {"own": own}

    def process(self, fragment):
        """Return what SAC learns from: transitions."""
        return {
            "obs": flat(fragment.obs).numpy(),
            "own": fragment.extras["own"],
            "rew": fragment.rew.astype(np.float32),
            "next_obs": flat(fragment.next_obs).numpy(),
            "goes_on": (~fragment.terminated).astype(np.float32),
        }

    def update(self, batch, rng, progress):
        """Keep the rows, and make gradient steps on rows of the replay."""
        new = {name: x for name, x in batch.items() if name != "fragment_id"}
        self.replay.add(new)
        losses = []
        for _ in range(math.ceil(self.options.steps_per_row * len(batch["rew"]))):
            rows = self.replay.sample(self.options.minibatch_size, rng)
            noise = rng.standard_normal((2, *rows["own"].shape)).astype(np.float32)
            some = {name: torch.from_numpy(x) for name, x in rows.items()}
            losses.append(self.step(some, *torch.from_numpy(noise)))
        q_loss, entropy = np.mean(losses, axis=0)
        return {"q_loss": q_loss, "entropy": entropy, "alpha": self.log_alpha.exp().item()}

    def step(self, rows, noise, next_noise):
        """Make one gradient step of each part; return the loss of the Q functions, and the policy's entropy."""
        policy, q, temperature = self.adams
        alpha = self.log_alpha.exp().detach()
        act, logp = self.draw(rows["next_obs"], next_noise)
        after = torch.min(*values(self.target, rows["next_obs"], act)) - alpha * logp
        ret = (rows["rew"] + self.options.gamma * rows["goes_on"] * after).detach()
        loss = sum(mse_loss(value, ret) for value in values(self.q, rows["obs"], rows["own"]))
        descend(q, loss)
        act, logp = self.draw(rows["obs"], noise)
        descend(policy, (alpha * logp - torch.min(*values(self.q, rows["obs"], act))).mean())
        missing = (logp.detach() - act.shape[1]).mean()  # of the entropy, which is to be -k
        descend(temperature, -self.log_alpha * missing)
        with torch.no_grad():
            for target, now in zip(self.target.parameters(), self.q.parameters(), strict=True):
                target.lerp_(now, self.options.tau)
        return loss.item(), -logp.mean().item()

    def draw(self, obs, noise):
        """Return actions in [-1, 1], (N, k), and their log-probabilities, (N,)."""
        mean, log_std = self.policy(obs).chunk(2, dim=1)
        log_std = log_std.clamp(-5, 2)
        x = mean + log_std.exp() * noise
        normal = -(noise.square() / 2 + log_std + math.log(2 * math.pi) / 2)
        slope = 2 * (math.log(2) - x - softplus(-2 * x))  # log of the derivative of tanh
        return torch.tanh(x), (normal - slope).sum(dim=1)

    def modules(self):
        """Return what acts."""
        return {"policy": self.policy}

    def state(self):
        """Return what only rank 0 has."""
        return {
            "q": self.q.state_dict(),
            "target": self.target.state_dict(),
            "log_alpha": self.log_alpha,
            "adams": [adam.state_dict() for adam in self.adams],
            "replay": self.replay,
        }

    def load(self, state):
        """Take it back."""
        self.q.load_state_dict(state["q"])
        self.target.load_state_dict(state["target"])
        self.log_alpha.data = state["log_alpha"]
        for adam, saved in zip(self.adams, state["adams"], strict=True):
            adam.load_state_dict(saved)
        self.replay.load(state["replay"])


def mlp(inputs, hidden, outputs):
    """Return a network with two hidden layers."""
    return nn.Sequential(
        *(
            Linear(inputs, hidden),
            nn.ReLU(),
            Linear(hidden, hidden),
            nn.ReLU(),
            Linear(hidden, outputs),
        )
    )


def flat(obs):
    """Return observations as rows of float32, (N, numbers)."""
    return torch.from_numpy(obs.reshape(len(obs), -1).astype(np.float32))


def values(networks, obs, act):
    """Return the value of each Q function, (N,)."""
    return [network(torch.cat([obs, act], dim=1)).squeeze(1) for network in networks]


def descend(adam, loss):
    """Make a step of Adam along a loss."""
    adam.zero_grad()
    loss.backward()
    adam.step()
