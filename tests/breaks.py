"""An environment and an agent that fail at the place that the variable PLACE names.

PLACE is "place" or "place:rank"; without a rank, all of them fail.
"""

import os

import toy_envs

import rank0rl.mpi.comm

PLACE, _, RANK = os.environ.get("PLACE", "").partition(":")


def fail(place):
    if place == PLACE and (not RANK or rank0rl.mpi.comm.rank == int(RANK)):
        raise ZeroDivisionError("on purpose")


class Env(toy_envs.Count):
    made = 0

    def __init__(self):
        Env.made += 1
        if Env.made > (rank0rl.mpi.comm.rank == 0):  # rank 0 makes one to look at it
            fail("constructor")
        super().__init__(length=20)

    def reset(self, **kwargs):
        fail("reset")
        return super().reset(**kwargs)

    def step(self, action):
        if self.t == 10:
            fail("step")
        return super().step(action)


class Agent(toy_envs.NoiseAgent):
    def __init__(self, *args):
        fail("init")
        super().__init__(*args)

    def act(self, step):
        fail("act")
        return super().act(step)

    def process(self, fragment):
        fail("process")
        return super().process(fragment)

    def update(self, *args):
        fail("update")
        return super().update(*args)


toy_envs.gym.register("Breaks-v1", Env)
