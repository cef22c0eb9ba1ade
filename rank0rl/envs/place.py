"""The place of an environment: its index in the run, its ranks, and its folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rank0rl.envs.wrappers import Around


@dataclass(frozen=True)
class Place:
    """Index, ranks and folder of an environment. A function or class that makes one may take it, as `place`."""

    index: int = 0
    """Index of the environment among those of training, or of evaluation, on all ranks; of a game, its number. For ports and files alone: which of them plays an episode may depend on the number of ranks."""
    evaluation: bool = False
    """True if episodes are evaluated or shown here, and none are trained on."""
    folder: Path | None = None
    """Empty folder of this environment alone in a run with --env-folders; None without, and when a run first looks at its spaces."""
    make_comm: Callable[[], Any] | None = field(default=None, repr=False)
    """Returns `comm`."""
    call: Callable[..., Any] | None = field(default=None, repr=False)
    """Calls a function on all ranks of `comm`, if there are several, before the environment is made on them."""

    find_solver: Callable[[], Any] | None = field(default=None, repr=False)
    """Returns `solver`."""

    @property
    def solver(self) -> Any:
        """The solver of this environment in a job of several programs: a communicator of mpi4py, and its rank there.

        None without --mpmd, and for evaluations.
        """
        return self.find_solver() if self.find_solver else None

    @property
    def comm(self) -> Any:
        """Communicator of mpi4py, of the ranks on which the environment is one program: this one alone, unless there are more.

        A run with one rank loads MPI when this is first read. None for a place that was made without a run.
        """
        return self.make_comm() if self.make_comm else None


class FolderEnv(Around):
    """An environment with a folder of its own, which is removed at the end, but kept after an error.

    Args:
        make: makes the environment, in this folder.
        parent: where the folder is made; made too if it is missing.
        name: beginning of the folder's name.
    """

    def __init__(self, make: Callable[[Path], Any], parent: str, name: str) -> None:
        Path(parent).mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent)).resolve()
        self._keep = False
        super().__init__(lambda: self._try(make, self.folder))

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment."""
        return self._try(self._env.reset, **kwargs)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self._try(self._env.step, action)

    def close(self) -> None:
        """Close the environment; remove its folder, unless there was an error."""
        self._try(self._env.close)
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _try(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._keep = True
            error.add_note(f"Its files are in {self.folder}.")
            raise
