"""rank0rl from Python: train, load and evaluate, in a script, a notebook or a test."""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from rank0rl.launch import WRONG_USE, exit_code_after, job, python
from rank0rl.launch.processes import new_job_folder
from rank0rl.launch.tree import end_with_parent
from rank0rl.options import flag
from rank0rl.policy import Policy, load
from rank0rl.run import files
from rank0rl.run.folder import read_run

_BOX = "\u2500\u2502\u256d\u256e\u256f\u2570 \n"
_OF_MODULES = ("env_id", "wrappers")  # options whose code is named by its module, not by its file
_WRONG_USE = ("error: ", "\u256d", "\u2502", "\u2570")  # tyro draws a box around what is wrong


class Run:
    """The folder of a run, and its contents. Each property reads the files anew.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run, by the names of its options.

        Raises:
            ValueError: if there is no such folder, or no iteration has ended yet.
        """
        return read_run(self.folder).settings

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json: steps, seconds, mean return, hash of the weights, and so on.

        Raises:
            ValueError: if there is none.
        """
        return dict(files.read_json(self.folder / "summary.json", "summary"))

    @property
    def progress(self) -> Any:
        """The rows of progress.csv: a pandas DataFrame if pandas is installed, else column -> array.

        Raises:
            ValueError: if there is no such folder, or no iteration has ended yet.
        """
        rows = read_run(self.folder).rows
        try:
            import pandas as pd
        except ModuleNotFoundError:
            return {name: _column([row[name] for row in rows]) for name in rows[0]}
        return pd.read_csv(self.folder / "progress.csv", nrows=len(rows))

    def policy(self, trust: bool = False) -> Policy:
        """Load the policy of the last checkpoint, as `rank0rl.load` does."""
        return load(self.folder, trust)

    def plot(self, y: str = "return_mean", x: str = "steps") -> Any:
        """Draw a column of progress.csv; return the matplotlib figure, which a notebook shows.

        Args:
            y: a column of progress.csv.
            x: "steps" or "hours".

        Raises:
            ValueError: if there is no such column, or no matplotlib.
        """
        from rank0rl.tools import figures, plot

        figure = plot.draw(plot.group([self.folder], x, y), x, {}, y)
        figure._repr_png_ = functools.partial(figures.image, figure)  # a notebook asks for it
        return figure

    def report(self) -> Path:
        """Write report.html into the folder; return its path.

        Raises:
            ValueError: if there is no iteration yet, or no matplotlib.
        """
        from rank0rl.tools import report

        out = self.folder / "report.html"
        files.write(out, report.of_run(self.folder).encode())
        return out


def train(env_id: str | Callable[..., Any] | None = None, **options: Any) -> Run:
    """Train an agent on N ranks, which this call starts, and wait for the end.

    The options are those of the command line, with the same names and checks: ``train("Walker2d",
    algo="ppo", nprocs=2, total_steps=1_000_000)``. The output of the run is printed here. An interrupt
    (Ctrl-C, or the stop button of a notebook) saves the run first; ``train(resume=folder)`` resumes it.
    With ``run_dir=folder, resume="auto"`` the same call begins a run, and later resumes it.

    In a script, call this under ``if __name__ == "__main__":`` if the agent or the environment is in
    the same file, because ranks import the file.

    Args:
        env_id: the environment: an id, or a function in a file that makes one. None for a resume.
        options: options of the run and of its agent. An option that is None counts as not given. A
            class or a function may stand for its name, as in algo=MyAgent or hook=MyHook, if ranks
            can import it from a file.

    Returns:
        The run.

    Raises:
        ValueError: for a wrong use, with the message of the command line.
        RuntimeError: if training has failed, such as on one of its ranks, whose traceback is printed
            before; or if a rank calls this.
        KeyboardInterrupt: after an interrupt, once the run is saved.
    """
    if job.world_rank() is not None or job.supervised():
        raise RuntimeError(
            "rank0rl.train was called while a rank imported this file: call it under "
            'if __name__ == "__main__":'
        )
    command, _ = python("-m", "rank0rl", "train", *_words(env_id, options))
    with new_job_folder() as folder:  # which a later start removes if this process is killed
        job.create(folder, 1)
        told = folder / "run"
        code, errors = _relayed(command, _environment(), told)
        run = Run(told.read_text()) if told.exists() else None
    if code == WRONG_USE and errors:
        raise ValueError(errors)
    if code in (exit_code_after(signal.SIGINT), -signal.SIGINT):
        raise KeyboardInterrupt(
            f"go on with rank0rl.train(resume={str(run.folder)!r})" if run else ""
        )
    if code or run is None:
        raise RuntimeError(f"training ended with exit code {code}: see what was printed above")
    return run


def evaluate(
    run: Policy | Run | str | Path,
    episodes: int = 100,
    seed: int | None = None,
    deterministic: bool = False,
    trust: bool = False,
) -> Mapping[str, Any]:
    """Run whole episodes of a run's environment with its policy.

    Args:
        run: a `Policy`, a `Run`, or what `rank0rl.load` takes.
        episodes: number of episodes.
        seed: seed of the episodes. None: the run's seed.
        deterministic: True to choose the most probable actions, and draw none at random.
        trust: as in `rank0rl.load`.

    Returns:
        "return", "length" and the figures of the run's `info`, (episodes,) each.

    Raises:
        ValueError: in the same cases as `rank0rl.load`, and for less than one episode.
    """
    if isinstance(run, Run):
        run = run.folder
    policy = run if isinstance(run, Policy) else load(run, trust)
    return policy.evaluate(episodes, seed, deterministic)


def _words(env_id: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the command line of these options."""
    words = [] if env_id is None else [_name("env_id", env_id)]
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool | np.bool_):
            words.append(flag(name if value else f"no_{name}"))
        elif isinstance(value, Mapping):
            words += [
                flag(name),
                *(f"{key}={json.dumps(item, default=_plain)}" for key, item in value.items()),
            ]
        else:
            value = _plain(value) if isinstance(value, np.ndarray) else value  # noqa: PLW2901 - as a list
            items = value if isinstance(value, list | tuple) else [value]
            words += [flag(name), *(_name(name, item) for item in items)]
    return words


def _plain(value: Any) -> Any:
    """Return a number or an array of NumPy as numbers and lists, for JSON."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise ValueError(f"options are numbers, texts and lists: got {value!r:.100}")


def _name(option: str, value: Any) -> str:
    """Return a value as a word of the command line. A class or a function becomes its file and name.

    Raises:
        ValueError: if ranks cannot import it, because it is in no file.
    """
    if isinstance(value, Run):
        return str(value.folder)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return str(value)
    path = getattr(sys.modules.get(value.__module__), "__file__", None)
    if path is None or value.__qualname__ != value.__name__ or not value.__name__.isidentifier():
        where = "inside another one, or without a name" if path else "in no file"
        raise ValueError(
            f"{option}: ranks cannot import {value.__name__}, because it is defined {where}: write it "
            f"to a file, in a notebook by a cell that begins with %%writefile mine.py, and give "
            f'{option}="mine{"" if option in _OF_MODULES else ".py"}:{value.__name__}"'
        )
    where = value.__module__
    if where == "__main__":
        spec = sys.modules[where].__spec__  # of python -m
        file = Path(path).stem if option in _OF_MODULES else path
        where = spec.name if spec and spec.name != "__main__" else file
    return f"{where}:{value.__name__}"


def _environment() -> dict[str, str]:
    """Return the environment of the ranks. They can import every module that this process can."""
    own = [path for path in sys.path if not _is_of_python(Path(path))]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else ""
    paths = os.pathsep.join(path or os.getcwd() for path in own)
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", job.TERMINAL: str(columns)}


def _is_of_python(path: Path) -> bool:
    """Return True for a folder or archive of the standard library or of installed packages, which ranks have too."""
    python = map(Path, {sys.prefix, sys.base_prefix})
    installed = {"site-packages", "dist-packages", *Path(sysconfig.get_path("stdlib")).parts[-1:]}
    return any(map(path.is_relative_to, python)) and (
        not installed.isdisjoint(path.parts) or path.suffix == ".zip"
    )


def _relayed(command: list[str], env: Mapping[str, str], told: Path) -> tuple[int, str]:
    """Run a command, print its output, and pass interrupts on to it.

    Args:
        command: the command.
        env: its environment variables.
        told: file into which the command writes the run's folder, once the run has begun.

    Returns:
        The exit code; and the message about a wrong use, which is not printed.
    """
    lines: queue.Queue[tuple[str, str]] = queue.Queue()
    process = subprocess.Popen(
        command,
        env={**env, job.TOLD: str(told)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C comes from here only
        preexec_fn=functools.partial(end_with_parent, os.getpid()),  # noqa: PLW1509
    )
    refused: list[str] = []
    try:
        for name in ("stdout", "stderr"):
            threading.Thread(
                target=_read, args=(getattr(process, name), name, lines), daemon=True
            ).start()
        while True:
            try:
                name, text = lines.get(timeout=0.2)
                wrong = refused or text.startswith(_WRONG_USE)  # whose message may have more lines
                if name == "stderr" and wrong and not told.exists():
                    refused.append(text)
                else:
                    print(text, end="", file=getattr(sys, name), flush=True)
            except queue.Empty:
                if process.poll() is not None:  # a child of the command may keep the pipes open
                    break
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:
            process.terminate()  # it saves the run, and ends the ranks
            process.wait()
    if process.returncode != 2:
        print("".join(refused), end="", file=sys.stderr)
    words = "".join(line.strip(_BOX).ljust(1) + "\n" for line in refused)
    return process.returncode, words.strip().removeprefix("error: ")


def _read(pipe: IO[bytes], name: str, lines: queue.Queue[tuple[str, str]]) -> None:
    """Put the lines of a pipe into a queue, until the end of the pipe."""
    text = io.TextIOWrapper(pipe, errors="replace", newline="")
    for line in iter(text.readline, ""):
        lines.put((name, line))


def _column(values: list[str]) -> Any:
    """Return a column of progress.csv as numbers, nan where it is empty; as texts if one is no number."""
    try:
        return np.array([float(value or "nan") for value in values])
    except ValueError:
        return np.array(values)
