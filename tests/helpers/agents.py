"""Agents for tests: small ones, slow ones, and one that may depend on more than it is given."""

import os
import signal
import sys
import time

from rank0rl.algos.a2c import A2C, A2COptions
from rank0rl.algos.cem import CEM, CEMOptions
from rank0rl.algos.klppo import KLPPO, KLPPOOptions
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.algos.reinforce import Reinforce, ReinforceOptions
from rank0rl.algos.trpo import TRPO, TRPOOptions

AGENTS = {
    "ppo": (PPO, PPOOptions(hidden=(8,), epochs=1)),
    "trpo": (TRPO, TRPOOptions(hidden=(8,), value_epochs=1)),
    "klppo": (KLPPO, KLPPOOptions(hidden=(8, 8), value_hidden=(8, 8), epochs=2)),
    "a2c": (A2C, A2COptions(hidden=(8,))),
    "reinforce": (Reinforce, ReinforceOptions(hidden=(8,))),
    "cem": (CEM, CEMOptions(population=4)),
}


class SlowPPO(PPO):
    """Receives SIGTERM in mid-update, once the share END_AT of the run is over."""

    def update(self, batch, rng, progress):
        metrics = super().update(batch, rng, progress)
        time.sleep(0.1)
        if progress >= float(os.environ.get("END_AT", "inf")):
            os.kill(os.getpid(), signal.SIGTERM)  # weights and Adam's moments have changed already
        return metrics


class MpiSeen(PPO):
    def update(self, *args):
        return {**super().update(*args), "mpi_loaded": int("mpi4py" in sys.modules)}


LIAR = """
import numpy as np
import random
import torch
from torch import nn
from torch.distributions import Categorical
from rank0rl import Agent
from rank0rl.nets.layers import Linear


class Liar(Agent):
    noise = ("uniform", 1)

    def __init__(self, spaces, options, rng):
        self.policy = nn.Sequential({layer}(4, 64), nn.Tanh(), {layer}(64, 2))
        self.optimizer = torch.optim.SGD(self.policy.parameters(), 0.01)
        self.hidden, self.cache = 0, None

    def act(self, step):
        with torch.no_grad():
            p = torch.softmax(self.policy(torch.from_numpy(step.obs)), 1).numpy()
        act = (step.noise[:, 0] > p[:, 0]).astype(np.int64)
        {act}
        return act, {{"p": p}}

    def process(self, fragment):
        {process}
        return {{"obs": fragment.obs, "act": fragment.act, "rew": fragment.rew}}

    def update(self, batch, rng, progress):
        logits = self.policy(torch.from_numpy(batch["obs"]))
        order = torch.randperm(len(logits))[:64]  # from the global generator, which is seeded
        loss = nn.functional.cross_entropy(logits[order], torch.from_numpy(batch["act"])[order])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {{"loss": loss.item()}}

    def modules(self):
        return {{"policy": self.policy}}
"""


def liar(tmp_path, layer="Linear", act="pass", process="pass"):
    file = tmp_path / "liar.py"
    file.write_text(LIAR.format(layer=layer, act=act, process=process))
    return ["CartPole", "--algo", f"{file}:Liar", "--num-envs", "4", "--total-steps", "768"]
