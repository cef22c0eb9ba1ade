"""Agents with a memory: GRU and LSTM layers, chunks of episodes, and `ActorCritic` over them.

Source: Cho et al. 2014, arXiv:1406.1078 (GRU); Hochreiter and Schmidhuber 1997 (LSTM), with a forget
bias of 1 (Gers et al. 2000); in the forms of torch.nn.GRU and torch.nn.LSTM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rank0rl.agent import Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.actor_critic import (
    ActorCritic,
    MakeNetworks,
    Outputs,
    ValueFunction,
    normalized,
)
from rank0rl.nets.flat import Views
from rank0rl.nets.normalize import Normalizer, normalizer
from rank0rl.nets.policies import Policy
from rank0rl.options import OptionError

Array = npt.NDArray[Any]


def chunked(steps: Batch, episodes: Sequence[slice], length: int) -> Batch:
    """Cut steps into chunks, none of which goes beyond the end of an episode.

    Args:
        steps: arrays of T steps, name -> (T, ...).
        episodes: the steps of each episode.
        length: L, steps of a chunk at most.

    Returns:
        The arrays, (chunks, L, ...), with zeros where a chunk has fewer steps; and "steps", the
        number that it has, (chunks,), int64.
    """
    left = [e.stop - start for e in episodes for start in range(e.start, e.stop, length)]
    counts = np.minimum(left, length).astype(np.int64)
    chunks: Batch = {}
    for name, array in steps.items():
        chunks[name] = np.zeros((len(counts), length, *array.shape[1:]), array.dtype)
        chunks[name][filled(counts, length)] = array
    return {**chunks, "steps": counts}


def filled(counts: Array, length: int) -> Array:
    """Return True where a chunk has a step, (chunks, L), for the steps of each chunk, (chunks,)."""
    return np.arange(length) < counts[:, None]


def firsts(steps: Array, episodes: Sequence[slice], length: int) -> Array:
    """Return the row of the first step of each chunk, (chunks, ...), of an array (T, ...)."""
    return steps[[start for e in episodes for start in range(e.start, e.stop, length)]]


Cell: TypeAlias = Literal["gru", "lstm"]


class Recurrent(nn.Module):
    """From observations and a memory to features and the next memory. The weights are orthogonal.

    A GRU's memory is its features, `size` numbers. An LSTM's is its features and its cells.
    """

    def __init__(self, cell: Cell, inputs: int, size: int, rng: np.random.Generator) -> None:
        super().__init__()
        self.size, is_lstm = size, cell == "lstm"
        self._cell: Any = _LSTM if is_lstm else _GRU
        self.memory = 2 * size if is_lstm else size
        """Numbers in a memory."""
        self.layer: Any = (nn.LSTM if is_lstm else nn.GRU)(inputs, size, batch_first=True)
        self._views = Views(self.layer._parameters)
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
        for name, parameter in self.layer.named_parameters():
            if name.startswith("weight"):
                for gate in torch.split(parameter.data, size):
                    nn.init.orthogonal_(gate, generator=torch_rng)
            else:
                nn.init.zeros_(parameter)
                if name == "bias_ih_l0" and is_lstm:
                    parameter.data[size : 2 * size] = 1.0  # remember at first

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Compute the features (n, L, size) of chunks (n, L, inputs) that begin with memory (n, m)."""
        return _chunks(self._cell, x, memory, *self.layer.parameters())

    def step(self, x: Tensor, memory: Tensor) -> Tensor:
        """Return the next memory (N, m) for inputs (N, inputs) and memory (N, m). It begins with the features."""
        layer = self.layer
        by_x = nn.functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)
        by_h = nn.functional.linear(memory[:, : self.size], layer.weight_hh_l0, layer.bias_hh_l0)
        return self._cell.next(by_x, by_h, memory, torch, torch.sigmoid)[0]

    def numpy(self, x: Array, memory: Array) -> Array:
        """Return what `step` does, in NumPy. No row depends on how many there are."""
        w_x, w_h, b_x, b_h = self._views()
        by_x = (x[:, None, :] @ w_x.T)[:, 0] + b_x
        by_h = (memory[:, None, : self.size] @ w_h.T)[:, 0] + b_h
        return self._cell.next(by_x, by_h, memory, np, _sigmoid)[0]


class _GRU:
    """One step, and its derivatives, given products of weights with inputs and with features, (n, 3 size) each."""

    @staticmethod
    def next(
        by_x: Any, by_h: Any, memory: Any, of: Any, sigmoid: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the next memory and what `back` needs, by functions of NumPy or torch."""
        (r_x, z_x, n_x), (r_h, z_h, n_h) = _parts(by_x, 3), _parts(by_h, 3)
        r, keep = sigmoid(r_x + r_h), sigmoid(z_x + z_h)
        new = of.tanh(n_x + r * n_h)
        return new + keep * (memory - new), (r, keep, n_h, new)

    @staticmethod
    def back(by: Array, memory: Array, kept: tuple[Any, ...], by_x: Array, by_h: Array) -> Array:
        """Return the derivatives by the memory, given those by the next one; write those by the products."""
        r, keep, n_h, new = kept
        by_n = by * (1 - keep) * (1 - new * new)
        by_r = by_n * n_h * r * (1 - r)
        by_z = by * (memory - new) * keep * (1 - keep)
        np.concatenate([by_r, by_z, by_n], 1, out=by_x)
        np.concatenate([by_r, by_z, by_n * r], 1, out=by_h)
        return by * keep


class _LSTM:
    """The same of an LSTM, with products (n, 4 size). Its memory is features and cells."""

    @staticmethod
    def next(
        by_x: Any, by_h: Any, memory: Any, of: Any, sigmoid: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the next memory and what `back` needs, by functions of NumPy or torch."""
        i, f, g, o = _parts(by_x + by_h, 4)
        i, f, g, o = sigmoid(i), sigmoid(f), of.tanh(g), sigmoid(o)
        cells = f * _parts(memory, 2)[1] + i * g
        seen = of.tanh(cells)
        return of.concatenate([o * seen, cells], 1), (i, f, g, o, seen)

    @staticmethod
    def back(by: Array, memory: Array, kept: tuple[Any, ...], by_x: Array, by_h: Array) -> Array:
        """Return the derivatives by the memory, given those by the next one; write those by the products."""
        (i, f, g, o, seen), (by_features, by_cells) = kept, _parts(by, 2)
        by_cells = by_cells + by_features * o * (1 - seen * seen)
        by_i, by_f = by_cells * g * i * (1 - i), by_cells * _parts(memory, 2)[1] * f * (1 - f)
        by_g, by_o = by_cells * i * (1 - g * g), by_features * seen * o * (1 - o)
        by_h[...] = np.concatenate([by_i, by_f, by_g, by_o], 1, out=by_x)
        return np.concatenate([np.zeros_like(by_cells), by_cells * f], 1)


def _parts(x: Any, n: int) -> list[Any]:
    """Return n parts of columns, of one size."""
    size = x.shape[1] // n
    return [x[:, a : a + size] for a in range(0, n * size, size)]


def _sigmoid(x: Array) -> Array:
    return np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x)


class _Chunks(torch.autograd.Function):
    """`Recurrent.forward` for autograd, in NumPy: torch's layers take longer, and its LSTM differs by CPU."""

    @staticmethod
    def forward(ctx: Any, cell: Any, x: Tensor, memory: Tensor, *weights: Tensor) -> Tensor:
        w_x, w_h, b_x, b_h = (w.detach().numpy() for w in weights)
        steps = np.ascontiguousarray(x.detach().numpy().transpose(1, 0, 2))
        by_x, kept = steps @ w_x.T + b_x, []
        memories = np.empty((len(steps) + 1, *memory.shape), by_x.dtype)
        memories[0] = memory.detach().numpy()
        features = memories[..., : w_h.shape[1]]
        for t in range(len(steps)):
            by_h = features[t] @ w_h.T + b_h
            memories[t + 1], each = cell.next(by_x[t], by_h, memories[t], np, _sigmoid)
            kept.append(each)
        ctx.save_for_backward(*weights)
        ctx.kept = cell, steps, memories, features, kept
        return torch.from_numpy(features[1:].transpose(1, 0, 2).copy())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_features: Tensor) -> Any:
        cell, steps, memories, features, kept = ctx.kept
        w_x, w_h = (w.detach().numpy() for w in ctx.saved_tensors[:2])
        (gates, size), by = w_h.shape, np.zeros_like(memories[0])
        by_x, by_h = np.empty((2, *steps.shape[:2], gates), by.dtype)
        for t in range(len(steps) - 1, -1, -1):
            by[:, :size] += by_features.numpy()[:, t]
            by = cell.back(by, memories[t], kept[t], by_x[t], by_h[t])
            by[:, :size] += by_h[t] @ w_h
        by_steps = (
            torch.from_numpy((by_x @ w_x).transpose(1, 0, 2)) if ctx.needs_input_grad[1] else None
        )
        by_x, by_h = by_x.reshape(-1, gates), by_h.reshape(-1, gates)
        by_w_x = by_x.T @ steps.reshape(-1, steps.shape[2])
        by_w_h = by_h.T @ features[:-1].reshape(-1, size)
        rest = by, by_w_x, by_w_h, by_x.sum(axis=0), by_h.sum(axis=0)
        return None, by_steps, *map(torch.from_numpy, rest)


_chunks: Any = _Chunks.apply


def recurrent_networks(
    options: Any, spaces: Spaces, rng: np.random.Generator, make: MakeNetworks | None = None
) -> ActorCritic:
    """Do what `NetworkOptions.networks` does, with a memory, by the options of PPO.

    Networks of your own take the features of the recurrent layer.
    """
    norm, inputs = normalizer(spaces.obs.shape, spaces.obs.dtype)
    if len(inputs) > 1:
        raise OptionError(
            f"a memory of images is not built in: observations are {spaces.obs.shape} bytes; "
            f"leave out --recurrent, or make frames gray, without an axis of channels, and stack them: "
            f"--wrappers GrayscaleObservation 'FrameStackObservation(stack_size=4)'"
        )
    if options.policy_obs or options.critic_obs:
        raise OptionError(
            "policy and value function share their memory, so both see the same: leave out "
            "--recurrent, or --policy-obs and --critic-obs"
        )
    layer = Recurrent(options.recurrent, inputs[0], options.memory_size, rng)
    policy, value = options.policy_and_value((options.memory_size,), spaces, rng, make)
    return _RecurrentActorCritic(norm, layer, policy, value, options.chunk_steps)


class _RecurrentActorCritic(ActorCritic):
    """A policy and a value function over the features of a recurrent layer. Rows of a batch are chunks."""

    def __init__(
        self,
        norm: Normalizer,
        layer: Recurrent,
        policy: Policy,
        value: ValueFunction,
        chunk_steps: int,
    ) -> None:
        super().__init__(norm, policy, value, layer)
        self._length = chunk_steps
        self.memory = layer.memory

    def evaluate(self, nets: Any, rows: dict[str, Tensor]) -> Outputs:
        """Return the arguments of a loss, by step, for chunks, through the recurrent layer."""
        there = torch.arange(rows["obs"].shape[1]) < rows["steps"][:, None]
        features = nets["shared"](rows["obs"], rows["memory"])
        chunks = ("steps", "memory")  # one row for each
        steps = {name: x[there] for name, x in rows.items() if name not in chunks}
        heads = {name: nets[name] for name in ("policy", "value")}
        return super().evaluate(heads, {**steps, "obs": features[there]})

    def mode(self) -> nn.Module:
        return _RecurrentMode(self.policy, self.norm, self.shared)

    def act(self, step: Step) -> tuple[Array, Batch]:
        assert step.memory is not None
        now = self.shared.numpy(self.norm.numpy(step.obs), step.memory)
        features = np.ascontiguousarray(now[:, : self.shared.size])
        act, extras = self.policy.act(features, step.noise, step.mask, step.explore)
        return act, {**extras, "memory": now}

    def process(self, fragment: Fragment, gamma: float, lam: float) -> Batch:
        """Return the rows of `ActorCritic.process` in chunks of at most L steps of one episode.

        "obs" is (chunks, L, *obs), and so on, with zeros behind the last step; "steps" is the number of
        steps in each chunk, and "memory" that before its first step, (chunks, m).
        """
        steps, episodes = super().process(fragment, gamma, lam), fragment.episodes()
        memory = firsts(fragment.extras["memory"], episodes, self._length)
        return {**chunked(steps, episodes, self._length), "memory": memory}

    def training_rows(self, batch: Batch) -> Batch:
        """Return chunks to learn from: as `ActorCritic`, with "memory" and "steps"."""
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
        there = filled(batch["steps"], self._length)
        return {name: batch[name][there] for name in ("obs", "val", "ret")}

    def rows_of(self, steps: int) -> int:
        return max(1, steps // self._length)

    def _features(self, obs: Array, memory: Array) -> Array:
        now = self.shared.numpy(self.norm.numpy(obs), memory)
        return np.ascontiguousarray(now[:, : self.shared.size])


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
