"""The unfinished episodes of all envs, as rank 0 knows them: all it takes to repeat them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.batch import Batch

Array = npt.NDArray[Any]


class Unfinished:
    """The seed and the actions of the episode that is under way in each env.

    Args:
        max_steps: Actions of longer episodes are not kept.
    """

    def __init__(self, max_steps: int) -> None:
        """Begin before the first iteration."""
        self._max_steps = max_steps
        self._envs: Batch = {}
        self._act: list[Array] = []  # one array per env, never changed in place

    def add(self, gathered: Batch) -> None:
        """Take what the ranks' `Rollout.unfinished` returned, in order of envs."""
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
        """Return a row for each env, for `Rollout.restore`; nothing if no episode is under way.

        Returns:
            "episode", "steps", "ret", "obs", and "kept", the number of actions that are kept, by
            env; and these actions, "act", (sum of kept, *act).
        """
        return {**self._envs, "act": np.concatenate(self._act)} if self._act else {}

    def load(self, envs: Batch) -> None:
        """Take back what `all` returned."""
        self._envs = {name: array for name, array in envs.items() if name != "act"}
        self._act = np.split(envs["act"], np.cumsum(envs["kept"])[:-1]) if envs else []
