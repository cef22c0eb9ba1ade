"""Draw noise for an agent, let it act with masks and with a memory, and check what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl import seeding
from rank0rl.agent import Agent, Space
from rank0rl.batch import Batch, count
from rank0rl.envs.block import Env, EnvBlock

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
    given: dict[str, Any] = {}
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


def check_acted(name: str, value: Any, rows: int, space: Space) -> None:
    """Make sure that an agent's `act` returned an array with a row for each observation.

    Args:
        name: "act", or the name of an extra.
        value: what it returned as this.
        rows: number of observations.
        space: of the actions.

    Raises:
        ValueError: if it returned something else.
    """
    row = space.shape if name == "act" else np.shape(value)[1:]
    is_array = isinstance(value, np.ndarray)
    if not is_array or value.shape != (rows, *row) or value.dtype.hasobject:
        kind = f"{value.dtype} {value.shape}" if is_array else type(value)
        raise ValueError(
            f"act must return {'actions' if name == 'act' else repr(name)} as an array of shape "
            f"{(rows, *row)}, a row for each observation: got {kind}"
        )


def check_processed(rows: Any) -> None:
    """Make sure that an agent's `process` returned rows.

    Raises:
        TypeError: if it returned something else.
        ValueError: if its arrays disagree on the number of rows.
    """
    wrong = rows if not isinstance(rows, Mapping) else None
    for name, array in {} if wrong is not None else rows.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            wrong = {name: array}
            break
    if wrong is not None:
        raise TypeError(
            f"process must return a dict of name -> array with rows along its first axis: got "
            f"{wrong!r:.100}"
        )
    count(rows)
