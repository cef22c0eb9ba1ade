"""One batch per iteration: roll out and process on every rank, gather on rank 0."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from rank0rl import batch as batches
from rank0rl.agent import Agent, Fragment, Space
from rank0rl.batch import Batch, Gathered
from rank0rl.envs.block import Settings
from rank0rl.envs.resume import restore
from rank0rl.envs.retry import take_failures
from rank0rl.mpi import comm, weights
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.gather import GatherThread, gather_rows
from rank0rl.rollout import ENDED_AT, Rollout, check_processed
from rank0rl.run import signals, usage
from rank0rl.run.agent_checks import Suspect
from rank0rl.run.agents import is_reference, short_name
from rank0rl.run.options import RunOptions
from rank0rl.run.state import Unfinished
from rank0rl.run.usage import Phases


class Collector:
    """Rolls out, processes and gathers.

    Collective: every rank makes one, with its own rollouts and the same weights.
    """

    def __init__(self, agent: Agent, rollout: Rollout, options: RunOptions, phases: Phases) -> None:
        self.rollout = rollout
        self._agent, self._phases = agent, phases
        self._drift_check_every = options.drift_check_every
        self._take_failures = options.survives_env_errors
        self._early = GatherThread() if rollout.nparts > 1 else None
        self._unfinished = Unfinished(options.max_replay_steps)  # filled on rank 0
        self._settings: dict[int, str] = {}  # of a curriculum, version -> JSON, on rank 0
        self.rolled: Batch = {}
        """Arrays of this rank that are rolled out and not gathered, by names such as "rows/obs"."""
        self._is_new = not is_reference(options.algo)  # of our own, tests say that they are honest
        self._took_s = 0.0
        self._breaks_masks = self._noted_masks = False
        self._quiet, self._algo = options.quiet, short_name(options.algo)
        self._ready: Gathered | None = None

    def batch(self, iteration: int) -> Gathered:
        """Return the batch of an iteration: collected now, or ahead of time by `--overlap`.

        Collective: every rank calls this. Rank 0 gets the rows of all.
        """
        if self._ready is None:
            self.roll(iteration)
            self.gather()
        ready, self._ready = self._ready, None
        assert ready is not None
        return ready

    def begin_with(self, version: int, settings: str) -> None:
        """Let episodes begin with these settings of a curriculum, as JSON, from now on."""
        self.rollout.block.settings = Settings(version, settings)
        if not comm.get_rank():
            self._settings[version] = settings

    def roll(self, iteration: int) -> None:
        """Collect and process this rank's fragments with the weights that were broadcast last.

        Collective: every rank calls this, and `gather` after it.
        """
        start = time.perf_counter()
        check = (iteration - 1) % self._drift_check_every == 0
        before = (
            weights.sha256_each(weights.named_tensors(self._agent.modules())) if check else None
        )
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
            if check:
                space = self.rollout.spaces.act
                self._breaks_masks |= any(_breaks_mask(each, space) for each in fragments)
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
            mine = {
                "took_s": int(1e6 * self._took_s),
                "peak_mb": int(1e6 * usage.peak_mb()),
                "signal": next(iter(signals.received), 0),
                "breaks_masks": int(self._breaks_masks),
            }
            if self._take_failures:
                mine |= take_failures(env.gym for env in self.rollout.envs)
            numbers = check_layout({}, "seconds and memory of ranks", numbers=[*mine.values()])
            ranks = dict(zip(mine, numbers.T, strict=True))  # name -> number of each rank
            signum = int(ranks.pop("signal").max())
            breaks_masks = bool(ranks.pop("breaks_masks").any())
        if signum and not comm.get_rank():
            raise signals.Interrupted(signum)
        if breaks_masks:
            self._note_masks()
        with self._phases("gather"):
            gathered = gather_rows(self.rolled)
            rows, ended, envs = [_below(x, gathered) for x in ("rows/", "ended/", "envs/")]
            if self._early:
                rows = batches.concatenate([each for each in [*self._early.take(), rows] if each])
            rows = batches.in_order(rows, rows["fragment_id"]) if rows else {}
            for key in ("fragment_id", ENDED_AT):  # equal steps keep the order of fragment ids
                ended = batches.in_order(ended, ended[key]) if key in ended else ended
            ended.pop(ENDED_AT, None)
            steps = int(gathered["fragments/steps"].sum())
            ranks |= {name: ranks[name] / 1e6 for name in ("took_s", "peak_mb")}
        if not comm.get_rank():
            self._unfinished.add(envs)
            used = {*envs.get("settings", []), self.rollout.block.settings.version}
            self._settings = {n: text for n, text in self._settings.items() if n in used}
        self.rolled = {}
        with self._phases("hash"):
            sha256 = weights.sha256_arrays(rows) if rows else ""
            settings = self.rollout.block.settings.json
            self._ready = Gathered(rows, ended, steps, sha256, settings, ranks)

    def _note_masks(self) -> None:
        """Print on rank 0, once, that the agent ignores masks."""
        if not (self._noted_masks or self._quiet or comm.get_rank()):
            print(
                f'note: {self._algo} takes actions that info["action_mask"] forbids: it does not read '
                "`step.mask`; the table in docs/agents.md says which agents do"
            )
        self._noted_masks = True

    def state(self) -> dict[str, Any]:
        """Return the episodes under way, their settings, and the batch that was collected ahead. Rank 0 only."""
        ahead = dict(vars(self._ready)) if self._ready else {}
        return {"envs": self._unfinished.all(), "settings": {**self._settings}, "ahead": ahead}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, as tensors. Rank 0 only, before `restore`."""
        self._unfinished.load(_arrays(state["envs"]))
        self._settings = {**state["settings"]}
        for text in self._settings.values():
            json.loads(text)
        unfinished = self._unfinished.all()
        versions = {*unfinished.get("settings", [None])} if unfinished and self._settings else set()
        if not versions <= self._settings.keys():
            raise ValueError("an episode under way has settings that are not in the checkpoint")
        ahead = {
            name: _arrays(value) if isinstance(value, Mapping) else value
            for name, value in state["ahead"].items()
        }
        self._ready = Gathered(**ahead) if ahead else None  # type: ignore[arg-type]

    def restore(self) -> dict[int, str]:
        """Bring every rank to the state that rank 0 has loaded, in the middle of the episodes under way.

        Collective: every rank calls this.

        Returns:
            Index of each of this rank's envs that begins a new episode instead -> the reason.
        """
        unfinished = self._unfinished.all()
        names = comm.bcast_obj(list(unfinished))
        settings = comm.bcast_obj(self._settings)
        strays = restore(
            self.rollout.block, {name: comm.bcast(unfinished.get(name)) for name in names}, settings
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


def _breaks_mask(fragment: Fragment, space: Space) -> bool:
    """Return True if an action of the fragment is one that its mask forbids."""
    mask = fragment.extras.get("action_mask")
    if mask is None:
        return False
    first = [columns.start for columns in space.choice_slices()]
    columns = fragment.act.reshape(len(mask), -1)[:, : len(first)].astype(np.int64) + first
    return not np.take_along_axis(mask, columns, axis=1).all()


def _under(prefix: str, batch: Batch) -> Batch:
    return {prefix + name: array for name, array in batch.items()}


def _below(prefix: str, batch: Batch) -> Batch:
    return {n.removeprefix(prefix): array for n, array in batch.items() if n.startswith(prefix)}


def _arrays(tensors: Mapping[str, Any]) -> Batch:
    return {name: t.numpy() for name, t in tensors.items()}
