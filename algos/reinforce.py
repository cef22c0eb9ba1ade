"""REINFORCE: the smallest complete agent, to copy. Source: Williams 1992, Machine Learning 8, 229-256."""

from dataclasses import dataclass

import numpy as np
import torch

from rank0rl.agent import Agent, check_ranges
from rank0rl.nets.flat import Adam, flatten_
from rank0rl.nets.policies import Mode, make_policy
from rank0rl.returns import discounted_sum


@dataclass(frozen=True)
class ReinforceOptions:
    """Options of REINFORCE."""

    gamma: float = 0.99
    """Discount per step, usually 0.95 to 1."""
    lr: float = 1e-2
    """Adam's step size, usually 1e-3 to 1e-2."""
    hidden: tuple[int, ...] = (32,)
    """Units of each hidden layer of the policy."""

    def __post_init__(self):
        check_ranges(self, gamma="[0, 1]", lr="(0, inf)", hidden="[1, inf)")


class Reinforce(Agent):
    """Policy gradient with the batch's mean return as baseline."""

    Options = ReinforceOptions

    def __init__(self, spaces, options, rng):
        self.options = options
        self.policy = make_policy((spaces.obs.size,), spaces.act, options.hidden, rng)
        self.noise = self.policy.noise
        self.flat = flatten_(self.policy)
        self.adam = Adam(self.flat)

    def act(self, obs, noise, fragment_id):
        return self.policy.act(inputs(obs), noise), {}

    def process(self, fragment):
        ret = [discounted_sum(fragment.rew[e], self.options.gamma) for e in fragment.episodes()]
        return {"obs": inputs(fragment.obs), "act": fragment.act, "ret": np.concatenate(ret)}

    def update(self, batch, rng, progress):
        ret = batch["ret"]
        adv = torch.from_numpy((ret - ret.mean()) / (ret.std() + 1e-8)).float()  # 1e-8: no variance
        now = self.policy.distribution(torch.from_numpy(batch["obs"]))
        loss = -(self.policy.logp(now, torch.from_numpy(batch["act"])) * adv).mean()
        self.flat.zero_grad()
        loss.backward()
        self.flat.check()
        self.adam.step(self.options.lr)
        return {"loss": loss.item()}

    def modules(self):
        return {"policy": self.policy}

    def state(self):
        return {"adam": self.adam.state()}

    def load(self, state):
        self.adam.load(state["adam"])

    def mode(self):
        return Mode(self.policy)


def inputs(obs):
    """Observations of any shape and type as rows of float32."""
    return obs.reshape(len(obs), -1).astype(np.float32)
