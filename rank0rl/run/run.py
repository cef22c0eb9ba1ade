"""A run on every rank: whether it goes on, its signals, its hooks, and the record on rank 0."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rank0rl.agent import Agent
from rank0rl.batch import Gathered
from rank0rl.launch import held
from rank0rl.mpi import comm
from rank0rl.run.hooks import Hook, Record
from rank0rl.run.record import Recorder
from rank0rl.run.signals import Interrupted, Interrupts, end
from rank0rl.run.usage import Phases


class Run:
    """Counts, records, saves and handles signals. Ranks other than 0 follow rank 0.

    Within its `with` block, a signal ends the run in order. At the end of the block, after an error
    too, the last iteration boundary is saved.

    Args:
        phases: seconds of each phase.
        recorder: keeps the record on rank 0; None on the other ranks.
        hooks: called around every iteration, and closed at the end of the block.

    Raises:
        Interrupted: on rank 0 after SIGINT, SIGTERM or SIGUSR1, once the last boundary is on disk.
    """

    def __init__(
        self, phases: Phases, recorder: Recorder | None, hooks: Sequence[Hook] = ()
    ) -> None:
        self.phases = phases
        self.hooks = hooks
        self._recorder = recorder
        self._interrupts = Interrupts(recorder is None, self._save_stuck if recorder else None)
        self._stack = ExitStack()
        self._last = 0.0

    def __enter__(self) -> Run:
        """Take over the signals."""
        with ExitStack() as stack:  # after a signal in this block, the last words are still printed
            if self._recorder:
                stack.push(self._interrupts.give_back)
                stack.enter_context(self._recorder.last_words())
            for hook in self.hooks:
                stack.callback(hook.close)
            stack.enter_context(self._interrupts)
            if self._recorder:
                stack.callback(self._save, self._recorder)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        """Save the last boundary, give the signals back, and say how to go on."""
        return self._stack.__exit__(*error)

    def restore(self, restore_envs: Callable[[], Mapping[int, str]]) -> int:
        """Bring all ranks to where rank 0 is; return the number of iterations made.

        Collective: every rank calls this.

        Args:
            restore_envs: brings the environments of every rank to where rank 0 is; returns, by their
                indices, why some cannot go on.
        """
        with held:
            if self._recorder:
                self._recorder.begin()
        iteration = comm.bcast_obj(self._recorder.iteration if self._recorder else None)
        for env, why in restore_envs().items():
            print(f"env {env}: {why}; a new episode begins there, so the curve is another one")
        comm.barrier()  # so that the first iteration's times are not those of starting
        self._last = time.perf_counter()
        return int(iteration)

    def goes_on(self) -> bool:
        """Return rank 0's decision on every rank: True while there is more to do.

        Collective: every rank calls this.
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
            batch: the batch that the agent learned from.
            metrics: numbers that its update returned.
        """
        with self.phases("evaluate"):
            for hook in self.hooks:
                if hook.on_every_rank:
                    hook.after(agent, iteration, Record())
        if self._recorder is None:
            return
        now = time.perf_counter()  # recording counts for the next iteration
        with held, self.phases("record"):
            self._recorder.record(now - self._last, batch, metrics)
        self._last = now

    def _save_stuck(self, signum: int) -> None:
        """Save the last boundary and end, in another thread: the main one does not come back from a call or a hook."""
        assert self._recorder
        interrupted = Interrupted(signum)
        try:
            with contextlib.suppress(Interrupted), self._recorder.last_words():
                self._recorder.save()
                print(
                    "rank 0 does not come back from a call or a hook: environments are not closed",
                    file=sys.stderr,
                )
                raise interrupted
        finally:
            end(interrupted)

    def _save(self, recorder: Recorder) -> None:
        with held:
            recorder.save()
