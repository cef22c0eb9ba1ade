"""Go on with the episodes that were under way when a run was stopped: from states, or by repeating them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.batch import Batch
from rank0rl.envs.block import Env, EnvBlock, Settings, rows_of
from rank0rl.envs.spaces import name_of
from rank0rl.envs.state import give_state, packed, take_state, unpacked

Array = npt.NDArray[Any]

_SAY_S = 5.0  # between two lines about an episode that takes long to repeat


def states(block: EnvBlock) -> Batch:
    """Return the state of each env in the middle of its episode.

    Returns:
        "state", the bytes of all envs; "state_bytes", the number of each, (envs,); and "mask" where there is one.
    """
    taken = [packed(take_state(env.gym)) for env in block.envs]
    mask = {} if block.mask is None else {"mask": block.mask.copy()}
    sizes = np.array([len(state) for state in taken], np.int64)
    return {"state": np.concatenate(taken), "state_bytes": sizes, **mask}


def restore(
    block: EnvBlock, unfinished: Batch, settings: Mapping[int, str] | None = None
) -> dict[int, str]:
    """Let each env go on in its unfinished episode, from its state, or else by its seed and actions.

    Args:
        block: a rank's envs.
        unfinished: what `Unfinished.all` returns, for the envs of all ranks.
        settings: version -> settings of a curriculum, as JSON, of these episodes.

    Returns:
        Index of each env that begins its next episode instead -> the reason.
    """
    if not unfinished:  # whole episodes have ended at every boundary
        return {}
    memory = unfinished.get("memory")
    if memory is not None:
        block.memory = np.zeros((len(block.envs), memory.shape[1]), memory.dtype)
    sizes = unfinished.get("state_bytes" if block.has_state else "", np.zeros(0, np.int64))
    states = np.split(unfinished["state"], np.cumsum(sizes)[:-1]) if len(sizes) else []
    acts = np.split(unfinished["act"], np.cumsum(unfinished["kept"])[:-1])
    strays: dict[int, str] = {}
    for group in block.groups:
        env, rows = group[0], rows_of(group)
        of = slice(env.index, env.index + len(group))
        env.episode = int(unfinished["episode"][env.index]) - 1
        if settings:
            version = int(unfinished["settings"][env.index])
            block.settings = Settings(version, settings[version])
        block.begin_next(env)
        why = ""
        if states:
            _go_on_from(block, env, unfinished, states)
        else:
            why = _repeat(block, group, np.stack(acts[of], axis=1), unfinished)
        if why:
            strays |= dict.fromkeys(range(of.start, of.stop), why)
            block.begin_next(env)
        elif memory is not None:
            block.memory[rows] = memory[of]
    return strays


def _repeat(block: EnvBlock, group: Sequence[Env], act: Array, unfinished: Batch) -> str:
    """Take a group, which has been reset, through these actions, (n, envs, *act); return why it does not go on."""
    env, rows = group[0], rows_of(group)
    of = slice(env.index, env.index + len(group))
    if unfinished["kept"][env.index] < (steps := unfinished["steps"][env.index]):
        if "state_bytes" in unfinished:
            return "its environment has no get_state and set_state now"
        return f"its episode of {steps} steps is longer than max_replay_steps"
    said, over = time.monotonic(), False
    for n, actions in enumerate(act):
        if time.monotonic() - said > _SAY_S:
            said = time.monotonic()
            say = f"repeating the episode of env {env.index}: step {n:,} of {len(act):,}"
            print(say, file=sys.stderr, flush=True)
        *_, ended = block.step(group, rows, actions)
        if over := bool(ended) and all(each.over for each in group):
            break
        block.go_on([each for each, _ in ended])
    goes_on = (
        not over
        and block.obs[rows].tobytes() == unfinished["obs"][of].tobytes()
        and (block.ret[rows] == unfinished["ret"][of]).all()
    )
    it = f"{name_of(env.gym)} does not repeat an episode from its seed and actions"
    return "" if goes_on else it


def _go_on_from(block: EnvBlock, env: Env, unfinished: Batch, states: Sequence[Array]) -> None:
    """Let an env, which has been reset, go on in the middle of its episode."""
    i, row = env.index, env.row
    give_state(env.gym, unpacked(states[i]))
    block.obs[row], block.ret[row] = unfinished["obs"][i], unfinished["ret"][i]
    block.length[row] = unfinished["steps"][i]
    if block.mask is not None:
        block.mask[row] = unfinished["mask"][i]
