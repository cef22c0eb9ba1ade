"""Rank 0's update, alone or while the other ranks collect the next batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rank0rl import seeding
from rank0rl.agent import Agent
from rank0rl.batch import Gathered
from rank0rl.collector import Collector
from rank0rl.mpi import comm, weights
from rank0rl.mpi.threads import set_threads
from rank0rl.nets.images import use_threads
from rank0rl.run.agent_checks import PREPARING, check_kept, lost_numbers, numbers, trained
from rank0rl.run.machine import available_cores
from rank0rl.run.options import RunOptions
from rank0rl.run.usage import Phases

_LOOKS = 2  # first updates that are checked; an optimizer has its tensors since its first step
_MOST_THREADS = 8  # a minibatch rarely has more tasks


class Learner:
    """Lets the agent learn from a batch on rank 0; the other ranks return at once.

    Collective: every rank makes one.

    Args:
        agent: the agent.
        options: options of the run.
        phases: takes the seconds of "update".
        share_over: returns the share of the run that is over, on rank 0.
    """

    def __init__(
        self,
        agent: Agent,
        options: RunOptions,
        phases: Phases,
        share_over: Callable[[], float],
    ) -> None:
        self._agent, self._options, self._phases = agent, options, phases
        self._share_over = share_over
        tensors = weights.named_tensors(agent.modules())
        self._infinite = {name for name, t in tensors.items() if t.isinf().any()}  # as masks may be
        agent.threads = options.learner_threads or _free_cores(options)
        use_threads(agent.modules().values(), agent.threads)
        self._preparing: Future[None] | None = None
        self._updates, self._has_noted = "", False

    def prepare(self) -> None:
        """Let the agent prepare its first update, in a thread. Call it on rank 0, once, if there is to be one."""
        pool = ThreadPoolExecutor(1, PREPARING)
        self._preparing = pool.submit(_prepare, self._agent)
        pool.shutdown(wait=False)

    def update(self, batch: Gathered, iteration: int) -> Mapping[str, float]:
        """Update the agent on rank 0. The iteration's number keys the update's random stream.

        Returns:
            What the agent records, name -> number; nothing on other ranks.

        Raises:
            TypeError: if what the agent's update returns cannot be recorded.
            ValueError: if it changes tensors that no checkpoint has.
            FloatingPointError: if weights are nan after it, or infinite and were not so at first.
        """
        if comm.get_rank():
            return {}
        rng = seeding.stream(self._options.seed, "update", iteration)
        try:
            self._finish_preparing()
            seeding.seed_globals(self._options.seed, "update", iteration)
            looks = iteration <= _LOOKS or not iteration % self._options.drift_check_every
            before, earlier = (trained(self._agent), numbers(self._agent)) if looks else ({}, {})
            with self._phases("update"):
                metrics = self._agent.update(batch.rows, rng, self._share_over())
            if looks:
                check_kept(self._agent, before)
                self._note_lost(lost_numbers(self._agent, earlier))
            _check_metrics(metrics)
            self._check_weights()
            self._tell_how()
        except Exception as error:
            error.add_note(f"In update, of iteration {iteration}; resuming the run repeats it.")
            raise
        return metrics

    def _note_lost(self, names: Sequence[str]) -> None:
        """Print once which numbers a resumed run would not have."""
        if names and not self._has_noted and not self._options.quiet:
            self._has_noted = True
            print(
                f"note: update has changed {', '.join(names)}, and neither modules() nor state() has it: other ranks "
                f"and a resumed run have another value; if act, process or a later update reads it, return it "
                f"from modules() or state()"
            )

    def _tell_how(self) -> None:
        """Print how updates are computed, when that becomes known and whenever it changes."""
        if self._agent.updates != self._updates and not self._options.quiet:
            print(f"updates: {self._agent.updates}")
        self._updates = self._agent.updates

    def _finish_preparing(self) -> None:
        if self._preparing is None:
            return
        start = time.perf_counter()
        with self._phases("wait"):
            self._preparing.result()
        self._preparing = None
        set_threads(1)  # the compiler has loaded a BLAS of its own
        waited = time.perf_counter() - start
        if waited > 3 and not self._options.quiet:
            print(
                f"note: the first update waited {waited:.1f} s until its code was compiled; the next "
                f"run finds it in the cache"
            )

    def _check_weights(self) -> None:
        for name, tensor in weights.named_tensors(self._agent.modules()).items():
            wrong = tensor.isnan() if name in self._infinite else tensor * 0  # inf * 0 is nan
            if wrong.any():
                raise FloatingPointError(
                    f"{name!r} holds {'nan' if tensor.isnan().any() else 'inf'}: look for nan "
                    f"and inf in a loss of your own and in its gradient, or try a lower learning rate, or "
                    f"smaller rewards and observations; the run's last checkpoint is from before this "
                    f"update"
                )


class Overlap:
    """Let rank 0 update on a batch while the other ranks collect the next one.

    That batch is collected with weights that are one update older, by rank 0 too, before its update.
    It is gathered before the new weights are broadcast, so that a checkpoint holds it. `share_over` is
    that of `State`, on rank 0.
    """

    def __init__(
        self,
        learner: Learner,
        collector: Collector,
        phases: Phases,
        share_over: Callable[[int, int], float],
    ) -> None:
        self._learner, self._collector = learner, collector
        self._phases, self._share_over = phases, share_over

    def update(self, batch: Gathered, iteration: int) -> Mapping[str, float]:
        """Update on rank 0; collect the next batch unless the schedule ends with this one.

        Collective: every rank calls this.
        """
        with self._phases("wait"):
            more = (
                not comm.get_rank()
                and self._share_over(batch.steps, len(batch.ended["return"])) < 1
            )
            more = comm.bcast_obj(more)
        if not more:
            return self._learner.update(batch, iteration)
        self._collector.roll(iteration + 1)
        metrics = self._learner.update(batch, iteration)
        self._collector.gather()
        return metrics


def _prepare(agent: Agent) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # the rollouts in the main thread get their turn at once
    try:
        agent.prepare()
    finally:
        sys.setswitchinterval(before)


def _free_cores(options: RunOptions) -> int:
    """Return the number of this host's cores that no rank needs during an update, 1 to 8.

    Collective with `--overlap`.
    """
    free = len(available_cores())
    if options.overlap:
        hosts = comm.hosts()
        free -= hosts.count(hosts[0]) - 1
    return max(1, min(free, _MOST_THREADS))


def _check_metrics(metrics: Any) -> None:
    """Raise unless an update has returned what can be recorded, and name what cannot."""
    wrong = metrics
    if isinstance(metrics, Mapping):
        wrong = {k: x for k, x in metrics.items() if not (_is_name(k) and _is_number(x))}
    if wrong or not isinstance(metrics, Mapping):
        raise TypeError(
            f"update must return a dict of name -> number, for the record: got {wrong!r:.100}"
        )


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isprintable()


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return np.ndim(value) == 0 and not isinstance(value, str | bytes)
