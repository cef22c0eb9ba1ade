"""Policies: drawing actions, their probabilities, and the distance of two policies.

Each works over one memory in two ways, as `mlp.MLP` does: in torch, where autograd takes the
gradient of any loss, and in NumPy, for acting. Where `act` returns "draw" besides the actions, the
probabilities are those of the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from rank0rl.agent import Space
from rank0rl.nets.beta import BetaPolicy
from rank0rl.nets.categorical import CategoricalPolicy
from rank0rl.nets.conv import Hidden
from rank0rl.nets.gaussian import GaussianPolicy, StateStdPolicy
from rank0rl.nets.mlp import place
from rank0rl.options import OptionError

Array = npt.NDArray[Any]

Policy: TypeAlias = GaussianPolicy | CategoricalPolicy | BetaPolicy

Actions: TypeAlias = Literal["normal", "squashed", "beta"]
"""Distribution of continuous actions."""


class Mode(nn.Module):
    """A module from observations to a policy's most probable actions, for an agent's `mode`.

    Args:
        policy: takes normalized observations.
        norm: normalizes observations; None leaves them as they are.
    """

    def __init__(self, policy: Policy, norm: nn.Module | None = None) -> None:
        """Combine the modules."""
        super().__init__()
        self.policy, self.norm = policy, norm or nn.Identity()

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return actions (N, *act) for flattened observations (N, numbers), float32."""
        return self.policy.mode(self.norm(obs), mask)


def make_policy(
    inputs: Sequence[int],
    act: Space,
    hidden: Hidden,
    rng: np.random.Generator,
    log_std: float = 0.0,
    rows: int = 1,
    actions: Actions = "normal",
    state_std: bool = False,
    **layers: Any,
) -> Policy:
    """Return a policy for a space of actions: continuous for a box, categorical for choices.

    Its attribute `noise` says which random numbers it takes: make it the agent's `noise`.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        act: the space of actions.
        hidden: units of each hidden layer, or a network of one's own.
        rng: draws the weights.
        log_std: initial log standard deviation of normal draws.
        rows: number of log-std parameters that are summed, see `GaussianPolicy`.
        actions: distribution of continuous actions.
        state_std: True if the network also gives the standard deviations of normal draws.
        layers: "activation", "layer_norm" and "columns" of the network, see `conv.network`.

    Raises:
        OptionError: if there is no such policy for this space.
    """
    if act.choices:
        if actions != "normal" or state_std:
            raise OptionError(
                f"actions here are choices, which have one distribution: got --actions {actions}"
                f"{' --state-std' if state_std else ''}; leave it out"
            )
        return CategoricalPolicy(inputs, act, hidden, rng, **layers)
    if actions == "beta":
        if state_std:
            raise OptionError("beta has no standard deviation: leave out --state-std")
        return BetaPolicy(inputs, act, hidden, rng, **layers)
    kind = StateStdPolicy if state_std else GaussianPolicy
    squash = actions == "squashed"
    return kind(inputs, act, hidden, rng, log_std, rows, squash, **layers)


def head(
    policy: GaussianPolicy | CategoricalPolicy, theta: Tensor
) -> tuple[Array | None, Array | None]:
    """Return what kernels must know of a policy's distribution besides its network.

    Args:
        policy: the policy, flat.
        theta: its flat vector.

    Returns:
        One of two arrays of int64, and None for the other. Of normal actions: where the log standard
        deviations begin in theta, how many are summed, and of how many actions. Of choices: the
        columns at which each begins, and their number.
    """
    if isinstance(policy, GaussianPolicy):
        std = policy.log_std
        shape = std.shape if std.ndim == 2 else (1, *std.shape)
        return np.array([place(std, theta), *shape]), None
    columns = policy.space.choice_slices()
    return None, np.array([*(c.start for c in columns), columns[-1].stop])
