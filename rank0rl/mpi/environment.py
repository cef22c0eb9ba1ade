"""The environment variables that ranks on other hosts get: a list, and those that the user adds.

Launchers send variables over the network in clear text, and some send all that they have. So the
launcher of a job on several hosts starts with the variables of the list alone. The ranks of this
host, where the services are used that need keys, read all others from a file in the job's folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Set
from fnmatch import fnmatchcase
from pathlib import Path

PASSED = (
    *("HOME", "USER", "LOGNAME", "SHELL", "PWD", "PATH", "TMPDIR", "TZ"),
    *("LANG", "LANGUAGE", "LC_*", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("SSH_AUTH_SOCK", "KRB5CCNAME"),  # with which the launcher reaches the other hosts
    *("LD_*", "DYLD_*", "MALLOC_*", "GLIBC_TUNABLES"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "VECLIB_*"),
    *("NPY_*", "ATEN_*", "ONEDNN_*", "NUMBA_*"),
    *("TORCH_*", "PYTORCH_*", "JAX_*", "XLA_*", "CUDA_*", "CUBLAS_*", "HIP_*", "ROCR_*"),
    *("MUJOCO_*", "PYOPENGL_*", "EGL_*", "SDL_*"),
    *("MPICH_*", "MPIR_*", "HYDRA_*", "I_MPI_*", "OMPI_*", "PRTE_*", "PMIX_*", "UCX_*", "FI_*"),
    "RANK0RL_*",
)
"""Names of the variables that ranks on every host get; * stands for any letters."""

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHELLS_OWN = {"UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"}  # bash refuses them


def passed_names(more: str | None, env: Mapping[str, str]) -> set[str]:
    """Return the names of the variables that ranks on every host get.

    Args:
        more: names that the user adds to the list, such as "A,B_*".
        env: variables of this process.

    Raises:
        ValueError: if there is no variable with one of these names.
    """
    added = [word.strip() for word in (more or "").split(",") if word.strip()]
    for pattern in added:
        if not _matching(env, [pattern]):
            raise ValueError(
                f"--pass-env must name environment variables that are set: got {pattern!r}; set it, "
                f"or leave it out"
            )
    return _matching(env, (*PASSED, *added))


def keep_here(env: Mapping[str, str], passed: Set[str], file: Path) -> dict[str, str]:
    """Return the variables of a launcher that goes to other hosts; write all others to a file of this host.

    Args:
        env: variables of the ranks on this host.
        passed: names of those that ranks on every host get, besides the ones that rank0rl has set.
        file: file for the others, as commands of a shell, read before a rank starts.
    """
    passed = _matching(env, PASSED) | passed
    kept = [name for name in env if name not in passed | _SHELLS_OWN and _NAME.fullmatch(name)]
    lines = "".join(f"export {name}={shlex.quote(env[name])}\n" for name in kept)
    file.write_text(lines, errors="surrogateescape")
    return {name: value for name, value in env.items() if name in passed}


def _matching(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    patterns = tuple(patterns)
    return {name for name in names if any(fnmatchcase(name, each) for each in patterns)}
