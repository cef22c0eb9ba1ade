"""A policy and a value function: their options, acting, rows with advantages, and what a loss takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.images import Convolutions
from rank0rl.nets.mlp import Activation
from rank0rl.nets.networks import Hidden, columns_of, network
from rank0rl.nets.normalize import Moments, Normalizer, is_image, normalizer
from rank0rl.nets.policies import Actions, Mode, Policy, StateStdPolicy, make_policy
from rank0rl.options import CheckedOptions, OptionError, option
from rank0rl.returns import advantages

Array = npt.NDArray[Any]

_ROUNDING = 1e-12  # variance of numbers that are equal but for rounding, over their square


Loss: TypeAlias = Callable[[Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]
"""Function of log ratios (n,), the mean entropy (), values (n,) and the rows of a minibatch: the loss, ()."""

Outputs: TypeAlias = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
"""The arguments of a `Loss`."""

Evaluate: TypeAlias = Callable[[Any, dict[str, Tensor]], Outputs]
"""Function of networks by name and the rows of a minibatch that returns the arguments of a `Loss`."""


class ClosedForm(NamedTuple):
    """A loss in the form f(log r, A) + value_coef E[(V - R)^2] - entropy_coef H, for kernels.

    Where it differs from the agent's loss in torch, the loss in torch is used.
    """

    slope: Callable[[float, float, float], float] | None
    """n times the derivative of E[f] by the log ratio of one of n rows, from that, its advantage and `coef`.

    It is compiled: it uses numbers and functions of NumPy. If numba cannot compile it, the loss in torch is
    used. None: the value function learns alone.
    """
    coef: float = 0.0
    """The third argument of `slope`."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""


class ValueFunction(nn.Module):
    """A network that predicts returns in units of their standard deviation, and 0 at first.

    So learning is the same whatever the size of rewards. Rank 0 alone learns the scale. It is a
    scale without a shift: returns that hardly vary around a large number are learned slowly.
    (What a network of your own predicts at first is in units of reward: begin near 0 where rewards are small.)

    To learn returns, call `merge(ret)` first. The targets of `forward` are then `ret / scale`. The
    arguments of the constructor are those of `networks.network`.
    """

    scale: Tensor

    def __init__(
        self, shape: Sequence[int], hidden: Hidden, rng: np.random.Generator, **layers: Any
    ) -> None:
        super().__init__()
        self.mlp = network(shape, hidden, 1, rng, 0.0, **layers)
        self.moments = Moments(())
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Predict values (N,) in units of the scale."""
        return self.mlp(x)[:, 0]

    def predict(self, x: Array) -> Array:
        """Predict values (N,) in units of reward, from inputs (N, inputs), in NumPy."""
        return self.mlp.numpy(x)[:, 0] * self.scale.numpy()

    def merge(self, ret: Array) -> None:
        """Add returns (N,) to the statistics, without changing predictions in units of reward.

        Returns that are the same but for rounding, such as without a reward yet, do not say what their size is: the scale
        stays.
        (A network of your own whose last layer is not linear predicts other values until it has learned.)

        Rank 0 only: its weights are broadcast.

        Source: van Hasselt et al. 2016, arXiv:1602.07714, section 2.2.
        """
        self.moments.merge(ret)
        if self.moments.var <= _ROUNDING * self.moments.mean.square():
            return
        scale = torch.sqrt(self.moments.var).to(torch.float32)
        with torch.no_grad():
            for last in (*self.mlp.weights[-1:], *self.mlp.biases[-1:]):
                last.mul_(self.scale / scale)
        self.scale.copy_(scale)


class ActorCritic:
    """A policy and a value function over observations that `norm` has normalized.

    `shared` are layers that turn these into features for both, if there are such layers.
    """

    def __init__(
        self, norm: Normalizer, policy: Policy, value: ValueFunction, shared: Any = None
    ) -> None:
        self.norm, self.policy, self.value, self.shared = norm, policy, value, shared
        self.noise = policy.noise
        self.memory = 0

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules, for an agent's `modules`."""
        shared = {"shared": self.shared} if self.shared else {}
        return {"policy": self.policy, "value": self.value, "norm": self.norm, **shared}

    def trained(self) -> nn.ModuleDict:
        """Return the networks that `evaluate` takes, by name."""
        return nn.ModuleDict({n: net for n, net in self.modules().items() if n != "norm"})

    def evaluate(self, nets: Any, rows: dict[str, Tensor]) -> Outputs:
        """Return the arguments of a loss for the rows of a minibatch, for autograd on any device.

        Args:
            nets: the networks by name, as `trained` returns them, or a copy on another device.
            rows: arrays of `training_rows` and others, as tensors, (n, ...) each.

        Returns:
            Log of the ratio of new to old probability of the actions, (n,); the mean entropy, (); values
            in units of the value function's scale, (n,); and the rows, by step.
        """
        policy, x = nets["policy"], rows["obs"]
        if "shared" in nets:
            x = nets["shared"](x)
        now = policy.distribution(x, rows.get("mask"))
        log_ratio = policy.logp(now, rows["act"]) - rows["logp"]
        return log_ratio, policy.entropy(now), nets["value"](x), rows

    def mode(self) -> nn.Module:
        """Return a module that gives the most probable actions, for an agent's `mode`."""
        mlp: Any = self.policy.mlp
        if self.shared:
            return Mode(self.policy, nn.Sequential(self.norm, self.shared))
        if not hasattr(mlp, "columns"):
            return Mode(self.policy, self.norm)
        norm: Any = self.norm
        policy, norm = copy.deepcopy(self.policy), norm.part(mlp.columns)
        policy.mlp = mlp.net
        return Mode(policy, norm)

    def act(self, step: Step) -> tuple[Array, Batch]:
        """Return actions and extras, for an agent's `act`."""
        x = self._features(step.obs, None)
        act, extras = self.policy.act(x, step.noise, step.mask, step.explore)
        return act, {**extras, "features": x} if self.shared else extras

    def process(self, fragment: Fragment, gamma: float, lam: float) -> Batch:
        """Turn a fragment of T steps into rows, for an agent's `process`. See `returns.gae`.

        Returns:
            Rows by name: "obs", (T, *obs); "act", (T, *act); and in float32, (T,) each, "logp",
            log-probabilities of the actions, "val", values, "adv", advantages, and "ret",
            advantages plus values. Also "mask", (T, all choices), where the environment gives it,
            and "draw", (T, k), where the policy does; "logp" is then that of the draws.
        """
        rows = {"obs": fragment.obs, "act": fragment.act}
        for name, extra in (("draw", "draw"), ("mask", "action_mask")):
            if extra in fragment.extras:
                rows[name] = fragment.extras[extra]
        x = fragment.extras.get("features") if self.shared else None
        if x is None:
            x = self._features(fragment.obs, fragment.extras.get("memory"))
        # All steps at once, which spares `act` the work.
        logp = self.policy.log_prob(x, rows.get("draw", fragment.act), rows.get("mask"))
        val = self.value.predict(x)
        end_val = self.value.predict(self._features(fragment.end_obs, fragment.end_memory))
        adv = advantages(fragment, val, end_val, gamma, lam).astype(np.float32)
        return {**rows, "logp": logp, "adv": adv, "val": val, "ret": adv + val}

    def training_rows(self, batch: Batch) -> Batch:
        """Return the rows of a batch to learn from, (N, ...) each.

        Returns:
            "obs", normalized; "act", actions or draws; "logp", their log-probabilities under the acting
            policy; "adv", normalized over the batch; "ret"; and "mask", where not all choices could be taken.
        """
        rows = {
            "obs": self.norm.numpy(batch["obs"]),
            "act": batch.get("draw", batch["act"]),
            "logp": batch["logp"],
            "adv": normalized(batch["adv"]),
            "ret": batch["ret"],
        }
        return {**rows, "mask": batch["mask"]} if "mask" in batch else rows

    def each_step(self, batch: Batch) -> Batch:
        """Return "obs", "val" and "ret" of a batch by step, (N, ...) each."""
        return batch

    def rows_of(self, steps: int) -> int:
        """Return the number of rows that hold so many steps."""
        return steps

    def _features(self, obs: Array, memory: Any) -> Array:
        """Return what policy and value function take, for observations of one fragment."""
        x = self.norm.numpy(obs)
        return self.shared.numpy(x) if self.shared else x


class Part:
    """Attribute of an agent that is a part of its `nets`, and of the same name. So there is one of each."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name of the attribute."""
        self._name = name

    def __get__(self, agent: Any, owner: type | None = None) -> Any:
        """Return the part; of the class, this attribute itself."""
        return self if agent is None else getattr(agent.nets, self._name)

    def __set__(self, agent: Any, value: Any) -> None:
        """Refuse another one, which would not be used everywhere."""
        raise AttributeError(
            f"{type(agent).__name__}.{self._name} is that of its nets, which act and learn. PPO and TRPO take "
            f"another policy or value function from a static method make_networks(spaces, options, rng) of "
            f"the class, which returns it by name, as docs/policies.md says"
        )


def normalized(adv: Array) -> Array:
    """Return advantages with mean 0 and standard deviation 1, (N,), float32; 0 if they are the same but for rounding."""
    mean = adv.sum() / np.float32(len(adv))
    adv = adv - mean
    variance = adv @ adv / np.float32(len(adv))
    if variance <= _ROUNDING * float(mean) ** 2 and np.ptp(adv) <= 4e-7 * abs(mean):
        return np.zeros_like(adv)
    return adv / (np.sqrt(variance) + np.float32(1e-8))


def whitened(loss: Loss) -> Loss:
    """Return a loss that gets the `normalized` advantages of each minibatch."""

    def of_whitened(
        log_ratio: Tensor, entropy: Tensor, value: Tensor, rows: dict[str, Tensor]
    ) -> Tensor:
        adv = rows["adv"]
        adv = torch.from_numpy(normalized(adv.numpy(force=True))).to(adv.device)
        return loss(log_ratio, entropy, value, {**rows, "adv": adv})

    return of_whitened


MakeNetworks: TypeAlias = Callable[[Spaces, Any, np.random.Generator], Mapping[str, Any]]
"""Function of spaces, options and rng that returns torch modules by name: "policy", "value" or both.

Each takes normalized observations, (N, numbers), float32. The policy's returns what its distribution
needs, (N, outputs): a number for each action or choice, or twice as many for beta and --state-std. The
value function's returns (N, 1). Torch's own generator is seeded by rng before.
"""


@dataclass(frozen=True)
class NetworkOptions(CheckedOptions):
    """Options of a policy and a value function."""

    hidden: tuple[int, ...] | None = option(None, "[1, inf)")
    """Units of each hidden layer of the policy and of the value function. None: 64 64; with images none, because they go through layers of their own first."""
    value_hidden: tuple[int, ...] | None = option(None, "[1, inf)")
    """Units of each hidden layer of the value function. None: those of --hidden."""
    activation: Activation = "tanh"
    """Activation of hidden layers; gelu is its form with tanh. PPO's updates are compiled for all of them."""
    layer_norm: bool = False
    """Normalize each hidden layer before its activation."""
    policy_obs: tuple[str, ...] = ()
    """Keys of a Dict observation that the policy sees. The exported policy takes these alone. None given: all."""
    critic_obs: tuple[str, ...] = ()
    """Keys of a Dict observation that the value function sees. None given: all."""
    log_std: float = option(0.0, "(-inf, inf)")
    """Initial log standard deviation of normal and squashed actions, usually -1 to 0. With --state-std, from -5 to 2."""
    state_std: bool = False
    """Let the network give the standard deviations too, so that they depend on the observation."""
    actions: Actions = "normal"
    """Distribution of continuous actions: normal (clipped to the bounds), squashed (tanh of normal) or beta. The last two never leave the bounds."""

    def __post_init__(self) -> None:
        """Check the numbers, and that a standard deviation that depends on observations can change."""
        super().__post_init__()
        low, high = StateStdPolicy.limits
        if self.state_std and not low <= self.log_std <= high:
            raise OptionError(
                f"log_std must be between {low:g} and {high:g} with --state-std, or it would never change: got "
                f"{self.log_std:g}"
            )

    def networks(
        self,
        spaces: Spaces,
        rng: np.random.Generator,
        make: MakeNetworks | None = None,
        share: bool = False,
    ) -> ActorCritic:
        """Return new networks for these spaces, or those of your own that `make` returns.

        With `share`, policy and value function share the layers for images.

        Raises:
            OptionError: if there are no such networks for these spaces.
        """
        norm, inputs = normalizer(spaces.obs.shape, spaces.obs.dtype)
        shared = None
        if share and len(inputs) == 3 and make is None:
            shared = Convolutions(inputs, rng)
            inputs = (shared.size,)
        return ActorCritic(norm, *self.policy_and_value(inputs, spaces, rng, make), shared)

    def policy_and_value(
        self,
        inputs: Sequence[int],
        spaces: Spaces,
        rng: np.random.Generator,
        make: MakeNetworks | None = None,
    ) -> tuple[Policy, ValueFunction]:
        """Return a policy and a value function for inputs of this shape, see `networks`."""
        own = _own(make, spaces, self, rng) if make else {}
        units = self.hidden
        if units is None:
            units = () if is_image(spaces.obs.shape, spaces.obs.dtype) else (64, 64)
        value_units = units if self.value_hidden is None else self.value_hidden
        layers: Any = {"activation": self.activation, "layer_norm": self.layer_norm}
        policy = make_policy(
            inputs,
            spaces.act,
            own.get("policy", units),
            rng,
            log_std=self.log_std,
            actions=self.actions,
            state_std=self.state_std,
            columns=columns_of(spaces.obs, self.policy_obs, "policy_obs"),
            **layers,
        )
        columns = columns_of(spaces.obs, self.critic_obs, "critic_obs")
        hidden = own.get("value", value_units)
        return policy, ValueFunction(inputs, hidden, rng, columns=columns, **layers)


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
        got: Any = type(own).__name__
        if isinstance(own, Mapping):
            got = {name: type(made).__name__ for name, made in own.items()}
        raise OptionError(
            f"make_networks must return a dict of torch modules with the names {sorted(names)}: got {got}"
        )
    return own
