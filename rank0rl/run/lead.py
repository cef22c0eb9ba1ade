"""Rank 0's part before the loop: resume from a checkpoint, open the record, say what is run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rank0rl.launch import job
from rank0rl.launch.hosts import count_ranks, read_hosts
from rank0rl.mpi import comm, threads
from rank0rl.nets.conv import image_notes
from rank0rl.nets.own import cost_notes
from rank0rl.options import flag, names
from rank0rl.run import checkpoint, config, init_from, provenance, trust
from rank0rl.run.logger import Logger
from rank0rl.run.options import RunOptions
from rank0rl.run.plan import Plan
from rank0rl.run.recorder import Recorder
from rank0rl.run.sinks import Sink, TensorBoard, WandB
from rank0rl.run.state import State
from rank0rl.run.timing import Phases


def lead(
    plan: Plan, state: State, phases: Phases, machines: Sequence[Mapping[str, Any]]
) -> Recorder:
    """Open a run's record; on a resume, load its last checkpoint first. Rank 0 only.

    Args:
        plan: settings and folder of the run.
        state: state of a run that begins.
        phases: seconds of each phase.
        machines: `provenance.machine` of every rank.

    Raises:
        ValueError: if the checkpoint does not fit the agent, or a file of the run is damaged.
    """
    options, folder, nworkers = plan.options, plan.folder, len(machines)
    if options.resume:
        state.load(checkpoint.read(checkpoint.latest(folder)))
    if plan.init:
        init_from.load(state.agent, plan.init)
    if plan.notes:
        state.progress.same_schedule_since = state.progress.iteration
    state.settings = trust.sealed(state.settings)
    start = provenance.record(machines, comm.mpi_version(), threads.blas())
    may_change = names(RunOptions, changes_curve=True, resume=True)
    its_own = {k: v for k, v in vars(options).items() if k in may_change and v is not None}
    start |= {"iteration": state.progress.iteration, "settings": its_own}
    starts = config.write(folder / "config.toml", state.settings, start)
    logger = Logger(folder, options.quiet, _sinks(plan, state, starts[0]))
    about = {
        "env_id": options.env_id,
        "algo": options.algo,
        "seed": options.seed,
        "nprocs": nworkers,
        "num_envs": options.num_envs,
    }
    command = partial(_resume_command, plan, nworkers, trust.words_to_go_on(state.settings))
    recorder = Recorder(state, options, phases, about, logger, command)
    logger.print(
        f"{options.env_id} with {options.algo}; {nworkers} rank{'s' * (nworkers > 1)}; settings: "
        f"{plan.source}; run folder: {folder}"
    )
    if options.resume and (by := state.ended()):
        logger.print(f"this run has ended, by {by}: to go on, raise {flag(by.partition(' ')[0])}")
    if options.gather_parts > 1 and not comm.has_threads():
        logger.print("note: --gather-parts has no effect: this MPI does not support threads")
    changes = provenance.differences(starts[-2], starts[-1]) if len(starts) > 1 else []
    differences = [*changes, *provenance.host_differences(machines)]
    modules = state.agent.modules().values()
    for note in [
        *plan.notes,
        *cost_notes(modules),
        *image_notes(modules, getattr(plan.agent, "epochs", 1), options.device),
        *(f"{d}: the last bits of the curve may differ" for d in differences),
    ]:
        logger.print(f"note: {note}")
    return recorder


def _resume_command(plan: Plan, nworkers: int, code: str) -> str:
    where = _where(plan.options, nworkers)
    resume = shlex.join([*provenance.program(), "--resume", str(plan.folder)])
    return f"{resume}{code}{where}"


def _where(given: RunOptions, nworkers: int) -> str:
    """Return the options that start as many ranks again, on the same hosts but for lost ones."""
    where = {"--hosts": given.hosts, "--hostfile": given.hostfile, "--pass-env": given.pass_env}
    where["--keep-batches"] = given.keep_batches
    if left := job.hosts_left():
        where |= {"--hosts": left, "--hostfile": None}
        nworkers = min(nworkers, count_ranks(None, read_hosts(left, None)))
    named = [f" {flag} {shlex.quote(value)}" for flag, value in where.items() if value]
    return "".join(named) + f" --nprocs {nworkers}" * (nworkers > 1)


def _sinks(plan: Plan, state: State, first_start: Mapping[str, Any]) -> Iterator[Sink]:
    """Yield where the record goes besides the run's folder."""
    options, folder = plan.options, plan.folder
    if options.tensorboard:
        yield TensorBoard(folder, state.progress.steps)
    if options.wandb:
        yield WandB(
            options.wandb,
            folder,
            trust.without_seal(state.settings),
            provenance.key(folder, first_start),
        )
