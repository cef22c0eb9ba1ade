"""An environment whose simulator is a parallel program in C, which it starts once and talks to line by line.

mpicc -O2 -o oscillator examples/oscillator.c
python train.py examples.oscillator:make --num-envs 2 --steps-per-batch 800 --minibatch-size 100 --total-steps 40000

Or its solver is a program of the same MPI job, one for each environment, and they send messages to each other:

mpiexec -n 1 python train.py examples.oscillator:make --mpmd --num-envs 2 --steps-per-batch 800 --minibatch-size 100 --total-steps 40000 : -n 2 ./oscillator : -n 2 ./oscillator
"""

from pathlib import Path

import gymnasium
import numpy as np

import rank0rl

STEPS = 100  # of an episode
NUMBERS = {"end": 0, "reset": 1, "step": 2}  # of requests in messages


class Lines:
    """A solver that is started for one environment, and talked to line by line."""

    def __init__(self, program, ranks, folder):
        self.solver = rank0rl.Solver([Path(program).resolve()], ranks, folder, timeout=60)

    def ask(self, what, number):
        """Return position and speed of the free end."""
        self.solver.write(f"{what} {number:.17g}\n")
        return np.array(self.solver.readline().split(), np.float64)

    def end(self):
        """End the solver."""
        self.solver.close()


class Messages:
    """A solver that is a program of the same job."""

    def __init__(self, comm, rank):
        self.comm, self.rank = comm, rank

    def ask(self, what, number):
        """Return position and speed of the free end."""
        answer = np.empty(2)
        self.comm.Send(np.array([NUMBERS[what], number], np.float64), self.rank)
        self.comm.Recv(answer, self.rank)
        return answer

    def end(self):
        """End the solver."""
        self.comm.Send(np.array([NUMBERS["end"], 0.0]), self.rank)


class Oscillator(gymnasium.Env):
    """Bring a chain of masses to rest by pushing its free end.

    Observation: position and speed of the free end, (2,). Action: a force, (1,), from -1 to 1.
    Reward: minus the square of position and speed.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, solver):
        self.solver = solver

    def reset(self, *, seed=None, options=None):
        """Stretch the chain by a random length."""
        super().reset(seed=seed)
        self.t = 0
        return self.solver.ask("reset", self.np_random.uniform(-1, 1)).astype(np.float32), {}

    def step(self, action):
        """Push."""
        self.t += 1
        now = self.solver.ask("step", np.clip(float(action[0]), -1, 1))
        return now.astype(np.float32), -float(np.sum(now**2)), False, self.t == STEPS, {}

    def close(self):
        """End the solver."""
        self.solver.end()


def make(place, program="oscillator", ranks=2):
    """Return an environment with a solver of its own, on some ranks."""
    if place.solver is not None:
        return Oscillator(Messages(*place.solver))
    return Oscillator(Lines(program, ranks, place.folder))
