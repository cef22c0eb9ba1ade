"""mpiexec: whose it is, the command line that starts ranks, and the variables that ranks get.

Where all ranks are on one host, they stay off the network.
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
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NoReturn

from rank0rl.launch import usage_error
from rank0rl.launch.hosts import Host, listed

# Open MPI refuses root and more ranks than cores unless told. Like Intel MPI, it binds each rank to a
# core, which would leave rank 0's update a single one. Each MPI reads its own variables only. The first
# three are those of Spinning Up, OmniSafe and mpi_util: ranks share the cores, so each begins with one thread.
DEFAULT_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "IN_MPI": "1",
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
# Its variables have names of their own: a shell hands on a new value of a variable that it was given.
# It stays while its launcher lives, for 30 s at most: elsewhere, nobody else ends it once the launcher is killed.
# A zombie does not live: in a container without an init process, a launcher without a supervisor stays one.
_SHELL = """
r0_rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$SLURM_PROCID}}
r0_job=$RANK0RL_JOB
exec 3>&2 2>/dev/null
trap : TERM USR1
end_of() {
    while wait $1; r0_status=$?; [ $r0_status -gt 128 ] && kill -0 $1; do :; done
}
lives() {
    read -r r0_stat < /proc/$1/stat
    case ${r0_stat##*) } in Z*) return 1 ;; esac
    kill -0 $1
}
r0_here=$(uname -n)
read -r r0_supervisor r0_nprocs r0_host < "$r0_job/begun"
if [ "$r0_host" = "$r0_here" ]; then
    say() { echo "$2" > "$r0_job/$1.$r0_rank"; }
    say shell "$r0_here $PPID $$"
    { [ -e "$r0_job/environment" ] && . "$r0_job/environment"; exec "$@"; } 2>&3 3>&- &
    say shell "$r0_here $PPID $$ $!"
    end_of $!
    say status $r0_status
    if [ $r0_status = 0 ] && [ -e "$r0_job/ended.$r0_rank" ]; then
        [ -e "$r0_job/meets.$r0_rank" ] && exit 0
        count() { set -- "$r0_job/$1".[0-9]*; echo $#; }
        while [ $(count ended) -lt $r0_nprocs ] && lives $r0_supervisor; do sleep 0.05; done
        exit 0
    fi
    mark() { (printf '\\036%s %s.%s \\n' "${r0_job##*/}" $1 $r0_rank); }
    mark out
    mark err >&3
else
    say() { printf '\\036%s %s.%s %s\\n' "${r0_job##*/}" "$1" $r0_rank "$2" >&3; }
    say shell "$r0_here"
    "$@" 2>&3 3>&- &
    r0_child=$!
    while read -r r0_stat < /proc/$r0_child/stat; do
        case ${r0_stat##*) } in T*) r0_now=T ;; *) r0_now= ;; esac
        [ "$r0_now" = "$r0_was" ] || say state $r0_now
        r0_was=$r0_now
        lives $PPID || kill -9 $r0_child
        sleep 1 3>&-
    done > /dev/null &
    end_of $r0_child
    kill $!
    say status $r0_status
    [ $r0_status = 0 ] && exit 0
fi
r0_stayed=0
while lives $PPID && [ $((r0_stayed += 1)) -le 30 ]; do sleep 1; done
exit $r0_status
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


@dataclass(frozen=True)
class Launcher:
    """A command line that starts ranks."""

    words: list[str]
    """The launcher, such as mpiexec, with its own switches."""
    rank: list[str]
    """Command of every rank."""
    passed: Set[str] = frozenset()
    """Names of the variables that ranks on every host get."""

    @classmethod
    def of(
        cls,
        own: str | None,
        args: Sequence[str] | None,
        pass_env: str | None,
        bind_to_core: bool,
        hwthreads: bool,
    ) -> Launcher:
        """Return the launcher that `mpi_fork` describes.

        Raises:
            SystemExit: with code 2, if there is no launcher or no command line to repeat.
            ValueError: if a variable in pass_env is not set.
        """
        passed = _passed_variables(pass_env, os.environ)
        if os.name != "posix":
            _refuse("more than one rank needs Linux or macOS: use WSL on Windows")
        if args is None and (sys.argv[0] in ("", "-", "-c") or hasattr(builtins, "__IPYTHON__")):
            _refuse("ranks repeat a command line, and this Python has none: put it into a script")
        words = shlex.split(own or "") or [find_mpiexec() or ""]
        found = shutil.which(words[0])
        if not found:
            _refuse(
                f"there is no launcher {words[0]!r}: name one that can be run"
                if own
                else "more than one rank needs mpiexec, and none was found beside this Python or on "
                "PATH: activate the virtual environment, or pip install mpi4py mpich"
            )
        if bind_to_core or hwthreads:
            known = vendor(found)
            if known not in _VENDORS:
                _refuse(
                    f"{found} does not tell which MPI it belongs to: bind ranks with --mpiexec instead"
                )
            _, bind, threads = _VENDORS[known]
            words += [*(bind if bind_to_core else []), *(threads if hwthreads else [])]
        return cls(words, _rank_command(args), passed)

    @property
    def vendor(self) -> str:
        """Name of its MPI; "" if it does not tell."""
        return vendor(self.words[0])

    def command(self, n: int, hosts: Sequence[Host], env: Mapping[str, str]) -> list[str]:
        """Return the command line for n ranks on these hosts, with this environment of the launcher.

        Raises:
            ValueError: if this launcher's switches for hosts are not known.
        """
        where = _switches(self.vendor, hosts, env) if hosts else []
        return [*self.words, *where, "-n", str(n), *self.rank]

    def not_started(self, n: int, output: str, code: int | None) -> tuple[str, bool]:
        """Say why this output and exit code came in place of n ranks.

        Returns:
            One line, which also says what to do; and True if the same command line can never start them.
        """
        lines = [line.strip(" -=|*") for line in output.splitlines()]
        telling = [line for line in lines if any(re.search(words, line) for words in _REMEDIES)]
        said = [*telling, *(line for line in lines if line), f"it ended with code {code}"][0]
        known = [remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, said)]
        remedy = [*known, "find out more with python -m rank0rl doctor"][0]
        return f"{self.words[0]} did not start {n} ranks: {said}; {remedy}", bool(known)


def _refuse(message: str) -> NoReturn:
    sys.exit(usage_error(message))


def _rank_command(args: Sequence[str] | None) -> list[str]:
    """Return the command of a rank: Python, with this process's arguments by default, in a shell."""
    command = [sys.executable, *(sys.orig_argv[1:] if args is None else args)]
    return ["sh", "-c", _SHELL, "sh", *command]


def _switches(vendor: str, hosts: Sequence[Host], env: Mapping[str, str]) -> list[str]:
    """Return a launcher's switches to start ranks on these hosts, in order, with its environment.

    MPICH's launcher passes its whole environment to the ranks on every host. Open MPI's passes only
    its own variables and those that it is told to.

    Raises:
        ValueError: if the switches of this vendor (see `vendor`) are not known.
    """
    if vendor == "MPICH":
        return ["-hosts", listed(hosts)]
    if vendor == "Open MPI":
        own = ("OMPI_", "PRTE_", "PMIX_")
        names = [name for name in env if name.isidentifier() and not name.startswith(own)]
        passed = [word for name in names for word in ("-x", name)]
        return ["--host", listed(hosts), "--map-by", "slot:oversubscribe", *passed]
    raise ValueError(
        f"--hosts needs the launcher of MPICH or Open MPI: got "
        f"{vendor or 'a launcher that does not tell which MPI it belongs to'}; give the hosts by its "
        f"own switches, in --mpiexec"
    )


# Launchers send variables over the network in clear text, and some send all that they have. So the
# launcher of a job on several hosts starts with these variables alone. The ranks of this host, where the
# services are used that need keys, read all others from a file in the job's folder.
PASSED_VARIABLES = (
    *("HOME", "USER", "LOGNAME", "SHELL", "PWD", "PATH", "TMPDIR", "TZ"),
    *("LANG", "LANGUAGE", "LC_*", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("SSH_AUTH_SOCK", "KRB5CCNAME"),  # with which the launcher reaches the other hosts
    *("LD_*", "DYLD_*", "MALLOC_*", "GLIBC_TUNABLES"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "VECLIB_*"),
    *("IN_MPI", "NPY_*", "ATEN_*", "ONEDNN_*", "NUMBA_*"),
    *("TORCH_*", "PYTORCH_*", "JAX_*", "XLA_*", "CUDA_*", "CUBLAS_*", "HIP_*", "ROCR_*"),
    *("MUJOCO_*", "PYOPENGL_*", "EGL_*", "SDL_*"),
    *("MPICH_*", "MPIR_*", "HYDRA_*", "I_MPI_*", "OMPI_*", "PRTE_*", "PMIX_*", "UCX_*", "FI_*"),
    "RANK0RL_*",
)
"""Names of the variables that ranks on every host get; * stands for any letters."""

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHELLS_OWN = {"UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"}  # bash refuses them


def _passed_variables(more: str | None, env: Mapping[str, str]) -> set[str]:
    """Return the names of those of these variables that ranks on every host get.

    The user adds more, such as "A,B_*", to the list. Each of them must be there.
    """
    added = [word.strip() for word in (more or "").split(",") if word.strip()]
    for pattern in added:
        if not _matching(env, [pattern]):
            raise ValueError(
                f"--pass-env must name environment variables that are set: got {pattern!r}; set it, "
                f"or leave it out"
            )
    return _matching(env, (*PASSED_VARIABLES, *added))


def keep_variables_here(env: Mapping[str, str], passed: Set[str], file: Path) -> dict[str, str]:
    """Return the variables of a launcher that goes to other hosts; write all others to a file of this host.

    Args:
        env: variables of the ranks on this host.
        passed: names of those that ranks on every host get, besides the ones that rank0rl has set.
        file: file for the others, as commands of a shell, read before a rank starts.
    """
    passed = _matching(env, PASSED_VARIABLES) | passed
    kept = [name for name in env if name not in passed | _SHELLS_OWN and _NAME.fullmatch(name)]
    lines = "".join(f"export {name}={shlex.quote(env[name])}\n" for name in kept)
    file.write_text(lines, errors="surrogateescape")
    return {name: value for name, value in env.items() if name in passed}


def _matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
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

    The launcher's variables tell whether they are, whoever has started it. One port stays open: that of
    Open MPI's launcher, see docs/several-machines.md.

    Args:
        env: variables of this rank. What the user has set stays.
    """
    alone = any(env.get(here, "") == env.get(of_all) for here, of_all in _SIZES)
    for name, value in _SETTINGS.items() if alone else ():
        env.setdefault(name, value)
    # Each rank inherits the open port of MPICH's launcher. What a rank sets on it counts in the launcher too,
    # because they share one socket.
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
