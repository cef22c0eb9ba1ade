"""Environments that are programs of their own, or know where they are."""

import ctypes
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from helpers.envs import Count

import rank0rl

SOLVER = Path(__file__).with_name("solver.py")


class Placed(Count):
    """Writes where it is into a file of the folder `log`; fails in the step of this number."""

    def __init__(self, place, log, fails=None):
        super().__init__(length=5)
        self.place, self.fails = place, fails
        folder = place.folder and str(place.folder)
        about = {"index": place.index, "evaluation": place.evaluation, "folder": folder}
        Path(log, f"{os.getpid()}-{id(self)}").write_text(json.dumps(about))
        if folder:
            (place.folder / "scratch").write_text("")

    def step(self, action):
        if self.t + 1 == self.fails:
            raise OSError("on purpose")
        return super().step(action)


def placed(log, fails=None, place=None):
    return Placed(place, log, fails)


def in_folder(place):
    """Return an environment that cannot be trained without a folder of its own."""
    assert place.evaluation or place.folder
    return Count(length=5)


class Summed(Count):
    """Sums its step over the ranks of its communicator."""

    def __init__(self, comm, length=5):
        super().__init__(length)
        self.comm = comm

    def step(self, action):
        obs, rew, *rest = super().step(action)
        return obs, self.comm.allreduce(rew) / self.comm.size, *rest


def summed(place):
    assert place.comm.size == 1
    return Summed(place.comm)


def shared(place, raises=None, fails_once=None, talks=True):
    """Return an environment on all ranks of its place, one of which raises in the step of a number."""
    env = Summed(place.comm) if talks else Count(length=5)
    if raises and place.comm.rank == raises[0]:
        env.step = broken(env.step, raises[1], fails_once)
    return env


def broken(step, number, once):
    steps = []

    def call(action):
        steps.append(action)
        if len(steps) == number and (once is None or not Path(once).exists()):
            if once:
                Path(once).write_text("")
            raise OSError("on purpose")
        return step(action)

    return call


def worldly():
    """Return an environment that takes the whole job for its own ranks, as PETSc and FEniCS do by default."""
    from mpi4py import MPI

    return Summed(MPI.COMM_WORLD)


class Closes(Count):
    """Notes in the folder `log` that it has been closed; takes its time for it; fails in the step of a number."""

    def __init__(self, place, log, hangs=0.0, fails=None):
        super().__init__(length=50)
        self.index, self.evaluation, self.log = place.index, place.evaluation, Path(log)
        self.hangs, self.fails, self.stepped = hangs, fails, False

    def step(self, action):
        self.stepped = True
        if (self.index, self.t) == (1, self.fails):
            raise OSError("on purpose")
        time.sleep(0.001)
        return super().step(action)

    def close(self):
        time.sleep(self.hangs * self.stepped)  # not of the one that only shows its spaces
        (self.log / f"{'evaluation' if self.evaluation else 'env'}-{self.index}").touch()


class Computes(Count):
    """Computes for minutes in C, where no handler of Python runs, in the step of a number."""

    def __init__(self, begin):
        super().__init__(length=50)
        self.begin, self.steps = begin, 0

    def step(self, action):
        self.steps += 1
        if self.steps == self.begin:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)
        return super().step(action)


class Solved(Count):
    """Asks a solver on ranks of its own; crashes or hangs, once, in the step of a number."""

    def __init__(
        self,
        place,
        ranks=2,
        mark="",
        fails=None,
        how="crash",
        once=None,
        timeout=60.0,
        launcher=None,
    ):
        super().__init__(length=10)
        command = [sys.executable, SOLVER, *[mark] * bool(mark)]
        self.solver = rank0rl.Solver(command, ranks, place.folder, timeout, launcher=launcher)
        self.ranks, self.fails, self.how, self.once = ranks, fails, how, once

    def step(self, action):
        obs, rew, *rest = super().step(action)
        fails = self.t == self.fails and not (self.once and Path(self.once).exists())
        if fails and self.once:
            Path(self.once).touch()
        self.solver.write(f"{self.how if fails else 'sum'} {rew}\n")
        return obs, float(self.solver.readline()) / self.ranks, *rest

    def close(self):
        self.solver.close()


class Remembers(Count):
    """An environment with a state, which draws random numbers, and notes each step in the folder `log`."""

    def __init__(self, log=None, forgets=False, comm=None):
        super().__init__(length=1000)
        self.log, self.forgets, self.comm = log, forgets, comm

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.x = self.np_random.normal()
        return super().reset(seed=seed)

    def step(self, action):
        if self.log:
            with Path(self.log, str(os.getpid())).open("a") as file:
                file.write("step\n")
        obs, rew, *rest = super().step(action)
        self.x = 0.9 * self.x + self.np_random.normal() + float(np.sum(action))
        return obs + np.float32(self.x), rew + self.x, *rest

    def get_state(self):
        x = self.comm.allreduce(self.x) / self.comm.size if self.comm else self.x
        return {"t": np.array(self.t), "x": np.array(0.0 if self.forgets else x)}

    def set_state(self, state):
        self.t, self.x = int(state["t"]), float(state["x"])


def remembers(log=None, place=None, limit=None):
    env = Remembers(log, comm=place.comm if place else None)
    return gym.wrappers.TimeLimit(env, limit) if limit else env


class WorldlyInC(Count):
    """Adds its rewards over all ranks by a call of C, which no hook of Python sees."""

    def __init__(self):
        super().__init__(length=5)
        from mpi4py import MPI

        maps = Path("/proc/self/maps").read_text().split()
        library = ctypes.CDLL(next(word for word in maps if "/libmpi.so" in word))
        kind = ctypes.c_void_p if MPI._sizeof(MPI.COMM_WORLD) == 8 else ctypes.c_int
        double, add, world = (
            kind(MPI._handleof(each)) for each in (MPI.DOUBLE, MPI.SUM, MPI.COMM_WORLD)
        )
        self.sum = lambda x, y: library.MPI_Allreduce(x, y, 1, double, add, world)

    def step(self, action):
        obs, rew, *rest = super().step(action)
        mine, total = ctypes.c_double(rew), ctypes.c_double()
        self.sum(ctypes.byref(mine), ctypes.byref(total))
        return obs, total.value, *rest


def failing(place):
    """Return an environment that raises at its tenth step, whose solver is a program of the job."""
    from examples import oscillator

    env = oscillator.make(place)
    step = env.step

    def fail(action):
        if env.t == 9:
            raise RuntimeError("the tenth step")
        return step(action)

    env.step = fail
    return env
