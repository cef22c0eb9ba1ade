"""Acting, and turning fragments into chunks of rows: `ActorCritic` with a memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import Fragment, Spaces
from rank0rl.batch import Batch
from rank0rl.nets.actor_critic import ActorCritic, normalized
from rank0rl.nets.chunks import chunked, filled, firsts
from rank0rl.nets.networks import MakeNetworks, NetworkOptions
from rank0rl.nets.normalize import ObsNormalizer, PixelScale, normalizer
from rank0rl.nets.objective import Objective
from rank0rl.nets.policies import Policy
from rank0rl.nets.recurrent import Cell, Recurrent
from rank0rl.nets.value import ValueFunction
from rank0rl.options import OptionError, option

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RecurrentOptions(NetworkOptions):
    """Options of a policy and a value function that may share a memory."""

    recurrent: Cell | None = None
    """Memory: a layer before the hidden layers, gru or lstm, shared by policy and value function."""
    memory_size: int = option(64, "[1, inf)")
    """With --recurrent: units of that layer."""
    chunk_steps: int = option(32, "[1, inf)")
    """With --recurrent: steps through which gradients flow, usually 8 to 64. A minibatch holds whole chunks."""

    def networks(
        self, spaces: Spaces, rng: np.random.Generator, make: MakeNetworks | None = None
    ) -> ActorCritic:
        """Return new networks for these spaces. Those of one's own take the layer's features.

        Raises:
            OptionError: if there are no such networks for them.
        """
        if self.recurrent is None:
            return super().networks(spaces, rng, make)
        norm, inputs = normalizer(spaces.obs.shape, spaces.obs.dtype)
        if len(inputs) > 1:
            raise OptionError(
                f"a memory of images is not built in: observations are {spaces.obs.shape} bytes; "
                f"leave out --recurrent, or stack frames with --wrappers FrameStackObservation"
            )
        if self.policy_obs or self.critic_obs:
            raise OptionError(
                "policy and value function share their memory, so both see the same: leave out "
                "--recurrent, or --policy-obs and --critic-obs"
            )
        layer = Recurrent(self.recurrent, inputs[0], self.memory_size, rng)
        policy, value = self.heads((self.memory_size,), spaces, rng, make)
        return RecurrentActorCritic(norm, layer, policy, value, self.chunk_steps)


class RecurrentActorCritic(ActorCritic):
    """A policy and a value function over the features of a recurrent layer.

    Rows of a batch are chunks: see `process`.

    Args:
        norm: scales observations.
        layer: takes normalized observations and a memory.
        policy: takes the layer's features.
        value: takes the layer's features.
        chunk_steps: L, steps of a chunk at most.
    """

    def __init__(
        self,
        norm: ObsNormalizer | PixelScale,
        layer: Recurrent,
        policy: Policy,
        value: ValueFunction,
        chunk_steps: int,
    ) -> None:
        """Combine the networks."""
        super().__init__(norm, policy, value)
        self.layer, self._length = layer, chunk_steps
        self.memory = layer.memory

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules, for an agent's `modules`."""
        return {**super().modules(), "recurrent": self.layer}

    def trained(self) -> nn.ModuleDict:
        """Return the networks that an objective takes, by name."""
        return nn.ModuleDict({**super().trained(), "recurrent": self.layer})

    def objective(self, **settings: Any) -> Objective:
        """Return the loss of a minibatch of chunks."""
        return _ChunkObjective(**settings)

    def mode(self) -> nn.Module:
        """Return a module from observations and memory to actions and memory, for an agent's `mode`."""
        return _RecurrentMode(self.policy, self.norm, self.layer)

    def act(
        self,
        obs: Array,
        noise: Array,
        mask: Array | None = None,
        memory: Array | None = None,
        explore: bool = True,
    ) -> tuple[Array, Batch]:
        """Return actions, and the next memory among the extras, for an agent's `act`."""
        assert memory is not None
        now = self.layer.numpy(self.norm.numpy(obs), memory)
        features = np.ascontiguousarray(now[:, : self.layer.size])
        act, extras = self.policy.act(features, noise, mask, explore)
        return act, {**extras, "memory": now}

    def process(self, fragment: Fragment, gamma: float, lam: float) -> Batch:
        """Turn a fragment into chunks, for an agent's `process`.

        Returns:
            What `ActorCritic.process` returns, but in chunks of at most L steps of one episode: "obs",
            (chunks, L, *obs), and so on, with zeros behind the last step; "steps", the number of
            steps in each chunk; and "memory", that before its first step, (chunks, m).
        """
        steps, episodes = super().process(fragment, gamma, lam), fragment.episodes()
        memory = firsts(fragment.extras["memory"], episodes, self._length)
        return {**chunked(steps, episodes, self._length), "memory": memory}

    def training_rows(self, batch: Batch) -> Batch:
        """Return the chunks that the objective takes: as `ActorCritic`, with "memory" and "steps"."""
        there, obs = filled(batch["steps"], self._length), batch["obs"]
        flat = self.norm.numpy(obs.reshape(-1, *obs.shape[2:]))
        adv = np.zeros_like(batch["adv"])
        adv[there] = normalized(batch["adv"][there])
        rows = {
            "obs": flat.reshape(*there.shape, -1),
            "act": batch.get("draw", batch["act"]),
            **{name: batch[name] for name in ("logp", "ret", "memory", "steps")},
            "adv": adv,
        }
        return {**rows, "mask": batch["mask"]} if "mask" in batch else rows

    def each_step(self, batch: Batch) -> Batch:
        """Return "obs", "val" and "ret" of a batch by step, (N, ...) each."""
        there = filled(batch["steps"], self._length)
        return {name: batch[name][there] for name in ("obs", "val", "ret")}

    def rows_of(self, steps: int) -> int:
        """Return the number of rows that hold so many steps: of chunks, at least one."""
        return max(1, steps // self._length)

    def _features(self, obs: Array, memory: Array) -> Array:
        with torch.no_grad():
            x = torch.from_numpy(self.norm.numpy(obs))
            now = self.layer.step(x, torch.from_numpy(memory))
            return now[:, : self.layer.size].contiguous().numpy()  # type: ignore[no-any-return]


class _ChunkObjective(Objective):
    """The loss of the steps of some chunks, through the recurrent layer."""

    def loss(  # type: ignore[override]
        self, nets: Any, obs: Tensor, memory: Tensor, steps: Tensor, **others: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss, (), for chunks (n, L, ...); and what there is to record, by step."""
        features = nets["recurrent"](obs, memory)
        there = torch.arange(obs.shape[1]) < steps[:, None]
        others = {name: x[there] for name, x in others.items()}
        return super().loss(nets, features[there], **others)


class _RecurrentMode(nn.Module):
    """A module from observations and a memory to the most probable actions and the next memory."""

    def __init__(self, policy: Policy, norm: nn.Module, layer: Recurrent) -> None:
        super().__init__()
        self.policy, self.norm, self.layer = policy, norm, layer

    def forward(
        self, obs: Tensor, memory: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return actions (N, *act) and memory (N, m), for observations (N, numbers) and memory (N, m)."""
        now = self.layer.step(self.norm(obs), memory)
        return self.policy.mode(now[:, : self.layer.size], mask), now
