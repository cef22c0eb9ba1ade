"""What a run is at an iteration boundary: enough to go on as if nothing had happened. Rank 0 only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.mpi import weights
from rank0rl.rollout import Unfinished
from rank0rl.run import checkpoint
from rank0rl.run.config import RunOptions

_LAST = 100  # episodes that a mean return is taken over


@dataclass
class Progress:
    """How far a run has come."""

    iteration: int = 0
    steps: int = 0
    episodes: int = 0
    seconds: float = 0.0
    best_eval: float | None = None
    """The highest mean return of an evaluation so far."""
    same_schedule_since: int = 0
    """Iteration at which a resume last changed the length of the run."""
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    """Of the last episodes, in order of iterations, then units."""
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST))
    """The same for their steps."""

    def add(self, steps: int, ended: Batch) -> None:
        """Count what an iteration has gathered."""
        self.iteration += 1
        self.steps += steps
        self.episodes += len(ended["return"])
        self.returns.extend(ended["return"].tolist())
        self.lengths.extend(ended["length"].tolist())

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return dict(vars(self), returns=list(self.returns), lengths=list(self.lengths))

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        for name in vars(self).keys() - {"returns", "lengths"}:
            setattr(self, name, state[name])
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])


@dataclass(frozen=True, eq=False)
class Gathered:
    """What all ranks have collected in one iteration: on rank 0 everything, elsewhere no rows."""

    batch: Batch
    """Rows of all fragments in order of units, and "fragment_id", the unit of each."""
    ended: Batch
    """The episodes that ended, in order of units: "fragment_id", "return", "length"."""
    steps: int
    """Environment steps of all."""
    sha256: str = ""
    """Of the batch, to compare runs."""
    ranks: Batch = field(default_factory=dict)
    """What each rank tells of its part: "took_s" that it worked, "peak_mb" of memory before it was gathered, (ranks,)."""


class State:
    """Agent, progress, and the episodes under way. Random streams are keyed: they have no state.

    Args:
        agent: whose weights and state it is.
        options: of the run.
        settings: all of the run and the agent, name -> value, to resume with.
    """

    def __init__(self, agent: Agent, options: RunOptions, settings: Mapping[str, Any]) -> None:
        """Begin before the first iteration."""
        self.settings = settings
        self.agent = agent
        self.progress = Progress()
        self.unfinished = Unfinished(options.max_replay_steps)
        self.ahead: dict[str, Any] = {}
        """With overlap, the batch that is gathered and not learned from yet, as plain data."""
        self._options = options

    def share_over(self, steps: int = 0, episodes: int = 0) -> float:
        """Share of the run that is over after so many more steps and episodes, 1 or more at its end."""
        made = self.progress
        return self._options.progress(made.steps + steps, made.episodes + episodes)

    def snapshot(self) -> dict[str, Any]:
        """A copy for a checkpoint, of tensors, numbers and strings: a fraction of a millisecond."""
        return checkpoint.snapshot(  # type: ignore[no-any-return]
            {
                "settings": self.settings,
                "progress": self.progress.state(),
                "lanes": self.unfinished.all(),
                "ahead": self.ahead,
                "weights": weights.named_tensors(self.agent.modules()),
                "agent": self.agent.state(),
            }
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `snapshot` gave.

        Raises:
            ValueError: if its weights are not those of this agent.
        """
        mine = weights.named_tensors(self.agent.modules())
        saved = state["weights"]
        if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in saved.items()}:
            raise ValueError(
                "the checkpoint holds weights of other names or shapes than this agent's: resume "
                "with the run's own --algo and network sizes"
            )
        for name, t in mine.items():
            t.copy_(saved[name])
        self.agent.load(state["agent"])
        where = checkpoint.first_difference(
            checkpoint.snapshot(self.agent.state()), checkpoint.snapshot(state["agent"])
        )
        if where is not None:
            raise ValueError(
                f"load must take back all that the agent's state() gave: after it {where!r} is "
                f"another; the resumed run would not be the one that was stopped"
            )
        self.progress.load(state["progress"])
        if state["lanes"]:
            self.unfinished.load(_arrays(state["lanes"]))
        self.ahead = {
            name: _arrays(value) if isinstance(value, Mapping) else value
            for name, value in state["ahead"].items()
        }


def _arrays(tensors: Mapping[str, Any]) -> Batch:
    return {name: t.numpy() for name, t in tensors.items()}
