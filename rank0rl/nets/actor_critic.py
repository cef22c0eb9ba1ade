"""Acting, and turning fragments into rows with advantages: the common part of policy-gradient agents."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from rank0rl.agent import Fragment
from rank0rl.batch import Batch
from rank0rl.nets.columns import Columns
from rank0rl.nets.normalize import ObsNormalizer, PixelScale
from rank0rl.nets.objective import Objective
from rank0rl.nets.policies import Mode, Policy
from rank0rl.nets.value import ValueFunction
from rank0rl.returns import advantages

Array = npt.NDArray[Any]


class ActorCritic:
    """A policy and a value function over normalized observations.

    Args:
        norm: scales observations.
        policy: takes normalized observations.
        value: takes normalized observations.
    """

    def __init__(
        self, norm: ObsNormalizer | PixelScale, policy: Policy, value: ValueFunction
    ) -> None:
        """Combine the networks."""
        self.norm, self.policy, self.value = norm, policy, value
        self.noise = policy.noise
        self.memory = 0

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules, for an agent's `modules`."""
        return {"policy": self.policy, "value": self.value, "norm": self.norm}

    def trained(self) -> nn.ModuleDict:
        """Return the networks that an objective takes, by name."""
        return nn.ModuleDict({"policy": self.policy, "value": self.value})

    def objective(self, **settings: Any) -> Objective:
        """Return the loss of a minibatch of rows."""
        return Objective(**settings)

    def mode(self) -> nn.Module:
        """Return a module that gives the most probable actions, for an agent's `mode`."""
        mlp: Any = self.policy.mlp
        if not isinstance(mlp, Columns):
            return Mode(self.policy, self.norm)
        norm: Any = self.norm
        policy, norm = copy.deepcopy(self.policy), norm.part(mlp.columns)
        policy.mlp = mlp.net
        return Mode(policy, norm)

    def act(
        self,
        obs: Array,
        noise: Array,
        mask: Array | None = None,
        memory: Array | None = None,
        explore: bool = True,
    ) -> tuple[Array, Batch]:
        """Return actions and extras, for an agent's `act`."""
        return self.policy.act(self.norm.numpy(obs), noise, mask, explore)

    def process(self, fragment: Fragment, gamma: float, lam: float) -> Batch:
        """Turn a fragment into rows, for an agent's `process`.

        Where an episode did not terminate, the value of its last observation stands for the rest.

        Args:
            fragment: T steps.
            gamma: discount in [0, 1].
            lam: GAE mixing in [0, 1].

        Returns:
            Rows by name: "obs", (T, *obs); "act", (T, *act); and in float32, (T,) each, "logp",
            log-probabilities of the actions, "val", values, "adv", advantages, and "ret",
            advantages plus values. Also "mask", (T, all choices), where the environment gives it,
            and "draw", (T, k), where the policy does; "logp" is then that of the draws.
        """
        rows = {"obs": fragment.obs, "act": fragment.act}
        if "draw" in fragment.extras:
            rows["draw"] = fragment.extras["draw"]
        if "action_mask" in fragment.extras:
            rows["mask"] = fragment.extras["action_mask"]
        x = self._features(fragment.obs, fragment.extras.get("memory"))
        # All steps at once, which spares `act` the work.
        logp = self.policy.log_prob(x, rows.get("draw", fragment.act), rows.get("mask"))
        val = self.value.predict(x)
        end_val = self.value.predict(self._features(fragment.end_obs, fragment.end_memory))
        end_val[fragment.terminated[fragment.end]] = 0.0
        adv = advantages(fragment.rew, val, end_val, fragment.episodes(), gamma, lam)
        adv = adv.astype(np.float32)
        return {**rows, "logp": logp, "adv": adv, "val": val, "ret": adv + val}

    def training_rows(self, batch: Batch) -> Batch:
        """Return the rows that a policy's objective takes, (N, ...) each, from a batch of `process`.

        Returns:
            "obs", normalized; "act", or the draws behind it; "logp", log-probabilities under the acting policy; "adv",
            normalized; "ret"; and "mask", where the environment gives it.
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
        return self.norm.numpy(obs)


def normalized(adv: Array) -> Array:
    """Return advantages with mean 0 and standard deviation 1, (N,), float32."""
    adv = adv - adv.sum() / np.float32(len(adv))
    std = np.sqrt(adv @ adv / np.float32(len(adv)))
    return adv / (std + np.float32(1e-8))  # type: ignore[no-any-return] # 1e-8: they may be equal
