r"""A rod of metal that is heated in four places: a simulator in parallel, on the ranks of one communicator.

Each rank computes its part of the rod, and exchanges the temperatures at the borders with its neighbours.

    python train.py examples.heat:make --num-envs 8 --steps-per-batch 1600 --minibatch-size 200 \
        --total-steps 64000 --nprocs 2 --ranks-per-env 2

The returns of training rise from -48, without control, to -5 in 40 iterations. Any number of ranks, of either kind,
gives the same numbers.
"""

import gymnasium
import numpy as np

CELLS, HEATERS, SENSORS = 96, 4, 12
STEPS, SUBSTEPS = 50, 40  # of an episode, and of the solver in each of them
DIFFUSION, COOLING, POWER = 0.4, 0.002, 0.02  # for each substep; DIFFUSION <= 0.5 is stable


class Rod(gymnasium.Env):
    """Keep a rod, whose ends are cold, at temperature 1.

    Observation: temperatures of the sensors, (12,). Action: power of the heaters, (4,), from -1 to 1.
    Reward: minus the mean square of what is missing.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (SENSORS,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (HEATERS,), np.float32)

    def __init__(self, comm):
        self.comm = comm
        parts = np.array_split(np.arange(CELLS), comm.size)
        self.mine = parts[comm.rank]
        last = comm.size - 1
        self.left = comm.rank - 1 if comm.rank > 0 else None
        self.right = comm.rank + 1 if comm.rank < last else None
        centers = (np.arange(HEATERS) + 0.5) * CELLS / HEATERS
        self.shape = np.exp(-(((self.mine[:, None] - centers) / 8.0) ** 2))  # (cells, heaters)

    def reset(self, *, seed=None, options=None):
        """Begin with a profile of temperatures that is drawn at random."""
        super().reset(seed=seed)  # all ranks draw the same numbers
        height, waves = self.np_random.uniform(0, 1, 3), np.arange(1, 4)
        self.heat = _dot(np.sin(np.outer(self.mine / CELLS, waves) * np.pi), height)
        self.t = 0
        return self._whole()[:: CELLS // SENSORS].astype(np.float32), {}

    def step(self, action):
        """Heat for some time."""
        source = POWER * _dot(self.shape, np.clip(action, -1, 1).astype(np.float64))
        for _ in range(SUBSTEPS):
            left, right = self._borders()
            around = np.concatenate([[left], self.heat, [right]])
            spread = around[:-2] - 2 * self.heat + around[2:]
            self.heat = self.heat + DIFFUSION * spread - COOLING * self.heat + source
        self.t += 1
        whole = self._whole()
        obs = whole[:: CELLS // SENSORS].astype(np.float32)
        return obs, -float(np.mean((whole - 1.0) ** 2)), False, self.t == STEPS, {}

    def _borders(self):
        """Return the temperatures beside this rank's part; the ends of the rod are at 0."""
        requests = []
        for other, own in ((self.left, self.heat[0]), (self.right, self.heat[-1])):
            if other is not None:
                requests.append(self.comm.isend(own, dest=other))
        left = self.comm.recv(source=self.left) if self.left is not None else 0.0
        right = self.comm.recv(source=self.right) if self.right is not None else 0.0
        for request in requests:
            request.wait()
        return left, right

    def _whole(self):
        """Return the temperatures of the whole rod, on every rank: sums do not depend on how many there are."""
        return np.concatenate(self.comm.allgather(self.heat))


def _dot(rows, x):
    """Return each row times x. The last bits of a product of matrices would depend on the number of rows."""
    return (rows * x).sum(axis=1)


def make(place):
    """Return a rod on the ranks of its place."""
    return Rod(place.comm)
