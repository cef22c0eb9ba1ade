"""A curriculum: reset options of the next episodes, chosen on rank 0 after every iteration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rank0rl.mpi import comm

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
        return comm.bcast_obj((self.version, self.text))  # type: ignore[no-any-return]

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
