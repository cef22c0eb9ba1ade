"""Lanes step their environments with the agent: fragments, one per unit.

All that decides what a fragment holds is keyed by its unit: its noise, and the seeds of its
episodes. So it is the same whichever rank collects it, and whatever else that rank collects.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl import envs, seeding
from rank0rl.agent import Agent, Fragment, Spaces
from rank0rl.batch import Batch

Array = npt.NDArray[Any]

_BLOCK = 256  # steps of noise drawn at once where an episode's length is not known


def lanes_of(rank: int, nworkers: int, num_envs: int, of_rank0: int | None = None) -> range:
    """The contiguous block of lanes that a rank owns; blocks differ in length by one at most.

    Args:
        rank: whose they are.
        nworkers: number of ranks.
        num_envs: lanes of all.
        of_rank0: lanes of rank 0, if not an equal share; the others share the rest.
    """
    if of_rank0 is None or nworkers == 1:
        return range(rank * num_envs // nworkers, (rank + 1) * num_envs // nworkers)
    if rank == 0:
        return range(of_rank0)
    rest = lanes_of(rank - 1, nworkers - 1, num_envs - of_rank0)
    return range(of_rank0 + rest.start, of_rank0 + rest.stop)


@dataclass(eq=False)
class Lane:
    """One environment, and what of its episode is under way."""

    number: int
    env: Any
    row: int
    """Of this lane in the rank's arrays."""
    episode: int = -1
    """How many episodes it began before this one: the key of this one's seed."""
    seed: int = 0
    """Of this one."""
    fragment_id: int = 0
    over: bool = True


class Rollout:
    """The lanes of one rank, and `collect`, which steps them.

    Args:
        make_env: makes one environment.
        lanes: numbers of this rank's lanes, in a job of any size.
        seed: the run's seed.
        steps: fixed-step batches: T, steps per lane and iteration.
        episodes: whole-episode batches: called in each iteration for the numbers of the episodes
            that this rank collects in it. Give either steps or episodes.
        at_once: of these episodes, how many are under way at the same time, at most. The fewer, the
            shorter the longest wait of ranks that share them.
        cuts: numbers of units, ascending: when this rank has finished so many, they are a part.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        lanes: range,
        seed: int,
        *,
        steps: int = 0,
        episodes: Callable[[], Iterator[int]] | None = None,
        at_once: int | None = None,
        cuts: Sequence[int] = (),
    ) -> None:
        """Make the environments."""
        self.lanes = [Lane(number, _make(make_env, number), i) for i, number in enumerate(lanes)]
        env = self.lanes[0].env if lanes else _make(make_env, lanes.start)
        self.spaces: Spaces = envs.describe(env)
        first = envs.first_choice(env)
        self._first_choice = first if np.any(first) else None
        if not lanes:
            env.close()
        self._seed, self._steps, self._episodes, self._at_once = seed, steps, episodes, at_once
        self._cuts = cuts
        self.nparts = len(cuts) + 1
        self._rows: Batch = {}  # name -> (lanes, capacity, ...)
        self._capacity = steps or _BLOCK
        self._obs = np.zeros((len(lanes), *self.spaces.obs.shape), self.spaces.obs.dtype)
        self._mask: Array | None = None  # of each lane, once an environment has told one
        self._takes_mask = False
        self._ret = np.zeros(len(lanes), np.float64)  # of the episodes under way
        self._length = np.zeros(len(lanes), np.int64)
        self._finished: dict[str, list[float]] = {}
        self._doing: tuple[Lane, Any] | None = None  # lane and action, or agent that chooses one
        self.failed_at: tuple[int, int] | None = None
        """Iteration and unit in which something has raised."""

    def collect(self, agent: Agent, iteration: int) -> tuple[list[Fragment], Batch]:
        """Collect this rank's units of one iteration.

        Returns:
            Fragments in order of units; and the episodes that ended, in the order in which they
            did: "fragment_id", "return" and "length", each (E,).
        """
        fragments = [fragment for part in self.parts(agent, iteration) for fragment in part]
        return sorted(fragments, key=lambda fragment: fragment.fragment_id), self.ended()

    def parts(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        """Collect, and give units away as soon as the first ones are finished.

        Returns:
            As many parts as there are cuts, and the rest, which has a unit at the least wherever
            this rank has any.
        """
        self._finished = {"fragment_id": [], "return": [], "length": []}
        if not self.lanes:
            if self._episodes:
                self._episodes()  # every rank takes part in the round
            yield from ([] for _ in range(self.nparts))
            return
        self._takes_mask = "mask" in inspect.signature(agent.act).parameters
        collect = self._collect_episodes if self._episodes else self._collect_steps
        try:
            yield from collect(agent, iteration)
        except Exception as error:
            self._tell(error, iteration)
            raise

    def ended(self) -> Batch:
        """The episodes that ended while the last iteration was collected, as `collect` gives them."""
        return {
            "fragment_id": np.array(self._finished["fragment_id"], np.int64),
            "return": np.array(self._finished["return"], np.float64),
            "length": np.array(self._finished["length"], np.int64),
        }

    def unfinished(self) -> Batch:
        """The episodes under way at an iteration boundary, for `Unfinished.add` on rank 0.

        Returns:
            Nothing in whole-episode batches, where none is. Else one row per lane: "episode", "steps" so far, "ret", the sum of their rewards, "obs" after
            them, and "new", how many of the steps were made in this iteration; and their actions,
            "act", (sum of new, *act).
        """
        lanes, T = self.lanes, self._steps
        if self._episodes or not lanes:
            return {}
        new = np.minimum(self._length, T)
        act = self._rows["act"]
        return {
            "episode": np.array([lane.episode for lane in lanes], np.int64),
            "steps": self._length.copy(),
            "ret": self._ret.copy(),
            "obs": self._obs.copy(),
            "new": new,
            "act": np.concatenate(
                [act[lane.row, T - n : T] for lane, n in zip(lanes, new, strict=True)]
            ),
        }

    def restore(self, lanes: Batch) -> dict[int, str]:
        """Repeat each lane's unfinished episode: an episode is its seed and its actions.

        Args:
            lanes: of all lanes, what `Unfinished.all` gives.

        Returns:
            The lanes that begin their next episode instead, and why.
        """
        if not lanes:  # whole episodes are over at every boundary
            return {}
        acts = np.split(lanes["act"], np.cumsum(lanes["kept"])[:-1])
        strays = {}
        for lane in self.lanes:
            lane.episode = int(lanes["episode"][lane.number]) - 1
            self._begin_next(lane)
            steps, kept = lanes["steps"][lane.number], lanes["kept"][lane.number]
            if kept < steps:
                why = f"its episode of {steps} steps is longer than max_replay_steps"
            elif not (
                self._repeat(lane, acts[lane.number])
                and self._obs[lane.row].tobytes() == lanes["obs"][lane.number].tobytes()
                and self._ret[lane.row] == lanes["ret"][lane.number]
            ):
                why = (
                    f"{envs.name_of(lane.env)} does not repeat an episode from its seed and actions"
                )
            else:
                continue
            strays[lane.number] = why
            self._begin_next(lane)
        return strays

    def _repeat(self, lane: Lane, act: Array) -> bool:
        """Take a lane through these actions; whether the episode goes on after them."""
        for action in self._to_env(act):
            obs, rew, over, cut_off, info = lane.env.step(action)
            self._obs[lane.row] = obs
            if self._mask is not None:
                self._mask[lane.row] = _mask_of(info, self.spaces.act.size)
            self._ret[lane.row] += rew
            self._length[lane.row] += 1
            if over or cut_off:
                return False
        return True

    def _tell(self, error: Exception, iteration: int) -> None:
        """Add to an error which episode was under way."""
        if self._doing is None:
            return
        lane, action = self._doing
        self.failed_at = iteration, lane.fragment_id
        step = f"step {self._length[lane.row] + 1}"
        what = "reset" if action is None else f"{step}, action {action}"
        if isinstance(action, Agent):
            what = f"the agent acts in {step} of this unit and others"
        error.add_note(
            f"In unit {lane.fragment_id} of iteration {iteration}: {envs.name_of(lane.env)}, episode of seed "
            f"{lane.seed}, {what}."
        )

    def close(self) -> None:
        """Close the environments."""
        for lane in self.lanes:
            lane.env.close()

    def _collect_steps(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        """T steps of every lane, whose episodes go on from one iteration to the next."""
        for start, end in itertools.pairwise([0, *self._cuts, len(self.lanes)]):
            lanes = self.lanes[start:end]
            yield self._collect_lanes(agent, iteration, lanes) if lanes else []

    def _collect_lanes(self, agent: Agent, iteration: int, lanes: list[Lane]) -> list[Fragment]:
        """T steps of these lanes, which are neighbours."""
        ends: dict[int, list[tuple[int, Array]]] = {lane.row: [] for lane in lanes}
        noise = np.stack(
            [self._noise(agent, iteration, lane.number)(self._steps) for lane in lanes], axis=1
        )
        unit = np.array([lane.number for lane in lanes])
        rows = slice(lanes[0].row, lanes[-1].row + 1)
        for lane in lanes:
            lane.fragment_id = lane.number
            if lane.over:
                self._begin_next(lane)
        for t in range(self._steps):
            for lane, last_obs in self._step(agent, lanes, (rows, t), noise[t], unit):
                ends[lane.row].append((t, last_obs))
                self._begin_next(lane)
        for lane in lanes:
            if not ends[lane.row] or ends[lane.row][-1][0] != self._steps - 1:
                ends[lane.row].append((self._steps - 1, self._obs[lane.row].copy()))
        return [self._fragment(lane, self._steps, ends[lane.row]) for lane in lanes]

    def _collect_episodes(self, agent: Agent, iteration: int) -> Iterator[list[Fragment]]:
        """Whole episodes; a lane that is through takes the next one."""
        assert self._episodes is not None
        cuts = list(self._cuts)
        fragments: list[Fragment] = []
        given = 0
        todo = self._episodes()
        idle = list(reversed(self.lanes[: self._at_once]))
        active: list[Lane] = []
        draw: dict[int, Callable[[int], Array]] = {}
        noise = np.empty((len(self.lanes), _BLOCK, agent.noise[1]), np.float32)
        while True:
            while idle and (number := next(todo, None)) is not None:
                lane = idle.pop()
                lane.fragment_id = number
                draw[lane.row] = self._noise(agent, iteration, lane.fragment_id)
                seed = seeding.integer(self._seed, "reset", iteration, lane.fragment_id)
                self._begin(lane, seed)
                active.append(lane)
            if not active:
                break
            if cuts and given + len(fragments) >= cuts[0]:
                del cuts[0]
                given += len(fragments)
                yield fragments
                fragments = []
            rows = np.array([lane.row for lane in active])
            steps = self._length[rows]
            for row in rows[steps % _BLOCK == 0]:
                noise[row] = draw[row](_BLOCK)
            unit = np.array([lane.fragment_id for lane in active])
            self._reserve(int(steps.max()) + 1)
            at = (rows, steps)
            for lane, last_obs in self._step(agent, active, at, noise[rows, steps % _BLOCK], unit):
                length = int(self._length[lane.row])
                fragments.append(self._fragment(lane, length, [(length - 1, last_obs)], copy=True))
                active.remove(lane)
                idle.append(lane)
        yield from ([] for _ in cuts)
        yield fragments

    def _step(
        self, agent: Agent, lanes: list[Lane], at: Any, noise: Array, fragment_id: Array
    ) -> list[tuple[Lane, Array]]:
        """One step of these lanes, written at [at] = [rows, steps].

        Returns:
            The lanes whose episode ended, each with its last observation.
        """
        rows, obs = at[0], self._obs[at[0]]
        self._doing = lanes[0], agent
        if self._mask is None or not self._takes_mask:
            act, extras = agent.act(obs, noise, fragment_id)
        else:
            mask = self._mask[at[0]].copy()
            act, extras = agent.act(obs, noise, fragment_id, mask=mask)
            extras = {**extras, "action_mask": mask}
        self._write(at, obs=obs, act=act, **extras)
        rewards, terminated, truncated, ended = [], [], [], []
        env_act = self._to_env(act)
        try:
            for lane, action in zip(lanes, env_act, strict=True):
                self._obs[lane.row], reward, over, cut_off, info = lane.env.step(action)
                if self._mask is not None:
                    self._mask[lane.row] = _mask_of(info, self.spaces.act.size)
                rewards.append(reward)
                terminated.append(over)
                truncated.append(cut_off)
                if over or cut_off:
                    lane.over = True
                    ended.append((lane, self._obs[lane.row].copy()))
        except Exception:
            self._doing = lane, action
            raise
        rew = np.array(rewards, np.float64)
        self._ret[rows] += rew
        self._length[rows] += 1
        for lane, _ in ended:
            self._finished["fragment_id"].append(lane.fragment_id)
            self._finished["return"].append(self._ret[lane.row])
            self._finished["length"].append(self._length[lane.row])
        self._write(
            at, rew=rew, terminated=np.array(terminated, bool), truncated=np.array(truncated, bool)
        )
        return ended

    def _to_env(self, act: Array) -> Any:
        space = self.spaces.act
        if space.kind == "discrete":
            return act if self._first_choice is None else act + self._first_choice
        assert space.low is not None
        assert space.high is not None
        return np.minimum(np.maximum(act, space.low), space.high)  # half the time of np.clip

    def _begin_next(self, lane: Lane) -> None:
        lane.episode += 1
        seed = seeding.integer(self._seed, "reset", lane.number, lane.episode)
        self._begin(lane, seed)

    def _begin(self, lane: Lane, seed: int) -> None:
        self._doing = lane, None
        lane.seed, lane.over = seed, False
        self._ret[lane.row], self._length[lane.row] = 0.0, 0
        self._obs[lane.row], info = lane.env.reset(seed=seed)
        if self._mask is None and self.spaces.act.choices and "action_mask" in info:
            self._mask = np.ones((len(self.lanes), self.spaces.act.size), bool)
        if self._mask is not None:
            self._mask[lane.row] = _mask_of(info, self.spaces.act.size)

    def _noise(self, agent: Agent, iteration: int, unit: int) -> Callable[[int], Array]:
        """Draws (T, k) numbers, and the next ones at the next call, from the unit's own stream."""
        kind, k = agent.noise
        if kind not in ("normal", "uniform"):
            raise ValueError(f'noise must be ("normal" or "uniform", k): got {agent.noise}')
        rng = seeding.stream(self._seed, "act", iteration, unit)
        if kind == "normal":
            return lambda steps: rng.standard_normal((steps, k), dtype=np.float32)
        return lambda steps: rng.random((steps, k), dtype=np.float32)

    def _write(self, at: Any, **values: Array) -> None:
        for name, value in values.items():
            if name not in self._rows:
                self._check_acted(name, value, len(values["obs"]) if "obs" in values else None)
                shape = (len(self.lanes), self._capacity, *value.shape[1:])
                self._rows[name] = np.empty(shape, value.dtype)
            self._rows[name][at] = value

    def _check_acted(self, name: str, value: Any, rows: int | None) -> None:
        """Refuse what `act` gave if it is no array with a row per lane, once for each name."""
        row = self.spaces.act.shape if name == "act" else np.shape(value)[1:]
        if rows is not None and (
            not isinstance(value, np.ndarray)
            or value.shape != (rows, *row)
            or value.dtype.hasobject
        ):
            kind = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value)
            raise ValueError(
                f"act must give {'actions' if name == 'act' else repr(name)} as an array of shape "
                f"{(rows, *row)}, a row per observation: got {kind}"
            )

    def _reserve(self, steps: int) -> None:
        """Room for so many steps per lane."""
        if steps > self._capacity:
            self._capacity *= 2
            for name, rows in self._rows.items():
                self._rows[name] = np.concatenate([rows, np.empty_like(rows)], axis=1)

    def _fragment(
        self, lane: Lane, steps: int, ends: list[tuple[int, Array]], copy: bool = False
    ) -> Fragment:
        rows = {name: array[lane.row, :steps] for name, array in self._rows.items()}
        if copy:  # the lane goes on to another unit before this one is processed
            rows = {name: array.copy() for name, array in rows.items()}
        known = ("obs", "act", "rew", "terminated", "truncated")
        return Fragment(
            fragment_id=lane.fragment_id,
            end=np.array([t for t, _ in ends]),
            end_obs=np.stack([obs for _, obs in ends]),
            extras={name: array for name, array in rows.items() if name not in known},
            **{name: rows[name] for name in known},
        )


def _mask_of(info: Mapping[str, Any], size: int) -> Array:
    """Which choices may be taken, (all choices,): of several at once, those of each in a row.

    Raises:
        ValueError: if the environment has told it once, and does not any more.
    """
    mask = info.get("action_mask")
    if mask is None:
        raise ValueError(
            f'info["action_mask"] came with a reset before: it must come with every reset and every '
            f"step; this info has {sorted(info)}"
        )
    mask = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, tuple) else mask
    if np.size(mask) != size:
        raise ValueError(
            f'info["action_mask"] must have one entry for each of {size} choices: got {np.shape(mask)}'
        )
    return np.ravel(mask)


def _make(make_env: Callable[[], Any], lane: int) -> Any:
    try:
        return make_env()
    except Exception as error:
        error.add_note(f"In making the environment of lane {lane}.")
        raise


class Unfinished:
    """The unfinished episodes of all lanes, as rank 0 knows them: all it takes to repeat them.

    Args:
        max_steps: of a longer episode, no actions are kept.
    """

    def __init__(self, max_steps: int) -> None:
        """Begin before the first iteration."""
        self._max_steps = max_steps
        self.lanes: Batch = {}
        self._act: list[Array] = []  # of each lane, never changed in place

    def add(self, gathered: Batch) -> None:
        """Take what the ranks' `Rollout.unfinished` gave, in order of lanes."""
        if not gathered:
            return
        gathered = dict(gathered)
        parts = np.split(gathered.pop("act"), np.cumsum(gathered["new"])[:-1])
        continued = gathered["steps"] > gathered.pop("new")
        if self._act:
            parts = [
                np.concatenate([old, new]) if go_on else new
                for old, new, go_on in zip(self._act, parts, continued, strict=True)
            ]
        self.lanes = gathered
        self._act = [
            part if steps <= self._max_steps else part[:0]
            for part, steps in zip(parts, gathered["steps"], strict=True)
        ]
        gathered["kept"] = np.array([len(part) for part in self._act], np.int64)

    def all(self) -> Batch:
        """For `Rollout.restore`: "episode", "steps", "ret", "kept" and "obs" by lane, "act" of all lanes in a row."""
        return {**self.lanes, "act": np.concatenate(self._act)} if self._act else {}

    def load(self, lanes: Batch) -> None:
        """Take back what `all` gave."""
        self.lanes = {name: array for name, array in lanes.items() if name != "act"}
        self._act = np.split(lanes["act"], np.cumsum(lanes["kept"])[:-1])
