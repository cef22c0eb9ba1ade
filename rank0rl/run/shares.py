"""Each rank's share of a run's environments and episodes, as the options say, and its rollouts."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rank0rl.envs import make
from rank0rl.envs.block import envs_of, make_block
from rank0rl.envs.info import EpisodeInfo, StepInfo, label
from rank0rl.envs.place import FolderEnv, Place
from rank0rl.envs.process import EnvProcess
from rank0rl.envs.retry import RetriedEnv
from rank0rl.envs.shared import SharedEnv
from rank0rl.envs.wrappers import ResetMethod
from rank0rl.launch import job
from rank0rl.mpi import comm
from rank0rl.mpi import group as processes
from rank0rl.mpi.comm import Counter
from rank0rl.mpi.world import programs, self_comm
from rank0rl.rollout import FixedSteps, Rollout, WholeEpisodes
from rank0rl.run.agents import load_agent, load_function
from rank0rl.run.options import RunOptions

_TURNS = 2  # in which a rank collects its episodes, for an even end; more give act too few rows


def place_of(index: int = 0, evaluation: bool = True) -> Place:
    """Return the place of an environment of this rank: with all processes of its group, if there are several."""
    mine = processes.my_group()
    if mine is None:
        solver = functools.partial(_solver, index)
        has_one = job.has_programs() and not evaluation
        return Place(index, evaluation, None, self_comm, find_solver=solver if has_one else None)
    return Place(index, evaluation, make_comm=processes.group_comm, call=mine.call)


def _solver(index: int) -> tuple[comm.Comm, int]:
    """Return where the solver of an environment is: the communicator, and its rank there."""
    return programs()[1], comm.get_nworkers() + index


def check_solvers(options: RunOptions, nworkers: int) -> None:
    """Raise ValueError if other programs are in the job, and not one for each environment."""
    if options.mpmd and (others := programs()[1].size - nworkers) != options.num_envs:
        raise ValueError(
            f"in a job of several programs, each environment has one solver: got {others} solvers, and num_envs "
            f"{options.num_envs}; start {options.num_envs} solvers, or set --num-envs {others}"
        )


def _guard_world() -> None:
    """Let environments in this process raise where they use MPI.COMM_WORLD, if ranks with others are in it."""
    processes.guard_world(
        Path(make.__file__).parent,
        "an environment must use the communicator of its own ranks, `place.comm` of the function that makes it, or "
        "run in a process of its own, with --env-processes: see docs/simulators.md",
    )


def follows() -> bool:
    """Make the calls of this process's rank until the end, if it follows one; return False if it does not."""
    _guard_world()
    return processes.follow()


def group(make_env: Callable[..., Any], **kwargs: Any) -> Any:
    """Make an environment as one program on the `ranks_per_env` processes of each rank: see `mpi_fork`.

    The other processes of a rank go no further than this call: they make the environment, and the same calls
    of it as their rank, until the script ends. So what follows runs once for each rank.

    Args:
        make_env: a function or a class of the script or of a module. It may take its `place`.
        kwargs: its arguments.

    Returns:
        The environment; what its methods return in the first process counts.
    """
    if processes.follow():
        sys.exit()
    place = place_of(comm.get_rank(), evaluation=False)
    if place.call is None:
        return make_env(**make.with_place(make_env, place, kwargs))
    alone = dataclasses.replace(place, call=None)
    one = functools.partial(make_env, **make.with_place(make_env, alone, kwargs))
    return SharedEnv(place.call, one)


def make_shown(options: RunOptions, index: int = 0, /, **kwargs: Any) -> Any:
    """Make an environment as the run's, with its wrappers and nothing else around it.

    Args:
        options: options of the run.
        index: index of the environment among those that are shown.
        kwargs: more arguments, such as render_mode="human".
    """
    kwargs = {**options.env_kwargs, **kwargs}
    return make.make(options.env_id, options.wrappers, place_of(index), options.obs_dtype, **kwargs)


def env_maker(options: RunOptions, evaluation: bool = False) -> Callable[..., Any]:
    """Return a function that makes the environment of a run with a given index."""
    around = functools.partial  # each makes what it is around
    read = load_agent(options.algo).info
    kwargs_of = None
    if options.env_kwargs_of and not evaluation:
        kwargs_of = load_function(options.env_kwargs_of)

    def make_at(place: Place, kwargs: Mapping[str, Any], folder: Path | None = None) -> Any:
        place = dataclasses.replace(place, folder=folder)
        one: Callable[[], Any]
        how = options.env_id, options.wrappers, place, options.obs_dtype
        one = around(make.make, *how, **kwargs)
        if options.info:
            one = around(EpisodeInfo, one, options.info)
        if options.curriculum_method:
            one = around(ResetMethod, one, options.curriculum_method)
        if options.env_processes:
            preload = make.own_module(options.env_id)
            limits = options.step_timeout, options.start_timeout
            one = around(EnvProcess, one, *limits, preload, read)
        return one()

    def make_one(index: int = 0, /) -> Any:
        place = place_of(index, evaluation)
        own = kwargs_of(index) if kwargs_of else {}
        one: Callable[..., Any] = around(make_at, place, {**options.env_kwargs, **own})
        if options.env_folders:
            name = f"{'evaluation' if evaluation else 'env'}-{index:03}"
            one = around(FolderEnv, one, options.env_folders, name)
        if options.survives_env_errors:
            truncate, limit = options.on_env_error == "truncate", options.max_replay_steps
            one = around(RetriedEnv, one, options.env_retries, truncate, limit)
        if read:
            one = around(StepInfo, one, read)
        return one()

    return make_one


def make_rollout(options: RunOptions, rank: int, nworkers: int, only: int | None = None) -> Rollout:
    """Return the rollouts of one rank; or, with `only`, of that fragment id and its game alone.

    Collective: every rank calls this.
    """
    indices = _groups_of(options, rank, nworkers)
    groups = (options.episodes_per_batch or 0) // options.agents
    episodes = at_once = None
    fragments = (options.episodes_per_batch or 0) // nworkers or len(indices)
    if only is not None:
        number = only // options.agents
        indices = range(number, number + 1)
        episodes = (lambda: iter([number])) if groups else None
    elif groups:
        counter = Counter(groups)
        most = None
        if nworkers > 1:
            at_once = max(1, groups // (nworkers * _TURNS))
            if rank == 0 and options.rank0_envs is not None:
                most = groups * options.rank0_envs // options.num_envs
        episodes = functools.partial(counter.round, most)
    nparts = 1 if only is not None else _nparts(options, nworkers)
    block = make_block(env_maker(options), indices, options.seed)
    cuts = [fragments * part // nparts for part in range(1, nparts)]
    info = [label(name) for name in options.info]
    if episodes is None:
        return FixedSteps(block, options.steps_per_env, cuts, info)
    return WholeEpisodes(block, episodes, at_once, cuts, info)


def _groups_of(options: RunOptions, rank: int, nworkers: int) -> range:
    """Return the indices of a rank's envs, or of its games: no game is on two ranks."""
    of_rank0 = None if options.rank0_envs is None else options.rank0_envs // options.agents
    return envs_of(rank, nworkers, options.num_envs // options.agents, of_rank0)


def _nparts(options: RunOptions, nworkers: int) -> int:
    """Return the number of parts of a rank's rows: no more than the fragments of the largest share."""
    if nworkers == 1 or not comm.has_threads():
        return 1
    ranks = range(nworkers)
    blocks = [_groups_of(options, rank, nworkers) for rank in ranks]
    episodes = (options.episodes_per_batch or 0) // nworkers
    return min(options.gather_parts, episodes or max(map(len, blocks)))
