"""The instructions of the CPU that libraries may use: limited, other types of CPU give the same bits.

NumPy, OpenBLAS, torch and compiled updates choose their code by the type of CPU when they are loaded. Sums
of other lengths and other approximations have other last bits.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

# NumPy's names before and after 2.4; it passes over those that it does not know.
_NUMPY = "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
SETS = {
    "avx2": {
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": _NUMPY,
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
    }
}
"""Name of --cpu -> the variables of the libraries."""


def limit(name: str | None) -> None:
    """Limit this process, and those that it starts, before the libraries are loaded.

    Args:
        name: what --cpu says. None leaves all as it is.

    Raises:
        ValueError: for an unknown name.
    """
    if name is None:
        return
    if name not in SETS:
        raise ValueError(f"cpu must be one of {', '.join(SETS)}: got {name!r}; set --cpu")
    if "numpy" not in sys.modules:
        os.environ.update(SETS[name])


def limit_as(words: Iterable[str]) -> None:
    """Limit this process as the first run was that these words name: folders of runs, or files in them."""
    for word in words:
        for folder in (Path(word), *Path(word).parents[:2]):
            try:
                name = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")).get(
                    "cpu"
                )
            except (OSError, ValueError):
                continue
            if name in SETS:  # whatever else it is, reading the run will say so
                limit(name)
            return


def check(name: str | None) -> None:
    """Check that this process is limited as its options say.

    Raises:
        ValueError: if the libraries were loaded before that was known.
    """
    if name is not None and any(os.environ.get(k) != v for k, v in SETS[name].items()):
        raise ValueError(
            f"cpu {name} must be known before NumPy is loaded: give --cpu {name} on the command line of "
            f"train, or the file that sets it by --config"
        )
