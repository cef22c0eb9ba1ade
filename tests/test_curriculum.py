"""Figures of episodes and curricula: the same on any number of ranks, resumed and replayed."""

import json

import gymnasium as gym
import numpy as np
import pytest
from helpers import forks
from helpers.ranks import HERE
from helpers.runs import curve, replay, resume, sha, table, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rank0rl.envs.info import EPISODE, EpisodeInfo, label
from rank0rl.envs.wrappers import ResetMethod
from rank0rl.run.hooks import Curriculum, chosen

CORRIDOR = ["examples.02_environment:corridor", "--curriculum", "examples.06_curriculum:farther"]
STEPS = ["--steps-per-batch", "256", "--total-steps", "1536"]
EPISODES = ["--episodes-per-batch", "20", "-n", "120"]
INFO = ["--info", "success", "sum:success", "nowhere"]

OWN = """
import importlib

Corridor = importlib.import_module("examples.02_environment").Corridor


class Told(Corridor):
    def __init__(self, start=0):
        super().__init__()
        self.start, self.told = start, 0

    def tell(self, settings):
        self.told = settings["distance"]

    def reset(self, *, seed=None, options=None):
        assert options is None
        super().reset(seed=seed, options={"distance": self.told + self.start})
        return self._obs(), {}


def told(start=0):
    return Told(start)


def start_of(index):
    return {"start": index % 2}
"""


class Steps(gym.Env):
    """Its infos are given in advance, one for each step."""

    def __init__(self, infos):
        self.infos = infos

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1), {}

    def step(self, action):
        info = self.infos[self.t]
        self.t += 1
        return np.zeros(1), 1.0, self.t == len(self.infos), False, info


def figures(infos, *names):
    env = EpisodeInfo(lambda: Steps(infos), names)
    for _ in range(2):  # the second episode begins anew
        env.reset()
        given = [env.step(0)[4] for _ in infos]
    return given[-1][EPISODE]


def test_last_sum_and_maximum_of_what_steps_had():
    infos = [{"a": 1.5, "b": True}, {"a": np.float32(4)}, {"a": np.array([-2]), "c:d": 7}, {}]
    found = figures(infos, "a", "sum:a", "max:a", "b", "c:d", "e", "sum:e")
    expected = {"a": -2.0, "a_sum": 3.5, "a_max": 4.0, "b": 1.0, "c:d": 7.0}
    assert {name: found[name] for name in expected} == expected
    assert np.isnan([found["e"], found["e_sum"]]).all()
    assert label("max:x") == "x_max"


def test_what_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"info\['a'\] must be a number, for --info: got 'high'"):
        figures([{"a": "high"}], "a")


def test_settings_go_to_a_method_of_the_environment():
    env = ResetMethod(lambda: gym.make("CartPole-v1"), "get_wrapper_attr")
    assert len(env.reset(seed=3)) == 2
    with pytest.raises(ValueError, match="'harder', which CartPoleEnv does not have"):
        ResetMethod(lambda: gym.make("CartPole-v1"), "harder")


def test_settings_are_plain_data():
    asked = []

    def choose(progress, record):
        asked.append((progress, record))
        return {"a": np.int64(len(asked) // 2), "b": np.zeros(2)}

    began = []
    curriculum = Curriculum(choose, lambda *settings: began.append(settings), lambda: 0.5)
    for iteration in range(1, 4):
        curriculum.before(iteration)
        record = {"settings": began[-1][1], "return_mean": iteration}
        curriculum.after(None, iteration, record)
    assert began[0] == (1, '{"a": 0, "b": [0.0, 0.0]}')
    assert asked[1] == (0.5, {"return_mean": 1, "settings": {"a": 0, "b": [0.0, 0.0]}})
    assert [version for version, _ in began] == [1, 2, 2]
    assert curriculum.columns() == {"a": 1.0}  # of the batch; those of the next one are chosen
    with pytest.raises(ValueError, match="a dict of numbers, strings and lists: got 7"):
        chosen(lambda progress, record: 7, 0.0, {})
    with pytest.raises(ValueError, match="got {'a': <object"):
        chosen(lambda progress, record: {"a": object()}, 0.0, {})


CASES = [
    pytest.param([*STEPS, "--overlap"], id="steps, overlap"),
    pytest.param(EPISODES, id="episodes"),
    pytest.param([*STEPS, "--env-processes", "--env-retries", "1"], id="processes"),
    pytest.param([*STEPS, "--recurrent", "gru"], id="memory"),
]


@pytest.mark.slow
@pytest.mark.parametrize("args", CASES)
def test_the_same_on_any_number_of_ranks_resumed_and_replayed(args, tmp_path):
    options = [*CORRIDOR, *INFO, *args, "--num-envs", "4", "--eval-every", "2", "--lr", "1e-2"]
    options += ["--checkpoint-every", "2", "--keep-checkpoints", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = train(whole, *options, nprocs=2 if "--overlap" in args else 1)
    assert done.stdout.count("had 'nowhere' in its info") == 1
    assert "had 'success'" not in done.stdout
    train(parts, *options, "--stop-after-iterations", "3", nprocs=3)
    resume(parts, nprocs=2)
    assert curve(parts) == curve(whole)
    assert sha(parts) == sha(whole)
    rows = table(whole)
    used = [json.loads(row["settings"])["distance"] for row in rows]
    assert used[0] == 2
    assert used == [int(row["distance"]) for row in rows]
    assert used[-1] > 4, used  # it has become harder, more than once
    assert [row["eval_success"] for row in rows][::2] == [""] * len(rows[::2])
    assert float(rows[1]["eval_length"]) >= 30  # it is evaluated without settings, from far away
    assert float(rows[0]["success_mean"]) == float(rows[0]["success_sum_mean"]) > 0.2
    assert {row["nowhere_mean"] for row in rows} == {"nan"}
    kind = "episode" if args == EPISODES else "env"
    for iteration in (2, 5):
        assert replay(whole, iteration, **{kind: 3}).stdout.count("the same data") == 2


@pytest.mark.slow
def test_figures_are_everywhere_that_returns_are(tmp_path):
    train(tmp_path / "r", *CORRIDOR, *INFO, *STEPS, "--num-envs", "4", "--tensorboard")
    events = EventAccumulator(str(tmp_path / "r"))
    events.Reload()
    assert {"info/success_mean", "curriculum/distance"} <= {*events.Tags()["scalars"]}
    done = forks.run("-m", "rank0rl", "evaluate", str(tmp_path / "r"), "--episodes", "3")
    assert "success 0\n" in done.stdout, done.stdout
    assert "nowhere nan\n" in done.stdout
    done = forks.run("-m", "rank0rl", "report", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    rows = table(tmp_path / "r")
    assert "success mean by steps" in (tmp_path / "r" / "report.html").read_text()
    curve_of = ["--y", "success_mean", "--out", str(tmp_path / "a.svg")]
    done = forks.run("-m", "rank0rl", "plot", str(tmp_path / "r"), *curve_of)
    assert done.returncode == 0, done.stderr
    assert f"seeds: 1) at {rows[-1]['steps']}" in done.stdout.replace(",", "")
    done = forks.run("-m", "rank0rl", "plot", str(tmp_path / "r"), "--y", "nothing")
    assert "no column 'nothing': choose one of" in done.stderr


@pytest.mark.slow
def test_arguments_by_index_and_a_method_that_takes_the_settings(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parent}:{tmp_path}")
    args = ["mine:told", *CORRIDOR[1:], "--curriculum-method", "tell", "--num-envs", "4", *STEPS]
    args += ["--env-kwargs-of", f"{tmp_path}/mine.py:start_of"]
    train(tmp_path / "1", *args)
    train(tmp_path / "3", *args, "--stop-after-iterations", "2", nprocs=3)
    resume(tmp_path / "3", nprocs=2)
    assert curve(tmp_path / "3") == curve(tmp_path / "1")
    lengths = {row["length_mean"] for row in curve(tmp_path / "1")}
    train(tmp_path / "same", *[a for a in args if "of" not in a])
    assert lengths != {row["length_mean"] for row in curve(tmp_path / "same")}


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--info", "a", "a"], "each once: got 'a'"),
        (["--info", "return"], "got 'return'"),
        (["--info", "sum:"], "got 'sum:'"),
        (["--curriculum", "math:prod"], "TypeError"),
        (["--curriculum", "operator:and_"], "TypeError"),
        (["--env-kwargs-of", "math:sqrt"], "math:sqrt(0) must return a dict: got 0.0"),
        (["--curriculum", "examples.06_curriculum:nothing"], "does not name a function"),
        (["--curriculum", "nowhere.py:f"], "nowhere.py:f' ([Errno 2]"),
        (["--curriculum-method", "tell"], "add --curriculum"),
        ([*CORRIDOR[1:], "--curriculum-method", "tell"], "does not have"),
        (
            ["--env-kwargs-of", "examples.06_curriculum:farther", "--episodes-per-batch", "8"],
            "batches of",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(args, said, tmp_path):
    done = train(tmp_path / "r", CORRIDOR[0], *args, expect=2)
    assert said in done.stderr
    assert not (tmp_path / "r").exists()
