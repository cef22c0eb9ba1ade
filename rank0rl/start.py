"""Start a run on this rank: rank 0's plan, the objects of the loop, then the loop.

Rank 0 reads and checks everything, once. The other ranks are told what it found, or how it failed.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rank0rl import seeding
from rank0rl.collector import Collector
from rank0rl.envs import spaces
from rank0rl.evaluation import Evaluation
from rank0rl.launch import job
from rank0rl.launch.failures import WRONG_USE
from rank0rl.learner import Learner, Overlap
from rank0rl.mpi import comm
from rank0rl.mpi.threads import set_threads
from rank0rl.options import OptionError
from rank0rl.run import checkpoint, machine
from rank0rl.run import settings as config
from rank0rl.run.agents import load_agent, make_agent
from rank0rl.run.folder import discard
from rank0rl.run.hooks import Hook, make_hooks
from rank0rl.run.launch_options import Words
from rank0rl.run.options import RunOptions
from rank0rl.run.plan import Plan, prepare
from rank0rl.run.record import Recorder
from rank0rl.run.rollouts import make_rollout
from rank0rl.run.run import Run, lead
from rank0rl.run.state import State
from rank0rl.run.usage import Phases
from rank0rl.trainer import train


def start(
    words: Words,
    configs: Path | None,
    check: Callable[[RunOptions], None],
    more_hooks: Callable[[RunOptions, Path], Sequence[Hook]],
) -> int:
    """Train as the command line says.

    Collective: every rank calls this.

    Args:
        words: the command line.
        configs: folder of TOML files, one of which may be loaded by itself.
        check: raises ValueError for options that the hooks cannot serve. Called on rank 0.
        more_hooks: returns hooks of the loop, from the options and the run's folder.

    Returns:
        The exit code: 0, or 2 for a wrong use.
    """
    set_threads(1)
    plan = _plan(words, configs, check) if comm.get_rank() == 0 else None
    told = comm.bcast_obj(_plain(plan) if isinstance(plan, Plan) else plan)
    if isinstance(told, int):
        return told
    gc.freeze()  # what the imports made
    gc.enable()
    options, folder = RunOptions(**told["options"]), Path(told["folder"])
    agent_options = load_agent(options.algo).Options(**told["agent"])
    phases = Phases()
    with ExitStack() as stack:
        if isinstance(plan, Plan):
            stack.callback(plan.unlock)
        rollout = stack.enter_context(
            closing(make_rollout(options, comm.get_rank(), comm.get_nworkers()))
        )
        described = comm.allgather_obj(
            rollout.block.words, "the spaces of every rank's environments"
        )
        spaces.refuse_other_spaces({env: its for rank in described for env, its in rank.items()})
        try:
            seeding.seed_globals(options.seed, "init", 1)
            agent = make_agent(options, agent_options, rollout.spaces)
            if told["init"]:
                checkpoint.check_init(agent, told["init"], str(options.init_from))
        except OptionError as error:  # the same on every rank
            if isinstance(plan, Plan):
                discard(folder)
            return _refuse(error)
        collector = Collector(agent, rollout, options, phases)
        machines = comm.allgather_obj(machine.describe(), "what every rank runs on")
        settings = config.settings(options, agent_options)
        state = State(agent, collector, options, settings)
        if options.eval_every:
            state.hooks.append(Evaluation(options, comm.get_nworkers()))
        state.hooks += more_hooks(options, folder)
        state.hooks += make_hooks(options, agent, collector.begin_with, state.share_over)
        recorder = _lead(plan, state, phases, machines) if isinstance(plan, Plan) else None
        run = Run(phases, recorder, state.hooks)
        learner = Learner(agent, options, phases, state.share_over)
        overlap = Overlap(learner, collector, phases, state.share_over)
        set_threads(
            1
        )  # again: the user's code may have loaded another BLAS, or set torch's threads
        try:
            learner.prepare()
            train(agent, collector, overlap if options.overlap else learner, run)
        except Exception as error:
            if rollout.failed_at:
                error.add_note(_replay(options, folder, *rollout.failed_at))
            raise
    return 0


def _plan(words: Words, configs: Path | None, check: Callable[[RunOptions], None]) -> Plan | int:
    """Return the plan of rank 0, or the exit code after saying what is wrong."""
    try:
        return prepare(words, configs, comm.get_nworkers(), os.environ.get(job.RESUME), [check])
    except SystemExit as done:  # tyro has printed help or what is wrong with an argument
        return int(done.code or 0)
    except ValueError as error:
        return _refuse(error)


def _refuse(error: ValueError) -> int:
    """Say what is wrong with the command line, on rank 0; return the exit code."""
    if comm.get_rank() == 0:
        print(f"error: {error}", file=sys.stderr)
    return WRONG_USE


def _lead(
    plan: Plan, state: State, phases: Phases, machines: Sequence[Mapping[str, Any]]
) -> Recorder:
    """Return rank 0's recorder, or end the job with one line if the run cannot go on."""
    try:
        return lead(plan, state, phases, machines)
    except ValueError as error:
        job.fail(1, f"error: {error}")
        comm.abort(1)
        raise


def _plain(plan: Plan) -> dict[str, Any]:
    """Return the settings as dicts: the other ranks have not imported the agent's file yet."""
    fields = {f.name: getattr(plan.agent, f.name) for f in dataclasses.fields(plan.agent)}
    init = checkpoint.init_shapes(plan.init)
    return {
        "options": vars(plan.options),
        "agent": fields,
        "folder": str(plan.folder),
        "init": init,
    }


def _replay(options: RunOptions, folder: Path, iteration: int, fragment_id: int) -> str:
    which = "--episode" if options.episodes_per_batch else "--env"
    return (
        f"To repeat it on one rank: python -m rank0rl replay {folder} --iteration {iteration} "
        f"{which} {fragment_id}"
    )
