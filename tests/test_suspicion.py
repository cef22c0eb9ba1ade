"""An agent whose `act` or `process` depends on more than its arguments is found out, or repaired."""

import contextlib
import copy
import re

import numpy as np
import pytest
import torch
from helpers.agents import liar
from helpers.envs import NoiseAgent
from helpers.runs import table, train, train_here

from examples.rnd import RND
from rank0rl.agent import Step
from rank0rl.algos.ppo import PPO
from rank0rl.run.agent_checks import Suspect

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
    "no extras": ({"act": "return act"}, "such as (act, {}): got array(["),
    "a state that is not used": (
        {"act": "self.hidden = self.hidden + 1"},
        "act changes the agent's attribute 'hidden'",
    ),
    "a state of process": (
        {"process": "self.hidden = torch.full((2,), float(np.sum(fragment.obs)))"},
        "process changes the agent's attribute 'hidden'",
    ),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_the_run_with_a_line_that_says_why(tmp_path, lie):
    parts, words = LIES[lie]
    done = train(tmp_path / "run", *liar(tmp_path, **parts), expect=1)
    assert words in done.stderr


@pytest.mark.slow
def test_what_is_prepared_may_draw_and_does_not_change_the_curve(tmp_path):
    words = liar(tmp_path)
    file = tmp_path / "liar.py"
    draws = "import time; [(torch.randn(4), time.sleep(0.001)) for _ in range({})]"
    kept = {}
    for number in (0, 300):
        prepare = f"    def prepare(self):\n        {draws.format(number)}\n\n    def modules"
        file.write_text(file.read_text().replace("    def modules", prepare, 1))
        train(tmp_path / f"{number}", *words)
        kept[number] = [row["weights_sha256"] for row in table(tmp_path / f"{number}")]
    assert kept[0] == kept[300]


@pytest.mark.slow
def test_weights_and_updates_of_global_generators_are_those_of_the_seed(tmp_path):
    words = liar(tmp_path, act="self.cache = 1")  # set once, it changes nothing
    runs = {}
    for name, nprocs, seed in (("a", 1, 0), ("b", 2, 0), ("c", 1, 1)):
        train(tmp_path / name, *words, "--seed", str(seed), nprocs=nprocs)
        runs[name] = [row["weights_sha256"] for row in table(tmp_path / name)]
    assert runs["a"] == runs["b"] != runs["c"]


class NoPredictor(RND):
    """Trains a network that no checkpoint has."""

    def modules(self):
        return PPO.modules(self)


class NoMoments(RND):
    """Has an optimizer that no checkpoint has."""

    def state(self):
        return PPO.state(self)


class NoFactor(PPO):
    """Trains a number that no checkpoint has, in a dict."""

    def update(self, batch, rng, progress):
        self.factors = getattr(self, "factors", {"a": torch.zeros(1, requires_grad=True)})
        self.factors["a"].data += 1
        return super().update(batch, rng, progress)


class Anew(PPO):
    """Makes a copy in each update, and has views of what is saved."""

    def update(self, batch, rng, progress):
        self.old = copy.deepcopy(self.policy)
        metrics = super().update(batch, rng, progress)
        self.old.load_state_dict(self.policy.state_dict())
        for tensor in self.old.parameters():
            tensor.data *= 2
        self.first = self.flat.vectors[0].detach()[:3].requires_grad_()
        return metrics


class ReusesItsArray(NoiseAgent):
    class Kept:
        out = np.zeros((8, 1), np.float32)

    def act(self, step):
        act, extras = super().act(step)
        out = self.Kept.out[: len(act)]
        out[:] = act
        return out, extras


def test_an_agent_may_return_an_array_that_it_uses_again():
    step = Step(np.zeros((3, 2), np.float32), np.float32([[1], [2], [3]]), np.arange(3))
    expected = NoiseAgent().act(step)[0].tolist()
    assert Suspect(ReusesItsArray(), closely=True).act(step)[0].tolist() == expected


class Counts(PPO):
    """Changes numbers, one of which no checkpoint has."""

    kept = 1.0

    def __init__(self, *args):
        super().__init__(*args)
        self.lost, self.kept, self.later = {"a": 0.5}, 1.5, None
        self.many, self.mean, self.seen = [*range(1500)], np.full(3, 7.25), np.zeros(3)
        self.unknown, self.large = np.full(3, np.nan), 1 << 2000

    def update(self, batch, rng, progress):
        self.kept += 1
        self.lost["a"] += 1
        self.later = 3
        self.mean, self.seen = self.mean + 1, self.seen + 1
        self.many.append(len(self.many))
        return super().update(batch, rng, progress)

    def state(self):
        return {
            **super().state(),
            "kept": np.array([self.kept]),
            "many": np.array(self.many),
            "seen": self.seen,
        }


def test_numbers_that_an_update_changes_and_nobody_saves_are_noted(tmp_path, capsys):
    size = {"env_id": "Pendulum", "num_envs": 2, "steps_per_batch": 64, "total_steps": 192}
    train_here(Counts, Counts.Options(hidden=(8,)), tmp_path, **size)
    [note] = re.findall("note: update has changed (.*), and neither", capsys.readouterr().out)
    assert note == "lost, mean"


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (NoPredictor, "update has changed predictor.0.weight, and 5 more, which is in neither"),
        (NoMoments, r"update has changed bonus_adam \(0\), and 11 more"),
        (NoFactor, r"update has changed factors\['a'\], which is in neither"),
        (Anew, None),
    ],
)
def test_what_an_update_changes_must_be_saved(agent, said, tmp_path):
    size = {"env_id": "Pendulum", "num_envs": 2, "steps_per_batch": 64, "total_steps": 192}
    outcome = pytest.raises(ValueError, match=said) if said else contextlib.nullcontext()
    with outcome:
        train_here(agent, agent.Options(hidden=(8,)), tmp_path, **size)
