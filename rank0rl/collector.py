"""One batch per iteration: roll out and process on every rank, gather on rank 0."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rank0rl import batch as batches
from rank0rl.agent import Agent, Fragment
from rank0rl.batch import Batch, Gathered
from rank0rl.envs import make
from rank0rl.envs.block import Settings, envs_of, make_block
from rank0rl.envs.process import EnvProcess
from rank0rl.envs.retry import RetriedEnv, take_failures
from rank0rl.envs.wrappers import EpisodeInfo, ResetMethod, label
from rank0rl.mpi import comm, hashes, weights
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.comm import Counter
from rank0rl.mpi.gather import GatherThread, gather_rows
from rank0rl.rollout import FixedSteps, Rollout, WholeEpisodes, check_processed
from rank0rl.run import machine, signals
from rank0rl.run.agent_checks import Suspect
from rank0rl.run.agents import is_reference, load_function
from rank0rl.run.options import RunOptions
from rank0rl.run.state import Unfinished
from rank0rl.run.timing import Phases

_TURNS = 2  # in which a rank collects its episodes, for an even end; more give act too few rows


class Collector:
    """Rolls out, processes and gathers.

    Collective: every rank makes one.

    Args:
        agent: acts and processes; the same weights on every rank.
        rollout: this rank's rollouts.
        options: options of the run.
        phases: takes the seconds of "collect", "process", "wait", "gather" and "hash".
    """

    def __init__(self, agent: Agent, rollout: Rollout, options: RunOptions, phases: Phases) -> None:
        """Begin before the first iteration."""
        self.rollout = rollout
        self._agent, self._options, self._phases = agent, options, phases
        self._early = GatherThread() if rollout.nparts > 1 else None
        self._unfinished = Unfinished(options.max_replay_steps)  # filled on rank 0
        self._settings: dict[int, str] = {}  # of a curriculum, version -> JSON, on rank 0
        self.rolled: Batch = {}
        """Arrays of this rank that are rolled out and not gathered, by names such as "rows/obs"."""
        self._is_new = not is_reference(options.algo)  # of our own, tests say that they are honest
        self._took_s = 0.0
        self._ready: Gathered | None = None

    def batch(self, iteration: int) -> Gathered:
        """Return the batch of an iteration: collected now, or ahead of time by `--overlap`.

        Collective: every rank calls this.

        Returns:
            On rank 0 the rows of all ranks, in order of fragment ids; no rows elsewhere.
        """
        if self._ready is None:
            self.roll(iteration)
            self.gather()
        ready, self._ready = self._ready, None
        assert ready is not None
        return ready

    def begin_with(self, version: int, settings: str) -> None:
        """Let episodes begin with the settings of a curriculum from now on.

        Args:
            version: number of the settings.
            settings: the settings, as JSON.
        """
        self.rollout.block.settings = Settings(version, settings)
        if not comm.get_rank():
            self._settings[version] = settings

    def roll(self, iteration: int) -> None:
        """Collect and process this rank's fragments with the weights that were broadcast last.

        Collective: every rank calls this, and `gather` after it.
        """
        start = time.perf_counter()
        check = (iteration - 1) % self._options.drift_check_every == 0
        before = hashes.sha256_each(weights.named_tensors(self._agent.modules())) if check else None
        steps: list[int] = []
        rows: Batch = {}
        agent = self._agent
        if check:
            agent = Suspect(agent, closely=self._is_new)
            self._is_new = False
        parts = self.rollout.parts(agent, iteration)
        for later in reversed(range(self.rollout.nparts)):
            with self._phases("collect"):
                fragments = next(parts)
            with self._phases("process"):
                rows = self._process(agent, fragments, iteration)
            steps += [len(fragment.rew) for fragment in fragments]
            if self._early and later:
                self._early.begin(rows)
        self._took_s = time.perf_counter() - start
        if check:
            with self._phases("wait"):
                weights.chksum(self._agent.modules(), label="after act and process", before=before)
        self.rolled = {}
        if steps:
            self.rolled = {
                **_under("rows/", rows),
                **_under("ended/", self.rollout.ended()),
                **_under("envs/", self.rollout.unfinished()),
                "fragments/steps": np.array(steps, np.int64),
            }

    def gather(self) -> None:
        """Gather what the ranks have rolled out; `batch` returns it next.

        Collective: every rank calls this.
        """
        with self._phases("wait"):
            mine = {"took_s": int(1e6 * self._took_s), "peak_mb": int(1e6 * machine.peak_mb())}
            mine["signal"] = signals.received()
            if self._options.survives_env_errors:
                mine |= take_failures(env.gym for env in self.rollout.envs)
            numbers = check_layout({}, "seconds and memory of ranks", numbers=[*mine.values()])
            ranks = dict(zip(mine, numbers.T, strict=True))  # name -> number of each rank
            received = ranks.pop("signal")
        if not comm.get_rank():
            signals.obey(received)
        with self._phases("gather"):
            gathered = gather_rows(self.rolled)
            rows, ended, envs = [_below(x, gathered) for x in ("rows/", "ended/", "envs/")]
            if self._early:
                rows = batches.concatenate([each for each in [*self._early.take(), rows] if each])
            rows = batches.in_order(rows, rows["fragment_id"]) if rows else {}
            ended = batches.in_order(ended, ended["fragment_id"])
            steps = int(gathered["fragments/steps"].sum())
            ranks |= {name: ranks[name] / 1e6 for name in ("took_s", "peak_mb")}
        if not comm.get_rank():
            self._unfinished.add(envs)
            used = {*envs.get("settings", []), self.rollout.block.settings.version}
            self._settings = {n: text for n, text in self._settings.items() if n in used}
        self.rolled = {}
        with self._phases("hash"):
            sha256 = hashes.sha256_arrays(rows) if rows else ""
            settings = self.rollout.block.settings.json
            self._ready = Gathered(rows, ended, steps, sha256, settings, ranks)

    def state(self) -> dict[str, Any]:
        """Return the episodes under way, their settings, and the batch that was collected ahead. Rank 0 only."""
        ahead = dict(vars(self._ready)) if self._ready else {}
        return {"envs": self._unfinished.all(), "settings": {**self._settings}, "ahead": ahead}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, as tensors. Rank 0 only, before `restore`."""
        self._unfinished.load(_arrays(state["envs"]))
        self._settings = {**state["settings"]}
        ahead = {
            name: _arrays(value) if isinstance(value, Mapping) else value
            for name, value in state["ahead"].items()
        }
        self._ready = Gathered(**ahead) if ahead else None  # type: ignore[arg-type]

    def restore(self) -> dict[int, str]:
        """Bring every rank to the state that rank 0 has loaded: repeat the episodes under way.

        Collective: every rank calls this.

        Returns:
            Index of each of this rank's envs that begins a new episode instead -> the reason.
        """
        unfinished = self._unfinished.all()
        names = comm.bcast_obj(list(unfinished))
        settings = comm.bcast_obj(self._settings)
        strays = self.rollout.block.restore(
            {name: comm.bcast(unfinished.get(name)) for name in names}, settings
        )
        if comm.bcast_obj(self._ready is not None) and self._ready is None:
            self._ready = Gathered({}, {}, 0)
        return strays

    def _process(self, agent: Agent, fragments: list[Fragment], iteration: int) -> Batch:
        """Return the rows of these fragments, and the fragment id of each."""
        rows = []
        for fragment in fragments:
            try:
                processed = agent.process(fragment)
                check_processed(processed)
            except Exception as error:
                self.rollout.failed_at = iteration, fragment.fragment_id
                error.add_note(
                    f"In process, of fragment {fragment.fragment_id} in iteration {iteration}."
                )
                raise
            ids = np.full(batches.count(processed), fragment.fragment_id, np.int64)
            rows.append({**processed, "fragment_id": ids})
        return batches.concatenate(rows)


def env_maker(options: RunOptions) -> Callable[..., Any]:
    """Return the function that makes one environment of a run, in a process of its own if so asked.

    It takes arguments of this environment alone, over those of all.
    """

    def make_one(**kwargs: Any) -> Any:
        around = functools.partial  # each makes what it is around
        kwargs = {**options.env_kwargs, **kwargs}
        one: Callable[[], Any] = around(make.make, options.env_id, options.wrappers, **kwargs)
        if options.info:
            one = around(EpisodeInfo, one, options.info)
        if options.curriculum_method:
            one = around(ResetMethod, one, options.curriculum_method)
        if options.env_processes:
            preload = make.own_module(options.env_id)
            one = around(EnvProcess, one, options.step_timeout, options.start_timeout, preload)
        if options.survives_env_errors:
            truncate, limit = options.on_env_error == "truncate", options.max_replay_steps
            one = around(RetriedEnv, one, options.env_retries, truncate, limit)
        return one()

    return make_one


def make_rollout(options: RunOptions, rank: int, nworkers: int, only: int | None = None) -> Rollout:
    """Return the rollouts of one rank; or of one fragment of each iteration only, with its game.

    Collective: every rank calls this.

    Args:
        options: options of the run.
        rank: this rank.
        nworkers: number of ranks.
        only: the fragment's id.
    """
    indices = _groups_of(options, rank, nworkers)
    groups = (options.episodes_per_batch or 0) // options.agents
    episodes = at_once = None
    fragments = (options.episodes_per_batch or 0) // nworkers or len(indices)
    if only is not None:
        number = only // options.agents
        indices = range(number, number + 1)
        episodes = (lambda: iter([number])) if groups else None
    elif groups:
        counter = Counter(groups)
        most = None
        if nworkers > 1:
            at_once = max(1, groups // (nworkers * _TURNS))
            if rank == 0 and options.rank0_envs is not None:
                most = groups * options.rank0_envs // options.num_envs
        episodes = functools.partial(counter.round, most)
    nparts = 1 if only is not None else _nparts(options, nworkers)
    kwargs_of = load_function(options.env_kwargs_of) if options.env_kwargs_of else None
    block = make_block(env_maker(options), indices, options.seed, kwargs_of)
    cuts = [fragments * part // nparts for part in range(1, nparts)]
    info = [label(name) for name in options.info]
    if episodes is None:
        return FixedSteps(block, options.steps_per_env, cuts, info)
    return WholeEpisodes(block, episodes, at_once, cuts, info)


def _groups_of(options: RunOptions, rank: int, nworkers: int) -> range:
    """Return the indices of a rank's envs, or of its games: no game is on two ranks."""
    of_rank0 = None if options.rank0_envs is None else options.rank0_envs // options.agents
    return envs_of(rank, nworkers, options.num_envs // options.agents, of_rank0)


def _nparts(options: RunOptions, nworkers: int) -> int:
    """Return the number of parts of a rank's rows: no more than the fragments of the largest share."""
    if nworkers == 1 or not comm.has_threads():
        return 1
    ranks = range(nworkers)
    blocks = [_groups_of(options, rank, nworkers) for rank in ranks]
    episodes = (options.episodes_per_batch or 0) // nworkers
    return min(options.gather_parts, episodes or max(map(len, blocks)))


def _under(prefix: str, batch: Batch) -> Batch:
    return {prefix + name: array for name, array in batch.items()}


def _below(prefix: str, batch: Batch) -> Batch:
    return {n.removeprefix(prefix): array for n, array in batch.items() if n.startswith(prefix)}


def _arrays(tensors: Mapping[str, Any]) -> Batch:
    return {name: t.numpy() for name, t in tensors.items()}
