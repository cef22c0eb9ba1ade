"""The envs of one rank: reset them, step them, and know where their episodes stand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl import seeding
from rank0rl.agent import Spaces
from rank0rl.batch import Batch
from rank0rl.envs.games import AgentEnv, Game, agents_of
from rank0rl.envs.spaces import (
    check_reset,
    check_step,
    describe,
    mask_of,
    name_of,
    nested_actions,
    refuse_late_mask,
    refuse_other_spaces,
    spaces_in_words,
    to_env,
)
from rank0rl.envs.state import has_state

Array = npt.NDArray[Any]

_FLAGS = (bool, np.bool_)  # flags of these types need no further check


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
    settings: int = 0
    """Version of the curriculum's settings with which the episode has begun."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Info of the last step of the episode that has ended last."""


class Settings(NamedTuple):
    """Settings of a curriculum."""

    version: int = 0
    json: str = ""
    """The settings as JSON; "" without a curriculum."""


@dataclass(eq=False)
class Doing:
    """The operation under way in an env, for error messages."""

    env: Env
    what: Literal["reset", "act", "step"]
    action: Any = None
    """The action of a step."""
    seed: int | None = None
    """Seed of the episode. None: the one under way."""
    step: int | None = None
    """Number of the step in its episode, from 1. None: the next one."""


class EnvBlock:
    """The envs of one rank.

    Args:
        made: environments in groups that are reset together: each by itself, here. Without indices, the
            first group shows the spaces and is closed.
        indices: indices of this rank's groups; may be empty.
        seed: the run's seed, which keys the seed of every episode.
    """

    steps_together = False
    """True if the envs make their steps at the same time."""

    def __init__(self, made: Sequence[Sequence[Any]], indices: range, seed: int) -> None:
        first, size = made[0][0], len(made[0])
        self.groups = [
            [Env(index * size + i, gym, row * size + i) for i, gym in enumerate(group)]
            for row, (index, group) in enumerate(zip(indices, made, strict=False))
        ]
        """Envs that are reset together."""
        self.envs = [env for group in self.groups for env in group]
        self.spaces: Spaces = describe(first)
        self.words = {
            env.index: spaces_in_words(env.gym)
            + (f", and {len(group)} agents" if len(group) > 1 else "")
            for group in self.groups
            for env in group
        }
        """Index of each env -> its spaces in words, to compare with those of other ranks."""
        refuse_other_spaces(self.words)
        self._choice_starts = [columns.start for columns in self.spaces.act.choice_slices()]
        if not indices:
            first.close()
        self.seed = seed
        envs = len(self.envs)
        self.obs = np.zeros((envs, *self.spaces.obs.shape), self.spaces.obs.dtype)
        """Latest observation of each env, (envs, *obs)."""
        self.mask: Array | None = None
        """Choices that may be taken, (envs, all choices), if environments give any."""
        self._has_stepped = False
        self.memory = np.zeros((envs, 0), np.float32)
        """Memory of the agent in each env, (envs, m); zeros where an episode begins."""
        self.ret = np.zeros(envs, np.float64)
        """Sum of rewards of each env's episode, (envs,)."""
        self.length = np.zeros(envs, np.int64)
        """Steps of each env's episode, (envs,)."""
        self.settings = Settings()
        """Settings with which episodes begin from now on."""
        self.doing: Doing | None = None
        """The operation under way, or the last one."""
        self.has_state = all(has_state(env.gym) for env in self.envs)
        """True if an episode under way can go on from a state, and need not be repeated."""

    def begin(self, env: Env, seed: int) -> None:
        """Reset an env with this seed."""
        self.doing = Doing(env, "reset")
        env.seed, env.over = seed, False
        self.ret[env.row], self.length[env.row] = 0.0, 0
        self.memory[env.row] = 0
        env.settings = self.settings.version
        options = {"options": json.loads(self.settings.json)} if self.settings.json else {}
        answer = env.gym.reset(seed=seed, **options)
        check_reset(answer, self.obs[env.row])
        self.obs[env.row], info = answer
        if self.mask is None and self.spaces.act.choices and "action_mask" in info:
            if self._has_stepped:
                refuse_late_mask(info)
            self.mask = np.ones((len(self.envs), self.spaces.act.size), bool)
        if self.mask is not None:
            self.mask[env.row] = mask_of(info, self.spaces.act.size)

    def begin_next(self, env: Env) -> None:
        """Reset an env with the seed of its next episode."""
        env.episode += 1
        self.begin(env, seeding.integer(self.seed, "reset", env.index, env.episode))

    def go_on(self, envs: Iterable[Env]) -> None:
        """Begin the next episode of these envs, whose episodes have ended."""
        for env in envs:
            self.begin_next(env)

    def group_of(self, env: Env) -> list[Env]:
        """Return the envs that are reset together with this one, with itself."""
        return self.groups[env.row // len(self.groups[0])]

    def since_reset(self) -> Array:
        """Return the steps of each env since its reset, (envs,)."""
        return self.length

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
        self._has_stepped = True
        env_act = self.to_env(act)
        try:
            for env, action in zip(envs, env_act, strict=True):
                answer = None
                answer = env.gym.step(action)
                if fully:
                    self._check(answer, env)
                self.obs[env.row], reward, over, cut_off, info = answer
                if self.mask is not None:
                    self.mask[env.row] = mask_of(info, self.spaces.act.size)
                rewards.append(reward)
                terminated.append(over)
                truncated.append(cut_off)
                if over or cut_off:
                    if type(over) not in _FLAGS or type(cut_off) not in _FLAGS:
                        check_step(answer, self.obs[env.row])
                    env.over, env.info = True, info
                    ended.append((env, self.obs[env.row].copy()))
        except Exception:
            self.doing = Doing(env, "step", action)
            if answer is not None:
                check_step(answer, self.obs[env.row])  # it says more than Python and numpy do
            raise
        try:
            rew = np.array(rewards, np.float64)
            self.ret[rows] += rew
        except (TypeError, ValueError):
            for env, action, reward in zip(envs, env_act, rewards, strict=True):
                self.doing = Doing(env, "step", action)
                check_step((self.obs[env.row], reward, False, False, {}), self.obs[env.row])
            raise
        self.length[rows] += 1
        return rew, np.array(terminated, bool), np.array(truncated, bool), ended

    def _check(self, answer: Any, env: Env) -> None:
        check_step(answer, self.obs[env.row])
        if self.mask is None and self.spaces.act.choices:
            refuse_late_mask(answer[4])

    def allowed(self, envs: Sequence[Env], rows: Any) -> Array:
        """Return a copy of the masks of these envs, (B, all choices), bool, for a block that has masks.

        Raises:
            ValueError: if one of them may take none.
        """
        assert self.mask is not None
        mask: Array = self.mask[rows].copy()
        some = np.logical_or.reduceat(mask, self._choice_starts, axis=1).all(
            axis=1
        )  # of each choice
        if not some.all():
            none = int(some.argmin())
            self.doing = Doing(envs[none], "act")
            raise ValueError(
                f'info["action_mask"] must allow at least one value of each choice while an episode '
                f"goes on: got {mask[none].astype(int)}"
            )
        return mask

    def note(self, error: Exception, iteration: int) -> int | None:
        """Add to an error what was done; return the id of the fragment in which it was, if in any."""
        doing = self.doing
        if doing is None:
            return None
        env = doing.env
        seed = env.seed if doing.seed is None else doing.seed
        step = self.length[env.row] + 1 if doing.step is None else doing.step
        what = {
            "reset": "in its reset",
            "act": f"the agent acts in step {step} of this fragment and of others",
            "step": f"step {step}, action {doing.action}",
        }[doing.what]
        error.add_note(
            f"In fragment {env.fragment_id} of iteration {iteration}: {name_of(env.gym)}, episode "
            f"with seed {seed}, {what}."
        )
        return int(env.fragment_id)

    def close(self) -> None:
        """Close the environments, all of them.

        Raises:
            Exception: the first one that an environment raises. After another error, it is a note of that.
        """
        _close(env.gym for env in self.envs)

    def to_env(self, act: Array) -> Any:
        """Return actions as environments take them."""
        return to_env(act, self.spaces.act)


def _close(envs: Iterable[Any]) -> None:
    failed = list[Exception]()
    for env in envs:
        try:
            env.close()
        except Exception as error:
            failed.append(error)
    before = sys.exception()
    if before is not None and failed:
        before.add_note(
            f"To close an environment failed too: {type(failed[0]).__name__}: {failed[0]}"
        )
    elif failed:
        raise failed[0]


def step_info(names: Sequence[str], envs: Sequence[Env]) -> Batch:
    """Return what an agent reads from the infos of the last step of B envs, name -> (B, ...), float64.

    Raises:
        ValueError: unless each of them has one shape.
    """
    try:
        return {name: np.stack([env.gym.step_info[name] for env in envs]) for name in names}
    except ValueError:
        shapes = {name: {env.gym.step_info[name].shape for env in envs} for name in names}
        raise ValueError(
            f"what an agent reads from infos must have the same shape in every step: got {shapes}"
        ) from None


def rows_of(group: Sequence[Env]) -> slice:
    """Return the rows of envs that are reset together."""
    return slice(group[0].row, group[-1].row + 1)


class _ProcessBlock(EnvBlock):
    """The envs of one rank, each in a process of its own."""

    steps_together = True

    def step(
        self, envs: Sequence[Env], rows: Any, act: Array, fully: bool = True
    ) -> tuple[Array, Array, Array, list[tuple[Env, Array]]]:
        """Begin the steps of all of these envs, then finish them, as `EnvBlock.step`."""
        for env, action in zip(envs, self.to_env(act), strict=True):
            env.gym.rank0rl_begin_step(action)
        return super().step(envs, rows, act, fully)


class _GameBlock(EnvBlock):
    """The envs of one rank, where each is an agent of a game. A group is a game, with all its agents.

    An agent that is gone waits for the end of its game: its env is over, and its steps count 0. It
    still has a row in `step`, but the game does not see its action.
    """

    def __init__(self, made: Sequence[Sequence[Any]], indices: range, seed: int) -> None:
        super().__init__(made, indices, seed)
        self._nested = nested_actions(made[0][0].unwrapped.game.agents[0])  # with nothing around it

    def begin(self, env: Env, seed: int) -> None:
        for each in self.group_of(env):
            each.episode = env.episode
            super().begin(each, seed)

    def go_on(self, envs: Iterable[Env]) -> None:
        for env in envs:
            group = self.group_of(env)
            if all(each.over for each in group):
                self.begin_next(group[0])
            elif env.over:
                self.length[env.row], self.ret[env.row] = 0, 0.0
                env.gym.unwrapped.game.idle(env.gym.unwrapped.agent)

    def since_reset(self) -> Array:
        of_games: Array = np.array([self.length[rows_of(group)].max() for group in self.groups])
        return np.repeat(of_games, len(self.groups[0]))

    def step(
        self, envs: Sequence[Env], rows: Any, act: Array, fully: bool = True
    ) -> tuple[Array, Array, Array, list[tuple[Env, Array]]]:
        """Step the games of these envs, as `EnvBlock.step`. All agents that are not gone are among them."""
        waiting = [env.row for env in envs if env.over]
        self._play(envs, self.to_env(act))
        answer = super().step(envs, rows, act, fully)
        self.length[waiting] = 0
        if self.mask is not None:
            self.mask[[env.row for env in envs if env.over]] = True  # they act, in vain
        return answer

    def _play(self, envs: Sequence[Env], env_act: Any) -> None:
        acts: dict[Game, dict[Any, Any]] = {}
        firsts: dict[Game, Env] = {}
        for env, action in zip(envs, env_act, strict=True):
            if not env.over:
                agent: AgentEnv = env.gym.unwrapped
                own = self._nested(action) if self._nested else action
                acts.setdefault(agent.game, {})[agent.agent] = own
                firsts.setdefault(agent.game, env)
        for game, actions in acts.items():
            try:
                game.step(actions)
            except Exception:
                self.doing = Doing(firsts[game], "step", actions)
                raise


def make_block(make_env: Callable[[int], Any], indices: range, seed: int) -> EnvBlock:
    """Make the environments of one rank.

    Args:
        make_env: makes the gymnasium environment with a given index; of a game, that of its first agent.
        indices: indices of this rank's environments and games; may be empty.
        seed: the run's seed, which keys the seed of every episode.
    """
    made = list[Sequence[Any]]()
    for index in indices or [indices.start]:
        try:
            made.append(agents_of(make_env(index)))
        except Exception as error:
            error.add_note(f"While making the environment of env {index}.")
            _close(env for group in made for env in group)
            raise
    first = made[0][0]
    if isinstance(getattr(first, "unwrapped", None), AgentEnv):
        return _GameBlock(made, indices, seed)
    return (_ProcessBlock if hasattr(first, "rank0rl_begin_step") else EnvBlock)(
        made, indices, seed
    )
