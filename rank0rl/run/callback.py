"""A function of the user's that rank 0 calls after every iteration: it may stop, save, or change coefficients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.agent import Agent
from rank0rl.mpi import comm
from rank0rl.run import config


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
        config.apply(values, self._agent.options, source="the function of --callback")
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
