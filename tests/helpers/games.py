"""Parallel environments as PettingZoo's are, without PettingZoo; and vector environments."""

import random

import gymnasium as gym
import numpy as np


class Hunt:
    """Agents leave after 2 to 9 steps each, drawn at the reset, or are cut off after `limit` steps.

    An agent sees the seed, the step, its place and the sum of all places; the reward is the sum of the
    actions of all who are there. So nothing repeats unless the whole game does.
    """

    def __init__(self, agents=3, limit=8, choices=(), sizes=(), render_mode=None, answer=None):
        self.possible_agents = [f"wolf {i}" for i in range(agents)]
        self.limit, self.choices, self.sizes, self.answer = limit, choices, sizes, answer
        self.render_mode, self.closed, self.seen, self.agents = render_mode, 0, [], []

    def observation_space(self, agent):
        size = dict(self.sizes).get(agent, 4)
        return gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def action_space(self, agent):
        if self.choices:
            return gym.spaces.Tuple([gym.spaces.Discrete(n) for n in self.choices])
        return gym.spaces.Discrete(3, start=-1)

    def reset(self, seed=None, options=None):
        rng = np.random.default_rng(seed)
        n = len(self.possible_agents)
        self.t, self.first, self.options = 0, seed % 1000, options
        self.last = dict(zip(self.possible_agents, rng.integers(2, 10, n), strict=True))
        self.place = dict(zip(self.possible_agents, rng.integers(5, size=n), strict=True))
        self.agents = self.possible_agents[:]
        if self.answer == "late":
            del self.agents[1]
        return self._obs(), self._infos()

    def step(self, actions):
        assert list(actions) == self.agents, (actions, self.agents)
        assert all(self.action_space(a).contains(act) for a, act in actions.items()), actions
        self.seen.append(actions)
        self.t += 1
        for agent, action in actions.items():
            self.place[agent] += np.sum(action)
        there, self.agents = self.agents, self.agents[:]
        rew = {agent: float(sum(map(np.sum, actions.values()))) + self.t for agent in there}
        terminated = {agent: bool(self.last[agent] <= self.t) for agent in there}
        if self.answer == "moody":  # the last agent's reward alone
            rew[there[-1]] += random.random() * (there[-1] == self.possible_agents[-1])
        truncated = dict.fromkeys(there, self.t >= self.limit)
        obs = self._obs()
        self.agents = [a for a in there if not (terminated[a] or truncated[a])]
        infos = self._infos(there)
        if self.answer == "gone" and self.t == 2:
            del obs[there[0]]
        if self.answer == "raises" and self.t == 2:
            raise ZeroDivisionError("on purpose")
        return (obs, rew, terminated, truncated, infos)[: 4 if self.answer == "short" else 5]

    def _infos(self, of=None):
        infos = {agent: {"place": self.place[agent]} for agent in of or self.agents}
        if self.answer == "masks":
            for agent, info in infos.items():
                # who has no more moves is gone
                gone = of and self.last[agent] <= self.t
                info["action_mask"] = np.array([not gone, self.t % 2 and not gone, False])
        return infos

    def harder(self, settings):
        self.limit = settings["limit"]

    def _obs(self):
        total = sum(self.place.values())
        return {
            agent: np.array([self.first, self.t, self.place[agent], total], np.float32)
            for agent in self.agents
        }

    def render(self):
        return np.full((32, 48, 3), 20 * self.t, np.uint8)

    def close(self):
        self.closed += 1


def make_hunt(**kwargs):
    return Hunt(**kwargs)


class Walk(gym.Env):
    """Shows the step, its place and a number that is drawn; ends after 2 to 9 steps, drawn at the reset."""

    observation_space = gym.spaces.Dict(
        t=gym.spaces.Discrete(10), drawn=gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    )
    action_space = gym.spaces.Discrete(3, start=-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.place, self.last = 0, 0, int(self.np_random.integers(2, 10))
        return self._obs(), {"place": 0}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        self.place += int(action)
        over = self.t == self.last
        info = {"place": self.place}
        return (
            self._obs(),
            float(action * self.t),
            over and self.t % 2 == 0,
            over and self.t % 2 == 1,
            info,
        )

    def _obs(self):
        drawn = np.array([self.place, self.np_random.random()], np.float32)
        return {"drawn": drawn, "t": self.t}


class NoSeed(Walk):
    """Ignores the seed of a reset, as EnvPool's environments do."""

    def reset(self, *, seed=None, options=None):
        return super().reset()


class Masked(Walk):
    """Allows its middle action only."""

    def reset(self, **kwargs):
        obs, _ = super().reset(**kwargs)
        return obs, {"action_mask": np.array([0, 1, 0], np.int8)}


class BothKinds(gym.vector.SyncVectorEnv, gym.Env):
    """Is an environment too by its class, as EnvPool's are."""


def make_walks(num_envs=3, mode="NextStep", kind="Walk", both=False):
    make = BothKinds if both else gym.vector.SyncVectorEnv
    return make([globals()[kind]] * num_envs, autoreset_mode=mode)


gym.register("Walks-v0", vector_entry_point=make_walks)


def make_carts():
    return gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
