"""The state of a run at an iteration boundary: enough to go on as if nothing had happened. Rank 0 only."""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.mpi import weights
from rank0rl.run import checkpoint
from rank0rl.run.hooks import LAST, Hook
from rank0rl.run.options import RunOptions

Array = npt.NDArray[Any]


class Unfinished:
    """The seed and the actions of the episode that is under way in each env.

    Args:
        max_steps: longest episode whose actions are kept.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._envs: Batch = {}
        self._act: list[Array] = []  # one array per env, never changed in place

    def add(self, gathered: Batch) -> None:
        """Add the steps of an iteration, as `FixedSteps.unfinished` of all ranks gives them, in order of envs."""
        if not gathered:
            return
        gathered = dict(gathered)
        acts = np.split(gathered.pop("act"), np.cumsum(gathered["new"])[:-1])
        continued = gathered["steps"] > gathered.pop("new")
        if self._act:
            acts = [
                np.concatenate([before, new]) if goes_on else new
                for before, new, goes_on in zip(self._act, acts, continued, strict=True)
            ]
        self._envs = gathered
        self._act = [
            act if steps <= self._max_steps else act[:0]
            for act, steps in zip(acts, gathered["steps"], strict=True)
        ]
        gathered["kept"] = np.array([len(act) for act in self._act], np.int64)

    def all(self) -> Batch:
        """Return a row for each env, for `restore`; nothing if no episode is under way.

        Returns:
            A row per env of "episode", "steps", "ret", "obs", and "kept", its number of kept actions;
            and "act", the kept actions of all envs, (sum of kept, *act).
        """
        return {**self._envs, "act": np.concatenate(self._act)} if self._act else {}

    def load(self, envs: Batch) -> None:
        """Go on with what `all` returned."""
        self._envs = {name: array for name, array in envs.items() if name != "act"}
        self._act = np.split(envs["act"], np.cumsum(envs["kept"])[:-1]) if envs else []


@dataclass
class Progress:
    """Counts of a run so far, and its last episodes."""

    iteration: int = 0
    steps: int = 0
    episodes: int = 0
    seconds: float = 0.0
    best_eval: float | None = None
    """Highest mean return of an evaluation so far."""
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    """Returns of the last episodes, in order of iterations, then as in `Gathered.ended`."""
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=LAST))
    """Steps of the same episodes."""
    infos: dict[str, deque[float]] = field(default_factory=dict)
    """Label -> figures of the same episodes."""

    def add(self, steps: int, ended: Batch) -> None:
        """Count the steps and the ended episodes of an iteration."""
        self.iteration += 1
        self.steps += steps
        self.episodes += len(ended["return"])
        self.returns.extend(ended["return"].tolist())
        self.lengths.extend(ended["length"].tolist())
        for name in ended.keys() - {"fragment_id", "return", "length"}:
            self.infos[name].extend(ended[name].tolist())

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        infos = {name: list(values) for name, values in self.infos.items()}
        return dict(vars(self), returns=[*self.returns], lengths=[*self.lengths], infos=infos)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` returned."""
        for name in vars(self).keys() - {"returns", "lengths", "infos"}:
            setattr(self, name, state[name])
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        for name, values in self.infos.items():
            values.extend(state["infos"][name])


class State:
    """Agent, collector and progress. Random streams are keyed: they have no state.

    Args:
        agent: the agent, with its weights.
        collector: a `Collector`, whose state has the episodes under way, and with overlap a batch
            that waits for its update.
        options: options of the run.
        settings: all settings of the run and the agent, name -> value, to resume with.
    """

    def __init__(
        self,
        agent: Agent,
        collector: Any,
        options: RunOptions,
        settings: Mapping[str, Any],
    ) -> None:
        self.agent, self._collector, self._options = agent, collector, options
        self.settings = settings
        self.hooks: list[Hook] = []
        """Hooks of the run, whose states are saved too. Filled before the run begins."""
        infos = {name: deque[float](maxlen=LAST) for name in collector.rollout.labels}
        self.progress = Progress(infos=infos)

    def share_over(self, steps: int = 0, episodes: int = 0) -> float:
        """Return the share of the run that will be over after some more steps and episodes; 1 or more at the end."""
        if self._options.num_episodes is not None:
            return (self.progress.episodes + episodes) / self._options.num_episodes
        return (self.progress.steps + steps) / self._options.total_steps

    def ended(self) -> str:
        """Return the option by which the run has ended, with its value; "" if there is more to do."""
        if self.share_over() >= 1:
            name = "total_steps" if self._options.num_episodes is None else "num_episodes"
            return f"{name} {getattr(self._options, name)}"
        return next((hook.ended for hook in self.hooks if hook.ended), "")

    def snapshot(self) -> dict[str, Any]:
        """Return a copy for a checkpoint. It has all actions of the episodes under way, so it takes longer the longer they are."""
        hooks = {key: hook.state() for key, hook in self._named_hooks()}
        return checkpoint.snapshot(
            {
                "hooks": {key: state for key, state in hooks.items() if state},
                "settings": self.settings,
                "progress": self.progress.state(),
                "collector": self._collector.state(),
                "weights": weights.named_tensors(self.agent.modules()),
                "agent": self.agent.state(),
            }
        )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `snapshot` returned.

        Raises:
            ValueError: if it is not of this agent and collector.
        """
        restore_agent(self.agent, saved)
        with _fitting():
            self.progress.load(saved["progress"])
            self._collector.load(saved["collector"])
            for key, hook in self._named_hooks():
                if key in saved["hooks"]:  # a resume may set a goal
                    hook.load(saved["hooks"][key])

    def _named_hooks(self) -> Iterator[tuple[str, Hook]]:
        """Yield each hook by its name; the second hook of a name is "name 2"."""
        count = Counter[str]()
        for hook in self.hooks:
            count[hook.name] += 1
            number = count[hook.name]
            yield hook.name if number == 1 else f"{hook.name} {number}", hook


def restore_agent(agent: Agent, saved: Mapping[str, Any]) -> None:
    """Give an agent the weights and the state of a checkpoint.

    Raises:
        ValueError: if they are not those of this agent.
    """
    with _fitting():
        checkpoint.load_weights(agent, saved["weights"], "the checkpoint")
        agent.load(saved["agent"])
        differs = checkpoint.first_difference(
            checkpoint.snapshot(agent.state()), checkpoint.snapshot(saved["agent"])
        )
        if differs is not None:
            raise ValueError(
                f"load() must take back all that the agent's state() returned: {differs!r} differs "
                f"after it, so the resumed run would not be the one that was stopped; complete load()"
            )


@contextmanager
def _fitting() -> Iterator[None]:
    """Turn any error into a ValueError of one line that names its place: a saved state does not fit."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # whatever the agent's load raises for what it does not know
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"the checkpoint does not fit this agent and its options: {type(error).__name__}: {why} "
            f"({place.filename}, line {place.lineno})"
        ) from error
