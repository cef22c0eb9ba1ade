"""Environments that raise, hang, exit or crash, and an agent that fails at a given place."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from helpers import envs

import rank0rl.mpi.comm


def crash():
    ctypes.string_at(0)


class TwoArgumentsError(Exception):
    """Cannot be unpickled: it takes one argument more than it keeps."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def fail(how):
    match how:
        case "raise":
            raise ZeroDivisionError("on purpose")
        case "raise what cannot be pickled":
            raise TwoArgumentsError("one", "two")
        case "raise a local class":
            raise type("HereError", (Exception,), {})("on purpose")
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(4)
        case "segfault":
            crash()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)


class FailsAt(envs.Count):
    """Fails in the given step; 0: in its reset; -1: when it is made; -2: when it is closed."""

    def __init__(self, how, step=2):
        super().__init__(length=9)
        self.how, self.at = how, step
        self._fail(-1)

    def _fail(self, now):
        if now == self.at:
            fail(self.how)

    def reset(self, **kwargs):
        self._fail(0)
        return super().reset(**kwargs)

    def step(self, action):
        self._fail(self.t + 1)
        return super().step(action)

    def close(self):
        self._fail(-2)


class Answers(envs.Count):
    """Answers in the second step what it is given, in place of what an environment should."""

    def __init__(self, answer):
        super().__init__(length=9)
        self.answer = answer

    def step(self, action):
        right = super().step(action)
        return right if self.t < 2 else self.answer


class Starts(envs.Count):
    """Starts a program, as an interface to a simulator does; tells its process id as a mask."""

    def reset(self, **kwargs):
        obs, _ = super().reset(**kwargs)
        return obs, {"action_mask": subprocess.Popen(["sleep", "1000"]).pid}


class Faulty(gym.Wrapper):
    """Fails at random, and not again in the same place when it is made anew.

    Every environment that is made has its own stream of faults, keyed by the lines of a file to which
    each adds one. Faults are written there too.
    """

    def __init__(self, env, log, kinds, rate, seed=0):
        super().__init__(env)
        self.log, self.kinds, self.rate = Path(log), kinds, rate
        self._write("made")
        made = self.log.read_text().count("made")
        self.rng = np.random.default_rng([seed, made])

    def step(self, action):
        if self.rng.random() < self.rate:
            how = self.kinds[self.rng.integers(len(self.kinds))]
            self._write(how)
            fail(how)
        return self.env.step(action)

    def _write(self, line):
        with self.log.open("a") as file:
            file.write(f"{line}\n")


def make_faulty(log, kinds, rate, env_id="CartPole-v1", seed=0):
    return Faulty(gym.make(env_id, disable_env_checker=True), log, kinds, rate, seed)


PLACE, _, RANK = os.environ.get("PLACE", "").partition(":")


def fail_at(place):
    if place == PLACE and (not RANK or rank0rl.mpi.comm.rank == int(RANK)):
        raise ZeroDivisionError("on purpose")


class Env(envs.Count):
    made = 0

    def __init__(self):
        Env.made += 1
        if Env.made > (rank0rl.mpi.comm.rank == 0):  # rank 0 makes one to look at it
            fail_at("constructor")
        super().__init__(length=20)

    def reset(self, **kwargs):
        fail_at("reset")
        return super().reset(**kwargs)

    def step(self, action):
        if self.t == 10:
            fail_at("step")
        return super().step(action)


class Agent(envs.NoiseAgent):
    def __init__(self, *args):
        fail_at("init")
        super().__init__(*args)

    def act(self, step):
        fail_at("act")
        return super().act(step)

    def process(self, fragment):
        fail_at("process")
        return super().process(fragment)

    def update(self, *args):
        fail_at("update")
        return super().update(*args)


envs.gym.register("Breaks-v1", Env)
