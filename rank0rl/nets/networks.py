"""Options of an agent's networks, and the networks that they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from rank0rl.agent import Spaces
from rank0rl.nets.actor_critic import ActorCritic, ValueFunction
from rank0rl.nets.columns import columns_of
from rank0rl.nets.mlp import Activation
from rank0rl.nets.normalize import normalizer
from rank0rl.nets.policies import Actions, Policy, make_policy
from rank0rl.options import CheckedOptions, OptionError, option

MakeNetworks: TypeAlias = Callable[[Spaces, Any, np.random.Generator], Mapping[str, Any]]
"""Function of spaces, options and rng that returns torch modules by name: "policy", "value" or both.

Each takes normalized observations, (N, numbers), float32. The policy's returns what its distribution
needs, (N, outputs): a number for each action or choice, or twice as many for beta and --state-std. The
value function's returns (N, 1). Torch's own generator is seeded by rng before.
"""


@dataclass(frozen=True)
class NetworkOptions(CheckedOptions):
    """Options of a policy and a value function."""

    hidden: tuple[int, ...] = option((64, 64), "[1, inf)")
    """Units of each hidden layer of the policy and of the value function."""
    value_hidden: tuple[int, ...] | None = option(None, "[1, inf)")
    """Units of each hidden layer of the value function. None: those of --hidden."""
    activation: Activation = "tanh"
    """Activation of hidden layers. Updates are compiled for tanh; the others take several times as long."""
    layer_norm: bool = False
    """Normalize each hidden layer before its activation. Updates are not compiled then."""
    policy_obs: tuple[str, ...] = ()
    """Keys of a Dict observation that the policy sees. The exported policy takes these alone. None given: all."""
    critic_obs: tuple[str, ...] = ()
    """Keys of a Dict observation that the value function sees. None given: all."""
    log_std: float = 0.0
    """Initial log standard deviation of continuous actions, usually -1 to 0."""
    state_std: bool = False
    """Let the network give the standard deviations too, so that they depend on the observation."""
    actions: Actions = "normal"
    """Distribution of continuous actions: normal (clipped to the bounds), squashed (tanh of normal) or beta. The last two never leave the bounds."""

    def networks(
        self, spaces: Spaces, rng: np.random.Generator, make: MakeNetworks | None = None
    ) -> ActorCritic:
        """Return new networks for these spaces.

        Args:
            spaces: of the environment.
            rng: draws the weights.
            make: returns networks of one's own, see `MakeNetworks`.

        Raises:
            OptionError: if there are no such networks for these spaces.
        """
        norm, inputs = normalizer(spaces.obs.shape, spaces.obs.dtype)
        return ActorCritic(norm, *self.heads(inputs, spaces, rng, make))

    def heads(
        self,
        inputs: Sequence[int],
        spaces: Spaces,
        rng: np.random.Generator,
        make: MakeNetworks | None = None,
    ) -> tuple[Policy, ValueFunction]:
        """Return a policy and a value function for inputs of this shape."""
        own = _own(make, spaces, self, rng) if make else {}
        obs = spaces.obs
        policy = make_policy(
            *(inputs, spaces.act, own.get("policy", self.hidden), rng, self.log_std),
            actions=self.actions,
            state_std=self.state_std,
            columns=columns_of(obs, self.policy_obs, "policy_obs"),
            **self._layers(),
        )
        hidden = own.get("value", self.hidden if self.value_hidden is None else self.value_hidden)
        columns = columns_of(obs, self.critic_obs, "critic_obs")
        return policy, ValueFunction(inputs, hidden, rng, columns=columns, **self._layers())

    def _layers(self) -> dict[str, Any]:
        return {"activation": self.activation, "layer_norm": self.layer_norm}


def _own(
    make: MakeNetworks, spaces: Spaces, options: Any, rng: np.random.Generator
) -> Mapping[str, Any]:
    """Return the networks that a user's function makes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**63)))
        own = make(spaces, options, rng)
    names = {"policy", "value"}
    is_dict = isinstance(own, Mapping) and all(isinstance(n, nn.Module) for n in own.values())
    if not is_dict or not {*own} <= names:
        raise OptionError(
            f"make_networks must return a dict of torch modules with the names {sorted(names)}: got "
            f"{ {k: type(v).__name__ for k, v in own.items()} if isinstance(own, Mapping) else type(own).__name__ }"
        )
    return own
