"""The loop: collect, update on rank 0, broadcast the new weights, record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.collector import Collector
from rank0rl.learner import Learner, Overlap
from rank0rl.mpi.weights import rank0_bcast_wts
from rank0rl.run.run import Run


class Hook(Protocol):
    """Something that is done with new weights, such as an `Evaluation`."""

    name: str
    """Name of the result. The result of "evaluation" is recorded; other hooks keep theirs."""

    def due(self, iteration: int) -> bool:
        """Return True, on every rank, if it is to be done after this iteration."""

    def __call__(self, agent: Agent, iteration: int) -> Batch | None:
        """Do it; return its result on rank 0, if it has one. Collective: every rank calls this."""


def train(
    agent: Agent,
    collector: Collector,
    learner: Learner | Overlap,
    run: Run,
    hooks: Sequence[Hook] = (),
) -> None:
    """Roll out on every rank, update on rank 0, broadcast, until rank 0 says stop.

    Collective: every rank calls this. Rank 0's weights count.
    """
    with run:  # saves the last boundary on the way out
        iteration = run.restore(collector)
        rank0_bcast_wts(agent.modules())  # equal before the first rollout
        while run.goes_on():  # rank 0 decides for all
            iteration += 1
            batch = collector.batch(iteration)  # rank 0: the rows of all ranks, in order
            metrics = learner.update(batch, iteration)  # rank 0 alone
            with run.phases("broadcast"):
                rank0_bcast_wts(agent.modules())
            with run.phases("evaluate"):
                results = {
                    hook.name: hook(agent, iteration) for hook in hooks if hook.due(iteration)
                }
            run.record(batch, metrics, results)
