"""Environments, games and functions for the rows of `same_curve.py`.

Both checkouts get a copy of this file, so nothing here may come from rank0rl.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

OBS = {
    "box": spaces.Box(-1, 1, (3,)),
    "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
    "discrete": spaces.Discrete(4, start=1),
    "dict": spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3)),
    "tuple": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-1, 1, (1, 2), np.float64))),
}
ACT = {
    "box": spaces.Box(-0.5, 0.5, (2,)),
    "discrete": spaces.Discrete(3, start=-1),
    "multi": spaces.MultiDiscrete([3, 2]),
    "binary": spaces.MultiBinary(3),
    "floats": spaces.Tuple((spaces.Box(-1, 1, ()), spaces.Box(0, 2, (2, 1), np.float64))),
    "choices": spaces.Dict(
        a=spaces.Discrete(2, start=5),
        b=spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([[3], [2]]))),
        c=spaces.Box(-2, 2, (), np.int8),
    ),
}


class World(gym.Env[Any, Any]):
    """Shows samples of a space, and rewards by the action and by chance.

    Args:
        obs, act: its spaces, keys of `OBS` and `ACT`.
        masked: forbid some of the choices at each step.
        scale: multiplies all rewards.
        length: steps of an episode, which settings may change. None: 4 to 12, drawn at each reset.
    """

    def __init__(
        self,
        obs: str = "box",
        act: str = "discrete",
        masked: bool = False,
        scale: float = 1.0,
        length: int | None = None,
    ) -> None:
        """Copy the spaces, because each environment seeds its own."""
        self.observation_space = copy.deepcopy(OBS[obs])
        self.action_space = copy.deepcopy(ACT[act])
        self.masked, self.scale = masked, scale
        self.settings: Mapping[str, Any] = {"length": length}

    def set_task(self, settings: Mapping[str, Any]) -> None:
        """Take the settings of a curriculum, as the options of a reset are otherwise."""
        self.settings = settings

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t, self.place = 0, 0.0
        drawn = int(self.np_random.integers(4, 13))
        self.length = (options or self.settings).get("length") or drawn
        return self.observation_space.sample(), self._info()

    def step(self, action: Any) -> Any:
        """Reward; end by terminating or truncating in turn."""
        flat = gym.spaces.flatten(self.action_space, action)
        self.place = float((flat * np.arange(1, len(flat) + 1)).sum())
        self.t += 1
        rew = self.scale * (self.place + float(self.np_random.random()))
        over = self.t >= self.length
        odd = bool(self.length % 2)
        return self.observation_space.sample(), rew, over and odd, over and not odd, self._info()

    def _info(self) -> dict[str, Any]:
        if not self.masked:
            return {"place": self.place}
        space: Any = self.action_space
        sizes = [space.n] if isinstance(space, spaces.Discrete) else [*space.nvec]
        masks = [self.np_random.integers(0, 2, n, dtype=np.int8) for n in sizes]
        for mask in masks:
            mask[self.np_random.integers(len(mask))] = 1  # one of them is always allowed
        return {"place": self.place, "action_mask": masks[0] if len(masks) == 1 else tuple(masks)}


class Unsure(gym.Wrapper[Any, Any, Any, Any]):
    """Finds the steps of an environment that are to fail: about one in 29."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode."""
        self.seed, self.t = seed or 0, 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Fail, or step the environment."""
        self.t += 1
        if (self.seed + self.t) % 29 == 0 and self.fails((self.seed, self.t)):
            raise ConnectionError("on purpose")
        return super().step(action)

    def fails(self, at: tuple[int, int]) -> bool:
        """Return True if the step fails."""
        return True


class Flaky(Unsure):
    """Fails at a step of an episode when a process makes this step for the first time."""

    failed: ClassVar[set[tuple[int, int]]] = set()

    def fails(self, at: tuple[int, int]) -> bool:
        """Return True the first time."""
        first = at not in self.failed
        self.failed.add(at)
        return first


class Broken(Unsure):
    """Fails at a step of an episode whenever it is made."""


class Game:
    """A parallel environment of three agents, which leave after 2 to 9 steps each.

    Args:
        masked: forbid one of the three choices at each step, another one to each agent.
    """

    possible_agents: ClassVar = ["a", "b", "c"]
    metadata: ClassVar[dict[str, Any]] = {}
    render_mode = None

    def __init__(self, masked: bool = False) -> None:
        """Begin with nobody there."""
        self.masked = masked
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        """Return the space of the observations of each agent."""
        return spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent: str) -> Any:
        """Return the space of the actions of each agent."""
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Draw for how long each agent stays."""
        rng = np.random.default_rng(seed)
        self.agents, self.t = self.possible_agents[:], 0
        self.last = dict(zip(self.agents, rng.integers(2, 10, 3).tolist(), strict=True))
        self.place = dict(zip(self.agents, rng.integers(5, size=3).tolist(), strict=True))
        return self._obs(self.agents), self._infos(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        """Move all agents; reward each by the actions of all."""
        there, self.t = [*actions], self.t + 1
        for agent, action in actions.items():
            self.place[agent] += int(action) - 1
        total = float(sum(int(action) for action in actions.values()))
        rew = {agent: total + self.place[agent] for agent in there}
        over = {agent: self.last[agent] <= self.t for agent in there}
        terminated = {agent: over[agent] and self.last[agent] % 2 == 0 for agent in there}
        truncated = {agent: over[agent] and self.last[agent] % 2 == 1 for agent in there}
        self.agents = [agent for agent in there if not over[agent]]
        return self._obs(there), rew, terminated, truncated, self._infos(there)

    def close(self) -> None:
        """Close nothing."""

    def _obs(self, agents: list[str]) -> dict[str, Any]:
        total = sum(self.place.values())
        return {a: np.array([self.t, self.place[a], total], np.float32) for a in agents}

    def _infos(self, agents: list[str]) -> dict[str, Any]:
        if not self.masked:
            return {agent: {} for agent in agents}
        return {a: {"action_mask": np.arange(3) != (self.t + ord(a)) % 3} for a in agents}


def game(masked: bool = False) -> Game:
    """Return a game, as the name of an environment."""
    return Game(masked)


def vector(mode: str = "NextStep") -> Any:
    """Return a vector environment of two worlds."""
    return gym.vector.SyncVectorEnv([World, World], autoreset_mode=mode)


def kwargs_of(index: int) -> dict[str, Any]:
    """Return the arguments of the world with this index."""
    return {"scale": 1.0 + index % 3, "length": 4 + index}


def lengths(progress: float, record: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a curriculum: longer episodes after some returns."""
    last = record["settings"]["length"] if record else 3
    return {"length": last + 1 + int(10 * record.get("return_mean", 0.0)) % 3}


def coefficients(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return coefficients that depend on the record: rank 0 reads the first, all ranks the other."""
    return {"lr": 1e-3 / (1 + record["iteration"]), "lam": 0.9 + (record["return_mean"] % 1) / 20}


def tune(iteration: Any) -> None:
    """Change coefficients after each iteration: for --callback."""
    iteration.set(**coefficients(iteration.record))


def write_data(folder: Path) -> None:
    """Write observations and actions for behaviour cloning: CartPole.npz and Hopper.npz."""
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((200, 11)).astype(np.float32)
    np.savez(folder / "CartPole.npz", obs=obs[:, :4], act=(obs[:, 2] > 0).astype(np.int64))
    np.savez(folder / "Hopper.npz", obs=obs, act=np.tanh(obs[:, :3]))
