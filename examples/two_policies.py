"""A policy for each agent of a game: PPO several times over, each with the rows of its own agent.

    python train.py examples.two_policies:make --algo examples/two_policies.py --num-envs 16 --steps-per-batch 1024 \
        --minibatch-size 64 --total-steps 20000

The game: both see a number, left is to say it, and right the next one. One policy for both, as without --algo, can do
what one of them is to do: of the 20 points of a game, the two get 10.
"""

import gymnasium
import numpy as np

from rank0rl import Agent
from rank0rl.algos.ppo import PPO, PPOOptions


class PolicyEach(Agent):
    """PPO for each agent of a game. Its fragments are those of the agents in turn: 0, 1, 0, 1, ..."""

    Options = PPOOptions
    settings = "ppo"

    def __init__(self, spaces, options, rng):
        names = spaces.agents or ("alone",)
        self.each = {name: PPO(spaces, options, rng) for name in names}
        self.all = [*self.each.values()]
        self.noise, self.memory = self.all[0].noise, self.all[0].memory

    def act(self, step):
        """Let each agent's policy act on its rows."""
        whole = None
        for _, rows, agent in self._of_each(step.fragment_id):
            part = {n: x[rows] if isinstance(x, np.ndarray) else x for n, x in vars(step).items()}
            act, extras = agent.act(type(step)(**part))
            acted = {"act": act, **extras}
            if whole is None:
                size = len(step.obs)
                whole = {n: np.empty((size, *x.shape[1:]), x.dtype) for n, x in acted.items()}
            for name, x in acted.items():
                whole[name][rows] = x
        return whole.pop("act"), whole

    def process(self, fragment):
        """Return the rows of one agent."""
        return self.all[fragment.fragment_id % len(self.all)].process(fragment)

    def prepare(self):
        """Compile once for all: they have the same networks."""
        for agent in self.all:
            agent.threads = self.threads
            agent.prepare()

    def update(self, batch, rng, progress):
        """Let each agent learn from its own rows."""
        names, metrics = [*self.each], {}
        for i, rows, agent in self._of_each(batch["fragment_id"]):
            own = agent.update({n: x[rows] for n, x in batch.items()}, rng, progress)
            metrics |= {f"{names[i]}_{n}": x for n, x in own.items()}
        return metrics

    def modules(self):
        """Return the networks of all."""
        return {name: agent.modules() for name, agent in self.each.items()}

    def state(self):
        """Return the optimizers of all."""
        return {name: agent.state() for name, agent in self.each.items()}

    def load(self, state):
        """Take them back."""
        for name, agent in self.each.items():
            agent.load(state[name])

    def _of_each(self, fragment_id):
        """Yield the number of each agent that has rows, the rows, and its PPO."""
        for i, agent in enumerate(self.all):
            rows = np.flatnonzero(fragment_id % len(self.all) == i)
            if len(rows):
                yield i, rows, agent


class Numbers:
    """A parallel environment as PettingZoo's: ten rounds, with a point for each right answer."""

    possible_agents = ("left", "right")
    rounds = 10

    def observation_space(self, agent):
        """Return the space of numbers, one-hot, (3,)."""
        return gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)

    def action_space(self, agent):
        """Return the space of answers."""
        return gymnasium.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        """Begin."""
        self.rng, self.t, self.agents = np.random.default_rng(seed), 0, [*self.possible_agents]
        return self.show(), {}

    def show(self):
        """Draw a number; return what the agents see."""
        self.number = self.rng.integers(3)
        return dict.fromkeys(self.possible_agents, np.eye(3, dtype=np.float32)[self.number])

    def step(self, actions):
        """Play a round."""
        self.t += 1
        wanted = {"left": self.number, "right": (self.number + 1) % 3}
        rew = {agent: float(actions[agent] == wanted[agent]) for agent in wanted}
        over = dict.fromkeys(wanted, self.t == self.rounds)
        if self.t == self.rounds:
            self.agents = []
        return self.show(), rew, over, dict.fromkeys(wanted, False), {}


def make():
    """Return the game."""
    return Numbers()
