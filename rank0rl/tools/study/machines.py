"""The machines of a study: each runs the same study, and takes runs that no other one has claimed."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from rank0rl.launch.hosts import SSH, Host
from rank0rl.run.machine import available_cores


def claim(folder: Path) -> Callable[[], None] | None:
    """Claim a folder for this process, at most while it lives.

    Args:
        folder: of a run, for instance. It is made if there is none.

    Returns:
        A function that gives it up; None if another process has claimed it.

    Raises:
        OSError: if the file system has no locks: two machines would train the same run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A file system that machines share knows the locks of files that are open for writing.
    file = os.open(folder / "claim", os.O_RDWR | os.O_CREAT)
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError as error:
            os.close(file)
            raise OSError(
                f"a study needs a folder on a file system with locks: {folder} has none ({error}); "
                f"choose another --out"
            ) from error
    return partial(os.close, file)


_FOLDER = "machines"


def enter(out: Path) -> Callable[[], None]:
    """Claim the cores of this machine for a study; return what gives them up.

    Args:
        out: folder of the study.

    Raises:
        ValueError: if another process trains the study with these cores.
    """
    release = claim(out / _FOLDER / f"{platform.node()}-{available_cores()[0][0]}")
    if release is None:
        raise ValueError(f"another process of this machine trains the study in {out}")
    return release


class Others:
    """The study on other machines while entered, each started by ssh.

    Args:
        hosts: this host first; none if the study is of this machine only.
        out: folder of the study, on storage that all machines share.
    """

    def __init__(self, hosts: Sequence[Host], out: Path) -> None:
        """Start nothing yet."""
        self._hosts, self._out = hosts[1:], out
        self._sessions: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Others:
        """Start the study on every other machine."""
        for host in self._hosts:
            study = [sys.executable, "-m", "rank0rl", "study", str(self._out), "--trust"]
            words = shlex.join([*study, "--cores", str(host.slots)])
            path = shlex.quote(os.environ.get("PYTHONPATH", ""))
            command = f"cd {shlex.quote(os.getcwd())} && PYTHONPATH={path} TERM=dumb exec {words}"
            with (self._out / _FOLDER / f"{host.name}.txt").open("ab") as output:
                self._sessions[host.name] = subprocess.Popen(
                    [*SSH[:-1], "-tt", *SSH[-1:], host.name, command],  # it ends with its terminal
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C must not reach ssh
                )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the other machines; if the study is stopped, they are stopped."""
        for name, session in self._sessions.items():
            if kind is not None:
                session.terminate()
            if session.wait() and kind is None:
                file = self._out / _FOLDER / f"{name}.txt"
                print(
                    f"note: the study on {name} has not come to its end: see {file}",
                    file=sys.stderr,
                )
