"""The command line that starts ranks: whose mpiexec it is, its switches, and the variables that ranks get.

Launchers send variables over the network in clear text, and some send all that they have. So the
launcher of a job on several hosts starts with the variables of the list alone. The ranks of this
host, where the services are used that need keys, read all others from a file in the job's folder.

The ranks know from their launcher that nobody is elsewhere, whoever has started it. What cannot be
had is the port of Open MPI's launcher, see docs/several-machines.md.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

# Open MPI refuses root and more ranks than cores unless told. Like Intel MPI, it binds each rank to a
# core, which would leave rank 0's update a single one. Each MPI reads its own variables only.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "I_MPI_PIN": "off",
}
# The folder of the files of Open MPI's launcher. It leaves them if it is ended with the job, and a later
# launcher that got the same process id would not start. So the folder is the job's, and goes with it.
OPEN_MPI_FILES = "PRTE_MCA_prte_local_tmpdir_base"

# Vendor -> a pattern of what its `mpiexec --version` prints, its switches for one core per rank, and
# those to count hardware threads as cores, which only Open MPI needs.
_VENDORS: dict[str, tuple[str, list[str], list[str]]] = {
    "Intel MPI": (
        r"Intel\(R\) MPI",
        ["-genv", "I_MPI_PIN", "on", "-genv", "I_MPI_PIN_DOMAIN", "core"],
        [],
    ),
    "MPICH": (r"HYDRA|MPICH", ["-bind-to", "core"], []),
    "Open MPI": (
        r"Open ?MPI|OpenRTE|PRTE|PRRTE|prun",
        ["--bind-to", "core"],
        ["--use-hwthread-cpus"],
    ),
}

# Pattern of what a launcher printed -> what to do about it.
_REMEDIES = {
    r"slots": "name a command line of your own, such as --mpiexec 'mpiexec --oversubscribe', or "
    "lower --nprocs",
    r"\broot\b": "run as another user, or give its switch for root with --mpiexec",
    r"(?i)unrecogni[sz]ed|unknown|invalid|illegal": "it does not take '-n N COMMAND': name another "
    "one with --mpiexec",
}

# $RANK0RL_JOB is the job's folder. What the shell says of its rank is a file there, or a line on stderr on
# other hosts, which do not see the folder: see job.py. The command runs in the background, because a shell
# prints a message about a foreground command that a signal ends. A rank that ended otherwise than well
# stays, so that the launcher does not end the job before rank 0 has saved; the supervisor ends it. A rank
# that never met the others waits for their end, because Open MPI would take the end of this rank for a failure.
# A batch system may signal every process of a job, this shell too: it goes on waiting for its rank.
# Its last words may still be on their way through the launcher: a line that follows them on either stream
# tells the supervisor when they are there.
# The sleep is short enough to leave nothing behind if the supervisor is gone.
_SHELL = """
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID}}
job=$RANK0RL_JOB
exec 3>&2 2>/dev/null
trap : TERM USR1
end_of() {
    while wait $1; status=$?; [ $status -gt 128 ] && kill -0 $1; do :; done
}
here=$(uname -n)
read -r supervisor nprocs host < "$job/begun"
if [ "$host" = "$here" ]; then
    say() { echo "$2" > "$job/$1.$rank"; }
    say shell "$here $PPID $$"
    { [ -e "$job/environment" ] && . "$job/environment"; exec "$@"; } 2>&3 3>&- &
    say shell "$here $PPID $$ $!"
    end_of $!
    say status $status
    if [ $status = 0 ] && [ -e "$job/ended.$rank" ]; then
        [ -e "$job/meets.$rank" ] && exit 0
        count() { set -- "$job/$1".[0-9]*; echo $#; }
        while [ $(count ended) -lt $nprocs ] && kill -0 $supervisor; do sleep 0.05; done
        exit 0
    fi
    mark() { (printf '\\036%s %s.%s \\n' "${job##*/}" $1 $rank); }
    mark out
    mark err >&3
else
    say() { printf '\\036%s %s.%s %s\\n' "${job##*/}" "$1" $rank "$2" >&3; }
    say shell "$here"
    "$@" 2>&3 3>&- &
    child=$!
    while read -r stat < /proc/$child/stat; do
        case ${stat##*) } in T*) now=T ;; *) now= ;; esac
        [ "$now" = "$was" ] || say state $now
        was=$now
        [ -d /proc/$PPID ] || kill -9 $child
        sleep 1 3>&-
    done > /dev/null &
    end_of $child
    kill $!
    say status $status
    [ $status = 0 ] && exit 0
fi
sleep 30
exit $status
"""


def find_mpiexec() -> str | None:
    """Return the mpiexec beside the running Python, else the one on PATH."""
    here = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=here) or shutil.which("mpiexec")


@cache
def vendor(mpiexec: str) -> str:
    """Return the name of a launcher's MPI; "" if its `--version` does not tell."""
    try:
        done = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    output = done.stdout + done.stderr
    return next((name for name, (prints, *_) in _VENDORS.items() if re.search(prints, output)), "")


def launcher_command(
    bind_to_core: bool, hwthreads: bool, own: str | None, args: Sequence[str] | None
) -> list[str]:
    """Return the launcher's command line, without the number of ranks, their hosts and their command.

    Args:
        bind_to_core: True to bind each rank to a core.
        hwthreads: True to count hardware threads as cores.
        own: a command line to use instead of the mpiexec that is found.
        args: arguments of the ranks' Python; None to repeat those of this one.

    Raises:
        SystemExit: with code 2, if there is no launcher or no command line to repeat.
    """
    if os.name != "posix":
        sys.exit(usage_error("more than one rank needs Linux or macOS: use WSL on Windows"))
    if args is None and (sys.argv[0] in ("", "-", "-c") or hasattr(builtins, "__IPYTHON__")):
        sys.exit(
            usage_error(
                "ranks repeat a command line, and this Python has none: put it into a script"
            )
        )
    launcher = shlex.split(own or "") or [find_mpiexec() or ""]
    found = shutil.which(launcher[0])
    if not found:
        sys.exit(
            usage_error(
                f"there is no launcher {launcher[0]!r}: name one that can be run"
                if own
                else "more than one rank needs mpiexec, and none was found beside this Python or "
                "on PATH: activate the virtual environment, or pip install mpi4py mpich"
            )
        )
    if bind_to_core or hwthreads:
        known = vendor(found)
        if known not in _VENDORS:
            sys.exit(
                usage_error(
                    f"{found} does not tell which MPI it belongs to: bind ranks with --mpiexec instead"
                )
            )
        _, bind, threads = _VENDORS[known]
        launcher += bind * bind_to_core + threads * hwthreads
    return launcher


def rank_command(args: Sequence[str] | None) -> list[str]:
    """Return the command of every rank: Python with these arguments, in a shell that keeps its exit status.

    Args:
        args: arguments of Python; None to repeat those of this process.
    """
    command = [sys.executable, *(sys.orig_argv[1:] if args is None else args)]
    return ["sh", "-c", _SHELL, "sh", *command]


def not_started(mpiexec: str, n: int, output: str, code: int | None) -> str:
    """Return one line that says why there are no ranks, and what to do.

    Args:
        mpiexec: the launcher.
        n: number of ranks that it should have started.
        output: its output.
        code: its exit code.
    """
    lines = [line.strip(" -=|*") for line in output.splitlines()]
    telling = [line for line in lines if any(re.search(pattern, line) for pattern in _REMEDIES)]
    line = next(iter([*telling, *(line for line in lines if line)]), f"it ended with code {code}")
    remedy = next(
        (remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, line)),
        "find out more with python -m rank0rl doctor",
    )
    return f"{mpiexec} did not start {n} ranks: {line}; {remedy}"


def usage_error(message: str) -> int:
    """Print a message about wrong use; return its exit code, 2."""
    print(f"error: {message}", file=sys.stderr)
    return 2


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


# The number of ranks on this host and of all ranks, as MPICH and Intel MPI, and as Open MPI say them.
_SIZES = (
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
)
# Without these, each rank listens on all networks, in case another one is elsewhere. Ranks on one host
# talk in shared memory. UCX serves MPICH and Open MPI, libfabric MPICH, and the others are their own.
_SETTINGS = {
    "UCX_TLS": "^tcp",
    "FI_PROVIDER": "^tcp,sockets,udp",
    "OMPI_MCA_btl": "^tcp",
    "I_MPI_FABRICS": "shm",
}


def stay_on_loopback(env: MutableMapping[str, str] = os.environ) -> None:
    """Keep MPI, which is not loaded yet, and its launcher off the network if all ranks are on this host.

    Args:
        env: variables of this rank. What the user has set stays.
    """
    alone = any(env.get(here, "") == env.get(of_all) for here, of_all in _SIZES)
    for name, value in _SETTINGS.items() if alone else ():
        env.setdefault(name, value)
    _close_launchers_ports(alone)


def _close_launchers_ports(alone: bool) -> None:
    """Close the ports that the launcher has left open in this rank; let them hear loopback only if alone.

    Each rank inherits the port of MPICH's launcher. What a rank sets on it counts in the launcher too,
    because they share one socket.
    """
    inherited = _sockets("self").items() & _sockets(str(os.getppid())).items()
    for descriptor, _ in inherited:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as port:
            if _listens(port):
                os.close(descriptor)
                if alone:  # not every system allows it
                    port.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def _sockets(process: str) -> dict[int, str]:
    """Return descriptor -> the socket's name in the kernel, of a process; nothing where there is no /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if (name := str(file.readlink())).startswith("socket:"):
                    found[int(file.name)] = name
    return found


def _listens(port: socket.socket) -> bool:
    is_ip = port.family in (socket.AF_INET, socket.AF_INET6)
    return is_ip and bool(port.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
