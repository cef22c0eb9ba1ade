"""An environment whose simulator is a program of its own, on two ranks: started once, and talked to line by line.

    python train.py examples.external:make --num-envs 2 --steps-per-batch 400 --minibatch-size 100 --total-steps 4000

Here the program is this file, and what it simulates is the rod of heat.py. It may as well be written in C or Fortran:
its rank 0 reads a line from the standard input for each step, and prints one.
"""

import sys
from pathlib import Path

import gymnasium
import numpy as np

import rank0rl

if __name__ == "__main__":
    from heat import SENSORS, Rod
else:
    from examples.heat import SENSORS, Rod


class ExternalRod(gymnasium.Env):
    """The rod of heat.py, simulated by another program."""

    observation_space = Rod.observation_space
    action_space = Rod.action_space

    def __init__(self, place):
        command = [sys.executable, Path(__file__).resolve()]
        self.solver = rank0rl.Solver(command, ranks=2, folder=place.folder, timeout=60)

    def reset(self, *, seed=None, options=None):
        """Begin with a profile of temperatures that is drawn at random."""
        super().reset(seed=seed)
        obs, _, _ = self._ask("reset", self.np_random.integers(2**31))
        return obs, {}

    def step(self, action):
        """Heat for some time."""
        obs, rew, truncated = self._ask("step", *np.asarray(action, np.float64))
        return obs, float(rew), False, bool(truncated), {}

    def close(self):
        """End the program."""
        self.solver.close()

    def _ask(self, *words):
        self.solver.write(" ".join(map(str, words)) + "\n")
        answer = np.array(self.solver.readline().split(), np.float64)
        return answer[:SENSORS].astype(np.float32), *answer[SENSORS:]


def make(place):
    """Return a rod with a program of its own."""
    return ExternalRod(place)


def solve():
    """Simulate a rod on all ranks of this program, as the lines of the standard input say, until there are no more."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rod = Rod(comm)
    while line := comm.bcast(sys.stdin.readline() if comm.rank == 0 else None):
        what, *numbers = line.split()
        if what == "reset":
            obs, rew, truncated = rod.reset(seed=int(numbers[0]))[0], 0.0, False
        else:
            obs, rew, _, truncated, _ = rod.step(np.array(numbers, np.float64))
        if comm.rank == 0:
            print(*map(float, obs), rew, int(truncated), flush=True)


if __name__ == "__main__":
    solve()
