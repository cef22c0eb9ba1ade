"""Objects as rows of bytes, which travel as arrays do."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.errors import alone

Array = npt.NDArray[Any]

ROW = 64  # bytes; MPI counts up to 2^31 - 1 rows, so that 128 GiB of objects can travel


def as_rows(value: Any) -> Array:
    """Return an object, pickled, as bytes of shape (rows, ROW).

    Raises:
        ValueError: if it cannot be pickled.
    """
    file = io.BytesIO()
    try:
        pickle.dump(value, file)
    except Exception as error:  # an object's own pickling may raise anything
        raise ValueError(f"cannot be sent: {error}") from None
    file.write(bytes(-file.tell() % ROW))
    return np.frombuffer(file.getbuffer(), np.uint8).reshape(-1, ROW)


def from_rows(rows: Array, name: str) -> Any:
    """Return the object that `as_rows` has pickled.

    Args:
        rows: its bytes.
        name: name of the object, for the error message.

    Raises:
        RuntimeError: on this rank alone, if it cannot be unpickled.
    """
    try:
        return pickle.loads(rows.data)
    except Exception as error:  # so may its unpickling
        raise alone(
            RuntimeError(
                f"{name} came, but cannot be unpickled here: {type(error).__name__}: {error}; send "
                f"arrays, numbers and text, or objects whose class this rank can import"
            )
        ) from error
