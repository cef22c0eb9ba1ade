"""What rank 0 finds out before a run: agent, settings and folder, from the command line and files."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import tyro

from rank0rl import envs
from rank0rl.agent import Agent
from rank0rl.nets.cuda import check_device
from rank0rl.run import checkpoint, config, sinks
from rank0rl.run.config import RunOptions
from rank0rl.tools import video


@dataclass(frozen=True)
class Plan:
    """What to do, as rank 0 has found it."""

    options: RunOptions
    """With the full id of the environment."""
    agent: Any
    """The agent's options."""
    folder: Path
    """Of the run."""
    source: str
    """Where the settings come from."""
    notes: tuple[str, ...]
    """What a resume changes of the schedule."""


def prepare(
    argv: list[str], configs: Path | None, nworkers: int, restart: str | None = None
) -> Plan:
    """Read and check the settings; make the run's folder.

    Args:
        argv: the command line, without the program's name.
        configs: folder of TOML files, one of which may be loaded by itself.
        nworkers: number of ranks.
        restart: folder of the run that this command line has begun, if a rank of it has failed.

    Raises:
        ValueError: for a wrong use, saying what was expected, what came and what to do.
        SystemExit: when help was asked for, or an argument is wrong, after tyro has printed it.
    """
    if restart:
        argv = ["--resume", restart, *_of_this_start(argv)]
    resume, source = (_path(argv, name) for name in ("--resume", "--config"))
    settings: dict[str, Any] = {}
    made = 0
    if resume:
        if resume.is_file():
            raise ValueError(f"a run goes on in its folder: got the file {resume}; name the folder")
        source = checkpoint.latest(resume)
        state = checkpoint.read(source)
        settings, made = state["settings"], state["progress"]["iteration"]
    else:
        if source is None:
            first, _ = read(argv, {}, "")
            if first.env_id:
                env = envs.base(envs.resolve(first.env_id))
                source = config.find(configs, config.short(first.algo), env)
        settings = config.load(source) if source else {}
    options, agent = read(argv, settings, str(source))
    if not options.env_id:
        raise ValueError("name an environment, such as: python train.py Walker2d (--help for more)")
    options = dataclasses.replace(options, env_id=envs.resolve(options.env_id))
    _check_update(options)
    options.check(nworkers)
    _check_environment(options)
    _check_device(options)
    if options.video_every is not None:
        video.check(options)
    sinks.check(tensorboard=options.tensorboard, wandb=bool(options.wandb))
    last = options.stop_after_iterations
    if last is not None and last < made:
        raise ValueError(
            f"stop_after_iterations counts from the run's beginning: got {last}, and the run has made "
            f"{made}; set --stop-after-iterations to more"
        )
    notes: tuple[str, ...] = ()
    if resume:
        old, old_agent = read([], settings, str(source))
        _check_unchanged((options, agent), (old, old_agent))
        notes = tuple(_schedule_notes(options, old))
    folder = resume or _new_folder(options)
    _hold(folder, 10 if restart else 0)  # the rank that died may take its time
    return Plan(options, agent, folder, str(source or "defaults"), notes)


def _check_environment(options: RunOptions) -> None:
    env = envs.make(options.env_id, options.wrappers, **options.env_kwargs)
    envs.describe(env)
    envs.refuse_running_statistics(env)
    env.close()


def _check_device(options: RunOptions) -> None:
    check_device(options.device)
    kinds = load_agent(options.algo).devices
    if options.device.partition(":")[0] not in kinds:
        raise ValueError(
            f"{options.algo} computes on {' and '.join(kinds)} only: got device {options.device!r}; "
            f"leave --device out"
        )


def _check_update(options: RunOptions) -> None:
    ways = load_agent(options.algo).updates
    if options.update not in ways:
        raise ValueError(
            f"{options.algo} updates by {' and '.join(ways)} only: got update {options.update!r}; "
            f"leave --update out, or average in its update what it takes of its rows, with "
            f"self.learners, and say so in its `updates`"
        )


# What may differ when a run goes on: what does not change its curve, and how long it is.
_MAY_CHANGE = config.SAME_CURVE - {"eval_every", "eval_episodes", "eval_deterministic"} | {
    *("nprocs", "hosts", "hostfile"),
    *("mpiexec", "bind_to_core", "collective_timeout", "max_restarts"),
    *("resume", "stop_after_iterations", "stop_after_seconds", "quiet"),
    *("total_steps", "num_episodes", "device"),
}  # but evaluations, which are columns of the record, and have a best one


def _check_unchanged(new: tuple[RunOptions, Any], old: tuple[RunOptions, Any]) -> None:
    """Refuse to go on with a run under other settings than its own.

    Raises:
        ValueError: listing what has changed.
    """
    after, before = ({**vars(options), **vars(agent)} for options, agent in (new, old))
    changed = [
        f"{name} {value} in place of {before.get(name)}"
        for name, value in after.items()
        if name not in _MAY_CHANGE and value != before.get(name)
    ]
    if changed:
        raise ValueError(
            f"a run goes on with its own settings: got {', '.join(sorted(changed))}; leave these "
            f"out, or start a new run"
        )


def _schedule_notes(new: RunOptions, old: RunOptions) -> list[str]:
    """What it means that a run goes on to another length than the one it began with."""
    moved = f"updates compute on {new.device} and no longer on {old.device}: other last bits"
    return [moved] * (new.device != old.device) + [
        f"the schedule changes: {name} was {getattr(old, name)} and is now {getattr(new, name)}, so "
        f"from here on the curve may not be that of a run that began with it"
        for name in ("total_steps", "num_episodes")
        if getattr(new, name) != getattr(old, name)
    ]


def read(argv: list[str], settings: Mapping[str, Any], source: str) -> tuple[RunOptions, Any]:
    """The command line, over settings, over defaults: the run's options, and the agent's.

    Args:
        argv: the command line, without the program's name.
        settings: name -> value, as in a file.
        source: where they are from, for messages.

    Raises:
        ValueError: for a wrong setting, or an agent that there is not.
        SystemExit: for a wrong argument, after tyro has said what is wrong.
    """
    settings = dict(settings)
    for given, other in itertools.permutations(("steps_per_batch", "episodes_per_batch")):
        if _option(argv, f"--{given.replace('_', '-')}") is not None:
            settings.pop(other, None)  # the command line's kind of batch is over the file's
    algo = _option(argv, "--algo") or settings.get("algo", RunOptions.algo)
    agent_class = load_agent(str(algo))
    defaults = config.apply(settings, RunOptions(), agent_class.Options(), source=source)
    unnamed = tyro.conf.arg(name="")
    both = dataclasses.make_dataclass(
        "Both",
        [
            ("run", Annotated[RunOptions, unnamed]),
            ("agent", Annotated[agent_class.Options, unnamed]),
        ],
        frozen=True,
    )
    parsed = tyro.cli(
        both,
        args=argv,
        default=both(*defaults),
        description="Train an agent on N ranks. Defaults shown are those of the agent named by --algo.",
    )
    where, colon, name = parsed.run.algo.partition(":")
    if where.endswith(".py"):  # the run may go on from another folder
        where = str(Path(where).resolve())
    return dataclasses.replace(parsed.run, algo=f"{where}{colon}{name}"), parsed.agent


def _of_this_start(argv: list[str]) -> list[str]:
    """What of a command line a checkpoint does not hold, and a rank needs."""
    ends = ("--stop-after-iterations", "--stop-after-seconds")
    words = [word for name in ends if (value := _option(argv, name)) for word in (name, value)]
    return [*words, *(["--quiet"] if "--quiet" in argv else [])]


def _path(argv: list[str], name: str) -> Path | None:
    value = _option(argv, name)
    return Path(value) if value else None


def _option(argv: list[str], name: str) -> str | None:
    """The value of an option that has to be known before the others can be."""
    for word, value in zip(argv, [*argv, ""][1:], strict=True):
        given, equals, attached = word.partition("=")
        if given.replace("_", "-") == name:
            return attached if equals else value
    return None


def _new_folder(options: RunOptions) -> Path:
    """The run's folder, made and empty of another run.

    Raises:
        ValueError: if it holds a run, or cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{options.env_id.rpartition(':')[2].replace('/', '-')}-{config.short(options.algo)}"
    default = f"runs/{name}-seed{options.seed}-{stamp}"
    try:
        if options.run_dir:
            folder = Path(options.run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.tmp").touch()  # it can be written to; config.toml replaces it
        else:
            Path("runs").mkdir(exist_ok=True)
            folder = _first_free(default)
    except OSError as error:
        raise ValueError(
            f"cannot make the run's folder: {error}; choose another --run-dir"
        ) from None
    if list(folder.glob("checkpoints/*.pt")):
        raise ValueError(f"{folder} holds a run already: choose another --run-dir, or --resume it")
    return folder


def _hold(folder: Path, patience_s: float) -> None:
    """Keep other processes from this run for as long as this one lives.

    Raises:
        ValueError: if another one holds it.
    """
    if os.name != "posix":
        return
    import fcntl

    held = os.open(folder, os.O_RDONLY)
    os.register_at_fork(after_in_child=lambda: os.close(held))  # which may outlive this process
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            raise ValueError(
                f"another process is training in {folder}: wait for its end, or choose another "
                f"--run-dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        return


def _first_free(name: str) -> Path:
    """Make a folder of this name, or of this name and a number, that did not exist."""
    for number in itertools.count(1):
        folder = Path(name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


@cache
def load_agent(algo: str) -> type[Agent]:
    """The agent's class.

    Args:
        algo: "file.py:Class", "package.module:Class", or the name of a module in algos/ with one
            agent.

    Raises:
        ValueError: if there is none of this name.
    """
    where, _, name = algo.partition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module  # dataclasses look their module up
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where if name else f"algos.{where}")
    except (ImportError, FileNotFoundError) as error:
        if isinstance(error, ImportError) and error.name not in (where, "algos", f"algos.{where}"):
            raise ValueError(f"the agent's file {where} cannot be imported: {error}") from error
        raise ValueError(
            f"no agent {algo!r} ({error}); expected a name in algos/, file.py:Class or "
            f"package.module:Class"
        ) from None
    agents = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Agent)
        and (name or value.__module__ == module.__name__)
    }
    if name not in agents and (name or len(agents) != 1):
        raise ValueError(
            f"{algo!r} does not name one agent: expected file.py:Class or module:Class with one of "
            f"{sorted(agents)}"
        )
    agent = agents[name] if name else next(iter(agents.values()))
    missing = [m for m in _METHODS if getattr(agent, m) is getattr(Agent, m)]
    if missing:
        raise ValueError(
            f"agent {agent.__name__} has no {' and no '.join(missing)}: expected "
            f"{', '.join(_METHODS[m] for m in missing)}; rank0rl/agent.py says what each gives"
        )
    return agent


_METHODS = {
    "__init__": "__init__(self, spaces, options, rng)",
    "act": "act(self, obs, noise, fragment_id)",
    "process": "process(self, fragment)",
    "update": "update(self, batch, rng, progress)",
    "modules": "modules(self)",
}
