"""One training run on one rank: agent and environments as planned, then the loop.

Rank 0 reads and checks everything, once; the other ranks are told what it found, or how it failed.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rank0rl import envs, seeding
from rank0rl.agent import Agent, Spaces
from rank0rl.evaluation import LANES, Part
from rank0rl.mpi import comm, job
from rank0rl.mpi.average import AllRanks
from rank0rl.mpi.counter import Tickets
from rank0rl.mpi.threads import set_threads
from rank0rl.rollout import Rollout, envs_of
from rank0rl.run import checkpoint, config, provenance
from rank0rl.run.config import RunOptions
from rank0rl.run.interrupt import Interrupted
from rank0rl.run.logger import Logger
from rank0rl.run.plan import Plan, load_agent, prepare
from rank0rl.run.recorder import Run
from rank0rl.run.sinks import Sink, TensorBoard, WandB
from rank0rl.run.state import State
from rank0rl.trainer import train

_TURNS = 2  # in which a rank collects its episodes, for an even end; more give act too few rows


def run(argv: list[str], configs: Path | None) -> int:
    """Train as the command line says.

    Collective: every rank calls this.

    Returns:
        The exit code: 0, 2 for a wrong use, 128 + s after signal s.
    """
    set_threads(1)
    plan = _try(argv, configs) if comm.get_rank() == 0 else None
    shared = comm.bcast_obj(plan if isinstance(plan, int) else _plain(plan))
    if isinstance(shared, int):
        return shared
    gc.freeze()  # what the imports made
    gc.enable()
    options = RunOptions(**shared["options"])
    agent_options = load_agent(options.algo).Options(**shared["agent"])
    rollout = make_rollout(options, comm.get_rank(), comm.get_nworkers())
    agent = make_agent(options, agent_options, rollout.spaces)
    evaluation = make_evaluation(options, comm.get_nworkers())
    machines = comm.allgather_obj(provenance.machine(), "what every rank runs on")
    try:
        if isinstance(plan, Plan):
            _lead(plan, agent, rollout, evaluation, machines)
        else:
            train(agent, rollout, options, None, evaluation)
        return 0
    except Exception as error:
        if rollout.failed_at and options.update == "rank0":
            iteration, unit = rollout.failed_at
            at = f"{shared['folder']} --iteration {iteration} --lane {unit}"
            error.add_note(f"To repeat it on one rank: python -m rank0rl replay {at}")
        raise
    finally:
        rollout.close()
        if evaluation:
            evaluation.close()


def _lead(
    plan: Plan,
    agent: Agent,
    rollout: Rollout,
    evaluation: Part | None,
    machines: Sequence[Mapping[str, Any]],
) -> None:
    """Rank 0's part: the run's files, and the words around the loop."""
    options, folder, nworkers = plan.options, plan.folder, comm.get_nworkers()
    about = {
        "env_id": options.env_id,
        "algo": options.algo,
        "seed": options.seed,
        "nprocs": nworkers,
        "num_envs": options.num_envs,
    }
    state = State(agent, options, config.settings(options, plan.agent))
    if options.resume:
        state.load(checkpoint.read(checkpoint.latest(folder)))
    if plan.notes:
        state.progress.same_schedule_since = state.progress.iteration
    record = provenance.record(machines, comm.mpi_version())
    starts = config.write(folder / "config.toml", (options, plan.agent), record)
    logger = Logger(folder, options.quiet, _sinks(plan, state, starts[0]))
    kept = Run(state, options, about, logger)
    logger.print(
        f"{options.env_id} with {options.algo}; {nworkers} rank{'s' * (nworkers > 1)}; settings: "
        f"{plan.source}; run folder: {folder}"
    )
    for note in [*_notes(options), *plan.notes]:
        logger.print(f"note: {note}")
    changes = provenance.differences(starts[-2], starts[-1]) if len(starts) > 1 else []
    for difference in [*changes, *provenance.apart(machines)]:
        logger.print(f"note: {difference}: the last bits of the curve may differ")
    go_on = f"python {sys.argv[0]} --resume {folder}{_where(options, nworkers)}"
    try:
        train(agent, rollout, options, kept, evaluation)
    except BaseException as error:
        logger.close()
        said = f"saved iteration {kept.saved}; go on with: {go_on}"
        logger.print(
            f"{error if isinstance(error, Interrupted) and not job.failed() else 'failed'}: "
            f"{'nothing was saved' if kept.saved is None else said}"
        )
        if isinstance(error, Interrupted):
            comm.abort(128 + error.signum)
        if isinstance(error, checkpoint.NotSaved):
            job.fail(1, f"error: {error}")
            comm.abort(1)
        raise
    finally:
        logger.close()
    if state.share_over() < 1:
        logger.print(f"stopped after iteration {kept.saved}, as asked; go on with: {go_on}")
    logger.print("  ".join(f"{name} {_short(value)}" for name, value in kept.summary().items()))


def _where(options: RunOptions, nworkers: int) -> str:
    """What starts as many ranks again, where these are."""
    hosts = {"--hosts": options.hosts, "--hostfile": options.hostfile}
    named = [f" {flag} {value}" for flag, value in hosts.items() if value]
    return "".join(named) + f" --nprocs {nworkers}" * (nworkers > 1)


def _notes(options: RunOptions) -> Iterator[str]:
    """What a user may not expect of these settings."""
    if options.update == "allreduce":
        yield "with --update allreduce every number of ranks has a curve of its own"
    if options.gather_parts > 1 and not comm.has_threads():
        yield "--gather-parts has no effect: several threads may not use this MPI"


def _sinks(plan: Plan, state: State, first_start: Mapping[str, Any]) -> Iterator[Sink]:
    """Where the record goes besides the run's folder, as was asked for."""
    options, folder = plan.options, plan.folder
    if options.tensorboard:
        yield TensorBoard(folder, state.progress.steps)
    if options.wandb:
        yield WandB(options.wandb, folder, state.settings, provenance.key(folder, first_start))


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def make_agent(options: RunOptions, agent_options: Any, spaces: Spaces) -> Agent:
    """The agent with its initial weights."""
    rng = seeding.stream(options.seed, "init")
    agent = load_agent(options.algo)(spaces, agent_options, rng)
    agent.device = options.device
    if options.update == "allreduce":
        agent.learners = AllRanks()
    return agent


def make_rollout(options: RunOptions, rank: int, nworkers: int, only: int | None = None) -> Rollout:
    """The lanes of one rank; or the lane, or episode of each iteration, of this number only.

    Collective: every rank calls this.
    """
    lanes = envs_of(rank, nworkers, options.num_envs, options.rank0_envs)
    episodes = at_once = None
    units = (options.episodes_per_batch or 0) // nworkers or len(lanes)
    if only is not None:
        lanes = range(only, only + 1)
        episodes = (lambda: iter([only])) if options.episodes_per_batch else None
    elif options.episodes_per_batch:
        tickets = Tickets(options.episodes_per_batch)
        most = None
        if nworkers > 1:
            at_once = max(1, options.episodes_per_batch // (nworkers * _TURNS))
            if rank == 0 and options.rank0_envs is not None:
                most = options.episodes_per_batch * options.rank0_envs // options.num_envs
        episodes = functools.partial(tickets.round, most)
    parts = 1 if only is not None else _parts(options, nworkers)
    return Rollout(
        lambda: envs.make(options.env_id, options.wrappers, **options.env_kwargs),
        lanes,
        options.seed,
        steps=options.steps_per_env,
        episodes=episodes,
        at_once=at_once,
        cuts=[units * part // parts for part in range(1, parts)],
    )


def _parts(options: RunOptions, nworkers: int) -> int:
    """In how many parts a rank's share travels: no more than the largest share has units."""
    if nworkers == 1 or not comm.has_threads():
        return 1
    lanes = [envs_of(r, nworkers, options.num_envs, options.rank0_envs) for r in range(nworkers)]
    episodes = (options.episodes_per_batch or 0) // nworkers
    return min(options.gather_parts, episodes or max(map(len, lanes)))


def make_evaluation(options: RunOptions, nworkers: int) -> Part | None:
    """This rank's part of the run's evaluations, if it has any.

    Collective: every rank calls this.
    """
    if options.eval_every is None:
        return None
    return Part(
        lambda: envs.make(options.env_id, options.wrappers, **options.env_kwargs),
        options.eval_episodes,
        options.seed,
        Tickets(options.eval_episodes).round,
        min(LANES, -(-options.eval_episodes // nworkers)),
    )


def _plain(plan: Plan | None) -> dict[str, Any]:
    """The settings as dicts: the other ranks have not imported the agent's file yet."""
    if plan is None:
        return {}
    fields = {f.name: getattr(plan.agent, f.name) for f in dataclasses.fields(plan.agent)}
    return {"options": vars(plan.options), "agent": fields, "folder": str(plan.folder)}


def _try(argv: list[str], configs: Path | None) -> Plan | int:
    """What rank 0 found, or the exit code after it has said what is wrong."""
    try:
        return prepare(argv, configs, comm.get_nworkers(), os.environ.get(job.RESUME))
    except SystemExit as done:  # tyro has printed help or what is wrong with an argument
        return int(done.code or 0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
