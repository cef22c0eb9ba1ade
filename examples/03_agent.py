"""An agent of your own: advantage actor-critic for choices, in plain torch.

    python examples/03_agent.py
    python train.py CartPole --algo examples/03_agent.py --num-envs 4

`act` and `process` run on every rank, `update` on rank 0 alone. No MPI, no files, no seeds.
"""

from dataclasses import dataclass

import torch
from torch.nn import Sequential, Tanh

import rank0rl
from rank0rl.agent import choose
from rank0rl.nets.layers import Linear  # a row of it has the same bits in every batch
from rank0rl.returns import advantages


@dataclass(frozen=True)
class MyOptions:
    """Options on the command line, each with a default."""

    lr: float = 3e-3
    """Adam's step size. This line is the help of --lr."""


class MyA2C(rank0rl.Agent):
    """One gradient step per batch."""

    Options = MyOptions
    noise = ("uniform", 1)  # one random number per step

    def __init__(self, spaces, options, rng):
        self.space = spaces.act
        self.policy = Sequential(Linear(spaces.obs.size, 64), Tanh(), Linear(64, spaces.act.size))
        self.value = Sequential(Linear(spaces.obs.size, 64), Tanh(), Linear(64, 1))
        self.adam = torch.optim.Adam(torch.nn.ModuleDict(self.modules()).parameters(), options.lr)

    @torch.no_grad()
    def act(self, step):
        """Draw a choice for each row, or take the most probable one."""
        logits = self.policy(torch.from_numpy(step.obs)).numpy()
        return choose(logits, step.noise, self.space, explore=step.explore), {}

    @torch.no_grad()
    def process(self, fragment):
        """Return rows for the batch: one for each step of the fragment."""
        val = self.value(torch.from_numpy(fragment.obs))[:, 0].numpy()
        end_val = self.value(torch.from_numpy(fragment.end_obs))[:, 0].numpy()
        adv = advantages(fragment, val, end_val, gamma=0.99, lam=0.95)
        return {"obs": fragment.obs, "act": fragment.act, "adv": adv, "ret": adv + val}

    def update(self, batch, rng, progress):
        """Learn from the rows of all ranks. The numbers returned go into the record."""
        obs, act, adv, ret = (torch.from_numpy(batch[k]) for k in ("obs", "act", "adv", "ret"))
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)  # 1e-8: they may be equal
        logp = torch.distributions.Categorical(logits=self.policy(obs)).log_prob(act)
        value_loss = (self.value(obs)[:, 0] - ret).square().mean()
        self.adam.zero_grad()
        (0.5 * value_loss - (logp * adv).mean()).backward()
        self.adam.step()
        return {"value_loss": value_loss.item()}

    def modules(self):
        """Return what is broadcast after each update, and saved."""
        return {"policy": self.policy, "value": self.value}

    def state(self):
        """Return what only rank 0 has. It is saved too."""
        return {"adam": self.adam.state_dict()}

    def load(self, state):
        """Restore it when a run is resumed."""
        self.adam.load_state_dict(state["adam"])


if __name__ == "__main__":
    rank0rl.train("CartPole", algo=MyA2C, nprocs=2, num_envs=4, total_steps=60_000)
