"""What happens around an iteration: callback, curriculum, goal, and sinks of the record."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rank0rl.agent import Agent
from rank0rl.mpi import comm
from rank0rl.run import settings
from rank0rl.run.options import RunOptions


class Iteration:
    """The iteration that has just ended, as a function of --callback is given it.

    Args:
        folder: the run's folder.
        record: column of progress.csv -> value. Columns of times and hashes are not among them, so
            that what follows from it is the same for every number of ranks.
        agent: the agent, whose options may be changed.
        values: options that were changed earlier.
    """

    def __init__(
        self, folder: Path, record: Mapping[str, Any], agent: Agent, values: Mapping[str, Any]
    ) -> None:
        """Change nothing yet."""
        self.folder, self.record = folder, {**record}
        self._agent: Any = agent
        self.saves = False
        """True once `save` has been called."""
        self.values = {**values}
        """Options that were changed by `set`, now or earlier."""

    @property
    def options(self) -> Any:
        """Options of the agent, as the next update has them."""
        return dataclasses.replace(self._agent.options, **self.values)

    def save(self) -> None:
        """Write a checkpoint of this iteration's boundary."""
        self.saves = True

    def set(self, **values: float | str) -> None:
        """Change coefficients from the next update on. A resumed run has them too.

        Args:
            values: option of the agent -> value or schedule, for those in its `coefficients`.

        Raises:
            ValueError: for any other option, and for a value that is not allowed.
        """
        may = self._agent.coefficients
        values = {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}
        if unknown := values.keys() - {*may}:
            raise ValueError(
                f"{type(self._agent).__name__} reads {', '.join(sorted(unknown))} only at the "
                f"beginning, or does not have it: a callback may change {', '.join(may) or 'nothing'}"
            )
        settings.apply(values, self._agent.options, source="the function of --callback")
        self.values |= values


class Callback:
    """Calls the function, and brings what it has changed to every rank.

    Args:
        function: takes an `Iteration`; returns False to end the run.
        agent: the agent.
    """

    def __init__(self, function: Callable[[Iteration], bool | None], agent: Agent) -> None:
        """Begin before the first iteration."""
        self._function, self._agent = function, agent
        self.values: dict[str, Any] = {}
        """Options that were changed, on rank 0."""
        self._told: dict[str, Any] = {}
        self.ends = False
        """True once the function has ended the run."""

    def __call__(self, folder: Path, record: Mapping[str, Any]) -> bool:
        """Call the function after an iteration, on rank 0; return True if it asks for a checkpoint."""
        of = Iteration(folder, record, self._agent, self.values)
        try:
            answer = self._function(of)
        except Exception as error:
            error.add_note(f"In the function of --callback, after iteration {record['iteration']}.")
            raise
        self.ends = answer is not None and not answer
        self.values = of.values
        return of.saves

    def broadcast(self) -> None:
        """Give the agent of every rank its options as they are now.

        Collective: every rank calls this.
        """
        values = comm.bcast_obj(self.values)
        if values != self._told:
            agent: Any = self._agent
            agent.options, self._told = dataclasses.replace(agent.options, **values), values


Choose = Callable[[float, dict[str, Any]], Any]


class Curriculum:
    """The settings with which episodes begin. They are plain data, and travel as JSON.

    Args:
        choose: takes the share of the run that is over and the record of the last iteration, an empty
            one at the beginning; returns the settings, a dict. Called on rank 0. What it
            returns may depend on nothing else: record["settings"] holds what it returned last.
    """

    def __init__(self, choose: Choose) -> None:
        """Begin before the first iteration."""
        self._choose = choose
        self.version = 0
        """Number of times that the settings have changed."""
        self.texts: dict[int, str] = {}
        """Version -> settings, for those that an episode under way has, and the last ones."""
        self._names: list[str] | None = None

    @property
    def text(self) -> str:
        """The settings as JSON; "" before the first iteration."""
        return self.texts.get(self.version, "")

    def broadcast(self, iteration: int) -> tuple[int, str]:
        """Return the version and text of the settings of an iteration's batch on every rank.

        Collective: every rank calls this.
        """
        if comm.get_rank() == 0 and not self.version:
            self.advance(0.0, {})
        return comm.bcast_obj((self.version, self.text))

    def advance(self, progress: float, record: Mapping[str, Any]) -> None:
        """Choose the next settings. Rank 0 only.

        Raises:
            ValueError: if they are no dict of what JSON knows.
        """
        last = {"settings": json.loads(self.text)} if self.text else {}
        try:
            known = {name: value for name, value in record.items() if value != ""}
            settings = self._choose(min(progress, 1.0), {**known, **last})
        except Exception as error:
            error.add_note(f"In the function of --curriculum, at {progress:.1%} of the run.")
            raise
        try:
            if not isinstance(settings, Mapping):
                raise TypeError
            self.follow(json.dumps(settings, default=_plain))
        except (TypeError, ValueError):
            raise ValueError(
                f"a curriculum must return a dict of numbers, strings and lists: got {settings!r:.100}"
            ) from None

    def follow(self, text: str) -> None:
        """Take over settings, as JSON. Rank 0 only."""
        if text != self.text:
            self.version += 1
            self.texts[self.version] = text

    def forget_all_but(self, used: Any) -> None:
        """Forget all settings but those of these versions, and the last ones. Rank 0 only."""
        kept = {*np.asarray(used).tolist(), self.version}
        self.texts = {version: text for version, text in self.texts.items() if version in kept}

    def columns(self, text: str) -> dict[str, float | str]:
        """Return settings for the record: as JSON, and the numbers among them by name."""
        settings = json.loads(text)
        numbers = {k: float(v) for k, v in settings.items() if isinstance(v, int | float)}
        if self._names is None:
            self._names = [*numbers]
        return {"settings": text, **{name: numbers.get(name, np.nan) for name in self._names}}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"version": self.version, "texts": dict(self.texts), "names": self._names}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self.version, self._names = state["version"], state["names"]
        self.texts = dict(state["texts"])


def _plain(value: Any) -> Any:
    """Return a number or an array of NumPy as JSON knows it."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError


class Goal:
    """Judges a run by its evaluations, or by its last episodes if there are no evaluations.

    Args:
        options: options of the run.
    """

    def __init__(self, options: RunOptions) -> None:
        """Begin without a score."""
        self._options = options
        self._score: float | None = None
        self._best: float | None = None
        self._best_at = self._judged_at = 0

    def judge(
        self,
        iteration: int,
        returns: deque[float],
        ended: int,
        evaluated: npt.NDArray[Any] | None,
    ) -> None:
        """Take in an iteration. One without an evaluation, or without an episode that ended, brings no news.

        Args:
            iteration: its number.
            returns: returns of the last episodes of training. They count once there are `maxlen`.
            ended: number of those that ended in this iteration.
            evaluated: returns of an evaluation's episodes, if there was one.
        """
        if self._options.eval_every:
            episodes = evaluated
        else:
            episodes = np.array(returns) if ended and len(returns) == returns.maxlen else None
        if episodes is None:
            return
        self._score, self._judged_at = float(np.mean(episodes)), iteration
        if self._best is None or self._score > self._best:
            self._best, self._best_at = self._score, iteration

    def reached(self) -> str:
        """Return why the run ends now, "" if it goes on."""
        enough, patience = self._options.stop_at_return, self._options.patience
        if self._score is None:
            return ""
        if enough is not None and self._score >= enough:
            return f"stop_at_return {enough:g}"
        if patience is not None and self._judged_at - self._best_at >= patience:
            return f"patience {patience}"
        return ""

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        of = {"score": self._score, "best": self._best}
        return {**of, "best_at": self._best_at, "judged_at": self._judged_at}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self._score, self._best = state["score"], state["best"]
        self._best_at, self._judged_at = state["best_at"], state["judged_at"]


def goal_of(options: RunOptions) -> Goal | None:
    """Return the goal that the options set; None if the run has none."""
    return None if options.stop_at_return is options.patience is None else Goal(options)


class Sink(Protocol):
    """A receiver of the numbers of every iteration."""

    def row(self, values: Mapping[str, float], step: int) -> None:
        """Write the numbers of one iteration.

        Args:
            values: "group/name" -> number.
            step: environment steps so far, over all ranks.
        """

    def close(self) -> None:
        """Write everything that is not written yet."""


def check(**wanted: bool) -> None:
    """Raise ValueError if the package of a wanted sink is missing.

    Args:
        wanted: package -> True if it is wanted, such as tensorboard=True.

    Raises:
        ValueError: naming the package to install.
    """
    for package, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--{package} needs the package {package}, which is not installed: "
                f"pip install {package}, or leave --{package} out"
            )


class TensorBoard:
    """An events file in the run's folder.

    Args:
        folder: the run's folder.
        after: steps that the run has made. TensorBoard hides what an earlier start wrote after
            them.
    """

    def __init__(self, folder: Path, after: int) -> None:
        """Open the file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after + 1)  # type: ignore[no-untyped-call]

    def row(self, values: Mapping[str, float], step: int) -> None:
        """Write the numbers of one iteration."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()  # type: ignore[no-untyped-call]


class WandB:
    """A run in a Weights & Biases project.

    Args:
        project: the project's name.
        folder: the run's folder.
        settings: the run's settings.
        key: id of the W&B run. It is the same for every start of this run, and no other run has it.
    """

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any], key: str) -> None:
        """Start the W&B run, or continue it."""
        import wandb

        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=key,
            dir=str(folder),
            config=dict(settings),
            resume="allow",
        )

    def row(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers of one iteration."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send everything that is not sent yet."""
        self._run.finish()
