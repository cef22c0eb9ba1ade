"""Whole episodes of an agent, with seeds that training never uses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl import batch as batches
from rank0rl import seeding
from rank0rl.agent import Agent, Step
from rank0rl.batch import Batch
from rank0rl.envs.block import make_block
from rank0rl.envs.info import label
from rank0rl.mpi import comm, weights
from rank0rl.mpi.comm import Counter
from rank0rl.mpi.gather import gather_rows
from rank0rl.rollout import WholeEpisodes
from rank0rl.run.hooks import Columns, Hook, Record
from rank0rl.run.options import RunOptions
from rank0rl.run.record import known_mean, mean
from rank0rl.run.shares import env_maker

Array = npt.NDArray[Any]

MAX_ENVS = 16  # per rank: acting on all of them costs little more than on one


def whole_episodes(
    agent: Agent,
    make_env: Callable[..., Any],
    episodes: int,
    seed: int = 0,
    num_envs: int = MAX_ENVS,
    info: Sequence[str] = (),
) -> Batch:
    """Return the returns and lengths of some episodes.

    An episode is the same however many there are, and however many envs share them.

    Args:
        agent: acts; it learns nothing, and reads no infos.
        make_env: makes one gymnasium environment, given its `index`.
        episodes: number of episodes.
        seed: keys the episodes. They are never those of training, whatever its seed.
        num_envs: number of environments to step at the same time, at most.
        info: figures of `EpisodeInfo`, which `make_env` puts around environments.

    Returns:
        "return", "length" and each figure by its label, (episodes,) each.
    """
    agent = copy.copy(agent)
    agent.info = ()
    envs = range(min(episodes, num_envs))
    rollout = _rollout(make_env, envs, seed, lambda: iter(range(episodes)), info)
    try:
        ended = rollout.collect(agent, 1)[1]
    finally:
        rollout.close()
    order = np.argsort(ended["fragment_id"])
    return {name: ended[name][order] for name in ended if name != "fragment_id"}


class Evaluation(Hook):
    """A hook of the loop: the same episodes with new weights, every few iterations.

    Collective: every rank makes one.

    Args:
        options: options of the run; `eval_every` is set.
        nworkers: number of ranks.
    """

    name = "evaluation"
    on_every_rank = True

    def __init__(self, options: RunOptions, nworkers: int) -> None:
        assert options.eval_every
        self._every, self._deterministic = options.eval_every, options.eval_deterministic
        self._columns: Columns = {}
        envs = min(MAX_ENVS, -(-options.eval_episodes // nworkers))
        first = envs * comm.get_rank()
        self.rollout = _rollout(
            env_maker(options, evaluation=True),
            range(first, first + envs),
            options.seed,
            Counter(options.eval_episodes).round,
            options.info,
        )
        """Rollouts of the episodes. Who makes the hook closes them."""
        self._labels = self.rollout.labels

    def after(self, agent: Agent, iteration: int, record: Record) -> None:
        """Evaluate the agent every `eval_every` iterations.

        Collective: every rank calls this.

        Raises:
            ValueError: the same on every rank, if acting has changed weights.
        """
        names = ("return", "return_std", "length", *self._labels)
        self._columns = {f"eval_{name}": "" for name in names}
        if iteration % self._every:
            return
        ended = self._episodes(agent, iteration)
        if comm.get_rank():
            return
        figures = [known_mean(ended[name]) for name in self._labels]
        returns = ended["return"]
        found = [mean(returns), float(np.std(returns)), mean(ended["length"]), *figures]
        self._columns = dict(zip(self._columns, found, strict=True))

    def columns(self) -> Columns:
        """Return the mean figures of the episodes; texts without a word where there was no evaluation."""
        return self._columns

    def _episodes(self, agent: Agent, iteration: int) -> Batch:
        """Return, on rank 0, the returns, lengths and figures of the episodes, in order."""
        before = weights.sha256_each(weights.named_tensors(agent.modules()))
        try:
            acting = Deterministic.of(agent, self._deterministic)
            ended = self.rollout.collect(acting, 1)[1]
        except Exception as error:
            error.add_note(
                f"In evaluation, after iteration {iteration}: the fragment above is one of its "
                f"episodes; python -m rank0rl evaluate runs the same ones."
            )
            raise
        weights.chksum(agent.modules(), label="after evaluation", before=before)
        ended = gather_rows(ended)
        return batches.in_order(ended, ended["fragment_id"])


class Deterministic(Agent):
    """An agent without exploration: its steps have `explore=False`, and 0 as normal noise."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self.noise, self.memory = agent, agent.noise, agent.memory
        self.info = agent.info

    @classmethod
    def of(cls, agent: Agent, wanted: bool) -> Agent:
        """Return an agent as it acts in training; without exploration if that is wanted, or if none of its actions is drawn."""
        return cls(agent) if wanted or not agent.noise[1] else agent

    def act(self, step: Step) -> tuple[Array, Batch]:
        """Act as the agent does at its best."""
        noise = np.zeros_like(step.noise) if self.noise[0] == "normal" else step.noise
        return self._agent.act(dataclasses.replace(step, noise=noise, explore=False))


def _rollout(
    make_env: Callable[..., Any],
    envs: range,
    seed: int,
    draw: Callable[[], Iterator[int]],
    info: Sequence[str] = (),
) -> WholeEpisodes:
    """Return the rollouts of this rank's share of evaluation episodes, the same ones at every call."""
    seed = seeding.integer(seed, "evaluate", 0, 0)
    block = make_block(make_env, envs, seed)
    return WholeEpisodes(block, draw, info=[label(name) for name in info])
