"""The plan of a run, made by rank 0 from the command line and files: agent, options and folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rank0rl.agent import Spaces
from rank0rl.envs.games import agents_of
from rank0rl.envs.make import make
from rank0rl.envs.spaces import describe
from rank0rl.envs.wrappers import ResetMethod, refuse_running_statistics
from rank0rl.nets.update import check_device
from rank0rl.options import flag
from rank0rl.run import checkpoint, cpu, hooks, settings
from rank0rl.run.agents import load_agent, load_function
from rank0rl.run.folder import lock, new_folder
from rank0rl.run.launch_options import Words
from rank0rl.run.machine import check_memory
from rank0rl.run.options import RunOptions
from rank0rl.run.trust import FUNCTIONS, functions_of, trusted


def check_environment(options: RunOptions) -> tuple[Spaces, int]:
    """Make an environment as a run makes its own, and close it.

    Returns:
        Its spaces; and the number of agents, if it is a game, else 1.

    Raises:
        ValueError: if there can be no such environment, curriculum or arguments by index.
    """
    kwargs = options.env_kwargs
    if options.env_kwargs_of:
        own = load_function(options.env_kwargs_of)(0)
        if not isinstance(own, Mapping):
            raise ValueError(f"{options.env_kwargs_of}(0) must return a dict: got {own!r:.100}")
        kwargs = {**kwargs, **own}
    env = make(options.env_id, options.wrappers, **kwargs)
    if options.curriculum:
        _check_curriculum(options, env)
    spaces = describe(env)
    refuse_running_statistics(env)
    env.close()
    return spaces, len(agents_of(env))


def _check_games(options: RunOptions, nworkers: int) -> None:
    """Check that whole games fit into a run, and whole numbers of them into a rank.

    Raises:
        ValueError: if they do not, or an option knows no games.
    """
    agents = options.agents
    if agents == 1:
        return
    for name in ("num_envs", "rank0_envs", "episodes_per_batch"):
        if (value := getattr(options, name) or 0) % agents:
            less = value // agents * agents
            nearest = [f"{flag(name)} {n}" for n in (less, less + agents) if n]
            raise ValueError(
                f"{name} must be a multiple of {agents}, because each of the {agents} agents of a game "
                f"of {options.env_id} counts: got {value}; set {' or '.join(nearest)}"
            )
    for name in ("num_envs", "episodes_per_batch"):
        games = (getattr(options, name) or options.num_envs) // agents
        if games < nworkers:
            raise ValueError(
                f"every rank needs a whole game: got {games} games of {agents} agents, and nprocs="
                f"{nworkers}; set {flag(name)} {nworkers * agents} or --nprocs {games}"
            )
    for name in ("env_processes", "env_retries", "on_env_error"):
        if (value := getattr(options, name)) not in (False, 0, "stop"):
            raise ValueError(
                f"{name} is for environments that are stepped by themselves, and {options.env_id} is a "
                f"game of {agents} agents: got {value}; leave {flag(name)} out"
            )


def _check_curriculum(options: RunOptions, env: Any) -> None:
    """Choose the first settings, and reset an environment with them."""
    choose = load_function(str(options.curriculum))
    try:
        chosen = json.loads(hooks.chosen(choose, 0.0, {}))
    except Exception as error:  # whatever the user's function raises
        raise ValueError(
            f"--curriculum {options.curriculum}, called with progress 0.0 and an empty record: "
            f"{type(error).__name__}: {error}"
        ) from error
    if options.curriculum_method:
        env = ResetMethod(partial(lambda same: same, env), options.curriculum_method)
    try:
        env.reset(seed=0, options=chosen)
    except Exception as error:  # whatever the environment raises
        raise ValueError(
            f"{options.env_id} cannot be reset with options={chosen}: {type(error).__name__}: "
            f"{error}; it must take what --curriculum returns"
        ) from error


@dataclass(frozen=True)
class Plan:
    """Options, agent and folder of a run, as rank 0 has found them."""

    options: RunOptions
    """The run's options, with the full id of the environment."""
    agent: Any
    """The agent's options."""
    folder: Path
    """The run's folder."""
    source: str
    """The file that the settings come from, or "defaults"."""
    notes: tuple[str, ...]
    """Changes of the curve that a resume brings, for the console."""
    init: Mapping[str, Any]
    """Weights that a new run begins with, name -> tensor; nothing without --init-from."""
    unlock: Callable[[], None]
    """Lets another process train in the folder."""


def prepare(
    words: Words,
    configs: Path | None,
    nworkers: int,
    restart: str | None = None,
    checks: Iterable[Callable[[RunOptions], None]] = (),
) -> Plan:
    """Read and check the options; make the run's folder.

    Args:
        words: the command line.
        configs: folder of TOML files, one of which may be loaded by itself.
        nworkers: number of ranks.
        restart: folder of the run that this command line has started, if a rank of it has failed.
        checks: more checks of the options. Each raises ValueError for what cannot be.

    Raises:
        ValueError: for a wrong use, saying what was expected, what came and what to do.
        SystemExit: when help was asked for, or an argument is wrong, after tyro has printed it.
    """
    if restart:
        words = words.of_restart(Path(restart))
    found = settings.read(words, configs)
    cpu.check(found.options.cpu)
    agent, run = found.agent, found.run
    options = _check_all(found.options, agent, nworkers, found.made, checks)
    notes: list[str] = []
    if found.before:
        settings.check_unchanged((options, agent), found.before)
        notes = settings.schedule_notes(options, found.before[0])
    init = {}
    if options.init_from and not run:
        file = checkpoint.latest(Path(options.init_from)).resolve()  # the run may go on meanwhile
        options, init = (
            dataclasses.replace(options, init_from=str(file)),
            checkpoint.read_init(file),
        )
    if options.keep_batches:
        _make_folder(Path(options.keep_batches), is_new=not run)
    folder = run or new_folder(options)
    patience_s = 10 if restart or words.is_auto else 0  # what ended may take its time to save
    unlock = lock(folder, patience_s)
    return Plan(options, agent, folder, str(found.file or "defaults"), tuple(notes), init, unlock)


def _check_all(
    options: RunOptions,
    agent: Any,
    nworkers: int,
    made: int,
    checks: Iterable[Callable[[RunOptions], None]],
) -> RunOptions:
    """Check everything about the options that a run would find out too late; return them complete."""
    options.check(nworkers)
    for name in FUNCTIONS:
        for function in functions_of(options, name):
            (hooks.load_hook if name == "hook" else load_function)(function)
    spaces, agents = check_environment(options)
    options = dataclasses.replace(options, agents=agents)
    _check_games(options, nworkers)
    check_memory(options, agent, spaces.obs)
    load_agent(options.algo).check(spaces, agent, options)
    _check_device(options)
    for check in checks:
        check(options)
    hooks.check(tensorboard=options.tensorboard, wandb=bool(options.wandb))
    last = options.stop_after_iterations
    if last is not None and last < made:
        raise ValueError(
            f"stop_after_iterations counts from the run's first start: got {last}, and the run has "
            f"made {made}; set --stop-after-iterations to more"
        )
    return options


def _make_folder(path: Path, is_new: bool) -> None:
    """Make the folder of --keep-batches. That of a new run holds no other one's."""
    if is_new and any(path.glob("*.npz")):
        raise ValueError(
            f"--keep-batches {path}: there are batches in it already; name another one"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--keep-batches {path}: cannot be a folder: {error.strerror}") from None


def _check_device(options: RunOptions) -> None:
    check_device(options.device)
    kinds = load_agent(options.algo).devices
    if options.device.partition(":")[0] not in kinds:
        raise ValueError(
            f"{options.algo} computes on {' and '.join(kinds)} only: got device {options.device!r}; "
            f"leave --device out"
        )


def options_of(argv: Sequence[str], configs: Path | None) -> tuple[RunOptions, Any]:
    """Return the options of a new run and of its agent, as a command line and its TOML file give them, checked.

    Raises:
        ValueError: for what a run would refuse.
        SystemExit: for a wrong argument, after tyro has said what is wrong.
    """
    found = settings.read(Words.read(argv), configs)
    return _check_all(found.options, found.agent, 1, 0, ()), found.agent


def check_same(options: RunOptions, agent: Any, run: Path, argv: Sequence[str]) -> None:
    """Check that the run in a folder has these options, but for those that change no curve.

    Args:
        options: options of a run.
        agent: options of its agent.
        run: the folder.
        argv: the command line that they come from.

    Raises:
        ValueError: listing what differs, or if code that the run names is not trusted.
    """
    file = run / "config.toml"
    its_own = trusted(settings.load(file), str(file), Words.read(argv))
    old, old_agent = settings.of_file(its_own, str(file))
    settings.check_unchanged((settings.without_beginning(options, old), agent), (old, old_agent))
    for name in (
        "total_steps",
        "num_episodes",
    ):  # a resume may change these: schedules then end elsewhere
        before, now = getattr(old, name), getattr(options, name)
        if before != now:
            raise ValueError(f"{name} was {before}, and is now {now}")
