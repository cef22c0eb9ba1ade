"""The plan of a run: its options, checked, and its folder, made and locked. Rank 0 makes it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.agent import Space, Spaces
from rank0rl.envs.games import AgentEnv, agents_of
from rank0rl.envs.spaces import describe
from rank0rl.envs.wrappers import ResetMethod, refuse_running_statistics
from rank0rl.nets.normalize import is_image
from rank0rl.options import flag, names
from rank0rl.run import checkpoint, code, hooks, machine, settings
from rank0rl.run.agents import load_agent, load_function
from rank0rl.run.folder import lock, new_folder
from rank0rl.run.launch_options import Words, check_cpu
from rank0rl.run.machine import check_device
from rank0rl.run.options import RunOptions
from rank0rl.run.shares import check_solvers, make_shown
from rank0rl.run.trust import FUNCTIONS, functions_of, trusted

_EVALUATION = ("eval_episodes", "eval_deterministic")


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
    """The file that the settings come from, or "defaults", and the reason if the agent's class names none."""
    notes: tuple[str, ...]
    """Changes of the curve that a resume brings, for the console."""
    agents_note: str
    """Note of the agent, for the console; "" without one."""
    init: Mapping[str, Any]
    """Weights that a new run begins with, name -> tensor; nothing without --init-from."""
    unlock: Callable[[], None]
    """Lets another process train in the folder."""
    made: int
    """Number of iterations that a run to resume has made."""
    code: Mapping[str, str]
    """Files of the run's own: path -> text."""


def prepare(
    words: Words,
    configs: Path | None,
    nworkers: int,
    restart: str | None = None,
    check: Callable[[RunOptions], None] | None = None,
) -> Plan:
    """Read and check the options; make the run's folder.

    Args:
        words: the command line.
        configs: folder of TOML files, one of which may be loaded by itself.
        nworkers: number of ranks.
        restart: folder of the run to go on with, after a rank of it has failed. None: no rank has.
        check: one more check of the options, which raises ValueError.

    Raises:
        ValueError: for a wrong use, saying what was expected, what came and what to do.
        SystemExit: when help was asked for, or an argument is wrong, after tyro has printed it.
    """
    if restart:
        words = Words.to_go_on(Path(restart), words.given)
    run = words.run or (Path(words.given["run_dir"]) if words.is_auto else None)
    is_run = run and (any(run.glob("checkpoints/*.pt")) or (words.is_auto and run.is_dir()))
    if words.is_help or not run or not is_run:
        return _prepare(words, configs, nworkers, check, None)
    # The process that ends may be saving: what there is to go on with is known once it has ended.
    unlock = lock(run, 10 if restart or words.is_auto else 0)
    try:
        words = Words.read(words.argv) if words.is_auto else words
        return _prepare(words, configs, nworkers, check, unlock)
    except BaseException:
        unlock()
        raise


def _prepare(
    words: Words,
    configs: Path | None,
    nworkers: int,
    check: Callable[[RunOptions], None] | None,
    unlock: Callable[[], None] | None,
) -> Plan:
    """Return the plan of a run; `unlock` lets another process train in its folder, if it is locked already."""
    found = settings.read(words, configs)
    check_cpu(found.options.cpu)
    options, agent, run = found.options, found.agent, found.run
    if found.before and words.is_auto:
        options = _without_beginning(options, found.before[0])
    options, note = _check_all(options, agent, nworkers, found.made, check)
    notes: list[str] = []
    if found.before:
        _check_unchanged((options, agent), found.before)
        notes = _schedule_notes(options, found.before[0])
    texts = code.of_run(options)
    if run:
        notes += _code_notes(texts, run, options.changed_code)
    init = {}
    if options.init_from and not run:
        file = checkpoint.latest(Path(options.init_from)).resolve()  # the run may go on meanwhile
        options = dataclasses.replace(options, init_from=str(file))
        init = checkpoint.read_weights(file)
    if options.keep_batches:
        _make_folder(Path(options.keep_batches), is_new=not run)
    folder = run or new_folder(options)
    unlock = unlock or lock(folder, 0, is_new=not run)
    named = load_agent(options.algo).settings
    source = f"defaults{'' if named else ', because its class names none in configs/'}"
    if found.file:
        here = Path.cwd()
        is_here = found.file.is_relative_to(here)
        source = str(found.file.relative_to(here) if is_here else found.file)
    without = [n for n in _EVALUATION if getattr(options, n) != getattr(RunOptions, n)]
    if without and options.eval_every is None:
        notes.append(f"these have no effect without --eval-every: {', '.join(map(flag, without))}")
    notes_of = tuple(notes)
    return Plan(options, agent, folder, source, notes_of, note, init, unlock, found.made, texts)


def _check_all(
    options: RunOptions,
    agent: Any,
    nworkers: int,
    made: int,
    check: Callable[[RunOptions], None] | None = None,
) -> tuple[RunOptions, str]:
    """Check the options in every way that a run would find out too late; return them complete, and the agent's note."""
    options.check(nworkers)
    check_solvers(options, nworkers)
    for name in FUNCTIONS:
        for function in functions_of(options, name):
            (hooks.load_hook if name == "hook" else load_function)(function)
    spaces, agents = _check_environment(options)
    options = dataclasses.replace(options, agents=agents)
    _check_shares(options, nworkers)
    _check_memory(options, agent, spaces.obs)
    note = load_agent(options.algo).check(spaces, agent, options) or ""
    _check_device(options)
    if check:
        check(options)
    for package in ("tensorboard", "wandb"):
        if getattr(options, package) and find_spec(package) is None:
            raise ValueError(
                f"--{package} needs the package {package}, which is not installed: "
                f"pip install {package}, or leave --{package} out"
            )
    last = options.stop_after_iterations
    if last is not None and last < made:
        raise ValueError(
            f"stop_after_iterations counts from the run's first start: got {last}, and the run has "
            f"made {made}; set --stop-after-iterations to more"
        )
    return options, note


def _without_beginning(options: RunOptions, old: RunOptions) -> RunOptions:
    """Return options of a command line that could begin a run, to compare them with the run's own."""
    begin = options.init_from
    if begin and old.init_from and Path(old.init_from).is_relative_to(Path(begin).resolve()):
        begin = old.init_from  # a checkpoint of the same run, its last one at that time
    return dataclasses.replace(options, run_dir=None, config=None, init_from=begin)


def _check_unchanged(new: tuple[RunOptions, Any], old: tuple[RunOptions, Any]) -> None:
    """Refuse to resume a run with other settings than its own.

    Raises:
        ValueError: listing the changed settings.
    """
    after, before = ({**vars(options), **vars(agent)} for options, agent in (new, old))
    may_change = names(RunOptions, resume=True)
    changed = [
        f"{name} {value} in place of {before.get(name)}"
        for name, value in after.items()
        if name not in may_change and value != before.get(name)
    ]
    if changed:
        raise ValueError(
            f"a resumed run keeps its own settings: got {', '.join(sorted(changed))}; keep to its "
            f"own, or start a new run"
        )


def _schedule_notes(new: RunOptions, old: RunOptions) -> list[str]:
    """Return notes on the curve of a resumed run that has another length or device."""
    notes = [
        f"the schedule changes: {name} was {getattr(old, name)} and is now {getattr(new, name)}, so "
        f"from here on the curve may differ from that of a run that began with it"
        for name in ("total_steps", "num_episodes")
        if getattr(new, name) != getattr(old, name)
    ]
    if new.device != old.device:
        moved = f"updates now compute on {new.device} and no longer on {old.device}"
        notes.insert(0, f"{moved}: the last bits differ")
    return notes


def _code_notes(texts: Mapping[str, str], run: Path, may_change: bool) -> list[str]:
    """Return a note if the code of a run has changed since its last start.

    Raises:
        ValueError: with what has changed, if it may not.
    """
    start = (settings.starts(run / "config.toml") or [{}])[-1]
    before, now = code.recorded(start), code.hashes(texts)
    if not before or before == now:
        return []
    lines = code.difference(code.kept(run, start), texts)
    if not may_change:
        raise ValueError(
            "\n".join(
                [
                    f"code of this run has changed since its last start: put it back ({run / 'code'} has copies), "
                    f"start a new run, or go on with {flag('changed_code')}",
                    *lines,
                ]
            )
        )
    changed = [path for path in sorted({*before, *now}) if before.get(path) != now.get(path)]
    return [f"code has changed: {', '.join(changed)}"]


def _check_environment(options: RunOptions) -> tuple[Spaces, int]:
    """Make an environment of the run and close it; return its spaces and the number of agents of a game, else 1."""
    own = {}
    if options.env_kwargs_of:
        own = load_function(options.env_kwargs_of)(0)
        if not isinstance(own, Mapping):
            raise ValueError(f"{options.env_kwargs_of}(0) must return a dict: got {own!r:.100}")
    env = make_shown(options, **own)
    if options.curriculum:
        _check_curriculum(options, env)
    spaces = describe(env)
    refuse_running_statistics(env)
    env.close()
    agents = len(agents_of(env))
    if isinstance(env.unwrapped, AgentEnv):
        _check_game(options, agents)
    return spaces, agents


def _check_curriculum(options: RunOptions, env: Any) -> None:
    """Choose the first reset options, and reset an environment with them."""
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


def _check_game(options: RunOptions, agents: int) -> None:
    """Refuse the options that games do not have."""
    for name in ("env_processes", "env_retries", "on_env_error"):
        if (value := getattr(options, name)) not in (False, 0, "stop"):
            raise ValueError(
                f"{name} is for environments that are stepped by themselves, and {options.env_id} is a game or a "
                f"vector environment ({agents} agent{'s' * (agents > 1)}): got {value}; leave {flag(name)} out"
            )


def _check_shares(options: RunOptions, nworkers: int) -> None:
    """Check that every rank has whole games."""
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
    options.check(nworkers)  # again: now the agents of a game are known


def _check_memory(options: RunOptions, agent: Any, obs: Space) -> None:
    """Refuse a batch or a network that this machine's memory surely cannot hold, before it is made.

    The size is a lower bound: only the observations of the batch count, and one network for each of
    the agent's options `hidden`, `value_hidden`, `memory_size` and the like.
    """
    steps = options.steps_per_env * options.num_envs
    layers = {name: sizes for name, sizes in vars(agent).items() if name.endswith("hidden")}
    if getattr(agent, "recurrent", None):
        layers["memory_size"] = (3 * agent.memory_size, agent.memory_size)  # a GRU has three gates
    needed = {
        f"a batch of {steps} steps": steps * obs.size * np.dtype(obs.dtype).itemsize,
        **{
            f"a network with {flag(name)} {' '.join(map(str, sizes))}": _bytes(sizes, obs)
            for name, sizes in layers.items()
            if isinstance(sizes, tuple)
        },
    }
    for what, size in needed.items():
        if size > machine.memory_bytes():
            raise ValueError(
                f"{what} needs more memory than there is: at least {size / 2**30:,.1f} GB of "
                f"{machine.memory_bytes() / 2**30:,.1f} GB; make it smaller"
            )


def _bytes(sizes: tuple[int, ...], obs: Space) -> int:
    """Return the size of weights and biases, their gradients, and Adam's two moments, in float32."""
    inputs = 1 if is_image(obs.shape, obs.dtype) else obs.size  # convolutions make an image small
    return 4 * 4 * sum((n + 1) * m for n, m in pairwise((inputs, *sizes, 1)))


def _check_device(options: RunOptions) -> None:
    check_device(options.device)
    kinds = load_agent(options.algo).devices
    if options.device.partition(":")[0] not in kinds:
        raise ValueError(
            f"{options.algo} computes on {' and '.join(kinds)} only: got device {options.device!r}; "
            f"leave --device out"
        )


def _make_folder(path: Path, is_new: bool) -> None:
    """Make the folder of --keep-batches. A new run needs one without batches of another run."""
    if is_new and any(path.glob("*.npz")):
        raise ValueError(
            f"--keep-batches {path}: there are batches in it already; name another one"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--keep-batches {path}: cannot be a folder: {error.strerror}") from None


def options_of(argv: Sequence[str], configs: Path | None) -> tuple[RunOptions, Any]:
    """Return the options of a new run and of its agent, read from a command line, and checked.

    Raises:
        ValueError: for a command line that a run would refuse.
        SystemExit: for a wrong argument, after tyro has said what is wrong.
    """
    found = settings.read(Words.read(argv), configs)
    return _check_all(found.options, found.agent, 1, 0)[0], found.agent


def check_same(options: RunOptions, agent: Any, run: Path, argv: Sequence[str]) -> None:
    """Check that the run in a folder has these options, except for those that do not change the curve.

    Args:
        options: options of a run.
        agent: options of its agent.
        run: the folder.
        argv: the command line of these options.

    Raises:
        ValueError: listing what differs, or if code that the run names is not trusted.
    """
    file = run / "config.toml"
    its_own = trusted(settings.load(file), str(file), Words.read(argv))
    old, old_agent = settings.of_file(its_own, str(file))
    _check_unchanged((_without_beginning(options, old), agent), (old, old_agent))
    for name in (
        "total_steps",
        "num_episodes",
    ):  # which a resume may change, and schedules with them
        before, now = getattr(old, name), getattr(options, name)
        if before != now:
            raise ValueError(f"{name} was {before}, and is now {now}")
