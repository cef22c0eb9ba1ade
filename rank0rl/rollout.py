"""Step the envs of one rank with the agent, and cut what they did into fragments.

All that decides what a fragment holds is keyed by its fragment id: its noise and the seeds of its
episodes. So a fragment is the same whichever rank collects it, and whatever else that rank collects.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl import seeding
from rank0rl.agent import Agent, Fragment, Space, Step
from rank0rl.batch import Batch, Buffer, count, take
from rank0rl.envs.block import Doing, Env, EnvBlock, step_info
from rank0rl.envs.info import EPISODE
from rank0rl.envs.resume import states

Array = npt.NDArray[Any]

_BLOCK = 256  # steps of noise drawn at once where an episode's length is not known
_KNOWN = ("obs", "act", "rew", "terminated", "truncated")  # arrays of every fragment
_AGENTS = 32  # of a game, whose returns are told apart
_TIMED = 3  # steps, the shortest of which counts: the first ones may load or compile something
_LONG_S = 5e-3  # of an environment's step, 20 times what an agent's act takes
ENDED_AT = ""  # the step of an episode's end, by a name that no --info has


class Rollout:
    """The rollouts of one rank: the base of `FixedSteps` and `WholeEpisodes`.

    Args:
        block: this rank's envs.
        cuts: numbers of finished environments, or of episodes, ascending, at each of which a part is
            complete.
        info: labels of the figures that `EpisodeInfo` gives for each episode.
        capacity: steps per env that there is room for at first.
    """

    _numbers: tuple[str, ...] = ("fragment_id", "length")  # whole ones, of an episode that ended

    def __init__(
        self, block: EnvBlock, cuts: Sequence[int], info: Sequence[str], capacity: int
    ) -> None:
        self.block, self.envs, self.spaces = block, block.envs, block.spaces
        self.nparts = len(cuts) + 1
        """Number of parts in which this rank's fragments are given away."""
        self.failed_at: tuple[int, int] | None = None
        """Iteration and fragment id at which something has raised."""
        self._cuts = cuts
        agents = self.spaces.agents if len(self.spaces.agents) <= _AGENTS else ()
        self.labels = [*info, *(f"return_{agent}" for agent in agents)]
        """Names of the figures of each episode: those of `info`, and the return of each agent of a game."""
        self._buffer = Buffer(len(self.envs), capacity)
        self._ended: dict[str, list[float]] = {}
        self._extras: set[str] | None = None  # names of what `act` returns besides actions

    def collect(self, agent: Agent, iteration: int) -> tuple[list[Fragment], Batch]:
        """Collect this rank's fragments of one iteration.

        Returns:
            Fragments in order of fragment ids; and the episodes that ended, in the order in which
            they ended: "fragment_id", "return", "length" and their figures by label, each (E,). With
            `FixedSteps`, also `ENDED_AT`, the step of the iteration at which they ended.
        """
        fragments = [fragment for part in self.parts(agent, iteration) for fragment in part]
        return sorted(fragments, key=lambda fragment: fragment.fragment_id), self.ended()

    def parts(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        """Collect one iteration, and yield each part as soon as it is complete.

        Yields:
            `nparts` lists of fragments. The last one has a fragment wherever this rank has any.
        """
        self._ended = {name: [] for name in (*self._numbers, "return", *self.labels)}
        if agent.memory != self.block.memory.shape[1]:
            self.block.memory = np.zeros((len(self.envs), agent.memory), np.float32)
        try:
            yield from self._parts(agent, iteration)
        except Exception as error:
            fragment_id = self.block.note(error, iteration)
            if fragment_id is not None:
                self.failed_at = iteration, fragment_id
            raise

    def _parts(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        raise NotImplementedError

    def ended(self) -> Batch:
        """Return the episodes that ended in the last iteration, as `collect` does."""
        return {
            name: np.array(values, np.int64 if name in self._numbers else np.float64)
            for name, values in self._ended.items()
        }

    def unfinished(self) -> Batch:
        """Return the episodes under way at an iteration boundary: none, unless a batch cuts them off."""
        return {}

    def close(self) -> None:
        """Close the environments."""
        self.block.close()

    def _step(
        self, agent: Agent, envs: list[Env], at: Any, noise: Array, fragment_id: Array, fully: bool
    ) -> list[tuple[Env, Array]]:
        """Step these envs once, and write what came at [at] = [rows, steps] of the buffer.

        With `fully`, all that the environments answer is checked.

        Returns:
            The envs whose episode ended, each with its last observation.
        """
        block, rows = self.block, at[0]
        block.doing = Doing(envs[0], "act")
        step = Step(
            obs=block.obs[rows],
            noise=noise,
            fragment_id=fragment_id,
            mask=None if block.mask is None else block.allowed(envs, rows),
            memory=block.memory[rows].copy() if agent.memory else None,
        )
        act, extras = agent.act(step)
        if step.mask is not None:
            extras = {**extras, "action_mask": step.mask}
        if step.memory is not None:
            block.memory[rows] = _new_memory(extras, step.memory)
            extras = {**extras, "memory": step.memory}
        if extras.keys() != self._extras:
            _check_acted(act, extras, self._extras, step, self.spaces.act, agent.info)
            self._extras = {*extras}
        self._buffer.write(at, obs=step.obs, act=act, **extras)
        rew, terminated, truncated, ended = block.step(envs, rows, act, fully)
        for env, _ in ended:
            self._ended["fragment_id"].append(env.fragment_id)
            self._ended["return"].append(block.ret[env.row])
            self._ended["length"].append(block.length[env.row])
            figures = dict(env.info.get(EPISODE, {})) if env.info else {}
            if agents := self.spaces.agents:
                figures[f"return_{agents[env.fragment_id % len(agents)]}"] = block.ret[env.row]
            for name in self.labels:
                self._ended[name].append(figures.get(name, np.nan))
        self._buffer.write(at, rew=rew, terminated=terminated, truncated=truncated)
        if agent.info:
            self._buffer.write(at, **step_info(agent.info, envs))
        return ended

    def _end(self, env: Env, t: int, last_obs: Array) -> _End:
        memory = self.block.memory[env.row].copy()
        return _End(t, last_obs, env.seed, int(self.block.length[env.row]), memory)

    def _fragment(self, env: Env, steps: int, ends: list[_End], copy: bool = False) -> Fragment:
        rows = {name: array[env.row, :steps] for name, array in self._buffer.rows.items()}
        # The env may go on to another fragment before this one is processed; `unfinished` reads actions after it.
        rows |= {name: x.copy() for name, x in rows.items() if copy or name == "act"}
        fragment = _cut(env.fragment_id, rows, ends)
        arrays = (fragment.rew, fragment.obs, fragment.end_obs)
        if not all(array.dtype.kind != "f" or np.isfinite(array).all() for array in arrays):
            self._refuse_infinite(env, fragment, ends)
        return fragment

    def _refuse_infinite(self, env: Env, fragment: Fragment, ends: Sequence[_End]) -> None:
        """Raise ValueError at the first nan or infinity among rewards and observations."""
        for end, steps in zip(ends, fragment.episodes(), strict=True):
            each_obs = [*fragment.obs[steps], end.obs]
            each_rew = [0.0, *fragment.rew[steps]]
            each_act = [None, *fragment.act[steps]]  # what led to it: at first, a reset
            first = end.length - len(each_obs) + 1
            came = zip(each_obs, each_rew, each_act, strict=True)
            for number, (obs, rew, act) in enumerate(came, first):
                if np.isfinite(rew) and np.isfinite(obs).all():
                    continue
                self.block.doing = Doing(
                    env, "reset" if act is None else "step", act, end.seed, number
                )
                wrong = f"the observation is {obs!r:.100}"
                if not np.isfinite(rew):
                    wrong = f"the reward is {rew}"
                raise ValueError(f"rewards and observations must be finite numbers: {wrong}")


class FixedSteps(Rollout):
    """Rollouts that step every env T times. Episodes go on in the next iteration.

    `steps` is T. Cuts are numbers of finished environments; a game counts as one.
    """

    _numbers = (*Rollout._numbers, ENDED_AT)

    def __init__(
        self, block: EnvBlock, steps: int, cuts: Sequence[int] = (), info: Sequence[str] = ()
    ) -> None:
        super().__init__(block, cuts, info, capacity=steps)
        self._steps = steps

    def unfinished(self) -> Batch:
        """Return the episodes under way at an iteration boundary, for `Unfinished.add` on rank 0.

        Returns:
            A row for each env: "episode"; "steps" so far; "ret", the sum of their rewards; "obs" after
            them; "new", the number of them made in this iteration; and the actions of these, "act",
            (sum of new, *act), of which there are none for envs with states, but what `states` returns. Also "memory", which comes of older weights and cannot be repeated, and
            "settings", the version of a curriculum's, if there are any.
        """
        T, block = self._steps, self.block
        if not self.envs:
            return {}
        steps = block.since_reset()
        new = np.minimum(steps, T)
        act = self._buffer.rows["act"]
        more = {"memory": block.memory.copy()} if block.memory.size else {}
        if block.has_state:
            more |= states(block)
            new = np.zeros_like(new)  # no action is needed
        if block.settings.json:
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

    def _parts(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        groups = self.block.groups
        for start, end in itertools.pairwise([0, *self._cuts, len(groups)]):
            envs = [env for group in groups[start:end] for env in group]
            yield self._collect(agent, iteration, envs) if envs else []

    def _collect(self, agent: Agent, iteration: int, envs: list[Env]) -> list[Fragment]:
        """Step these envs, which are neighbours, T times."""
        T, block = self._steps, self.block
        for env in envs:
            env.fragment_id = env.index
        fragment_id = np.array([env.index for env in envs])
        noise = [draws(agent, block.seed, iteration, env.index)(T) for env in envs]
        noise_at = np.stack(noise, axis=1)  # (T, B, k)
        rows = slice(envs[0].row, envs[-1].row + 1)
        ends: dict[int, list[_End]] = {env.row: [] for env in envs}
        block.go_on([env for env in envs if env.over])
        for t in range(T):
            ended = self._step(agent, envs, (rows, t), noise_at[t], fragment_id, t == 0)
            for env, last_obs in ended:
                ends[env.row].append(self._end(env, t, last_obs))
                self._ended[ENDED_AT].append(t)
            if ended:
                block.go_on([env for env, _ in ended])
        for env in envs:
            if block.length[env.row]:  # its episode goes on
                ends[env.row].append(self._end(env, T - 1, block.obs[env.row].copy()))
        return [self._fragment(env, T, ends[env.row]) for env in envs if ends[env.row]]


class WholeEpisodes(Rollout):
    """Rollouts of whole episodes. An env whose episode has ended takes the next one.

    Args:
        block: this rank's envs.
        episodes: called in each iteration for the numbers of the episodes, or games, that this rank
            collects in it.
        at_once: number of these episodes under way at the same time, at most. The fewer, the
            shorter the longest wait of ranks that share them. The first episode shows how long a step takes:
            if it is long, so that an agent's act for one episode costs little, it becomes 1.
        cuts: numbers of finished episodes.
        info: as `Rollout`.
    """

    def __init__(
        self,
        block: EnvBlock,
        episodes: Callable[[], Iterator[int]],
        at_once: int | None = None,
        cuts: Sequence[int] = (),
        info: Sequence[str] = (),
    ) -> None:
        super().__init__(block, cuts, info, capacity=_BLOCK)
        self._episodes, self._at_once = episodes, at_once
        times = at_once is not None and not block.steps_together
        self._untimed, self._step_s = _TIMED * times, float("inf")

    def _parts(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        cuts, given = list(self._cuts), 0
        part: list[Fragment] = []
        for completed in self._each_step(agent, iteration):
            if cuts and given + len(part) >= cuts[0]:  # `completed` or later ones are the last part
                del cuts[0]
                given += len(part)
                yield part
                part = []
            part += completed
        yield from ([] for _ in cuts)
        yield part

    def _each_step(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        """Step until all episodes have ended; yield the fragments that each step completes."""
        block, fully = self.block, True
        todo = self._episodes()  # every rank takes part in the round, one without envs too
        idle = block.groups[: 1 if self._untimed else self._at_once][::-1]
        active: list[Env] = []
        draw: dict[int, Callable[[int], Array]] = {}
        noise = np.empty((len(self.envs), _BLOCK, agent.noise[1]), np.float32)
        while True:
            while idle and (number := next(todo, None)) is not None:
                group = idle.pop()
                for i, env in enumerate(group):
                    env.fragment_id = number * len(group) + i
                    draw[env.row] = draws(agent, block.seed, iteration, env.fragment_id)
                block.begin(group[0], seeding.integer(block.seed, "reset", iteration, number))
                active += group
            if not active:
                return
            rows = np.array([env.row for env in active])
            steps = block.length[rows]
            for row in rows[steps % _BLOCK == 0]:
                noise[row] = draw[row](_BLOCK)
            fragment_id = np.array([env.fragment_id for env in active])
            self._buffer.reserve(int(steps.max()) + 1)
            now = noise[rows, steps % _BLOCK]
            completed = []
            begin = time.perf_counter()
            ended = self._step(agent, active, (rows, steps), now, fragment_id, fully)
            if self._untimed:
                idle += self._time(time.perf_counter() - begin)
            for env, last_obs in ended:
                length = int(block.length[env.row])
                end = self._end(env, length - 1, last_obs)
                completed.append(self._fragment(env, length, [end], copy=True))
                active.remove(env)
                group = block.group_of(env)
                if not any(each in active for each in group):
                    idle.append(group)
            yield completed
            fully = False

    def _time(self, seconds: float) -> list[list[Env]]:
        """Take note of the time of one of the first steps; return the groups that may begin besides the first one."""
        self._untimed -= 1
        self._step_s = min(self._step_s, seconds)
        if self._untimed:
            return []
        if self._step_s > _LONG_S:
            self._at_once = 1
        return self.block.groups[1 : self._at_once][::-1]


def draws(agent: Agent, seed: int, iteration: int, fragment_id: int) -> Callable[[int], Array]:
    """Return a function that draws the next (T, k) numbers of noise of the fragment's own stream.

    Raises:
        ValueError: for an agent whose `noise` is neither.
    """
    kind, k = agent.noise
    if kind not in ("normal", "uniform"):
        raise ValueError(f'noise must be ("normal" or "uniform", k): got {agent.noise}')
    rng = seeding.stream(seed, "act", iteration, fragment_id)
    if kind == "normal":  # in float32, those in the tails differ by the C library
        return lambda steps: rng.standard_normal((steps, k)).astype(np.float32)
    return lambda steps: rng.random((steps, k), dtype=np.float32)


def check_processed(rows: Any) -> None:
    """Make sure that an agent's `process` returned rows.

    Raises:
        TypeError: if it returned something else.
        ValueError: if its arrays disagree on the number of rows.
    """
    wrong = rows
    if isinstance(rows, Mapping):
        is_array = {name: isinstance(x, np.ndarray) and x.ndim > 0 for name, x in rows.items()}
        if all(is_array.values()):
            count(rows)
            return
        wrong = {name: x for name, x in rows.items() if not is_array[name]}
    raise TypeError(
        f"process must return a dict of name -> array with rows along its first axis: got "
        f"{wrong!r:.100}"
    )


def _new_memory(extras: Batch, old: Array) -> Array:
    """Return the extra "memory"; raise ValueError unless it has the shape and dtype of the old one."""
    new: Any = extras.get("memory")
    if not isinstance(new, np.ndarray) or (new.shape, new.dtype) != (old.shape, old.dtype):
        got = f"{new.dtype} {new.shape}" if isinstance(new, np.ndarray) else type(new)
        raise ValueError(
            f'act must return the extra "memory" as float32 {old.shape}, a row for each '
            f"observation: got {got}"
        )
    return new


def _check_acted(
    act: Any, extras: Batch, before: set[str] | None, step: Step, space: Space, info: Sequence[str]
) -> None:
    """Raise ValueError unless `act` returned arrays with a row for each observation, by the same names of its own as before."""
    if before is not None and (odd := extras.keys() ^ before):
        what = f"{sorted(odd)} came in some steps only; fill what has no value"
        raise ValueError(f"act must return the same names in every step: {what}")
    if taken := sorted(extras.keys() & {*_KNOWN, *info}):
        raise ValueError(f"act must return extras by names of its own: a fragment has {taken}")
    for name, value in {"act": act, **extras}.items():
        rows = len(step.obs), *(space.shape if name == "act" else np.shape(value)[1:])
        is_array = isinstance(value, np.ndarray)
        if not is_array or value.shape != rows or value.dtype.hasobject:
            kind = f"{value.dtype} {value.shape}" if is_array else type(value)
            raise ValueError(
                f"act must return {'actions' if name == 'act' else repr(name)} as an array of shape "
                f"{rows}, a row for each observation: got {kind}"
            )


class _End(NamedTuple):
    """The end of an episode in a fragment, or the end of the fragment within an episode."""

    t: int  # its last step in the fragment
    obs: Array  # the observation after it, (*obs)
    seed: int  # of the episode
    length: int  # of the episode so far, with its steps in earlier fragments
    memory: Array  # of the agent, after it, (m,)


def _cut(fragment_id: int, rows: Batch, ends: Sequence[_End]) -> Fragment:
    """Return the fragment with these rows, (T, ...) each, in which these episodes end.

    Rows of no episode are left out: those of an agent that waits for the end of its game.
    """
    steps = [min(end.length, end.t + 1) for end in ends]
    if sum(steps) < len(rows["rew"]):
        each = [np.arange(end.t + 1 - n, end.t + 1) for end, n in zip(ends, steps, strict=True)]
        rows = take(rows, np.concatenate(each))
    return Fragment(
        fragment_id=fragment_id,
        end=np.cumsum(steps) - 1,
        end_obs=np.stack([end.obs for end in ends]),
        end_memory=np.stack([end.memory for end in ends]),
        extras={name: array for name, array in rows.items() if name not in _KNOWN},
        **{name: rows[name] for name in _KNOWN},
    )
