"""The plan of a run, made by rank 0 from the command line and files: agent, options and folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from rank0rl.agent import Spaces
from rank0rl.envs import make as envs
from rank0rl.envs import spaces as env_spaces
from rank0rl.envs.games import agents_of
from rank0rl.envs.wrappers import ResetMethod, refuse_running_statistics
from rank0rl.nets.update import check_device
from rank0rl.options import flag, whole_number
from rank0rl.run import checkpoint, cpu, hooks, machine
from rank0rl.run import settings as config
from rank0rl.run import settings as resumed
from rank0rl.run.agents import absolute, load_agent, load_function, short_name
from rank0rl.run.folder import lock, new_folder
from rank0rl.run.launch_options import Words
from rank0rl.run.logger import check_rows
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
    env = envs.make(options.env_id, options.wrappers, **kwargs)
    if options.curriculum:
        _check_curriculum(options, env)
    spaces = env_spaces.describe(env)
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
        settings = json.loads(hooks.chosen(choose, 0.0, {}))
    except Exception as error:  # whatever the user's function raises
        raise ValueError(
            f"--curriculum {options.curriculum}, called with progress 0.0 and an empty record: "
            f"{type(error).__name__}: {error}"
        ) from error
    if options.curriculum_method:
        env = ResetMethod(partial(lambda same: same, env), options.curriculum_method)
    try:
        env.reset(seed=0, options=settings)
    except Exception as error:  # whatever the environment raises
        raise ValueError(
            f"{options.env_id} cannot be reset with options={settings}: {type(error).__name__}: "
            f"{error}; it must take what --curriculum returns"
        ) from error


_WHOLE_NUMBERS = ConstructorRegistry()


@_WHOLE_NUMBERS.primitive_rule
def _of_whole_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Let tyro read int as `options.read_some` does: 1e6 is one."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )


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
    resume = words.run_to_resume()
    path, saved, made = _last_checkpoint(resume, words) if resume else (None, {}, 0)
    source = path
    if words.is_auto or not resume:
        source, options, agent = read_new(words, configs)
    else:
        options, agent = read(words, saved, str(path))
    if not options.env_id:
        raise ValueError(
            f"name an environment, such as: {' '.join(machine.program())} Walker2d (--help for more)"
        )
    options = dataclasses.replace(
        options, env_id=envs.resolve(options.env_id), resume=str(resume) if resume else None
    )
    cpu.check(options.cpu)
    options = _check_all(options, agent, nworkers, made, checks)
    notes: tuple[str, ...] = ()
    if resume:
        old, old_agent = of_settings(saved, str(path))
        if words.is_auto:
            options = resumed.without_beginning(options, old)
        resumed.check_unchanged((options, agent), (old, old_agent))
        notes = tuple(resumed.schedule_notes(options, old))
    init = {}
    if options.init_from and not resume:
        file = checkpoint.latest(Path(options.init_from)).resolve()  # the run may go on meanwhile
        options, init = (
            dataclasses.replace(options, init_from=str(file)),
            checkpoint.read_init(file),
        )
    if options.keep_batches:
        _make_folder(Path(options.keep_batches), is_new=not resume)
    folder = resume or new_folder(options)
    patience_s = 10 if restart or words.is_auto else 0  # what ended may take its time to save
    unlock = lock(folder, patience_s)
    return Plan(options, agent, folder, str(source or "defaults"), notes, init, unlock)


def _last_checkpoint(run: Path, words: Words) -> tuple[Path, dict[str, Any], int]:
    """Return a run's last checkpoint, the settings in it, and the number of iterations made.

    Raises:
        ValueError: if the run cannot go on from there, because one of its files is damaged.
    """
    if run.is_file():
        raise ValueError(f"a run goes on in its folder: got the file {run}; name the folder")
    path = checkpoint.latest(run)
    saved = read_saved(path, words)
    made = saved["progress"]["iteration"]
    check_rows(run, made, saved["rows_sha256"])
    config.starts(run / "config.toml")  # damaged, it is better found now than when ranks wait
    return path, saved["settings"], made


def read_saved(path: Path, words: Words | None = None, trust: bool = False) -> dict[str, Any]:
    """Read the checkpoint of a run, if what its settings name may be imported here.

    Args:
        path: the checkpoint.
        words: a command line that may name the code again, or say --trust. None: it cannot.
        trust: True if the user trusts the code.

    Returns:
        What `State.snapshot` returned, with the run's settings.

    Raises:
        ValueError: if the checkpoint is damaged, is not of a run, or names code that is not trusted.
    """
    saved = checkpoint.read(path)
    parts = ("settings", "progress", "collector", "weights", "agent")
    if (
        not isinstance(saved, dict)
        or not all(isinstance(saved.get(name), dict) for name in parts)
        or not isinstance(saved["progress"].get("iteration"), int)
        or not isinstance(saved.get("rows_sha256"), str)
    ):
        raise ValueError(f"checkpoint {path} holds no run: expected {', '.join(parts)}")
    settings = resumed.with_moved_agent(saved["settings"], words)
    return {**saved, "settings": trusted(settings, str(path), words, trust)}


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
    machine.check_memory(options, agent, spaces.obs)
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


def read_new(words: Words, configs: Path | None) -> tuple[Path | None, RunOptions, Any]:
    """Return the TOML file of a new run, the run's options, and the agent's.

    The file is the one that --config names, else that of the agent and the environment.

    Raises:
        ValueError: for a wrong setting, or an agent that does not exist.
        SystemExit: for a wrong argument, after tyro has said what is wrong, and after help.
    """
    if given := words.given.get("config"):
        settings = trusted(config.load(Path(given)), given, words)
        return Path(given), *read(words, settings, given)
    without_help = [word for word in words.argv if word not in ("-h", "--help")]
    options, agent = read(Words(without_help, words.given), {}, "")
    path = None
    if options.env_id:  # those in configs/ belong to the program
        base = envs.base(envs.resolve(options.env_id))
        path = config.find(configs, short_name(options.algo), base)
    settings = config.load(path) if path else {}
    if words.is_help:
        read(words, settings, str(path))  # prints the values that this run would have
    if not path:
        return None, options, agent
    named = words.flags() | {"env_id"}
    run, own = of_settings(_without_other_batch(settings, words), str(path), options.algo)
    return path, _over(run, options, named), _over(own, agent, named)


def _over(below: Any, above: Any, named: set[str]) -> Any:
    """Return options, with those in `above` that the command line names, or that are not their defaults."""
    plain = type(above)()
    values = {
        name: value
        for name, value in vars(above).items()
        if name in named or value != getattr(plain, name)
    }
    return dataclasses.replace(below, **values)


def _without_other_batch(settings: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """Return settings without their kind of batch, if the command line has the other one."""
    settings = dict(settings)
    for given, other in itertools.permutations(("steps_per_batch", "episodes_per_batch")):
        if given in words.given:
            settings.pop(other, None)
    return settings


def of_settings(
    settings: Mapping[str, Any], source: str, algo: str | None = None
) -> tuple[RunOptions, Any]:
    """Return the run's options and the agent's: settings, over defaults.

    Args:
        settings: option -> value, as in a file.
        source: the file, for messages.
        algo: the agent. None: the one that the settings name.

    Raises:
        ValueError: for a wrong setting, or an agent that does not exist.
    """
    algo = algo or str(settings.get("algo", RunOptions.algo))
    options, agent = config.apply(settings, RunOptions(), load_agent(algo).Options(), source=source)
    return _with_whole_paths(options), agent


def read(words: Words, settings: Mapping[str, Any], source: str) -> tuple[RunOptions, Any]:
    """Return the run's options and the agent's: the command line, over settings, over defaults.

    Args:
        words: the command line.
        settings: option -> value, as in a file.
        source: the file, for messages.

    Raises:
        ValueError: for a wrong setting, or an agent that does not exist.
        SystemExit: for a wrong argument, after tyro has said what is wrong.
    """
    settings = _without_other_batch(settings, words)
    defaults = of_settings(settings, source, words.given.get("algo"))
    unnamed = tyro.conf.arg(name="")
    both = dataclasses.make_dataclass(
        "Both",
        [
            ("run", Annotated[RunOptions, unnamed]),
            ("agent", Annotated[type(defaults[1]), unnamed]),
        ],
        frozen=True,
    )
    parsed = tyro.cli(
        both,
        args=words.argv,
        default=both(*defaults),
        prog=" ".join(machine.program()),
        description="Train an agent on N ranks. The values shown are those that this run would have.",
        registry=_WHOLE_NUMBERS,
    )
    return _with_whole_paths(parsed.run), parsed.agent


def _with_whole_paths(options: RunOptions) -> RunOptions:
    """Return options in which files of code have whole paths: the run may be resumed from another folder."""
    of: dict[str, Any] = {"algo": absolute(options.algo)}
    for name in FUNCTIONS:
        found = [absolute(function) for function in functions_of(options, name)]
        of[name] = tuple(found) if name == "hook" else next(iter(found), None)
    return dataclasses.replace(options, **of)


def options_of(argv: Sequence[str], configs: Path | None) -> tuple[RunOptions, Any]:
    """Return the options of a new run and of its agent, as a command line and its TOML file give them, checked.

    Raises:
        ValueError: for what a run would refuse.
        SystemExit: for a wrong argument, after tyro has said what is wrong.
    """
    _, options, agent = read_new(Words.read(argv), configs)
    options = dataclasses.replace(options, env_id=envs.resolve(options.env_id))
    return _check_all(options, agent, 1, 0, ()), agent


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
    settings = trusted(config.load(file), str(file), Words.read(argv))
    old, old_agent = of_settings(settings, str(file))
    resumed.check_unchanged((resumed.without_beginning(options, old), agent), (old, old_agent))
    for name in (
        "total_steps",
        "num_episodes",
    ):  # a resume may change these: schedules then end elsewhere
        before, now = getattr(old, name), getattr(options, name)
        if before != now:
            raise ValueError(f"{name} was {before}, and is now {now}")
