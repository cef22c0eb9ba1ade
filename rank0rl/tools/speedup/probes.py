"""Programs that measure one cost each, in processes of their own: python -m rank0rl.tools.speedup.probes NAME ARGUMENT.

`bare` only calls `env.step`, `collect` collects and processes batches on one rank, and `exchange` starts ranks
that send what an iteration sends. Links between nodes are not measured: the user describes them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rank0rl.launch import fork, python

if TYPE_CHECKING:
    from rank0rl.collector import Collector

EXCHANGED = 16
"""Arrays that a rank of `exchange` sends: about as many as in an iteration."""

_LIMIT_S = 300
_DRAWN = 1000  # actions that a process of `bare` takes over and over again
_COLLECT_S = 2.0  # least seconds of a measurement of `collect`
_REPEATS = 21  # of each exchange
_BYTES = 1 << 22  # that a rank of `exchange` sends: more than fits into a cache that ranks share
_LATE_S = 0.02  # seconds of an update: ranks that wait that long go to sleep


class FailedError(Exception):
    """Failure of a program that the study started. The message has the program's output."""


def bare_rate(settings: Mapping[str, Any], processes: int, seconds: float, path: Path) -> float:
    """Measure the steps per second of processes that each step the environment of a run at the same time.

    Args:
        settings: settings of the run.
        processes: number of processes.
        seconds: time for which they step.
        path: folder in which the environment's module may be found.

    Returns:
        The sum over all processes; nan if one cannot make the environment, or step it.
    """
    what = {name: settings[name] for name in ("env_id", "wrappers", "env_kwargs")}
    command, env = _program("bare", json.dumps({**what, "seconds": seconds}), path)
    running = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=env,
        )
        for _ in range(processes)
    ]
    for process in running:
        assert process.stdout is not None
        while process.stdout.readline() not in ("ready\n", ""):  # the environment may print, too
            pass
    for process in running:  # all start at once
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # this process has failed
            process.stdin.write("go\n")
            process.stdin.flush()
    printed = [process.communicate()[0].split() for process in running]
    return sum(
        float(words[-1]) if words and process.returncode == 0 else float("nan")
        for words, process in zip(printed, running, strict=True)
    )


def collect_costs(run: Path, path: Path) -> dict[str, Any]:
    """Measure a step of a run in one process, with one env and with all; `path` is as for `bare_rate`.

    Returns:
        "per_step": number of envs -> wall and CPU seconds of one step of them all; "row_bytes" of a
        step, "arrays" of a batch, and "weights_bytes".

    Raises:
        FailedError: if the environment cannot be stepped in a process by itself.
    """
    return _printed("collect", str(run.resolve()), path)


def exchange_costs(nprocs: int) -> dict[str, float]:
    """Measure what ranks of this machine exchange in an iteration.

    Returns:
        Seconds: "latency_s" of a collective, "message_s" of an array of one rank, "exchange_s" and
        "least_exchange_s" of a whole exchange; "bandwidth" into rank 0, in bytes per second.

    Raises:
        FailedError: if ranks do not start.
    """
    return _printed("exchange", str(nprocs))


def _program(name: str, argument: str, *paths: Path) -> tuple[list[str], dict[str, str]]:
    folders = [str(path.resolve()) for path in paths]
    return python("-m", "rank0rl.tools.speedup.probes", name, argument, *folders)


def _printed(name: str, argument: str, *paths: Path) -> dict[str, Any]:
    """Run a program in a process of its own; return the JSON that it prints last."""
    command, env = _program(name, argument, *paths)
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
                check=False,
                cwd=folder,
                env=env,
            )
        except subprocess.TimeoutExpired:
            raise FailedError(
                f"cannot predict: {shlex.join(command)} did not end within {_LIMIT_S} s"
            ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise FailedError(f"cannot predict: {shlex.join(command)} failed: {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _bare(argument: str) -> None:
    """Make the environment, print "ready", wait for a line, step, print the steps per second."""
    import gymnasium as gym
    import numpy as np

    from rank0rl.envs.make import make
    from rank0rl.run.shares import place_of

    what = json.loads(argument)
    env = make(what["env_id"], what["wrappers"], place_of(), **what["env_kwargs"])
    space = env.action_space
    space.seed(0)
    actions = [space.sample() for _ in range(_DRAWN)]
    if isinstance(space, gym.spaces.Box):
        # As a new policy acts, because the cost of a robot's step depends on how it moves.
        drawn = np.random.default_rng(0).standard_normal((_DRAWN, *space.shape), dtype=np.float32)
        actions = list(np.clip(drawn, space.low, space.high))
    _, info = env.reset(seed=0)
    print("ready", flush=True)
    sys.stdin.readline()
    steps, took, begin = 0, 0.0, time.perf_counter()
    for action in itertools.cycle(actions):
        if "action_mask" in info:
            action = space.sample(info["action_mask"])  # noqa: PLW2901 - only some actions are allowed
        _, _, terminated, truncated, info = env.step(action)
        steps += 1
        if terminated or truncated:
            _, info = env.reset()
        took = time.perf_counter() - begin
        if took > what["seconds"]:
            break
    print(steps / took)


def _collect(argument: str) -> None:
    """Measure the run whose folder is the argument; print what `collect_costs` returns."""
    from rank0rl.collector import Collector
    from rank0rl.mpi.threads import set_threads
    from rank0rl.mpi.weights import named_tensors
    from rank0rl.run import settings, trust
    from rank0rl.run.agents import make_agent
    from rank0rl.run.shares import make_rollout
    from rank0rl.run.usage import Phases

    set_threads(1)
    folder = Path(argument)
    given = trust.without_seal(settings.load(folder / "config.toml"))  # the study made this run
    options, agent_options = settings.of_file(given, argument)
    per_step = {}
    one = options.agents  # of a game
    for num_envs in sorted({one, max(2 * one, options.num_envs)}):
        alone = replace(
            options,
            num_envs=num_envs,
            rank0_envs=None,
            steps_per_batch=num_envs * options.steps_per_env or None,
            episodes_per_batch=num_envs if options.episodes_per_batch else None,
        )
        rollout = make_rollout(alone, 0, 1)
        agent = make_agent(alone, agent_options, rollout.spaces)
        collector = Collector(agent, rollout, alone, Phases())
        wall, cpu = _seconds_per_step(collector)
        per_step[num_envs] = num_envs * wall, num_envs * cpu
        rollout.close()
    arrays = list(collector.rolled.values())
    weights = named_tensors(agent.modules()).values()
    found = {
        "per_step": per_step,
        "row_bytes": sum(array.nbytes for array in arrays) / _steps(collector),
        "arrays": len(arrays),
        "weights_bytes": sum(tensor.nbytes for tensor in weights),
    }
    print(json.dumps(found))


def _seconds_per_step(collector: Collector) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of a step, to collect and process a batch.

    Both are the least of many turns, because what disturbs a process only makes it slower.
    """
    collector.roll(1)
    walls: list[float] = []
    cpus: list[float] = []
    end = time.perf_counter() + _COLLECT_S
    while len(walls) < 2 or time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        collector.roll(2 + len(walls))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        walls.append(wall / _steps(collector))
        cpus.append(cpu / _steps(collector))
    return min(walls), min(cpus)


def _steps(collector: Collector) -> int:
    """Return the steps of the batch that was collected last."""
    return int(collector.rolled["fragments/steps"].sum())


def _exchange(argument: str) -> None:
    """Start so many ranks; print what `exchange_costs` returns, as rank 0 measures it."""
    nprocs = int(argument)
    if fork.mpi_fork(nprocs) == "parent":
        return
    import numpy as np

    from rank0rl.mpi import comm
    from rank0rl.mpi.agreement import check_layout
    from rank0rl.mpi.gather import rank0_accum_batches

    one, many = ({f"{i}": np.zeros((1, 4), np.float32) for i in range(n)} for n in (1, EXCHANGED))
    large = {"0": np.zeros(_BYTES, np.uint8)}

    def whole() -> None:
        check_layout({"a": "f4"}, "link")
        comm.bcast_(one["0"])
        comm.bcast_obj(True)
        check_layout({}, "link", numbers=[0, 0])
        rank0_accum_batches(many)

    def seconds(what: Callable[[], Any], late_s: float = 0.0) -> list[float]:
        """Return the seconds of a call from when all ranks are there, of each turn, in order of size."""
        turns = []
        for _ in range(_REPEATS):
            comm.barrier()
            if late_s and comm.get_rank() == 0:
                time.sleep(late_s)
            start = time.perf_counter()
            what()
            turns.append(time.perf_counter() - start)
        return sorted(turns)

    # The fastest turn is the one that nothing disturbed.
    latency = seconds(lambda: check_layout({"a": "f4"}, "link"))[0]
    of_one = seconds(lambda: rank0_accum_batches(one))[0]
    of_many = seconds(lambda: rank0_accum_batches(many))[0]
    of_large = seconds(lambda: rank0_accum_batches(large))[0]
    exchanges = seconds(whole, _LATE_S)
    found = {
        "latency_s": latency,
        "message_s": max(of_many - of_one, 0.0) / ((EXCHANGED - 1) * (nprocs - 1)),
        "bandwidth": _BYTES * (nprocs - 1) / max(of_large - of_one, 1e-9),
        "exchange_s": exchanges[_REPEATS // 2],
        "least_exchange_s": exchanges[0],
    }
    comm.print0(json.dumps(found))


if __name__ == "__main__":
    sys.path += sys.argv[3:]  # after all that is installed: the folder may be anybody's
    {"bare": _bare, "collect": _collect, "exchange": _exchange}[sys.argv[1]](sys.argv[2])
