"""An agent whose `act` or `process` depends on more than its arguments is found out, or repaired."""

import pytest
from runs import table, train

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

    def act(self, obs, noise, fragment_id):
        with torch.no_grad():
            p = torch.softmax(self.policy(torch.from_numpy(obs)), 1).numpy()
        act = (noise[:, 0] > p[:, 0]).astype(np.int64)
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
LIES = {
    "a product of rows": ({"layer": "nn.Linear"}, "for an observation alone"),
    "drawn by torch": (
        {"act": "act = Categorical(torch.from_numpy(p)).sample().numpy()"},
        "act has drawn from torch's global",
    ),
    "drawn by NumPy": ({"act": "np.random.random()"}, "act has drawn from NumPy's global"),
    "drawn by Python": ({"process": "random.random()"}, "process has drawn from Python's global"),
    "a hidden state": (
        {"act": "self.hidden = self.hidden + 1; act = act ^ (self.hidden % 2)"},
        "act returned other actions for the same arguments the second time",
    ),
    "a state that is not used": (
        {"act": "self.hidden = self.hidden + 1"},
        "act changes the agent's attribute 'hidden'",
    ),
    "a state of process": (
        {"process": "self.hidden = torch.full((2,), float(np.sum(fragment.obs)))"},
        "process changes the agent's attribute 'hidden'",
    ),
}


def liar(tmp_path, layer="Linear", act="pass", process="pass"):
    file = tmp_path / "liar.py"
    file.write_text(LIAR.format(layer=layer, act=act, process=process))
    return ["CartPole", "--algo", f"{file}:Liar", "--num-envs", "4", "--total-steps", "768"]


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_the_run_with_a_line_that_says_why(tmp_path, lie):
    parts, words = LIES[lie]
    done = train(tmp_path / "run", *liar(tmp_path, **parts), expect=1)
    assert words in done.stderr


def test_weights_and_updates_of_global_generators_are_those_of_the_seed(tmp_path):
    words = liar(tmp_path, act="self.cache = 1")  # set once, it changes nothing
    runs = {}
    for name, nprocs, seed in (("a", 1, 0), ("b", 2, 0), ("c", 1, 1)):
        train(tmp_path / name, *words, "--seed", str(seed), nprocs=nprocs)
        runs[name] = [row["weights_sha256"] for row in table(tmp_path / name)]
    assert runs["a"] == runs["b"] != runs["c"]
