"""The callback of `same_curve_envs.py` as a class, for checkouts that have --hook.

It has a file of its own, so that a change to it leaves the cached hashes of old checkouts valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from same_curve_envs import coefficients


class Tune:
    """Changes coefficients after each iteration: `tune` for --hook."""

    def __init__(self) -> None:
        """Begin without changes."""
        self.values: dict[str, Any] = {}

    def before(self, iteration: Any) -> None:
        """Do nothing."""

    def after(self, agent: Any, iteration: Any, record: Mapping[str, Any]) -> None:
        """Give the agent its coefficients."""
        self.values = coefficients(record)
        agent.options = dataclasses.replace(agent.options, **self.values)

    def columns(self) -> dict[str, Any]:
        """Return nothing for the record."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the coefficients, which a resumed run goes on with."""
        return dict(self.values)

    def load(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self.values = dict(state)
