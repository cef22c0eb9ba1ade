"""The networks that act are those that learn: another one is used everywhere, or refused."""

import inspect

import numpy as np
import pytest
from torch import nn

from rank0rl.agent import Space, Spaces
from rank0rl.algos.a2c import A2C
from rank0rl.algos.bc import BC
from rank0rl.algos.klppo import KLPPO
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.algos.reinforce import Reinforce
from rank0rl.algos.trpo import TRPO
from rank0rl.nets.flat import Adam, Flat

OBS, N = Space("box", (4,), "float32"), 300
BOX = Space("box", (2,), "float32", low=-np.ones(2, "f"), high=np.ones(2, "f"))


@pytest.mark.parametrize("of", [PPO, TRPO, KLPPO, BC])
@pytest.mark.parametrize("name", ["policy", "value", "norm"])
def test_an_agent_has_one_policy_and_one_value_function(of, name):
    agent = of(Spaces(OBS, BOX), of.Options(), np.random.default_rng(0))
    assert getattr(agent, name) is getattr(agent.nets, name)
    with pytest.raises(
        AttributeError, match=f"{of.__name__}.{name} is that of its nets.*make_networks"
    ):
        setattr(agent, name, nn.Linear(4, 1))


@pytest.mark.parametrize("of", [PPO, TRPO, KLPPO, BC])
def test_a_part_of_the_class_is_what_describes_it(of):
    assert {"policy", "value", "norm"} <= {name for name, _ in inspect.getmembers(of)}
    assert type(of.policy).__name__ == "Part"


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", ["policy", "value"])
@pytest.mark.parametrize("of", [A2C, Reinforce, PPO, TRPO, KLPPO])
def test_a_network_that_comes_later_must_be_in_the_flat_vector(of, name):
    """In agents with `nets`, which refuse such an attribute, it may still be put into these."""
    if of is Reinforce and name == "value":
        pytest.skip("reinforce has no value function")
    agent, other = (of(Spaces(OBS, BOX), of.Options(), np.random.default_rng(i)) for i in (0, 1))
    agent.prepare()
    rng = np.random.default_rng(0)
    batch = {"obs": rng.standard_normal((N, 4), dtype="f"), "act": np.zeros((N, 2), "f")}
    batch |= {k: rng.standard_normal(N, dtype="f") for k in ("logp", "adv", "val", "ret")}
    agent.update(batch, rng, 0.0)
    setattr(getattr(agent, "nets", agent), name, getattr(other, name))
    with pytest.raises(RuntimeError, match="is not in the flat vector: flatten the networks that"):
        agent.update(batch, rng, 0.0)
    if of in (A2C, Reinforce):
        agent.flat = Flat(nn.ModuleDict(agent.modules()))
        agent.adam = Adam(agent.flat)
        before = agent.flat.vectors[0].tolist()
        agent.update(batch, rng, 0.0)
        assert agent.flat.vectors[0].tolist() != before


def test_behaviour_cloning_trains_no_policy_that_comes_later():
    agent, other = (BC(Spaces(OBS, BOX), BC.Options(), np.random.default_rng(i)) for i in (0, 1))
    few = {"obs": np.ones((N, 4), "f"), "act": np.zeros((N, 2), "f")}
    agent.clone(few, 1e-3)
    agent.nets.policy = other.policy
    with pytest.raises(RuntimeError, match="is not in the flat vector"):
        agent.clone(few, 1e-3)


def test_networks_that_no_optimizer_has_are_refused():
    agent = PPO(Spaces(OBS, BOX), PPOOptions(), np.random.default_rng(0))
    agent.nets = PPO(Spaces(OBS, BOX), PPOOptions(), np.random.default_rng(1)).nets
    with pytest.raises(RuntimeError, match="policy.log_std is not in the flat vector"):
        agent.prepare()
