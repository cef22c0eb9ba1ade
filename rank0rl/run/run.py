"""A run as every rank takes part in it: how rank 0 begins it, whether it goes on, its signals and record."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from rank0rl.agent import Agent
from rank0rl.batch import Gathered
from rank0rl.launch import job
from rank0rl.launch.hosts import count_ranks, read_hosts
from rank0rl.mpi import comm, threads
from rank0rl.nets.networks import cost_notes
from rank0rl.options import flag, names
from rank0rl.run import checkpoint, machine, settings, trust
from rank0rl.run.hooks import Hook, Record, TensorBoard, WandB
from rank0rl.run.logger import Logger
from rank0rl.run.options import RunOptions
from rank0rl.run.plan import Plan
from rank0rl.run.record import Recorder
from rank0rl.run.signals import Interrupts
from rank0rl.run.state import State
from rank0rl.run.usage import Phases


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
    for hook in state.hooks:
        hook.folder, hook.settings = folder, state.settings
    if options.resume:
        state.load(checkpoint.read(checkpoint.latest(folder)))
    if plan.init:
        checkpoint.load_init(state.agent, plan.init)
    if plan.notes:
        state.progress.same_schedule_since = state.progress.iteration
    state.settings = trust.sealed(state.settings)
    start = machine.provenance(machines, comm.mpi_version(), threads.blas())
    may_change = names(RunOptions, changes_curve=True, resume=True)
    its_own = {k: v for k, v in vars(options).items() if k in may_change and v is not None}
    start |= {"iteration": state.progress.iteration, "settings": its_own}
    starts = settings.write(folder / "config.toml", state.settings, start)
    state.hooks += _loggers(plan, state, starts[0])
    logger = Logger(folder, options.quiet)
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
    changes = machine.differences(starts[-2], starts[-1]) if len(starts) > 1 else []
    differences = [*changes, *machine.host_differences(machines)]
    modules = state.agent.modules().values()
    for note in [
        *plan.notes,
        *cost_notes(modules, getattr(plan.agent, "epochs", 1), options.device),
        *(f"{d}: the last bits of the curve may differ" for d in differences),
    ]:
        logger.print(f"note: {note}")
    return recorder


def _resume_command(plan: Plan, nworkers: int, code: str) -> str:
    where = _where(plan.options, nworkers)
    resume = shlex.join([*machine.program(), "--resume", str(plan.folder)])
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


def _loggers(plan: Plan, state: State, first_start: Mapping[str, Any]) -> Iterator[Hook]:
    """Yield where the record goes besides the run's folder."""
    options, folder = plan.options, plan.folder
    if options.tensorboard:
        yield TensorBoard(folder, state.progress.steps)
    if options.wandb:
        yield WandB(
            options.wandb,
            folder,
            trust.without_seal(state.settings),
            machine.key(folder, first_start),
        )


class Restorable(Protocol):
    """The part of a run that is restored on every rank: a `Collector`."""

    def restore(self) -> Mapping[int, str]:
        """Bring every rank to where rank 0 is; return the envs that cannot go on, and why."""


class Run:
    """Counts, records, saves and handles signals; on ranks other than 0 it does what rank 0 says.

    Entered, it turns signals into an orderly end. Left, however that comes, it saves the last
    iteration boundary.

    Args:
        phases: takes the seconds of each phase.
        recorder: keeps the record on rank 0; None on the other ranks.
        hooks: what else happens around an iteration. They are closed when the run is left.

    Raises:
        Interrupted: on rank 0 after SIGINT, SIGTERM or SIGUSR1, when the last boundary's state is on disk.
    """

    def __init__(
        self, phases: Phases, recorder: Recorder | None, hooks: Sequence[Hook] = ()
    ) -> None:
        """Prepare; the run begins when it is entered."""
        self.phases = phases
        self.hooks = hooks
        self._recorder = recorder
        self._interrupts = Interrupts(keep=recorder is None)
        self._stack = ExitStack()
        self._last = 0.0

    def __enter__(self) -> Run:
        """Take over the signals."""
        with ExitStack() as stack:  # a signal that comes in here finds the last words
            if self._recorder:
                stack.enter_context(self._recorder.last_words())
            for hook in self.hooks:
                stack.callback(hook.close)
            stack.enter_context(self._interrupts)
            if self._recorder:
                stack.enter_context(self._saved(self._recorder))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        """Save the last boundary, give the signals back, and say how to go on."""
        return self._stack.__exit__(kind, error, trace)

    def restore(self, collector: Restorable) -> int:
        """Bring all ranks to where rank 0 is; return the number of iterations made.

        Collective: every rank calls this.
        """
        with self._interrupts.held():
            if self._recorder:
                self._recorder.begin()
            iteration = comm.bcast_obj(self._recorder.iteration if self._recorder else None)
            for env, why in collector.restore().items():
                print(f"env {env}: {why}; a new episode begins there, so the curve is another one")
            comm.barrier()  # so that the first iteration's times are not those of starting
        self._last = time.perf_counter()
        return int(iteration)

    def goes_on(self) -> bool:
        """Return rank 0's decision on every rank: True while there is more to do.

        Collective: every rank calls this. Called right after the broadcast of weights, it follows
        that on one trip.
        """
        with self.phases("wait"):
            return bool(comm.bcast_obj(self._recorder is not None and not self._recorder.over()))

    def before(self, iteration: int) -> None:
        """Call the hooks before an iteration. Collective: every rank calls this."""
        for hook in self.hooks:
            try:
                hook.before(iteration)
            except Exception as error:
                error.add_note(f"In the hook {type(hook).__name__}, before iteration {iteration}.")
                raise

    def record(
        self, agent: Agent, iteration: int, batch: Gathered, metrics: Mapping[str, float]
    ) -> None:
        """Call the hooks after an iteration, and record it on rank 0.

        Collective: every rank calls this.

        Args:
            agent: the agent.
            iteration: number of the iteration that has just ended.
            batch: what the agent learned from.
            metrics: what its update returned.
        """
        with self.phases("evaluate"):
            for hook in self.hooks:
                if hook.on_every_rank:
                    hook.after(agent, iteration, Record())
        if self._recorder is None:
            return
        now = time.perf_counter()  # recording counts for the next iteration
        with self._interrupts.held(), self.phases("record"):
            self._recorder.record(now - self._last, batch, metrics)
        self._last = now

    @contextmanager
    def _saved(self, recorder: Recorder) -> Iterator[None]:
        try:
            yield
        finally:
            with self._interrupts.held():
                recorder.save()
