"""Step the envs of one rank with the agent, and cut what they did into fragments.

All that decides what a fragment holds is keyed by its fragment id: its noise and the seeds of its
episodes. So a fragment is the same whichever rank collects it, and whatever else that rank collects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl import seeding
from rank0rl.agent import Agent, Fragment, Space, Spaces, Step
from rank0rl.batch import Batch, Buffer, count, take
from rank0rl.envs.block import Env, make_block
from rank0rl.envs.wrappers import EPISODE

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


def new_memory(extras: Batch, old: Array) -> Array:
    """Return the memory that an agent's `act` returned.

    Raises:
        ValueError: if it is not of the shape and dtype of the old one.
    """
    new: Any = extras.get("memory")
    if not isinstance(new, np.ndarray) or (new.shape, new.dtype) != (old.shape, old.dtype):
        got = f"{new.dtype} {new.shape}" if isinstance(new, np.ndarray) else type(new)
        raise ValueError(
            f'act must return the extra "memory" as float32 {old.shape}, a row for each '
            f"observation: got {got}"
        )
    return new


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


class End(NamedTuple):
    """The end of an episode in a fragment, or the end of the fragment within an episode."""

    t: int
    """Its last step in the fragment."""
    obs: Array
    """Observation after it, (*obs)."""
    seed: int
    """Seed of the episode."""
    length: int
    """Steps of the episode so far, those in earlier fragments included."""
    memory: Array
    """The agent's memory after it, (m,)."""


def cut(fragment_id: int, rows: Batch, ends: Sequence[End]) -> Fragment:
    """Return the fragment with these rows, (T, ...) each, in which these episodes end.

    Rows of no episode are left out: those of an agent that waits for the end of its game.
    """
    known = ("obs", "act", "rew", "terminated", "truncated")
    steps = [min(end.length, end.t + 1) for end in ends]
    if sum(steps) < len(rows["rew"]):
        each = [np.arange(end.t + 1 - n, end.t + 1) for end, n in zip(ends, steps, strict=True)]
        rows = take(rows, np.concatenate(each))
    return Fragment(
        fragment_id=fragment_id,
        end=np.cumsum(steps) - 1,
        end_obs=np.stack([end.obs for end in ends]),
        end_memory=np.stack([end.memory for end in ends]),
        extras={name: array for name, array in rows.items() if name not in known},
        **{name: rows[name] for name in known},
    )


def first_not_finite(fragment: Fragment, ends: Sequence[End]) -> tuple[str, Any, int, int] | None:
    """Find the first nan or infinity among the rewards and observations of a fragment.

    Returns:
        What it is; the action that led to it, None for a reset; the seed of the episode and the
        number of its step. None if all numbers are finite.
    """
    arrays = (fragment.rew, fragment.obs, fragment.end_obs)
    if all(array.dtype.kind != "f" or np.isfinite(array).all() for array in arrays):
        return None
    for end, steps in zip(ends, fragment.episodes(), strict=True):
        obs = [*fragment.obs[steps], end.obs]
        rew = [0.0, *fragment.rew[steps]]
        act = [None, *fragment.act[steps]]
        first = end.length - len(obs) + 1
        for step, now in enumerate(zip(obs, rew, act, strict=True), first):
            if not np.isfinite(now[1]):
                return f"the reward is {now[1]}", now[2], end.seed, step
            if not np.isfinite(now[0]).all():
                return f"the observation is {now[0]!r:.100}", now[2], end.seed, step
    return None


_BLOCK = 256  # steps of noise drawn at once where an episode's length is not known


class Rollout:
    """The rollouts of one rank, in fixed-step or in whole-episode batches.

    Args:
        make_env: makes one gymnasium environment.
        indices: indices of this rank's environments, over all ranks. A game counts as one.
        seed: the run's seed.
        steps: T, steps of each env in an iteration, for fixed-step batches.
        episodes: for whole-episode batches: called in each iteration for the numbers of the
            episodes, or games, that this rank collects in it. Give either steps or episodes.
        at_once: number of these episodes under way at the same time, at most. The fewer, the
            shorter the longest wait of ranks that share them.
        cuts: numbers of finished environments, or of episodes, ascending, at each of which a part is
            complete.
        kwargs_of: as `make_block` takes it.
        info: labels of the figures that `EpisodeInfo` gives for each episode.
    """

    def __init__(
        self,
        make_env: Callable[..., Any],
        indices: range,
        seed: int,
        *,
        steps: int = 0,
        episodes: Callable[[], Iterator[int]] | None = None,
        at_once: int | None = None,
        cuts: Sequence[int] = (),
        kwargs_of: Callable[[int], Mapping[str, Any]] | None = None,
        info: Sequence[str] = (),
    ) -> None:
        """Make the environments."""
        self.block = make_block(make_env, indices, seed, kwargs_of)
        self.envs: list[Env] = self.block.envs
        self.spaces: Spaces = self.block.spaces
        self._seed, self._steps, self._episodes = seed, steps, episodes
        self._at_once, self._cuts, self._info = at_once, cuts, info
        self.nparts = len(cuts) + 1
        """Number of parts in which this rank's fragments are given away."""
        self._buffer = Buffer(len(self.envs), steps or _BLOCK)
        self._finished: dict[str, list[float]] = {}
        self.failed_at: tuple[int, int] | None = None
        """Iteration and fragment id at which something has raised."""

    def collect(self, agent: Agent, iteration: int) -> tuple[list[Fragment], Batch]:
        """Collect this rank's fragments of one iteration.

        Returns:
            Fragments in order of fragment ids; and the episodes that ended, in the order in which
            they ended: "fragment_id", "return", "length" and their figures by label, each (E,).
        """
        fragments = [fragment for part in self.parts(agent, iteration) for fragment in part]
        return sorted(fragments, key=lambda fragment: fragment.fragment_id), self.ended()

    def parts(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        """Collect one iteration, and yield each part as soon as it is complete.

        Yields:
            `nparts` lists of fragments. The last one has a fragment wherever this rank has any.
        """
        self._finished = {name: [] for name in ("fragment_id", "return", "length", *self._info)}
        if not self.envs:
            if self._episodes:
                self._episodes()  # every rank takes part in the round
            yield from ([] for _ in range(self.nparts))
            return
        if agent.memory != self.block.memory.shape[1]:
            self.block.memory = np.zeros((len(self.envs), agent.memory), np.float32)
        collect = self._collect_episodes if self._episodes else self._collect_steps
        try:
            yield from collect(agent, iteration)
        except Exception as error:
            fragment_id = self.block.note(error, iteration)
            if fragment_id is not None:
                self.failed_at = iteration, fragment_id
            raise

    def ended(self) -> Batch:
        """Return the episodes that ended in the last iteration, as `collect` does."""
        return {
            "fragment_id": np.array(self._finished["fragment_id"], np.int64),
            "return": np.array(self._finished["return"], np.float64),
            "length": np.array(self._finished["length"], np.int64),
            **{name: np.array(self._finished[name], np.float64) for name in self._info},
        }

    def unfinished(self) -> Batch:
        """Return the episodes under way at an iteration boundary, for `Unfinished.add` on rank 0.

        Returns:
            Nothing in whole-episode batches, where none is under way. Else a row for each env:
            "episode"; "steps" so far; "ret", the sum of their rewards; "obs" after them; "new", the
            number of them made in this iteration; and the actions of these, "act", (sum of new, *act).
            Also "memory", if the agent has one: it comes of older weights and cannot be repeated; and
            "settings", their version at the beginning of the episode, if there is a curriculum.
        """
        T, block = self._steps, self.block
        if self._episodes or not self.envs:
            return {}
        steps = block.since_reset()
        new = np.minimum(steps, T)
        act = self._buffer.rows["act"]
        more = {"memory": block.memory.copy()} if block.memory.size else {}
        if block.settings[1]:
            more["settings"] = np.array([env.settings for env in self.envs], np.int64)
        return {
            **more,
            "episode": np.array([env.episode for env in self.envs], np.int64),
            "steps": steps.copy(),
            "ret": block.ret.copy(),
            "obs": block.obs.copy(),
            "new": new,
            "act": np.concatenate(
                [act[env.row, T - n : T] for env, n in zip(self.envs, new, strict=True)]
            ),
        }

    def close(self) -> None:
        """Close the environments."""
        self.block.close()

    def _collect_steps(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        """Step every env T times; its episodes go on from one iteration to the next."""
        groups = self.block.groups
        for start, end in itertools.pairwise([0, *self._cuts, len(groups)]):
            envs = [env for group in groups[start:end] for env in group]
            yield self._collect_envs(agent, iteration, envs) if envs else []

    def _collect_envs(self, agent: Agent, iteration: int, envs: list[Env]) -> list[Fragment]:
        """Step these envs, which are neighbours, T times."""
        ends: dict[int, list[End]] = {env.row: [] for env in envs}
        noise = np.stack(
            [draws(agent, self._seed, iteration, env.index)(self._steps) for env in envs], axis=1
        )
        fragment_id = np.array([env.index for env in envs])
        rows = slice(envs[0].row, envs[-1].row + 1)
        for env in envs:
            env.fragment_id = env.index
        self.block.go_on([env for env in envs if env.over])
        for t in range(self._steps):
            ended = self._step(agent, envs, (rows, t), noise[t], fragment_id, t == 0)
            for env, last_obs in ended:
                ends[env.row].append(self._end(env, t, last_obs))
            if ended:
                self.block.go_on([env for env, _ in ended])
        for env in envs:
            if self.block.length[env.row]:  # its episode goes on
                ends[env.row].append(
                    self._end(env, self._steps - 1, self.block.obs[env.row].copy())
                )
        return [self._fragment(env, self._steps, ends[env.row]) for env in envs if ends[env.row]]

    def _collect_episodes(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        """Collect whole episodes; an env whose episode has ended takes the next one."""
        assert self._episodes is not None
        cuts = list(self._cuts)
        fragments: list[Fragment] = []
        given = 0
        fully = True
        todo = self._episodes()
        idle = list(reversed(self.block.groups[: self._at_once]))
        active: list[Env] = []
        draw: dict[int, Callable[[int], Array]] = {}
        noise = np.empty((len(self.envs), _BLOCK, agent.noise[1]), np.float32)
        while True:
            while idle and (number := next(todo, None)) is not None:
                group = idle.pop()
                for i, env in enumerate(group):
                    env.fragment_id = number * len(group) + i
                    draw[env.row] = draws(agent, self._seed, iteration, env.fragment_id)
                self.block.begin(group[0], seeding.integer(self._seed, "reset", iteration, number))
                active += group
            if not active:
                break
            if cuts and given + len(fragments) >= cuts[0]:
                del cuts[0]
                given += len(fragments)
                yield fragments
                fragments = []
            rows = np.array([env.row for env in active])
            steps = self.block.length[rows]
            for row in rows[steps % _BLOCK == 0]:
                noise[row] = draw[row](_BLOCK)
            fragment_id = np.array([env.fragment_id for env in active])
            self._buffer.reserve(int(steps.max()) + 1)
            now = noise[rows, steps % _BLOCK]
            for env, last_obs in self._step(agent, active, (rows, steps), now, fragment_id, fully):
                length = int(self.block.length[env.row])
                end = self._end(env, length - 1, last_obs)
                fragments.append(self._fragment(env, length, [end], copy=True))
                active.remove(env)
                group = self.block.group_of(env)
                if not any(each in active for each in group):
                    idle.append(group)
            fully = False
        yield from ([] for _ in cuts)
        yield fragments

    def _step(
        self, agent: Agent, envs: list[Env], at: Any, noise: Array, fragment_id: Array, fully: bool
    ) -> list[tuple[Env, Array]]:
        """Step these envs once, and write what came at [at] = [rows, steps] of the buffer.

        With `fully`, all that the environments answer is checked.

        Returns:
            The envs whose episode ended, each with its last observation.
        """
        block, rows = self.block, at[0]
        block.doing = envs[0], agent
        step = Step(
            obs=block.obs[rows],
            noise=noise,
            fragment_id=fragment_id,
            mask=None if block.mask is None else block.allowed(envs, rows, agent),
            memory=block.memory[rows].copy() if agent.memory else None,
        )
        act, extras = agent.act(step)
        if step.mask is not None:
            extras = {**extras, "action_mask": step.mask}
        if step.memory is not None:
            block.memory[rows] = new_memory(extras, step.memory)
            extras = {**extras, "memory": step.memory}
        for name, value in (("act", act), *extras.items()):
            if name not in self._buffer.rows:
                check_acted(name, value, len(step.obs), self.spaces.act)
        self._buffer.write(at, obs=step.obs, act=act, **extras)
        rew, terminated, truncated, ended = block.step(envs, rows, act, fully)
        for env, _ in ended:
            self._finished["fragment_id"].append(env.fragment_id)
            self._finished["return"].append(block.ret[env.row])
            self._finished["length"].append(block.length[env.row])
            figures = env.info.get(EPISODE, {}) if self._info and env.info else {}
            for name in self._info:
                self._finished[name].append(figures.get(name, np.nan))
        self._buffer.write(at, rew=rew, terminated=terminated, truncated=truncated)
        return ended

    def _end(self, env: Env, t: int, last_obs: Array) -> End:
        memory = self.block.memory[env.row].copy()
        return End(t, last_obs, env.seed, int(self.block.length[env.row]), memory)

    def _fragment(self, env: Env, steps: int, ends: list[End], copy: bool = False) -> Fragment:
        rows = {name: array[env.row, :steps] for name, array in self._buffer.rows.items()}
        if copy:  # the env goes on to another fragment before this one is processed
            rows = {name: array.copy() for name, array in rows.items()}
        fragment = cut(env.fragment_id, rows, ends)
        if found := first_not_finite(fragment, ends):
            what, *place = found
            self.block.doing = env, *place
            raise ValueError(f"rewards and observations must be finite numbers: {what}")
        return fragment
