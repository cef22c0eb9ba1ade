"""Self-play: PPO plays against its past selves, which are frozen for the time of a batch.

    python train.py examples.self_play:make --algo examples/self_play.py --num-envs 16 --steps-per-batch 256 \
        --minibatch-size 64 --gamma 0 --lr 3e-4 --entropy-coef linear:0.5:0.1 --total-steps 50000

The game is rock, paper, scissors in which rock wins two points. Who plays only against himself as he is now goes round
in circles. Against a past self drawn from all of them, the mean of all comes close to the equilibrium: 1/4 rock, 1/2
paper, 1/4 scissors. The metric `exploitability` is what the best answer to that mean wins in a round, 0 in equilibrium.
The entropy bonus keeps all three in play: what is never tried is never learned again.
"""

import gymnasium
import numpy as np
import torch

from rank0rl import Replay
from rank0rl.algos.ppo import PPO

PAYOFF = np.array([[0, -1, 2], [1, 0, -1], [-2, 1, 0]])  # of rock, paper, scissors against each


class SelfPlay(PPO):
    """PPO for the first player of a game of two. The second ones are past selves, drawn anew by each update."""

    opponents = 8

    def __init__(self, spaces, options, rng):
        super().__init__(spaces, options, rng)
        self.past = [PPO(spaces, options, rng).policy for _ in range(self.opponents)]
        self.selves = Replay(capacity=10_000)

    def act(self, step):
        """Let past selves act for the second players, whose fragments have odd numbers: another one in each game."""
        act, extras = super().act(step)
        game, player = np.divmod(step.fragment_id, 2)
        for i, policy in enumerate(self.past):
            rows = np.flatnonzero((player == 1) & (game % self.opponents == i))
            if len(rows):
                x = self.norm.numpy(step.obs[rows])
                act[rows], _ = policy.act(x, step.noise[rows], explore=step.explore)
        return act, extras

    def process(self, fragment):
        """Return rows of the first player, and none of the second."""
        rows = super().process(fragment)
        return {name: x[:0] if fragment.fragment_id % 2 else x for name, x in rows.items()}

    def update(self, batch, rng, progress):
        """Remember who has played, learn, and draw the next opponents."""
        weights = {name: x.numpy()[None] for name, x in self.policy.state_dict().items()}
        self.selves.add({**weights, "plays": self.plays()})
        metrics = super().update(batch, rng, progress)
        drawn = self.selves.sample(self.opponents, rng)
        for i, policy in enumerate(self.past):
            policy.load_state_dict({name: torch.from_numpy(drawn[name][i]) for name in weights})
        end = self.selves.added
        mean = self.selves.rows(end - len(self.selves), end)["plays"].mean(axis=0)
        return {**metrics, "exploitability": (PAYOFF @ mean).max()}

    def plays(self):
        """Return the probabilities of rock, paper and scissors, (1, 3)."""
        with torch.no_grad():
            [logp] = self.policy.distribution(self.norm(torch.zeros(1, 1)))
        return logp.exp().numpy()

    def modules(self):
        """Return the opponents too: all ranks play against the same ones."""
        return {**super().modules(), "past": dict(enumerate(self.past))}

    def state(self):
        """Return all past selves."""
        return {**super().state(), "selves": self.selves}

    def load(self, state):
        """Take them back."""
        super().load(state)
        self.selves.load(state["selves"])


class RockPaperScissors:
    """A parallel environment as PettingZoo's: ten rounds. There is nothing to see."""

    possible_agents = ("first", "second")

    def observation_space(self, agent):
        """Return a space with one element, 0."""
        return gymnasium.spaces.Box(0.0, 0.0, (1,), np.float32)

    def action_space(self, agent):
        """Return the space of rock, paper and scissors."""
        return gymnasium.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        """Begin."""
        self.t, self.agents = 0, [*self.possible_agents]
        return dict.fromkeys(self.agents, np.zeros(1, np.float32)), {}

    def step(self, actions):
        """Play a round."""
        self.t += 1
        won = float(PAYOFF[actions["first"], actions["second"]])
        over = dict.fromkeys(self.agents, self.t == 10)
        obs = dict.fromkeys(self.agents, np.zeros(1, np.float32))
        self.agents = [] if self.t == 10 else self.agents
        return obs, {"first": won, "second": -won}, over, dict.fromkeys(over, False), {}


def make():
    """Return the game."""
    return RockPaperScissors()
