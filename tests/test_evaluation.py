"""Evaluation in training: on all ranks, without a trace in what is trained."""

import json

import numpy as np
import pytest
from helpers.envs import NoiseAgent
from helpers.ranks import HERE
from helpers.runs import SMALL, curve, resume, sha, table, train, train_on_ranks

from rank0rl.agent import Step
from rank0rl.api import evaluate
from rank0rl.evaluation import Deterministic
from rank0rl.run import checkpoint

EVAL = ["--eval-every", "2", "--eval-episodes", "5"]
LENGTH = ["--total-steps", "320"]


def without(rows):
    return [{k: v for k, v in row.items() if not k.startswith("eval_")} for row in rows]


EPISODES = ["--minibatch-size", "16", "--episodes-per-batch", "4"]


MODES = [
    SMALL,
    pytest.param([*SMALL, "--overlap"], marks=pytest.mark.slow),
    pytest.param(["CartPole", *EPISODES], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_the_same_way_with_and_without(mode, tmp_path):
    args = [*mode, *LENGTH]
    done = train(tmp_path / "without", *args, *EVAL[2:])
    assert "note: these have no effect without --eval-every: --eval-episodes" in done.stdout
    for n in (1, 3):
        train_on_ranks(tmp_path / str(n), *args, *EVAL, nprocs=n)
        assert without(curve(tmp_path / str(n))) == curve(tmp_path / "without")
        assert sha(tmp_path / str(n)) == sha(tmp_path / "without")
    assert curve(tmp_path / "1") == curve(tmp_path / "3")


def test_a_reloaded_checkpoint_repeats_the_evaluation_that_was_recorded(tmp_path):
    args = [*SMALL, "--seed", "4", *EVAL, "--keep-checkpoints", "9", "--checkpoint-every", "1"]
    train_on_ranks(tmp_path, *args, *LENGTH, nprocs=2)
    rows = table(tmp_path)
    assert [bool(row["eval_return"]) for row in rows] == [False, True, False, True, False]
    for row in rows[1::2]:
        file = checkpoint.before(tmp_path, int(row["iteration"]))
        again = evaluate(file, 5, deterministic=True)
        assert float(row["eval_return"]) == pytest.approx(np.mean(again["return"]))
        assert float(row["eval_return_std"]) == pytest.approx(np.std(again["return"]), rel=1e-5)
        assert float(row["eval_length"]) == pytest.approx(np.mean(again["length"]))


RISES = """
from helpers.envs import NoiseAgent, np
class Rises(NoiseAgent):
    def __init__(self, *args):
        self.w = np.zeros(1)
    def act(self, step):
        return np.repeat(self.w, len(step.obs))[:, None] + step.noise, {"noise": step.noise}
    def update(self, batch, rng, progress):
        self.w[:] = [0.2, 0.5, 0.4, 0.1, 0.5][int(round(5 * progress))]
        return {}
    def modules(self):
        return {"w": self.w}
"""


@pytest.mark.slow
def test_the_best_model_is_kept_over_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    (tmp_path / "rises.py").write_text(RISES)
    run = tmp_path / "r"
    args = ["helpers.envs:Paid-v0", "--algo", f"{tmp_path / 'rises.py'}:Rises", "--eval-every", "1"]
    args += ["--num-envs", "2", "--steps-per-batch", "6", "--total-steps", "30"]
    train(run, *args, "--stop-after-iterations", "3", nprocs=2)
    resume(run)
    returns = [float(row["eval_return"]) for row in table(run)]
    assert returns == pytest.approx([0.6, 1.5, 1.2, 0.3, 1.5])
    best = run / "checkpoints" / "best.pt"
    assert checkpoint.read(best)["progress"]["iteration"] == 2
    assert json.loads((run / "summary.json").read_text())["best_eval"] == pytest.approx(1.5)
    assert evaluate(best, 2, deterministic=True)["return"].tolist() == pytest.approx([1.5, 1.5])


@pytest.mark.slow
def test_acting_that_changes_weights_is_found_out(tmp_path):
    (tmp_path / "a.py").write_text(
        "from rank0rl.algos.ppo import PPO\n"
        "class Drifts(PPO):\n"
        "    def act(self, step):\n"
        "        if not step.explore:\n"
        "            self.value.mlp.biases[0].data += 1\n"
        "        return super().act(step)\n"
    )
    args = ["Pendulum", "--algo", f"{tmp_path / 'a.py'}:Drifts", "--num-envs", "2"]
    args += ["--steps-per-batch", "64", "--eval-every", "1"]
    done = train(tmp_path / "r", *args, nprocs=2, expect=1)
    assert "after evaluation: rank 0: 'value.mlp.biases.0' has changed" in done.stderr


def test_without_exploration_normal_noise_is_0_and_all_else_as_it_was():
    class Shows(NoiseAgent):
        def act(self, step):
            return step.noise, {"mask": step.mask, "explore": step.explore}

    agent, step = Shows(), Step(np.zeros(2), np.ones(2), np.arange(2), mask=np.array([3]))
    for agent.noise, noise in (("normal", 1), [0, 0]), (("uniform", 1), [1, 1]):
        act, extras = Deterministic(agent).act(step)
        assert act.tolist() == noise
        assert extras == {"mask": step.mask, "explore": False}
