"""The loop: collect, update on rank 0, broadcast the new weights, record."""

from __future__ import annotations

from rank0rl.agent import Agent
from rank0rl.collector import Collector
from rank0rl.learner import Learner, Overlap
from rank0rl.mpi.weights import rank0_bcast_wts
from rank0rl.run.run import Run


def train(agent: Agent, collector: Collector, learner: Learner | Overlap, run: Run) -> None:
    """Roll out on every rank, update on rank 0, broadcast, until rank 0 says stop.

    Collective: every rank calls this. Rank 0's weights count.
    """
    with run:  # saves the last boundary on the way out
        iteration = run.restore(collector.restore)
        rank0_bcast_wts(agent.modules())  # equal before the first rollout
        while run.goes_on():  # rank 0 decides for all
            iteration += 1
            run.before(iteration)  # hooks: curriculum, evaluation, loggers, ...
            batch = collector.batch(iteration)  # rank 0: the rows of all ranks, in order
            metrics = learner.update(batch, iteration)  # rank 0 alone
            with run.phases("broadcast"):
                rank0_bcast_wts(agent.modules())
            run.record(agent, iteration, batch, metrics)
