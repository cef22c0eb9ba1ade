"""Draw noise for an agent, and let it act with masks and with a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl import seeding
from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.env_block import Env, EnvBlock

Array = npt.NDArray[Any]


def draws(agent: Agent, seed: int, iteration: int, fragment_id: int) -> Callable[[int], Array]:
    """Return a function that draws the next (T, k) numbers of noise of the fragment's own stream.

    Raises:
        ValueError: if the agent's `noise` is of no kind that there is.
    """
    kind, k = agent.noise
    if kind not in ("normal", "uniform"):
        raise ValueError(f'noise must be ("normal" or "uniform", k): got {agent.noise}')
    rng = seeding.stream(seed, "act", iteration, fragment_id)
    if kind == "normal":
        return lambda steps: rng.standard_normal((steps, k), dtype=np.float32)
    return lambda steps: rng.random((steps, k), dtype=np.float32)


def act_with_more(
    agent: Agent,
    block: EnvBlock,
    envs: Sequence[Env],
    rows: Any,
    noise: Array,
    fragment_id: Array,
    masked: bool,
) -> tuple[Array, Batch]:
    """Let an agent act with masks, or with its memory, or both.

    Args:
        agent: acts.
        block: has these envs; it keeps the agent's new memory.
        envs: the envs to act in, B of them.
        rows: index of their rows in the block's arrays: a slice or an array.
        noise: (B, k).
        fragment_id: (B,).
        masked: True if it gets the masks.

    Returns:
        Actions; and the extras, with "action_mask" and "memory" as the agent was given them.

    Raises:
        ValueError: if it gives no new memory.
    """
    given: Batch = {}
    if masked:
        given["mask"] = block.allowed(envs, rows, agent)
    if agent.memory:
        given["memory"] = block.memory[rows].copy()
    act, extras = agent.act(block.obs[rows], noise, fragment_id, **given)
    kept = dict(extras)
    if "mask" in given:
        kept["action_mask"] = given["mask"]
    if "memory" in given:
        new, old = kept.get("memory"), given["memory"]
        if not isinstance(new, np.ndarray) or (new.shape, new.dtype) != (old.shape, old.dtype):
            got = f"{new.dtype} {new.shape}" if isinstance(new, np.ndarray) else type(new)
            raise ValueError(
                f'act must return the extra "memory" as float32 {old.shape}, a row for each '
                f"observation: got {got}"
            )
        block.memory[rows], kept["memory"] = new, old
    return act, kept
