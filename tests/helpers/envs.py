"""Environments and agents whose numbers are known in advance."""

from __future__ import annotations

import copy
import random
import time
from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import numpy as np

import rank0rl.mpi.comm
from rank0rl import seeding
from rank0rl.agent import Agent


class Count(gym.Env):
    """Observes (seed, t), and `offset` more; rewards t + 1; terminates, or is cut off, after `length` steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, length=3, truncate=False, vary=False, action_start=None, offset=0):
        self.base, self.truncate, self.vary, self.offset = length, truncate, vary, offset
        self.seen = []
        if action_start is None:
            self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        else:
            self.action_space = gym.spaces.Discrete(2, start=action_start)

    def reset(self, *, seed=None, options=None):
        self.first, self.t = seed, 0
        self.length = self.base + seed % 7 if self.vary else self.base
        return self._obs(), {}

    def step(self, action):
        self.seen.append(action)
        self.t += 1
        end = self.t >= self.length
        return self._obs(), float(self.t), end and not self.truncate, end and self.truncate, {}

    def _obs(self):
        return np.array([self.first % 1000, self.t], np.float64) + self.offset


class Drawn(Count):
    """Rewards the action; its picture, of odd sides, is as bright as its step. Fails as it is told."""

    metadata: ClassVar = {"render_modes": ["rgb_array", "human"], "render_fps": 20}
    closed = 0

    def __init__(self, render_mode=None, fails="", **kwargs):
        super().__init__(**kwargs)
        self.render_mode, self.fails = render_mode, fails

    def reset(self, **kwargs):
        if self.render_mode == "human":
            print("a window")
        return super().reset(**kwargs)

    def step(self, action):
        if self.fails == "step" and self.t == 3:
            raise ZeroDivisionError("on purpose")
        obs, _, *rest = super().step(action)
        return obs, float(action[0]), *rest

    def render(self):
        if self.fails == "render":
            raise ZeroDivisionError("on purpose")
        side = 40 if self.fails == "size" and self.t == 2 else 33
        dtype = np.float32 if self.fails == "dtype" else np.uint8
        return np.full((side, 47, 3), 20 * self.t, dtype, order="F")

    def close(self):
        Drawn.closed += 1


class Toll(Count):
    """Wants the action 1, and has its square as info["cost"]; 10 steps."""

    def __init__(self):
        super().__init__(length=10)
        self.action_space = gym.spaces.Box(-3.0, 3.0, (1,), np.float32)

    def step(self, action):
        obs, _, *flags, _ = super().step(action)
        a = float(action[0])
        return obs * 0, -((a - 1) ** 2), *flags, {"cost": a**2}


class Doors(gym.Env):
    """A corridor of 20 doors, 120 steps: of two at each, one leads on and one back to the first. The last one has a reward."""

    observation_space = gym.spaces.Box(0.0, 1.0, (20,), np.float32)
    action_space = gym.spaces.Discrete(2)
    right = np.random.default_rng(0).integers(2, size=20)

    def reset(self, *, seed=None, options=None):
        self.at = self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        self.at = self.at + 1 if action == self.right[self.at] else 0
        through, self.at = self.at == 20, self.at % 20
        return self._obs(), float(through), False, self.t == 120, {}

    def _obs(self):
        return np.eye(20, dtype=np.float32)[self.at]


class Throw(gym.Env):
    """Shows a target in -1..1; wants the side it is on, and how far it is away. 10 steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Dict(
        {
            "far": gym.spaces.Box(0.0, 1.0, (1,), np.float32),
            "side": gym.spaces.Discrete(2, start=1),
            "unused": gym.spaces.MultiBinary(2),
        }
    )

    def __init__(self, masks=False):
        self.masks = masks

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._show()

    def step(self, action):
        assert self.action_space.contains(action)
        at = float(action["far"][0]) * (1 if action["side"] == 2 else -1)
        reward = -abs(at - self.target)
        self.t += 1
        obs, info = self._show()
        return obs, reward, False, self.t == 10, info

    def _show(self):
        self.target = self.np_random.uniform(-1, 1)
        side = self.target > 0
        mask = np.array([not side, side, True, True, True, True])
        info = {"action_mask": mask} if self.masks else {}
        return np.array([self.target], np.float32), info


class Identity(gym.Env):
    """Rewards the choice that it shows: 1 if right, 0 if not; 10 steps. It shows `low` and one `high`."""

    action_space = gym.spaces.Discrete(4)

    def __init__(self, low=0, high=1):
        self.low, self.high = low, high
        self.observation_space = gym.spaces.Box(low, high, (4,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._show(), {}

    def step(self, action):
        self.t += 1
        rew = float(action == self.shown)
        return self._show(), rew, False, self.t == 10, {}

    def _show(self):
        self.shown = int(self.np_random.integers(4))
        obs = np.full(4, self.low, np.float32)
        obs[self.shown] = self.high
        return obs


class Paid(Count):
    """Rewards its action."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(action[0]), *rest


class Forever(gym.Env):
    """Rewards 1 at every step and is cut off after 20: the value is 1 / (1 - gamma)."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.ones(1, np.float32), 1.0, False, self.t == 20, {}


class Odd(gym.Env):
    """Has a space that no agent can use."""

    observation_space = gym.spaces.Text(5)
    action_space = gym.spaces.Discrete(2)


class Endless(Count):
    """Never ends."""

    def __init__(self):
        super().__init__(length=10**9)


class Moody(Endless):
    """Observes the global random numbers of Python: no episode repeats."""

    def _obs(self):
        return np.array([self.t, random.random()])


class Latent(Endless):
    """Rewards by the global random numbers, and shows nothing of it."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, random.random(), *rest


class Keys(gym.ObservationWrapper):
    """CartPole with two keys: the places, and the velocities."""

    def __init__(self, env):
        super().__init__(env)
        two = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gym.spaces.Dict({"seen": two, "hidden": two})

    def observation(self, observation):
        return {"seen": observation[[0, 2]], "hidden": observation[[1, 3]]}


def cartpole_keys(**kwargs):
    return Keys(gym.make("CartPole-v1", **kwargs))


def normalized():
    return gym.wrappers.NormalizeObservation(Count(length=50))


class Restless(Endless):
    """Observes how often all of its kind were stepped: a lane is another one beside others."""

    steps = 0

    def step(self, action):
        Restless.steps += 1
        return super().step(action)

    def _obs(self):
        return np.array([self.t, Restless.steps % 1000], np.float64)


class Breaks(Endless):
    """Fails in its 30th step, where its seed says so."""

    def step(self, action):
        if self.t == 30 and self.first == seeding.integer(0, "reset", 1, 0):
            raise ZeroDivisionError("on purpose")
        return super().step(action)


class Ranked(Count):
    """Has one more action on rank 1."""

    def __init__(self):
        super().__init__(action_start=0)
        self.action_space = gym.spaces.Discrete(2 + (rank0rl.mpi.comm.get_rank() == 1))


class Flaky(gym.Wrapper):
    """CartPole that raises at random when it is reset or stepped; all else is CartPole's own."""

    metadata = gym.Env.metadata  # Gymnasium 1.1 looks for it in the class
    chance = random.Random(0)  # of all in this process, so that no failure comes again

    def __init__(self, share=0.01):
        super().__init__(gym.make("CartPole-v1", disable_env_checker=True))
        self.share = share

    def reset(self, **kwargs):
        self._fail()
        return super().reset(**kwargs)

    def step(self, action):
        self._fail()
        return super().step(action)

    def _fail(self):
        if self.chance.random() < self.share:
            raise ConnectionError("on purpose")


class Sleeps(Endless):
    """Takes a time for a step in which other processes can work; lane 1 of seed 0 may take longer."""

    def __init__(self, step_s=0.005, slow=1, size=2):
        super().__init__()
        self.step_s, self.slow = step_s, slow
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float64)

    def reset(self, *, seed=None, options=None):
        self.times = self.slow if seed == seeding.integer(0, "reset", 1, 0) else 1
        return super().reset(seed=seed)

    def step(self, action):
        time.sleep(self.times * self.step_s)
        return super().step(action)

    def _obs(self):
        obs = np.zeros(self.observation_space.shape)
        obs[:2] = super()._obs()
        return obs


OBS_SPACES = {
    "box": gym.spaces.Box(-1, 1, (3,)),
    "box2d": gym.spaces.Box(-1, 1, (2, 3), np.float64),
    "image": gym.spaces.Box(0, 255, (12, 12, 3), np.uint8),
    "frames": gym.spaces.Box(0, 255, (2, 36, 40), np.uint8),
    "scalar": gym.spaces.Box(-1, 1, ()),
    "discrete": gym.spaces.Discrete(4, start=1),
    "multi": gym.spaces.MultiDiscrete([3, 2]),
    "binary": gym.spaces.MultiBinary(3),
    "dict": gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (2,)), b=gym.spaces.Discrete(3)),
    "tuple": gym.spaces.Tuple((gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1, 2)))),
}
ACT_SPACES = {
    "box": gym.spaces.Box(-0.5, 0.5, (2,)),
    "box2d": gym.spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "scalar": gym.spaces.Box(-1, 1, ()),
    "discrete": gym.spaces.Discrete(3, start=-1),
    "multi": gym.spaces.MultiDiscrete([3, 2], start=[1, 0]),
    "multi2d": gym.spaces.MultiDiscrete([[3, 2], [2, 2]]),
    "binary": gym.spaces.MultiBinary(3),
    "integers": gym.spaces.Box(np.array([[1, 0]]), np.array([[3, 1]]), dtype=np.uint8),
    "choices": gym.spaces.Dict(
        a=gym.spaces.Discrete(2, start=5),
        b=gym.spaces.Tuple((gym.spaces.MultiBinary(2), gym.spaces.MultiDiscrete([[3], [2]]))),
        c=gym.spaces.Box(-2, 2, (), np.int8),
    ),
    "floats": gym.spaces.Tuple(
        (gym.spaces.Box(-1, 1, ()), gym.spaces.Box(0, 2, (2, 1), np.float64))
    ),
}


class Spaced(gym.Env):
    """Shows samples of one space and refuses what is not in another, or not allowed."""

    def __init__(self, obs="box", act="discrete", masked=False, strict=True):
        self.strict = strict
        self.observation_space = copy.deepcopy(OBS_SPACES[obs])
        self.action_space = copy.deepcopy(ACT_SPACES[act])
        self.masked = masked

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), self._info()

    def step(self, action):
        if self.action_space.shape == () and isinstance(self.action_space, gym.spaces.Box):
            action = np.asarray(action)
        assert self.action_space.contains(action), action
        if self.masked and self.strict:
            start = getattr(self.action_space, "start", 0)
            chosen = np.atleast_1d(np.ravel(action - start))
            masks = self.mask if isinstance(self.mask, tuple) else (self.mask,)
            assert all(mask[a] for mask, a in zip(masks, chosen, strict=True))
        self.t += 1
        obs, rew = self.observation_space.sample(), float(self.np_random.random())
        return obs, rew, self.t == 7, False, self._info()

    def _info(self):
        if not self.masked:
            return {}
        space = self.action_space
        sizes = [space.n] if isinstance(space, gym.spaces.Discrete) else np.ravel(space.nvec)
        masks = [self.np_random.integers(0, 2, n, dtype=np.int8) for n in sizes]
        for mask in masks:
            mask[self.np_random.integers(len(mask))] = 1
        self.mask = masks[0] if isinstance(space, gym.spaces.Discrete) else tuple(masks)
        return {"action_mask": self.mask}


def long_from_4_on(env):
    return {"length": 1 + (env >= 4)}


def noise_of(agent):
    return (agent, "no environment")


def make_silent():
    assert 1 > 2


class InTurn:
    """Is of several agents that act in turn, as PettingZoo's AEC environments are."""

    possible_agents = ("a", "b")

    def agent_iter(self):
        """Return the agents in turn."""


def make_count(length=3):
    return Count(length)


_ALL = (
    Count,
    Drawn,
    Identity,
    Paid,
    Sleeps,
    Forever,
    Odd,
    Endless,
    Moody,
    Latent,
    Restless,
    Breaks,
    Flaky,
    Ranked,
    Spaced,
    Toll,
    Throw,
    Doors,
)
for env in _ALL:
    gym.register(f"{env.__name__}-v0", f"helpers.envs:{env.__name__}")
gym.register("Normalized-v0", normalized)


@dataclass(frozen=True)
class NoOptions:
    """None."""


class NoiseAgent(Agent):
    """Acts with its noise, and shows it and the fragment id."""

    Options = NoOptions
    noise = ("normal", 1)

    def __init__(self, spaces=None, options=None, rng=None):
        self.shape = (-1, *spaces.act.shape) if spaces else (-1, 1)

    def act(self, step):
        act = 3 * step.noise.reshape(self.shape)
        return act, {"noise": step.noise, "whose": step.fragment_id}

    def process(self, fragment):
        return {"obs": fragment.obs, "act": fragment.act, "noise": fragment.extras["noise"]}

    def update(self, batch, rng, progress):
        return {"rows": len(batch["obs"])}

    def modules(self):
        return {"none": np.zeros(1)}
