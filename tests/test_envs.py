"""Find, make and describe environments."""

import gymnasium as gym
import numpy as np
import pytest
from helpers.envs import Count

from rank0rl.envs import shared
from rank0rl.envs.block import make_block
from rank0rl.envs.games import first_agent
from rank0rl.envs.make import base, make, resolve
from rank0rl.envs.spaces import _flat_space, describe, flatten, nested_actions
from rank0rl.envs.wrappers import refuse_running_statistics

MIXED = gym.spaces.Discrete(2)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("Walker2d", "Walker2d-v5"),
        ("Walker2d-v4", "Walker2d-v4"),
        ("CartPole", "CartPole-v1"),
        ("helpers.envs:Count-v0", "helpers.envs:Count-v0"),
        ("helpers.envs:Count", "helpers.envs:Count-v0"),
        ("phys2d/CartPole", "phys2d/CartPole-v1"),
    ],
)
def test_names_are_resolved(name, full):
    assert resolve(name) == full


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("walker2d", "did you mean Walker2d"),
        ("Walker2d-v9", "did you mean Walker2d-v"),
        ("no_such_module:X-v0", "cannot import 'no_such_module'"),
        ("point.py:make_env", "cannot import 'point.py': .*; name it as point:make_env$"),
        ("helpers.envs:Cuont", "'helpers.envs' has no function 'Cuont', and no environment"),
        ("qqqqqq", "module:EnvId-v0"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_ones(name, message):
    with pytest.raises(ValueError, match=message):
        resolve(name)


def test_double_precision_is_kept_as_single():
    spaces = describe(make("Walker2d-v5"))
    assert (spaces.obs.kind, spaces.obs.shape, spaces.obs.dtype) == ("box", (17,), "float32")
    assert (spaces.act.kind, spaces.act.size) == ("box", 6)
    assert spaces.act.low.tolist() == [-1.0] * 6
    spaces = describe(make("CartPole-v1"))
    assert (spaces.act.kind, spaces.act.choices, spaces.act.size) == ("discrete", (2,), 2)


@pytest.mark.parametrize(
    ("obs", "act", "message"),
    [
        (
            gym.spaces.Sequence(gym.spaces.Discrete(3)),
            gym.spaces.Discrete(2),
            "observations must be of fixed size, .*Sequence.*TransformObservation.*FilterObservation",
        ),
        (gym.spaces.Box(0, 1), gym.spaces.Text(2), "actions must be .*Text.*TransformAction"),
        (gym.spaces.Box(0, 1), gym.spaces.Box(0, 256, (2,), np.int64), "actions must be floats"),
        (gym.spaces.Box(0, 1), gym.spaces.Tuple((MIXED, gym.spaces.Text(2))), "a Tuple or Dict of"),
        (gym.spaces.Box(0, 1), gym.spaces.Tuple(()), "actions must be floats"),
    ],
)
def test_a_space_that_no_agent_can_use_is_named(obs, act, message):
    env = gym.Env()
    env.observation_space, env.action_space = obs, act
    with pytest.raises(ValueError, match=message):
        describe(flatten(env))


def test_what_cannot_be_made_gives_the_reason():
    with pytest.raises(ValueError, match="unexpected keyword argument 'speed'"):
        make("CartPole-v1", speed=3)

    with pytest.raises(ValueError, match=r"envs.py\", line \d+, in make_silent\n    assert 1 > 2"):
        make("helpers.envs:make_silent")


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("Walker2d-v5", "Walker2d"),
        ("a.b:X-v0", "X"),
        ("ALE/Pong-v5", "ALE/Pong"),
        ("Plain", "Plain"),
    ],
)
def test_base_names(env_id, expected):
    assert base(env_id) == expected


def test_wrappers_with_running_statistics_are_refused_wherever_they_are():
    env = gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(gym.make("CartPole-v1")))
    env = gym.wrappers.TimeLimit(env, 10)
    with pytest.raises(ValueError, match="NormalizeReward and NormalizeObservation"):
        refuse_running_statistics(env)
    refuse_running_statistics(gym.wrappers.RescaleAction(gym.make("Pendulum-v1"), -1, 1))
    with pytest.raises(ValueError, match="wrapped in NormalizeReward"):
        shared._make(0, lambda: gym.wrappers.NormalizeReward(gym.make("CartPole-v1")))


@pytest.mark.parametrize("inside", [True, False])
def test_a_vector_environment_with_running_statistics_is_refused(inside):
    wrappers = [gym.wrappers.NormalizeReward] if inside else []
    made = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync", wrappers=wrappers)
    made = made if inside else gym.wrappers.vector.NormalizeReward(made)
    made = gym.wrappers.vector.ClipReward(made, -1, 1)
    with pytest.raises(ValueError, match="wrapped in NormalizeReward"):
        first_agent(made, "mine:envs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class A(\n", r"cannot import 'own_env': .*\(own_env\.py, line 1\)$"),
        ("import sys\nsys.exit(7)\n", r"cannot import 'own_env': line 2 of .*sys\.exit\(7\)$"),
        ("1 / 0\n", r"(?s)import 'own_env': \n  File .*own_env\.py\", line 1.*ZeroDivisionError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_short_error(text, said, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_env.py").write_text(text)
    with pytest.raises(ValueError, match=said):
        resolve("own_env:Env-v0")


def test_integers_are_choices_with_the_numbers_of_their_bounds():
    space = gym.spaces.Box(-128, 127, (1, 2), np.int8)
    flat = _flat_space(space)
    assert (flat.nvec.tolist(), flat.start.tolist()) == ([256, 256], [-128, -128])
    wide = gym.spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (1,), np.int64)
    assert _flat_space(wide) is None  # 2 ** 64 values: numpy's difference would be -1


def test_rows_of_numbers_become_the_environments_actions():
    env = make("helpers.envs:Spaced-v0", obs="dict", act="choices")
    assert env.action_space == gym.spaces.MultiDiscrete(
        [2, 2, 2, 3, 2, 5], start=[5, 0, 0, 0, 0, -2]
    )
    nested = nested_actions(env)
    act = nested(np.array([6, 1, 0, 2, 1, -2]))
    assert env.unwrapped.action_space.contains(act)
    binary, multi = act["b"]
    assert (act["a"], binary.tolist(), multi.tolist(), act["c"]) == (6, [1, 0], [[2], [1]], -2)
    assert nested(act) is act
    env = make("helpers.envs:Spaced-v0", act="floats")
    assert env.action_space.low.tolist() == [-1, 0, 0]
    assert env.action_space.high.tolist() == [1, 2, 2]
    one, two = nested_actions(env)(np.array([0.5, 1, 2], np.float32))
    assert (one.shape, one.dtype, two.tolist(), two.dtype) == (
        (),
        np.float32,
        [[1], [2]],
        np.float64,
    )
    assert nested_actions(make("CartPole-v1")) is None


def test_environments_are_closed_if_a_later_one_cannot_be_made():
    closed = []

    class Simulator(Count):
        def close(self):
            closed.append(self)
            raise OSError("it has gone")

    def make_env(index):
        if index == 6:
            raise ValueError("no licence left")
        return Simulator()

    with pytest.raises(ValueError, match="no licence left") as refused:
        make_block(make_env, range(4, 9), seed=0)
    assert len(closed) == 2
    assert refused.value.__notes__ == [
        "While making the environment of env 6.",
        "To close an environment failed too: OSError: it has gone",
    ]
