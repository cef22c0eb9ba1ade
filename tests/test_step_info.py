"""An agent reads numbers from the info of every step, in every kind of environment and of batch."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from helpers.envs import Count, Toll

from rank0rl import seeding
from rank0rl.algos.reinforce import Reinforce, ReinforceOptions
from rank0rl.envs.info import InfoError, StepInfo
from rank0rl.envs.spaces import describe
from rank0rl.evaluation import whole_episodes
from rank0rl.run.agents import load_agent
from rank0rl.run.options import RunOptions
from rank0rl.run.shares import make_rollout

ALGO = "test_step_info:Reads"
SIZE = {"num_envs": 2, "steps_per_batch": 50, "algo": ALGO}


class Reads(Reinforce):
    """Reads the cost of each step."""

    info = ("cost",)


class ReadsPlace(Reinforce):
    """Reads the place of an agent of a game."""

    info = ("place",)


class ActsCost(Reads):
    """Returns an extra of the name that it reads."""

    def act(self, step):
        act, extras = super().act(step)
        return act, {**extras, "cost": act}


def fragments_of(agent_class, **options):
    """Return the fragments of one iteration."""
    run = RunOptions(**{"env_id": "helpers.envs:Toll-v0", **SIZE, **options})
    rollout = make_rollout(run, 0, 1)
    try:
        rng = seeding.stream(0, "init")
        agent = agent_class(rollout.spaces, ReinforceOptions(hidden=(8,)), rng)
        return rollout.collect(agent, 1)[0]
    finally:
        rollout.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_batch": None, "episodes_per_batch": 3},
        {"env_processes": True, "info": ("max:cost",)},
        {"env_retries": 1, "info": ("cost",)},
    ],
    ids=["steps", "episodes", "processes", "retries"],
)
def test_a_fragment_has_what_its_agent_reads(options):
    for one in fragments_of(Reads, **options):
        cost = one.extras["cost"]
        assert cost.dtype == np.float64
        np.testing.assert_allclose(cost, np.square(np.clip(one.act[:, 0], -3, 3)), rtol=1e-6)


def test_an_agent_of_a_game_reads_its_own():
    every = fragments_of(
        ReadsPlace, env_id="helpers.games:make_hunt", algo=f"{ALGO}Place", num_envs=6, agents=3
    )
    assert len(every) == 6
    for one in every:
        np.testing.assert_array_equal(one.extras["place"], one.next_obs[:, 2])


def test_an_agent_that_only_acts_reads_nothing():
    """As where it is shown or filmed, in an environment that tells nothing."""
    env = Toll()
    agent = Reads(describe(env), ReinforceOptions(hidden=(8,)), seeding.stream(0, "init"))
    ended = whole_episodes(agent, lambda index: Count(length=3), 2)
    assert len(ended["return"]) == 2
    assert agent.info == ("cost",)


def test_the_next_observations_are_those_after_each_step():
    [one] = fragments_of(
        Reinforce, env_id="helpers.envs:Count-v0", algo="reinforce", num_envs=1, steps_per_batch=8
    )
    assert one.obs[:, 1].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert one.next_obs[:, 1].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert one.next_obs.dtype == one.obs.dtype


class Says(gym.Wrapper):
    """Says these infos, one at each step."""

    def __init__(self, infos):
        super().__init__(Toll())
        self.infos = iter(infos)

    def step(self, action):
        return *self.env.step(action)[:4], next(self.infos)


@pytest.mark.parametrize(
    ("infos", "said"),
    [
        ([{"price": 1}], r"must have 'cost', a number .*: got the keys \['price'\]"),
        ([{"cost": "much"}], "must have 'cost', a number .*: got 'much'"),
        ([{"cost": None}], "got None"),
        ([{"cost": 1j}], "got 1j"),
        ([{"cost": 10**400}], "got 1000"),
        ([{"cost": 1}, {"cost": [1, 2]}], r"same shape in every step.*got \(2,\) after \(\)"),
    ],
)
def test_an_info_without_its_numbers_is_an_error_that_says_what_came(infos, said):
    env = StepInfo(partial(Says, infos), ("cost",))
    env.reset(seed=0)
    with pytest.raises(InfoError, match=said):
        for _ in infos:
            env.step(np.zeros(1, np.float32))


def test_envs_with_infos_of_several_shapes_are_an_error(monkeypatch):
    monkeypatch.setattr(
        Toll,
        "step",
        lambda self, action: (np.zeros(2), 0.0, False, False, {"cost": [0] * (self.first % 997)}),
    )
    with pytest.raises(ValueError, match="same shape in every step: got {'cost': {"):
        fragments_of(Reads)


def test_what_act_returns_has_another_name_than_what_is_read():
    with pytest.raises(ValueError, match="names of its own: a fragment has \\['cost'\\]"):
        fragments_of(ActsCost)


@pytest.mark.parametrize("names", ["cost", ("obs",), ("cost", "rew"), ("draw",)])
def test_names_that_cannot_be_read_are_refused(names, monkeypatch):
    monkeypatch.setattr(Reads, "info", names)
    load_agent.cache_clear()
    with pytest.raises(
        ValueError, match="Reads.info must be a tuple of names that are none of act,"
    ):
        load_agent(ALGO)
    load_agent.cache_clear()
