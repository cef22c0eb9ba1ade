"""Environments with `get_state` and `set_state`: a resumed run goes on in the middle of their episodes, and repeats nothing."""

import gymnasium as gym
import numpy as np
import pytest
from helpers.ranks import HERE
from helpers.runs import curve, resume, sha, table, train, train_on_ranks
from helpers.simulators import Remembers, remembers

from rank0rl.envs.spaces import flatten
from rank0rl.envs.state import give_state, has_state, packed, take_state, unpacked
from rank0rl.tools.check import check

ARGS = ["--num-envs", "4", "--steps-per-batch", "40", "--minibatch-size", "20"]
TOTAL = [*ARGS, "--total-steps", "200"]
REMEMBERS = "helpers.simulators:remembers"


@pytest.fixture(autouse=True, scope="module")
def _helpers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, REMEMBERS, "--info", "raw_reward", "sum:x", *TOTAL)
    return folder


def steps_made(log):
    return sum(len(file.read_text().splitlines()) for file in log.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "layout", "then"),
    [
        ([], (1, 1), (2, 1)),
        (["--env-processes"], (2, 1), (1, 1)),
        ([], (1, 2), (2, 1)),
        (["--env-retries", "1"], (1, 1), (1, 1)),
    ],
)
def test_a_resumed_run_repeats_no_step(whole, tmp_path, more, layout, then):
    (tmp_path / "log").mkdir()
    words = [
        REMEMBERS,
        "--env-kwargs",
        f'log="{tmp_path / "log"}"',
        "--info",
        "raw_reward",
        "sum:x",
    ]
    groups = ["--ranks-per-env", str(layout[1])]
    stop = ["--stop-after-iterations", "3"]
    train(tmp_path / "run", *words, *TOTAL, *stop, *more, *groups, nprocs=layout[0])
    resume(tmp_path / "run", "--trust", nprocs=then[0])
    assert steps_made(tmp_path / "log") == 120 * layout[1] + 80
    assert sha(tmp_path / "run") == sha(whole)
    columns = [(row["batch_sha256"], row["return_mean"]) for row in table(whole)]
    assert [(row["batch_sha256"], row["return_mean"]) for row in table(tmp_path / "run")] == columns


def limited(**kwargs):
    return gym.wrappers.OrderEnforcing(remembers(**kwargs, limit=15))


def test_random_numbers_and_time_limits_go_on():
    action = np.zeros(1, np.float32)
    env, other = limited(), limited()
    env.reset(seed=3)
    for _ in range(10):
        env.step(action)
    other.reset(seed=4)
    other.unwrapped.first = 3
    give_state(other, unpacked(packed(take_state(env))))
    for t in range(11, 16):
        answers = [each.step(action) for each in (env, other)]
        assert [(a[0].tolist(), *a[1:4]) for a in answers[:1]] == [
            (a[0].tolist(), *a[1:4]) for a in answers[1:]
        ]
        assert answers[1][3] == (t == 15)


def test_an_environment_may_reset_itself_and_write_into_the_state_that_it_is_given(monkeypatch):
    set_state = Remembers.set_state

    def resets(env, state):
        env.reset(seed=0)
        set_state(env, state)
        state["x"] += 1

    action = np.zeros(1, np.float32)
    env, other = limited(), limited()
    env.reset(seed=3)
    env.step(action)
    state = take_state(env)
    before = packed(state)
    other.reset(seed=4)
    other.unwrapped.first = 3
    monkeypatch.setattr(Remembers, "set_state", resets)
    give_state(other, state)
    other.unwrapped.first = env.unwrapped.first
    assert packed(state).tobytes() == before.tobytes()
    assert env.step(action)[1] == other.step(action)[1]
    assert env.step(action)[1] == other.step(action)[1]


class Twice(gym.Wrapper):
    """Gives every observation twice as large, and has a state of its own."""

    def step(self, action):
        obs, *rest = self.env.step(action)
        return 2 * obs, *rest

    def get_state(self):
        return self.unwrapped.get_state()

    def set_state(self, state):
        self.unwrapped.set_state(state)


def test_the_time_limit_below_a_wrapper_with_a_state_goes_on():
    env, other = (Twice(remembers(limit=10)) for _ in range(2))
    action = np.zeros(1, np.float32)
    env.reset(seed=3)
    for _ in range(7):
        env.step(action)
    other.reset(seed=4)
    give_state(other, take_state(env))
    assert [other.step(action)[3] for _ in range(3)] == [False, False, True]


def test_a_wrapper_with_a_state_of_its_own_is_repeated():
    assert has_state(limited())
    assert not has_state(gym.wrappers.FrameStackObservation(Remembers(), 2))
    assert not has_state(Converted(Remembers(), lambda obs: obs, None))
    assert not has_state(gym.make("CartPole-v1"))


class PassesOn(gym.Wrapper):
    """Has what it wraps, and a state that the methods there do not know."""

    def __getattr__(self, name):
        return getattr(self.env, name)


class Both(gym.Wrapper):
    def get_state(self):
        return self.env.get_state()

    def set_state(self, state):
        self.env.set_state(state)


def test_the_methods_must_be_those_of_the_wrapper_itself():
    assert not has_state(PassesOn(Remembers()))
    assert has_state(Both(Remembers()))
    assert has_state(Both(PassesOn(Remembers())))


class Converted(gym.wrappers.TransformObservation):
    """Gymnasium's wrapper with something of its own, which may be a state."""


class Keyed(Remembers):
    """Has a Dict of observations and a Dict of actions, which are flattened."""

    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Dict({"x": self.observation_space})
        self.action_space = gym.spaces.Dict({"a": self.action_space})

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return {"x": obs}, info

    def step(self, action):
        obs, *rest = super().step(action["a"])
        return {"x": obs}, *rest


def test_an_environment_whose_actions_and_observations_are_converted_has_its_state():
    env, other = (gym.wrappers.ClipReward(flatten(Keyed()), -1, 1) for _ in range(2))
    action = np.zeros(1, np.float32)
    env.reset(seed=3)
    for _ in range(7):
        env.step(action)
    other.reset(seed=4)
    other.unwrapped.first = env.unwrapped.first
    give_state(other, take_state(env))
    assert other.step(action)[0].tolist() == env.step(action)[0].tolist()


@pytest.mark.parametrize(
    "state", [{"x": 1.0}, [np.ones(1)], {"x": np.array([None])}, {1: np.ones(1)}]
)
def test_a_state_is_a_dict_of_arrays(state):
    env = Remembers()
    env.get_state = lambda: state
    with pytest.raises(TypeError, match="get_state must return a dict of name -> array of numbers"):
        take_state(env)


@pytest.mark.parametrize("forgets", [False, True])
def test_check_tells_whether_a_state_is_all_there_is(forgets):
    findings = check(lambda: Remembers(forgets=forgets), steps=40, others=1)
    found = findings["restored from its state"]
    assert ("differs from step" in found) == forgets
    assert "restored from its state" not in check(lambda: gym.make("CartPole-v1"), steps=40)


MIXED = """
import gymnasium as gym

class Stateless(gym.Wrapper):
    pass

def make(stateless=False):
    return Stateless(gym.make("CartPole-v1")) if stateless else Stateful()

class Stateful(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def step(self, action):
        *answer, info = super().step(action)
        self.steps += 1
        return *answer, {"step": self.steps}

    def reset(self, **kwargs):
        self.steps = 0
        return super().reset(**kwargs)

def kwargs_of(env):
    return {"stateless": env == 3}
"""


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "steps"])
def test_a_state_or_a_step_of_its_own_is_the_same_for_every_number_of_ranks(
    mixed, tmp_path, monkeypatch
):
    (tmp_path / "mixed.py").write_text(MIXED)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{tmp_path}")
    words = ["--env-kwargs-of", "mixed:kwargs_of"] if mixed else ["--info", "step"]
    for nprocs in (1, 3):
        train_on_ranks(tmp_path / f"{nprocs}", "mixed:make", *words, *TOTAL, nprocs=nprocs)
    rows = curve(tmp_path / "1")
    assert rows == curve(tmp_path / "3")
    assert mixed or all(float(row["step_mean"]) > 0 for row in rows if float(row["episodes"]))
