"""python -m rank0rl study ENVIRONMENT ...: train many runs on all cores, and compare them.

The state of a study is the folders of its runs. A study that was stopped, or killed, goes on when the
same command is given again. Each machine runs the same study, and takes runs that no other one has claimed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tomli_w
import tyro

from rank0rl.launch import exit_code_after, one_line, python, usage_error
from rank0rl.launch.hosts import SSH, Host, read_hosts
from rank0rl.options import apply, check
from rank0rl.run import files, settings
from rank0rl.run.agents import short_name
from rank0rl.run.folder import FOREIGN
from rank0rl.run.machine import available_cores
from rank0rl.run.signals import Interrupted
from rank0rl.tools import figures
from rank0rl.tools.study import results, search
from rank0rl.tools.study.planned import Options, planned, unequal
from rank0rl.tools.study.training import Runs, claim, train

_MACHINES = "machines"  # folder of their claims and of what they print
_TRUST = "--trust"
_HELPS = "RANK0RL_STUDY_HELPS"  # set on the other machines: the first one writes the results


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, 1 if a run has failed, 2 for a wrong use, 128 + s after signal s.

    SIGHUP counts as SIGTERM.
    """
    try:
        with figures.style():  # without matplotlib, now, and not after all runs
            given, rest, source = _read(argv)
        if given.search:
            search.check(given, rest, source)
        runs = planned(given, rest, source=source)
        out = Path(given.out or _name(given))
        for run in runs:
            run.check(out)
        hosts = read_hosts(given.hosts, None)
        leave = _enter(out)
        number = hosts[0].slots if hosts else given.cores
        searching = search.Search(given, rest, out) if given.search else None
        _keep_options(given, rest, out)
    except (ValueError, OSError) as error:
        return usage_error(str(error))
    _end_with_terminal()
    try:
        with _on_others(hosts[1:], out, source is None):
            if searching:
                runs = planned(given, rest, _found(searching, given.trials, number), source)
            cores = available_cores()[:number]
            notes = [f"note: {line}" for line in unequal(runs)]
            print(
                *notes,
                f"runs: {len(runs)}, cores: {len(cores)}, folder: {out}",
                sep="\n",
                flush=True,
            )
            left = Runs(runs, out)
            train(left, cores)
    except Interrupted as stop:
        print(f"stopped: {out} goes on with the same command", file=sys.stderr)
        return exit_code_after(stop.signum)
    except (ValueError, OSError) as error:
        usage_error(str(error))
        return 1
    finally:
        leave()
    for name, why in left.failed.items():
        words = f"failed: {name}: {why} (see {out / name / 'output.txt'})"
        print(one_line(words), file=sys.stderr)
    if len(left.failed) == len(runs) or _HELPS in os.environ:
        return 1 if left.failed else 0
    try:
        print(results.write(out, given.minutes_to, notes))
    except FOREIGN as error:
        print(f"error: all is trained, but there are no results: {error}", file=sys.stderr)
        return 1
    print(f"in {out}: table.md, table.csv, runs.csv, learning.png, report.html")
    return 1 if left.failed else 0


def _read(argv: Sequence[str]) -> tuple[Options, list[str], Path | None]:
    """Return the options of the study, those of training, and the file that has them, if it is not trusted.

    Raises:
        ValueError: if an option is wrong, or no environment is named.
        SystemExit: when help was asked for, or an argument is wrong, after tyro has printed it.
    """
    envs = [*itertools.takewhile(lambda word: not word.startswith("-"), argv)]
    default, file = Options(envs=tuple(envs)), None
    if len(envs) == 1:
        path = Path(envs[0])
        if path.suffix == ".toml":
            file = path
        elif (path / results.FILE).exists():
            file = path / results.FILE
    if file:
        (of_file,) = apply(settings.load(file), Options(), source=str(file))
        default = dataclasses.replace(of_file, trust=False)  # only the command line says that
        if file.name == results.FILE:  # a study goes on in its folder, wherever that is now
            default = dataclasses.replace(default, out=str(file.parent))
    given, rest = tyro.cli(
        Options,
        args=argv[len(envs) :],
        default=default,
        prog="python -m rank0rl study",
        return_unknown_args=True,
    )
    _check(given, argv)
    source = None if given.trust else file
    if source and of_file.hosts:
        raise ValueError(
            f"{source} has --hosts, where programs would start: if you trust it, add --trust"
        )
    if source and default.out:
        here = (Path.cwd(), source.resolve().parent)
        if not any(map(Path(default.out).resolve().is_relative_to, here)):
            raise ValueError(
                f"{source} has out={default.out!r}, a folder elsewhere: if you trust it, add --trust"
            )
    trust = [_TRUST] if given.trust else []
    return given, [*shlex.split(given.train), *rest, *trust], source


def _check(given: Options, argv: Sequence[str]) -> None:
    """Check the options of a study, and that nothing which its command line says would be lost."""
    check(given)
    if not given.envs:
        raise ValueError(
            "name the environments first, or a file of a study: python -m rank0rl study Walker2d "
            "Hopper --seeds 0:5"
        )
    for name in ("--grid", "--search", "--algo", "--minutes-to"):
        if sum(word.partition("=")[0].replace("_", "-") == name for word in argv) > 1:
            raise ValueError(f"name all values after one {name}")
    if given.hosts and given.cores:
        raise ValueError("--hosts has the cores of every machine: leave out --cores")


def _name(given: Options) -> str:
    """Return the name of a study's folder: its environments and agents."""
    words = [*(env.rpartition(":")[2] for env in given.envs), *map(short_name, given.algo)]
    return f"runs/study-{re.sub(r'[^A-Za-z0-9_.-]+', '_', '-'.join(words))}"


def _enter(out: Path) -> Callable[[], None]:
    """Claim the cores of this machine for the study in a folder; return what gives them up."""
    if out.exists():
        files.check_folder(out)
    if (out / "config.toml").exists():
        raise ValueError(
            f"{out} holds a run, and a study has a folder of its own: name another --out"
        )
    leave = claim(out, f"{_MACHINES}/{platform.node()}-{available_cores()[0][0]}")
    if leave is None:
        raise ValueError(f"another process of this machine trains the study in {out}")
    return leave


def _end_with_terminal() -> None:
    """Let SIGHUP count as SIGTERM, unless it is ignored, as nohup does.

    The terminal of a study on another machine hangs up if this one stops.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def _keep_options(given: Options, rest: Sequence[str], out: Path) -> None:
    """Write study.toml, with the options with which `study FOLDER` goes on, on any machine."""
    train = shlex.join(word for word in rest if word != _TRUST)
    values = dataclasses.asdict(given) | {"train": train}
    values |= dict.fromkeys(("out", "cores", "hosts", "trust"))
    known = {name: value for name, value in values.items() if value not in (None, (), "")}
    file, content = out / results.FILE, tomli_w.dumps(known).encode()
    if not file.exists() or file.read_bytes() != content:  # by another machine
        files.write(file, content)


@contextlib.contextmanager
def _on_others(hosts: Sequence[Host], out: Path, trust: bool) -> Iterator[None]:
    """Start the study on other machines by ssh. Wait for them at the end; stop them if the study is stopped.

    With `trust`, its code was named or trusted here.
    """
    sessions: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for host in hosts:
            study, env = python("-m", "rank0rl", "study", str(out), *[_TRUST][:trust])
            words = shlex.join([*study, "--cores", str(host.slots)])
            path = shlex.quote(env["PYTHONPATH"])
            command = f"cd {shlex.quote(os.getcwd())} && PYTHONPATH={path} TERM=dumb {_HELPS}=1 exec {words}"
            output = out / _MACHINES / f"{host.name}.txt"
            with files.append(output) as file:
                sessions[output] = subprocess.Popen(
                    [*SSH[:-1], "-tt", *SSH[-1:], host.name, command],  # it ends with its terminal
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C must not reach ssh
                )
        yield
        for output, session in sessions.items():
            if session.wait():
                print(
                    f"note: the study on {output.stem} has not come to its end: see {output}",
                    file=sys.stderr,
                )
    except BaseException:
        for session in sessions.values():
            session.terminate()
        raise
    finally:
        for session in sessions.values():
            session.wait()


def _found(searching: search.Search, trials: int, number: int | None) -> dict[str, str]:
    """Train the trials of a search on so many cores; return the best settings."""
    try:
        train(searching, available_cores()[:number])
    finally:
        if _HELPS not in os.environ:
            searching.write()
    found = searching.best()
    words = " ".join(f"{name}={value}" for name, value in found.items())
    print(f"the search of {trials} trials has found {words}")
    return found
