"""Start a run on this rank: rank 0's plan, the objects of the loop, then the loop.

Rank 0 reads and checks everything, once. It tells the other ranks the options, or the exit code.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rank0rl import seeding
from rank0rl.agent import Agent, Spaces
from rank0rl.collector import Collector
from rank0rl.envs.spaces import refuse_other_spaces
from rank0rl.evaluation import Evaluation
from rank0rl.launch import WRONG_USE, job, usage_error
from rank0rl.launch.hosts import count_ranks, read_hosts
from rank0rl.learner import Learner, Overlap
from rank0rl.mpi import comm
from rank0rl.mpi.threads import set_threads
from rank0rl.nets.networks import network_notes
from rank0rl.options import OptionError, as_settings, flag, names
from rank0rl.run import checkpoint, code, machine, settings
from rank0rl.run.agents import load_agent, make_agent, share_refusal
from rank0rl.run.folder import discard
from rank0rl.run.hooks import Hook, TensorBoard, WandB, make_hooks
from rank0rl.run.launch_options import Words, program
from rank0rl.run.logger import Logger
from rank0rl.run.options import RunOptions
from rank0rl.run.plan import Plan, prepare
from rank0rl.run.record import Recorder
from rank0rl.run.run import Run
from rank0rl.run.shares import make_rollout
from rank0rl.run.signals import Interrupted, closed, end
from rank0rl.run.state import State
from rank0rl.run.trust import sealed, without_seal, words_to_go_on
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
        check: raises ValueError if the options do not suit `more_hooks`. Called on rank 0.
        more_hooks: returns more hooks, given the options and the run's folder.

    Returns:
        The exit code: 0, or 2 for a wrong use.
    """
    set_threads(1)
    plan = _plan(words, configs, check) if comm.get_rank() == 0 else None
    told = comm.bcast_obj(_plain(plan) if isinstance(plan, Plan) else plan)
    if isinstance(told, int):
        return told
    assert not isinstance(plan, int)  # then it would have been told
    try:
        with ExitStack() as stack:
            return _train(stack, plan, told, more_hooks)
    except (Interrupted, job.Failure) as error:
        end(error)
        raise


def _train(
    stack: ExitStack,
    plan: Plan | None,
    told: Mapping[str, Any],
    more_hooks: Callable[[RunOptions, Path], Sequence[Hook]],
) -> int:
    """Train by a plan; return the exit code. `stack` closes what is opened here."""
    gc.freeze()  # what the imports made
    gc.enable()
    options, folder = RunOptions(**told["options"]), Path(told["folder"])
    agent_options = load_agent(options.algo).Options(**told["agent"])
    phases = Phases()
    if plan:
        stack.callback(plan.unlock)
    rank, nworkers = comm.get_rank(), comm.get_nworkers()
    rollout = make_rollout(options, rank, nworkers)
    stack.enter_context(closed(rollout.close))
    mine = rollout.block.words, rollout.block.has_state
    described, with_state = zip(*comm.allgather_obj(mine, "every environment"), strict=True)
    refuse_other_spaces({env: its for rank in described for env, its in rank.items()})
    rollout.block.has_state = all(with_state)
    try:
        seeding.seed_globals(options.seed, "init", 1)
        spaces = comm.bcast_obj(rollout.spaces)  # those of rank 0: bounds may differ
        agent = _make_agent(options, agent_options, spaces, plan)
        machines = comm.allgather_obj(machine.describe(), "what every rank runs on")
        _refuse_other_fingerprints(machines)
    except OptionError as error:  # the same on every rank
        if plan:
            discard(folder)
        return _refuse(error)
    collector = Collector(agent, rollout, options, phases)
    state = State(agent, collector, options, as_settings(options, agent_options))
    if options.eval_every:
        evaluation = Evaluation(options, nworkers)
        stack.enter_context(closed(evaluation.rollout.close))
        state.hooks.append(evaluation)
    state.hooks += more_hooks(options, folder)
    state.hooks += make_hooks(options, agent, collector.begin_with, state.share_over)
    try:
        recorder = _open_record(plan, state, phases, machines) if plan else None
    except (ValueError, OSError) as error:
        raise job.Failure(str(error)) from error
    run = Run(phases, recorder, state.hooks)
    learner = Learner(agent, options, phases, state.share_over)
    overlap = Overlap(learner, collector, phases, state.share_over)
    set_threads(1)  # again: the user's code may have loaded another BLAS or set torch's threads
    try:
        if recorder and not recorder.over():
            learner.prepare()
        train(agent, collector, overlap if options.overlap else learner, run)
    except Exception as error:
        if rollout.failed_at:
            error.add_note(_replay(options, folder, *rollout.failed_at))
        raise
    return 0


def _plan(words: Words, configs: Path | None, check: Callable[[RunOptions], None]) -> Plan | int:
    """Return the plan of rank 0; or the exit code, once help or the mistake is printed."""
    try:
        return prepare(words, configs, comm.get_nworkers(), os.environ.get(job.RESUME), check)
    except SystemExit as done:  # raised by tyro
        return int(done.code or 0)
    except ValueError as error:
        return _refuse(error)


def _refuse(error: ValueError) -> int:
    """Print the mistake in the command line, on rank 0; return the exit code."""
    if comm.get_rank() == 0:
        usage_error(str(error))
    return WRONG_USE


def _plain(plan: Plan) -> dict[str, Any]:
    """Return the settings as dicts: the other ranks have not imported the agent's file yet."""
    fields = {f.name: getattr(plan.agent, f.name) for f in dataclasses.fields(plan.agent)}
    return {"options": vars(plan.options), "agent": fields, "folder": str(plan.folder)}


def _make_agent(
    options: RunOptions, agent_options: Any, spaces: Spaces, plan: Plan | None
) -> Agent:
    """Return a run's agent, on rank 0 with the weights of --init-from.

    Collective: every rank calls this.

    Raises:
        OptionError: on every rank, if one cannot make it, or the weights do not fit.
    """
    refusal = ""
    try:
        agent = make_agent(options, agent_options, spaces)
        if plan and options.init_from and not options.resume:
            checkpoint.load_weights(agent, plan.init, f"--init-from {options.init_from}")
            agent.modules_loaded()
    except OptionError as error:
        refusal = str(error)
    share_refusal(refusal)
    return agent


def _replay(options: RunOptions, folder: Path, iteration: int, fragment_id: int) -> str:
    which = "--episode" if options.episodes_per_batch else "--env"
    return (
        f"To repeat it on one rank: python -m rank0rl replay {folder} --iteration {iteration} "
        f"{which} {fragment_id}"
    )


def _open_record(
    plan: Plan, state: State, phases: Phases, machines: Sequence[Mapping[str, Any]]
) -> Recorder:
    """Return rank 0's recorder. A resumed run first goes on from its last checkpoint.

    Args:
        plan: settings and folder of the run.
        state: state of a run that begins.
        phases: seconds of each phase.
        machines: `machine.describe` of every rank.

    Raises:
        ValueError: if the checkpoint does not fit the agent, or a file of the run is damaged.
        OSError: if a file cannot be written.
    """
    options, folder, nworkers = plan.options, plan.folder, len(machines)
    for hook in state.hooks:
        hook.folder, hook.settings = folder, state.settings
    if options.resume:
        file = checkpoint.before(folder, plan.made) or checkpoint.latest(folder)
        state.load(checkpoint.read(file))
    state.settings = sealed(state.settings)
    start = machine.provenance(machines, code.files_of(options))
    may_change = names(RunOptions, changes_curve=True, resume=True)
    its_own = {k: v for k, v in vars(options).items() if k in may_change and v is not None}
    group = {"ranks_per_env": options.ranks_per_env} if options.ranks_per_env > 1 else {}
    folders = {"env_folders": True} if options.env_folders else {}
    start |= {"iteration": state.progress.iteration, "settings": its_own, **group, **folders}
    start |= code.keep(plan.code, folder, settings.starts(folder / "config.toml"))
    starts = settings.write(folder / "config.toml", state.settings, start)
    state.hooks += _loggers(plan, state, starts[0])
    logger = Logger(folder, options.quiet)
    about: dict[str, Any] = {name: getattr(options, name) for name in ("env_id", "algo", "seed")}
    about |= {"nprocs": nworkers, **group, "num_envs": options.num_envs}
    about["fingerprint"] = machine.short(start["fingerprint"])
    command = partial(_resume_command, plan, nworkers, words_to_go_on(state.settings))
    recorder = Recorder(state, options, phases, about, logger, command)
    each = f" of {options.ranks_per_env} processes" if options.ranks_per_env > 1 else ""
    logger.print(
        f"{options.env_id} with {options.algo}; {nworkers} rank{'s' * (nworkers > 1)}{each}; settings: "
        f"{plan.source}; run folder: {folder}"
    )
    if options.resume and (by := state.ended()):
        logger.print(f"this run has ended, by {by}: to go on, raise {flag(by.partition(' ')[0])}")
    if options.gather_parts > 1 and not comm.has_threads():
        logger.print("note: --gather-parts has no effect: this MPI does not support threads")
    changes = machine.differences(starts[-2], starts[-1]) if len(starts) > 1 else []
    differences = [*changes, *_host_differences(machines)]
    modules = state.agent.modules().values()
    notes = [*plan.notes, *network_notes(modules, plan.agent, options.device)]
    notes += [plan.agents_note] if plan.agents_note else []
    notes += [f"{each}: the last bits of the curve may differ" for each in differences]
    for note in notes:
        logger.print(f"note: {note}")
    return recorder


def _refuse_other_fingerprints(machines: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptionError if ranks compute other bits than rank 0: the curve would depend on their number."""
    first = machines[0]
    for rank, each in enumerate(machines):
        if each["fingerprint"] != first["fingerprint"]:
            names = machine.unlike(first["fingerprint"], each["fingerprint"])
            raise OptionError(
                f"ranks must compute the same bits: on rank {rank} ({each['host']}, {each['cpu']}) "
                f"{', '.join(names[:3])} gives others than on rank 0 ({first['host']}, {first['cpu']}), "
                f"{len(names)} of the functions that were compared; leave out --cpu native, and have the "
                f"same versions and variables on every host (rank0rl doctor --hosts compares them)"
            )


def _host_differences(machines: Sequence[Mapping[str, Any]]) -> list[str]:
    """List how each host differs from the first one."""
    hosts = {each["host"]: each for each in reversed(machines)}
    return [
        line
        for host, each in reversed(hosts.items())
        for line in machine.differences(
            machines[0], each, f"{{name}} {{before}} is {{now}} on {host}"
        )
    ]


def _resume_command(plan: Plan, nworkers: int, code: str) -> str:
    """Return the command line that resumes a run, with as many ranks on the same hosts without lost ones.

    `code` names code that must be named again.
    """
    options, default = plan.options, vars(RunOptions())
    given = {n: v for n, v in vars(options).items() if v != default[n]}
    left = job.hosts_left()
    with suppress(ValueError):  # no host that is left has room for an environment's ranks
        if left:
            most = count_ranks(None, read_hosts(left, None), options.ranks_per_env)
            nworkers = min(nworkers, most)
            given |= {"hosts": left, "hostfile": None}
    given |= {"nprocs": nworkers if nworkers > 1 else None}
    given |= dict.fromkeys(("stop_after_iterations", "stop_after_seconds"))
    _, _, *words = Words.to_go_on(plan.folder, given).argv
    resume = shlex.join([*program(), "--resume", str(plan.folder)])
    return f"{resume}{code} {shlex.join(words)}".rstrip()


def _loggers(plan: Plan, state: State, first_start: Mapping[str, Any]) -> Iterator[Hook]:
    """Yield the hooks that send the record elsewhere."""
    options, folder = plan.options, plan.folder
    if options.tensorboard:
        yield TensorBoard(folder, state.progress.steps)
    if options.wandb:
        yield WandB(options.wandb, folder, without_seal(state.settings), first_start)
