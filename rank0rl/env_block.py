"""The envs of one rank: reset them, step them, and know where their episodes stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl import seeding
from rank0rl.agent import Agent, Spaces
from rank0rl.env_answers import FLAGS, check_reset, check_step, mask_of, some_allowed
from rank0rl.envs import (
    describe,
    first_choice,
    name_of,
    refuse_other_spaces,
    spaces_in_words,
)

Array = npt.NDArray[Any]


def envs_of(rank: int, nworkers: int, num_envs: int, of_rank0: int | None = None) -> range:
    """Return the contiguous block of envs that a rank owns; blocks differ in length by one at most.

    Args:
        rank: the rank that owns them.
        nworkers: number of ranks.
        num_envs: number of envs over all ranks.
        of_rank0: number of rank 0's envs, if it has no equal share; the other ranks share the rest.
    """
    if of_rank0 is None or nworkers == 1:
        return range(rank * num_envs // nworkers, (rank + 1) * num_envs // nworkers)
    if rank == 0:
        return range(of_rank0)
    rest = envs_of(rank - 1, nworkers - 1, num_envs - of_rank0)
    return range(of_rank0 + rest.start, of_rank0 + rest.stop)


@dataclass(eq=False)
class Env:
    """One env, and the episode that is under way in it."""

    index: int
    """Index over all ranks, from 0."""
    gym: Any
    """The gymnasium environment."""
    row: int
    """Row of this env in the rank's arrays."""
    episode: int = -1
    """Number of episodes begun before this one; it keys the episode's seed."""
    seed: int = 0
    """Seed of the episode."""
    fragment_id: int = 0
    """Fragment that the env's steps belong to."""
    over: bool = True
    """True if the episode has ended and the next one has not begun."""


class EnvBlock:
    """The envs of one rank.

    Args:
        make_env: makes one gymnasium environment.
        indices: indices of this rank's envs; may be empty.
        seed: the run's seed, which keys the seed of every episode.
    """

    def __init__(self, make_env: Callable[[], Any], indices: range, seed: int) -> None:
        """Make the environments. Without any, make one to see its spaces and close it."""
        self.envs = [Env(index, _make(make_env, index), row) for row, index in enumerate(indices)]
        env = self.envs[0].gym if indices else _make(make_env, indices.start)
        self.spaces: Spaces = describe(env)
        self.words = {env.index: spaces_in_words(env.gym) for env in self.envs}
        """Index of each env -> its spaces in words, to compare with those of other ranks."""
        refuse_other_spaces(self.words)
        self._choice_starts = [columns.start for columns in self.spaces.act.choice_slices()]
        first = first_choice(env)
        self._first_choice = first if np.any(first) else None
        if not indices:
            env.close()
        self._seed = seed
        self.obs = np.zeros((len(indices), *self.spaces.obs.shape), self.spaces.obs.dtype)
        """Latest observation of each env, (envs, *obs)."""
        self.mask: Array | None = None
        """Choices that may be taken, (envs, all choices), once an environment has given any."""
        self.memory = np.zeros((len(indices), 0), np.float32)
        """Memory of the agent in each env, (envs, m); zeros where an episode begins."""
        self.ret = np.zeros(len(indices), np.float64)
        """Sum of rewards of each env's episode, (envs,)."""
        self.length = np.zeros(len(indices), np.int64)
        """Steps of each env's episode, (envs,)."""
        self.doing: tuple[Any, ...] | None = None
        """Env in use, and its action, None for a reset, or the agent that is choosing one. If it is about
        an earlier step, the episode's seed and the step's number follow."""

    def begin(self, env: Env, seed: int) -> None:
        """Reset an env with this seed."""
        self.doing = env, None
        env.seed, env.over = seed, False
        self.ret[env.row], self.length[env.row] = 0.0, 0
        self.memory[env.row] = 0
        answer = env.gym.reset(seed=seed)
        check_reset(answer, self.obs[env.row])
        self.obs[env.row], info = answer
        if self.mask is None and self.spaces.act.choices and "action_mask" in info:
            self.mask = np.ones((len(self.envs), self.spaces.act.size), bool)
        if self.mask is not None:
            self.mask[env.row] = mask_of(info, self.spaces.act.size)

    def begin_next(self, env: Env) -> None:
        """Reset an env with the seed of its next episode."""
        env.episode += 1
        self.begin(env, seeding.integer(self._seed, "reset", env.index, env.episode))

    def step(
        self, envs: Sequence[Env], rows: Any, act: Array, fully: bool = True
    ) -> tuple[Array, Array, Array, list[tuple[Env, Array]]]:
        """Step these envs.

        Args:
            envs: the envs to step, B of them.
            rows: index of their rows in this block's arrays: a slice or an array.
            act: actions as the agent gave them, (B, *act).
            fully: check all that the environments answer, not only what costs no time.

        Returns:
            Rewards (B,), terminated (B,), truncated (B,), and the envs whose episode ended, each
            with its last observation.
        """
        rewards, terminated, truncated, ended = [], [], [], []
        env_act = self._to_env(act)
        try:
            for env, action in zip(envs, env_act, strict=True):
                answer = None
                answer = env.gym.step(action)
                if fully:
                    check_step(answer, self.obs[env.row])
                self.obs[env.row], reward, over, cut_off, info = answer
                if self.mask is not None:
                    self.mask[env.row] = mask_of(info, self.spaces.act.size)
                rewards.append(reward)
                terminated.append(over)
                truncated.append(cut_off)
                if over or cut_off:
                    if type(over) not in FLAGS or type(cut_off) not in FLAGS:
                        check_step(answer, self.obs[env.row])
                    env.over = True
                    ended.append((env, self.obs[env.row].copy()))
        except Exception:
            self.doing = env, action
            if answer is not None:
                check_step(answer, self.obs[env.row])  # it says more than Python and numpy do
            raise
        rew = np.array(rewards, np.float64)
        self.ret[rows] += rew
        self.length[rows] += 1
        return rew, np.array(terminated, bool), np.array(truncated, bool), ended

    def allowed(self, envs: Sequence[Env], rows: Any, agent: Agent) -> Array:
        """Return the choices that an agent may take in these envs, (B, all choices), bool, as a copy.

        Raises:
            ValueError: if one of them may take none.
        """
        assert self.mask is not None
        mask: Array = self.mask[rows].copy()
        some = some_allowed(mask, self._choice_starts)
        if not some.all():
            none = int(some.argmin())
            self.doing = envs[none], agent
            raise ValueError(
                f'info["action_mask"] must allow at least one value of each choice while an episode '
                f"goes on: got {mask[none].astype(int)}"
            )
        return mask

    def repeat(self, env: Env, act: Array) -> bool:
        """Take an env through these actions, (n, *act); return True if its episode goes on."""
        for action in act:
            _, _, _, ended = self.step([env], slice(env.row, env.row + 1), action[None])
            if ended:
                return False
        return True

    def note(self, error: Exception, iteration: int) -> int | None:
        """Add to an error which episode was under way; return its fragment id, if there was one."""
        if self.doing is None:
            return None
        env, action, *place = self.doing
        seed, step = place or (env.seed, self.length[env.row] + 1)
        if action is None:
            what = "in its reset"
        elif isinstance(action, Agent):
            what = f"the agent acts in step {step} of this fragment and of others"
        else:
            what = f"step {step}, action {action}"
        error.add_note(
            f"In fragment {env.fragment_id} of iteration {iteration}: {name_of(env.gym)}, episode "
            f"with seed {seed}, {what}."
        )
        return int(env.fragment_id)

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            env.gym.close()

    def _to_env(self, act: Array) -> Any:
        space = self.spaces.act
        if space.kind == "discrete":
            return act if self._first_choice is None else act + self._first_choice
        assert space.low is not None
        assert space.high is not None
        return np.minimum(np.maximum(act, space.low), space.high)  # half the time of np.clip


def _make(make_env: Callable[[], Any], index: int) -> Any:
    try:
        return make_env()
    except Exception as error:
        error.add_note(f"While making the environment of env {index}.")
        raise
