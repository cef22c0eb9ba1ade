"""Hooks around an iteration: curriculum, goal, loggers, and hooks of one's own."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.agent import Agent, NoOptions
from rank0rl.mpi import comm
from rank0rl.mpi.weights import rank0_bcast_wts
from rank0rl.options import apply
from rank0rl.run.agents import load_function
from rank0rl.run.options import RunOptions

Columns = Mapping[str, float | str]
_GROUPS = "run episodes info curriculum hook coefficients evaluation failures speed hashes update"
_TAKEN = {*_GROUPS.split(), "goal", "video"} - {"hook"}
LAST = 100
"""Number of episodes in a mean return."""


class Record(dict[str, Any]):
    """The row of an iteration, column -> value, without times and hashes.

    These columns are the same for every number of ranks. A hook that decides by them alone changes
    the curve in the same way for every number of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, dict[str, float | str]] = {name: {} for name in _GROUPS.split()}
        """Group -> column -> value, times and hashes included."""

    def add(self, group: str, columns: Columns, repeats: bool = True) -> None:
        """Add columns to the row.

        Args:
            group: a group of the record's own, or the name of a hook.
            columns: column -> value.
            repeats: True if the values are the same for every number of ranks.

        Raises:
            ValueError: if the row has a column of that name already.
        """
        row = self.row()
        if twice := [name for name in columns if name in row]:
            raise ValueError(
                f"{group}: {', '.join(map(repr, twice))} is a column of the record already; choose "
                f"a name other than {', '.join(row)}"
            )
        self.groups.setdefault(group, {}).update(columns)
        if repeats:
            self.update(columns)

    def row(self) -> dict[str, float | str]:
        """Return all columns in the order of progress.csv, times and hashes included."""
        return {name: x for columns in self.groups.values() for name, x in columns.items()}

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers so far, times included, as "group/column" -> number, for a logger."""
        return {
            f"{group}/{name}": float(value)
            for group, columns in self.groups.items()
            for name, value in columns.items()
            if not isinstance(value, str) and not math.isnan(value)
        }


class Hook:
    """Something that happens around every iteration, such as an evaluation or a logger.

    A subclass overrides the methods that it needs. `--hook file.py:Class` makes one on rank 0,
    without arguments.
    """

    name = "hook"
    """Group of its columns in the record."""
    on_every_rank = False
    """True if every rank calls `after`, before the iteration is recorded. Else rank 0 alone does."""
    folder = Path()
    """The run's folder."""
    settings: Mapping[str, Any] = {}
    """All settings of the run and its agent."""
    ended = ""
    """The reason to end the run after this iteration; "" to go on."""
    saves = False
    """True if a checkpoint is to be written after this iteration."""

    def before(self, iteration: int) -> None:
        """Prepare an iteration."""

    def after(self, agent: Agent, iteration: int, record: Record) -> None:
        """Follow an iteration.

        Args:
            agent: the agent after its update. A user's hook may replace `agent.options`, to change
                options that the agent lists in `coefficients` from the next update on. It may change
                weights too, which every rank gets before the next iteration: call `save` then, so that
                `replay` has them.
            iteration: its number, from 1.
            record: its row, with the columns of earlier hooks. A change of the row is not recorded.
        """

    def columns(self) -> Columns:
        """Return the hook's columns of this iteration's row. Those that are missing stay empty."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the hook's state for a checkpoint: numbers, texts and arrays, in dicts and lists."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state` returned. Its arrays have become tensors."""

    def close(self) -> None:
        """Free what the hook holds. Called after the last iteration, or after an error."""

    def stop(self, why: str = "") -> None:
        """End the run after this iteration. A resumed run goes on."""
        self.ended = f"hook {why or type(self).__name__}"

    def save(self) -> None:
        """Write a checkpoint after this iteration."""
        self.saves = True


def load_hook(name: str) -> type[Hook]:
    """Return a user's class of hooks. A class that does not derive from `Hook` gets its other methods.

    Raises:
        ValueError: if there is no such class, it takes a name or a role of rank0rl's own hooks, or
            its constructor needs arguments.
    """
    kind: Any = load_function(name)
    if not isinstance(kind, type) or not (hasattr(kind, "before") or hasattr(kind, "after")):
        raise ValueError(f"{name!r} is no hook: expected a subclass of rank0rl.Hook")
    hook: type[Hook] = kind if issubclass(kind, Hook) else type(kind.__name__, (kind, Hook), {})
    if hook.on_every_rank or hook.name in _TAKEN:
        wrong = "on_every_rank" if hook.on_every_rank else f"name {hook.name!r}"
        raise ValueError(f"{name!r} has {wrong}, which is for hooks of rank0rl alone: leave it out")
    try:
        inspect.signature(hook).bind()
    except TypeError as error:
        raise ValueError(
            f"{name!r} must need no arguments, because none are given: {error}"
        ) from None
    return hook


def make_hooks(
    options: RunOptions,
    agent: Agent,
    set_settings: Callable[[int, str], None],
    share_over: Callable[[], float],
) -> list[Hook]:
    """Return the goal, the curriculum and the user's hooks that the options name.

    Args:
        options: options of the run.
        agent: the agent, whose coefficients a user's hook may change.
        set_settings: see `Curriculum`.
        share_over: see `Curriculum`.
    """
    hooks: list[Hook] = []
    if options.stop_at_return is not None or options.patience is not None:
        hooks.append(Goal(options))
    if options.curriculum:
        choose = load_function(options.curriculum)
        hooks.append(Curriculum(choose, set_settings, share_over))
    if options.hook and not comm.get_rank():
        hooks += [load_hook(name)() for name in options.hook]
    if options.hook:
        hooks.append(Coefficients(agent))
    return hooks


class Coefficients(Hook):
    """Gives every rank what a user's hook has changed in the agent, and the record its options.

    Args:
        agent: the agent, with the options that the run began with.
    """

    name = "coefficients"

    def __init__(self, agent: Any) -> None:
        self._agent, self._first = agent, getattr(agent, "options", NoOptions())
        self.values: dict[str, Any] = {}
        """Changed option -> value, on rank 0."""

    def before(self, iteration: int) -> None:
        """Give the agent of every rank rank 0's options and weights, as hooks have left them after an iteration. Collective."""
        if not comm.get_rank() and self._now() != dataclasses.replace(self._first, **self.values):
            raise ValueError(
                "a hook must change the agent's options in `after`: this one did in `before`"
            )
        rank0_bcast_wts(self._agent.modules())
        self._give(comm.bcast_obj(self.values))

    def after(self, agent: Agent, iteration: int, record: Record) -> None:
        """Note which options the user's hooks have changed.

        Raises:
            ValueError: for an option that is not one of the agent's `coefficients`, and for a
                value of another type.
        """
        now, first = vars(self._now()), vars(self._first)
        may = self._agent.coefficients
        if unknown := {name for name in now if now[name] != first[name]} - {*may}:
            raise ValueError(
                f"a hook may change what {type(self._agent).__name__}.coefficients lists, "
                f"{', '.join(may) or 'which is nothing'}: it has changed {', '.join(sorted(unknown))}; add a name "
                f"to the list if the agent reads self.options whenever it uses that option"
            )
        changed = {name: now[name] for name in may if now[name] != first[name]}
        self.values = {k: v.item() if isinstance(v, np.generic) else v for k, v in changed.items()}
        apply(self.values, self._first, source="a hook")

    def columns(self) -> Columns:
        """Return the changed options as JSON."""
        return {"coefficients": json.dumps(self.values)}

    def state(self) -> dict[str, Any]:
        """Return the changed options."""
        return dict(self.values)

    def load(self, state: Mapping[str, Any]) -> None:
        """Change the same options."""
        self.values = dict(state)
        self._give(self.values)

    def _now(self) -> Any:
        return getattr(self._agent, "options", self._first)

    def _give(self, values: Mapping[str, Any]) -> None:
        if values or self._now() != self._first:
            self._agent.options = dataclasses.replace(self._first, **values)


_Choose = Callable[[float, dict[str, Any]], Any]


def chosen(choose: _Choose, progress: float, record: Mapping[str, Any]) -> str:
    """Return the settings that the function of --curriculum chooses, as JSON.

    Raises:
        ValueError: if the function does not return a dict, or JSON cannot write it.
    """
    try:
        settings = choose(progress, {**record})
    except Exception as error:
        error.add_note(f"In the function of --curriculum, at {progress:.1%} of the run.")
        raise
    try:
        if isinstance(settings, Mapping):
            return json.dumps(settings, default=methodcaller("tolist"))  # numbers of NumPy
    except (AttributeError, TypeError, ValueError):
        pass
    raise ValueError(
        f"a curriculum must return a dict of numbers, strings and lists: got {settings!r:.100}"
    )


class Curriculum(Hook):
    """Chooses the settings with which episodes begin. They are plain data, sent and saved as JSON.

    Args:
        choose: the user's function, called on rank 0. It takes the share of the run that is over, and
            the record of the last iteration, which is empty at the beginning. It returns the settings,
            a dict, and must not depend on anything else. record["settings"] has the last ones.
        set_settings: gives episodes that begin from now on their settings, on every rank. It takes the
            version and the text of the settings.
        share_over: returns the share of the run that is over. Called on rank 0.
    """

    name = "curriculum"

    def __init__(
        self,
        choose: _Choose,
        set_settings: Callable[[int, str], None],
        share_over: Callable[[], float],
    ) -> None:
        self._choose, self._set_settings, self._share_over = choose, set_settings, share_over
        self.version = 0
        """Number of times that the settings have changed."""
        self.text = ""
        """The settings as JSON; "" before the first iteration."""
        self._names: list[str] = []  # of the numbers in the first settings
        self._numbers: dict[str, float] = {}

    def before(self, iteration: int) -> None:
        """Let episodes on every rank begin with the settings. Collective."""
        if comm.get_rank() == 0 and not self.version:
            self.follow(chosen(self._choose, 0.0, {}))
            self._names = [*_numbers_in(self.text)]
        self._set_settings(*comm.bcast_obj((self.version, self.text)))

    def after(self, agent: Agent, iteration: int, record: Record) -> None:
        """Choose the next settings."""
        used = _numbers_in(record["settings"])
        self._numbers = {name: used.get(name, np.nan) for name in self._names}
        known = {name: value for name, value in record.items() if value != ""}
        last = {"settings": json.loads(self.text)}
        self.follow(chosen(self._choose, min(self._share_over(), 1.0), {**known, **last}))

    def follow(self, text: str) -> None:
        """Use other settings, given as JSON, from the next iteration on. Rank 0 only."""
        if text != self.text:
            self.version, self.text = self.version + 1, text

    def columns(self) -> Columns:
        """Return the numbers among the settings of the iteration's batch."""
        return self._numbers

    def state(self) -> dict[str, Any]:
        """Return the last settings."""
        return {"version": self.version, "text": self.text, "names": self._names}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the last settings."""
        self.version, self.text, self._names = state["version"], state["text"], state["names"]


def _numbers_in(text: str) -> dict[str, float]:
    """Return the numbers among settings, by name."""
    settings = json.loads(text)
    return {name: float(x) for name, x in settings.items() if isinstance(x, int | float)}


class Goal(Hook):
    """Judges a run by its evaluations, or by its last episodes if there are no evaluations.

    Args:
        options: options of the run.
    """

    name = "goal"

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._state: dict[str, Any] = {"score": None, "best": None, "best_at": 0, "judged_at": 0}

    def after(self, agent: Agent, iteration: int, record: Record) -> None:
        """Judge an iteration, unless there was no evaluation, or no episode has ended."""
        if self._options.eval_every:
            score = record["eval_return"]
        else:
            is_news = record["episodes"] >= LAST and not math.isnan(record["longest"])
            score = record["return_mean"] if is_news else ""
        if score == "":
            return
        self._state |= {"score": score, "judged_at": iteration}
        if self._state["best"] is None or score > self._state["best"]:
            self._state |= {"best": score, "best_at": iteration}
        self.ended = self._reached()

    def _reached(self) -> str:
        """Return the option by which the run ends now, with its value; "" if the run goes on."""
        enough, patience = self._options.stop_at_return, self._options.patience
        score, worse_for = self._state["score"], self._state["judged_at"] - self._state["best_at"]
        if enough is not None and score is not None and score >= enough:
            return f"stop_at_return {enough:g}"
        if patience is not None and worse_for >= patience:
            return f"patience {patience}"
        return ""

    def state(self) -> dict[str, Any]:
        """Return the scores."""
        return dict(self._state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the scores."""
        self._state = dict(state)
        self.ended = self._reached()


class TensorBoard(Hook):
    """Writes an events file into the run's folder.

    Args:
        folder: the run's folder.
        after: number of steps that the run has made. TensorBoard hides later points of an earlier
            start, because the run makes these steps again.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=after + 1)  # type: ignore[no-untyped-call]

    def after(self, agent: Agent, iteration: int, record: Record) -> None:
        """Write the numbers of one iteration."""
        for name, value in record.numbers.items():
            self._writer.add_scalar(name, value, record["steps"])

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WandB(Hook):
    """Sends the record to a Weights & Biases project.

    Args:
        project: the project's name.
        folder: the run's folder.
        settings: settings of the run, for the project's table of runs.
        first_start: `machine.provenance` of the run's first start. It gives the W&B run its id, which is
            the same for every start of this run, and which no other run has.
    """

    name = "wandb"

    def __init__(
        self,
        project: str,
        folder: Path,
        settings: Mapping[str, Any],
        first_start: Mapping[str, Any],
    ) -> None:
        import wandb

        unique = f"{first_start['host']} {folder.resolve()} {first_start['started']}"
        key = hashlib.sha256(unique.encode()).hexdigest()[:16]
        where = {"project": project, "name": folder.name, "id": key, "dir": str(folder)}
        self._run = wandb.init(**where, config=dict(settings), resume="allow")

    def after(self, agent: Agent, iteration: int, record: Record) -> None:
        """Send the numbers of one iteration."""
        self._run.log(record.numbers, step=record["steps"])

    def close(self) -> None:
        """Send everything that is not sent yet."""
        self._run.finish()
