"""A short reason for a module of the user's that cannot be imported."""

from __future__ import annotations

import itertools
import traceback
from pathlib import Path

_OURS = str(Path(__file__).parent)


def why(error: BaseException) -> str:
    """Return what has ended an import, with its place in the code that was imported."""
    if isinstance(error, SyntaxError):
        return str(error)  # with file and line
    frames = traceback.extract_tb(error.__traceback__)
    places = [*itertools.dropwhile(_is_before, frames)]
    if not places:
        return str(error)
    if isinstance(error, SystemExit):
        return f"line {places[0].lineno} of {places[0].filename} ends in sys.exit({error.code!r})"
    lines = [*traceback.format_list(places), *traceback.format_exception_only(error)]
    return "\n" + "".join(lines).rstrip()


def _is_before(frame: traceback.FrameSummary) -> bool:
    """Return True for a call that leads to the imported code."""
    return frame.filename.startswith(_OURS) or "importlib" in frame.filename
