"""The interface of a batch algorithm: `Agent`, and the fragments and spaces that it is given.

An agent acts, turns fragments into rows, and learns from a batch of rows. It holds no MPI, no
files, no logging and no seeding. ``algos/reinforce.py`` is the one to copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rank0rl.batch import Batch

Array = npt.NDArray[Any]

NEVER = -1e8  # logit of a choice that may not be taken: exp gives 0, and 0 times it is no nan


@dataclass(frozen=True, eq=False)
class Space:
    """A space of observations or actions: the shape and dtype of its elements, and their bounds."""

    kind: str
    """"box": numbers; "discrete": one choice, or several at once, each numbered from 0; "hybrid": choices, then numbers."""
    shape: tuple[int, ...]
    """Shape of one element; () for a single choice."""
    dtype: str
    """Dtype of an element as rows hold it."""
    choices: tuple[int, ...] = ()
    """Discrete or hybrid space: number of values of each choice. Several choices can be made at once."""
    low: Array | None = None
    """Box or hybrid space: lower bounds, with its shape. Actions are clipped to them on the way to the environment."""
    high: Array | None = None
    """Box or hybrid space: upper bounds, likewise."""
    first: Array | None = None
    """Discrete or hybrid space: the environment's numbers for choices 0, with its shape; None if all are 0."""
    parts: Mapping[str, slice] = field(default_factory=dict)
    """Dict observations, flattened: the columns of each key."""

    @property
    def size(self) -> int:
        """Length of one element as a flat row; where there are choices, the number of values of all of them."""
        return sum(self.choices) if self.choices else int(np.prod(self.shape))

    def halves(self) -> tuple[Space, Space]:
        """Return the discrete space of a hybrid space's choices, and the box of its numbers."""
        assert self.low is not None
        assert self.high is not None
        n = len(self.choices)
        choices = Space("discrete", (n,), "int64", self.choices)
        low, high = self.low[n:], self.high[n:]
        return choices, Space("box", low.shape, self.dtype, low=low, high=high)

    def choice_slices(self) -> list[slice]:
        """Return the columns of each choice in a row that holds all choices of a discrete space."""
        return [slice(a, b) for a, b in pairwise(accumulate(self.choices, initial=0))]


@dataclass(frozen=True, eq=False)
class Spaces:
    """The observations that an environment gives and the actions that it takes."""

    obs: Space
    """Space of one observation. A Dict or a Tuple is flattened."""
    act: Space
    """Space of one action, as `Agent.act` returns it."""
    agents: tuple[str, ...] = ()
    """Names of the agents of a game. Fragment i is of agents[i % len(agents)]. (): there are no games."""


@dataclass(frozen=True, eq=False)
class Step:
    """Everything that an agent may use to choose actions, one row for each of B envs."""

    obs: Array
    """Observations, (B, *obs), of dtype `spaces.obs.dtype`."""
    noise: Array
    """Random numbers, (B, k), float32, drawn as `Agent.noise` says."""
    fragment_id: Array
    """The fragment of each row, (B,), int64."""
    mask: Array | None = None
    """True for choices that may be taken, (B, all choices), bool, if the environment gives info["action_mask"].

    The fragment then has it in its extras, as "action_mask".
    """
    memory: Array | None = None
    """Memory of an agent that has one, (B, m), float32: what `act` returned in the step before, or zeros
    where an episode begins."""
    explore: bool = True
    """False to choose the most probable actions, as in evaluations. Normal noise is then 0."""


@dataclass(eq=False)
class Fragment:
    """T steps that belong together: what one env collected in one iteration, or one whole episode.

    It holds steps of E episodes. Episode e ends with step end[e]. The last one ends with step T-1,
    where the episode may go on (a cut: neither terminated nor truncated).
    """

    fragment_id: int
    """Index of the env; in whole-episode batches, number of the episode within the iteration."""
    obs: Array
    """Observations before each step, (T, *obs), of dtype `spaces.obs.dtype`."""
    act: Array
    """Actions as `act` returned them, (T, *act), of dtype `spaces.act.dtype`."""
    rew: Array
    """Rewards, (T,), float64."""
    terminated: Array
    """True at steps that reached a terminal state, (T,), bool."""
    truncated: Array
    """True at steps at which a time limit cut the episode off, (T,), bool."""
    end: Array
    """Last step of each episode in the fragment, (E,), int64."""
    end_obs: Array
    """Observation after each episode's last step, (E, *obs). Its value counts unless the episode terminated."""
    extras: Batch = field(default_factory=dict)
    """Extras that `act` returned, and what `Agent.info` names, name -> (T, ...). "memory" is what `act` was given."""
    end_memory: Array = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """Memory after each episode's last step, (E, memory), for an agent that has one."""

    @property
    def next_obs(self) -> Array:
        """Observations after each step, (T, *obs): a new array at every use."""
        after = np.empty_like(self.obs)
        after[:-1] = self.obs[1:]
        after[self.end] = self.end_obs
        return after

    def episodes(self) -> list[slice]:
        """Return the steps of each episode in the fragment, in order."""
        starts = [0, *(self.end[:-1] + 1).tolist()]
        return [slice(a, b + 1) for a, b in zip(starts, self.end.tolist(), strict=True)]


@dataclass(frozen=True)
class NoOptions:
    """Options of an agent that leaves its user nothing to choose."""


class Agent:
    """Base class of batch algorithms. A subclass gives `Options`, `noise` and the methods without a body.

    Args of the constructor: spaces (`Spaces`), options (an instance of `Options`), and rng, a
    `numpy.random.Generator` for initial weights. Only rank 0's weights count.
    """

    Options: ClassVar[type] = NoOptions
    """A frozen dataclass with a default for every field: they become command-line options."""

    settings: ClassVar[str] = ""
    """Name of the settings in configs/ with which it trains, such as "ppo", unless there are some that have the name
    of its own file. A subclass takes those of its parent."""

    noise: tuple[str, int] = ("normal", 0)
    """Distribution and number, k, of what `act` draws per step: "normal", or "uniform" on [0, 1)."""

    memory: int = 0
    """Numbers in the memory of each env, m. 0: what `act` does depends on the observation alone."""

    info: tuple[str, ...] = ()
    """Names of numbers, or arrays of numbers, in the info of each step. Fragments have them in their extras,
    (T, ...), float64. The step that brought a reward brought them too. Of the class, not of an agent."""

    coefficients: tuple[str, ...] = ()
    """Names of options that a hook may change, because `self.options` is read whenever they are used."""

    devices: tuple[str, ...] = ("cpu",)
    """Kinds of devices that `update` can compute on: "cpu", "cuda"."""

    device: str = "cpu"
    """Device on which `update` computes. The modules always stay on the CPU."""

    threads: int = 1
    """Number of threads that `update` may use. What it computes must not depend on it."""

    updates: str = ""
    """Words about how `update` computes, such as "compiled", for the console and summary.json."""

    def __init__(self, spaces: Spaces, options: Any, rng: np.random.Generator) -> None:
        """Build the networks and everything else that `act`, `process` and `update` need."""
        raise NotImplementedError

    @classmethod
    def check(cls, spaces: Spaces, options: Any, run: Any) -> str | None:
        """Check what training needs and acting does not, such as files of data.

        Rank 0 calls this before a run begins or goes on. `run` has the options of the run.

        Returns:
            A note for the console, if there is something that a user should know.

        Raises:
            ValueError: with all that a user needs to know.
        """
        return None

    def act(self, step: Step) -> tuple[Array, Batch]:
        """Choose actions. Every rank. A row must not depend on how many rows there are.

        Keep nothing in the agent from one call to the next: rows come from any envs. An agent that
        needs to remember has a memory. All random numbers are in `step.noise`: drawing others here, or
        in `process`, ends the run.

        Returns:
            Actions (B, *act), int64 for choices; and extras, name -> (B, ...), kept in the fragment.
            With a memory, the extra "memory" is the new one, (B, m), float32.
        """
        raise NotImplementedError

    def process(self, fragment: Fragment) -> Batch:
        """Turn a fragment into rows for the batch, name -> (n, ...). Every rank, forward only.

        The arrays of the fragment are reused for the next iteration; rows are copied before that.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Do what the first update needs, such as compiling.

        Called once before it, on rank 0 only, in a thread, while the ranks collect the first batch.
        """

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        """Learn from a batch. Rank 0 only.

        Args:
            batch: rows of all fragments in order of fragment ids, and "fragment_id", that of each
                row. With overlap, they were collected with the weights before the last update.
            rng: random numbers of this iteration, for the order of minibatches and the like.
            progress: share of the run that is over, in [0, 1), for schedules.

        Returns:
            Name -> number, for the record, by names that are none of its own columns. A name that is missing
            in an iteration stays empty there.
        """
        raise NotImplementedError

    def modules(self) -> dict[str, Any]:
        """Return all that `act` and `process` read, name -> torch module or array. Broadcast and saved."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what only rank 0 has, such as an optimizer's state: saved, not broadcast.

        Dicts and lists of tensors, arrays, numbers, strings, None and a `Replay`.
        """
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned. Rank 0 only; the modules are loaded already."""

    def modules_loaded(self) -> None:
        """Begin with the modules of another run, which --init-from has loaded. Rank 0 only."""

    mode_obs: tuple[str, ...] = ()
    """Keys of a Dict observation that the module of `mode` takes, if not all."""

    def mode(self) -> Any:
        """Return the most probable actions as a torch module, for `export`.

        Returns:
            A torch module that takes observations, flattened to float32, (N, numbers), to the most
            probable actions, as `act` returns them, (N, *act). With a memory, it also takes memory
            (N, m), and returns actions and the next memory. If `act` reads masks, its last argument
            is `mask`. torch.export must be able to follow it.

        Raises:
            ValueError: if the agent has none.
        """
        raise ValueError(
            f"{type(self).__name__} has nothing to export: give it a method mode(self) that "
            f"returns a torch module; help(rank0rl.Agent) says which"
        )


def choose(
    logits: Array, noise: Array, space: Space, mask: Array | None = None, explore: bool = True
) -> Array:
    """Draw choices whose probabilities are the softmax of logits. No row depends on the others.

    Args:
        logits: (B, all choices); overwritten.
        noise: uniform on [0, 1), (B, number of choices at once).
        space: that of the actions, discrete.
        mask: which may be taken, (B, all choices), bool; all of them by default.
        explore: False to take the most probable ones instead.

    Returns:
        Choices, (B, *space.shape), int64.
    """
    if mask is not None:
        logits[~mask] = NEVER
    chosen = []
    for i, columns in enumerate(space.choice_slices()):
        some = logits[:, columns]
        if not explore:
            chosen.append(some.argmax(axis=1))
            continue
        some -= np.maximum.reduce(some, axis=1, keepdims=True)
        cumulative = np.add.accumulate(np.exp(some), axis=1)
        below = noise[:, i : i + 1] * cumulative[:, -1:] >= cumulative[:, :-1]
        choice = np.add.reduce(below, axis=1, dtype=np.int64)
        if mask is not None:  # rounding may have led past the last one that may be taken
            choice = np.minimum(choice, below.shape[1] - mask[:, columns][:, ::-1].argmax(axis=1))
        chosen.append(choice)
    return np.stack(chosen, axis=1).reshape(-1, *space.shape) if space.shape else chosen[0]
