"""Options of an agent's networks, and the networks that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rank0rl.agent import Space, Spaces
from rank0rl.nets.actor_critic import ActorCritic
from rank0rl.nets.normalize import normalizer
from rank0rl.nets.policies import Actions, Policy, make_policy
from rank0rl.nets.value import ValueFunction
from rank0rl.options import CheckedOptions, option


@dataclass(frozen=True)
class NetworkOptions(CheckedOptions):
    """Options of a policy and a value function."""

    hidden: tuple[int, ...] = option((64, 64), "[1, inf)")
    """Units of each hidden layer of the policy and of the value function."""
    log_std: float = 0.0
    """Initial log standard deviation of continuous actions, usually -1 to 0."""
    state_std: bool = False
    """Let the network give the standard deviations too, so that they depend on the observation."""
    actions: Actions = "normal"
    """Distribution of continuous actions: normal (clipped to the bounds), squashed (tanh of normal) or beta. The last two never leave the bounds."""

    def networks(self, spaces: Spaces, rng: np.random.Generator) -> ActorCritic:
        """Return new networks for these spaces.

        Raises:
            OptionError: if there is no such policy for this space of actions.
        """
        norm, inputs = normalizer(spaces.obs.shape, spaces.obs.dtype)
        policy = self.policy(inputs, spaces.act, rng)
        return ActorCritic(norm, policy, ValueFunction(inputs, self.hidden, rng))

    def policy(self, inputs: Sequence[int], act: Space, rng: np.random.Generator) -> Policy:
        """Return a new policy for inputs of this shape."""
        return make_policy(
            *(inputs, act, self.hidden, rng, self.log_std),
            actions=self.actions,
            state_std=self.state_std,
        )
