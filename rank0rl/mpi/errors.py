"""Errors in collectives: the same on every rank where that is possible, and the end of the job elsewhere.

Before the first message of a collective, `attempt` catches whatever goes wrong on this rank. The rank
still takes part in the exchange of layouts, tells the others, and all of them raise the same error.
What goes wrong later, on one rank alone, leaves ranks that wait for different messages. `collective`
remembers such an error, and that rank refuses every later collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from rank0rl.mpi.world import get_rank, world

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=Exception)

_IN_STEP = "ranks_are_in_step"  # attribute of errors after which a collective may follow

_alone: list[str] = []  # errors of this rank alone, which the next exchange of layouts tells
_broken: list[str] = []  # the error that left this rank out of step, if there was one


class OutOfStep(BaseException):
    """Refusal of a collective, because an earlier one failed on this rank alone.

    It is not an `Exception`, so that the script that has swallowed the first error ends now.
    """


def attempt(prepare: Callable[[], T], nothing: Any) -> tuple[T, str]:
    """Return what this rank prepares for a collective, and ""; or `nothing`, and what is wrong."""
    try:
        return prepare(), ""
    except (TypeError, ValueError) as error:
        return nothing, str(error) or repr(error)
    except Exception as error:  # objects of users may raise anything
        return nothing, f"{type(error).__name__}: {error}"


def agreed(error: E) -> E:
    """Mark an error that every rank raises, so that collectives may follow it."""
    setattr(error, _IN_STEP, True)
    return error


def alone(error: E) -> E:
    """Mark an error that other ranks may not have, raised where no message is on its way.

    The next exchange of layouts fails on every rank, unless each has raised equally many.
    """
    _alone.append(f"{type(error).__name__}: {error}")
    return agreed(error)


def raised_alone() -> list[str]:
    """Return the errors of this rank that other ranks may not have, oldest first."""
    return _alone


def collective(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse to run after an error in it, or in another one, on this rank alone."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _broken:
            raise OutOfStep(
                f"an earlier collective failed on rank {get_rank()} alone, so that the ranks are no "
                f"longer in step: {_broken[0]}; let such an error end the job"
            )
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if world() and not hasattr(error, _IN_STEP):
                _broken.append(f"{type(error).__name__}: {error}")
            raise

    return call
