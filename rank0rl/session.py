"""One training run on one rank: settings, agent and environments from the command line, then the loop.

Rank 0 reads and checks everything, once; the other ranks are told what it found, or how it failed.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import platform
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from rank0rl import checkpoint, comm, config, envs, seeding
from rank0rl.agent import Agent
from rank0rl.config import RunOptions
from rank0rl.interrupt import Interrupted
from rank0rl.logger import Logger
from rank0rl.rollout import Rollout, lanes_of
from rank0rl.run import Run
from rank0rl.threads import set_threads
from rank0rl.trainer import train


@dataclass(frozen=True)
class Plan:
    """What every rank has to know."""

    options: RunOptions
    """With the full id of the environment."""
    agent: Any
    """The agent's options."""


def run(argv: list[str], configs: Path | None) -> int:
    """Train as the command line says.

    Collective: every rank calls this.

    Returns:
        The exit code: 0, 2 for a wrong use, 128 + s after signal s.
    """
    set_threads(1)
    outcome = comm.share(_try(argv, configs) if comm.get_rank() == 0 else None)
    if isinstance(outcome, int):
        return outcome
    plan, folder, source = outcome
    options, nworkers = plan.options, comm.get_nworkers()
    agent_class = load_agent(options.algo)
    rollout = make_rollout(options, comm.get_rank(), nworkers)
    agent = agent_class(rollout.spaces, plan.agent, seeding.stream(options.seed, "init"))
    if comm.get_rank() != 0:
        train(agent, rollout, options, None)
        rollout.close()
        return 0
    logger = Logger(folder)
    about = {
        "env_id": options.env_id,
        "algo": options.algo,
        "seed": options.seed,
        "nprocs": nworkers,
        "num_envs": options.num_envs,
    }
    kept = Run(agent, options, about, logger)
    if options.resume:
        kept.load(checkpoint.read(folder / checkpoint.NAME))
    config.write(folder / "config.toml", (options, plan.agent), _record(nworkers))
    logger.print(f"{options.env_id} with {options.algo} on {nworkers} ranks; {source}; {folder}")
    try:
        train(agent, rollout, options, kept)
    except Interrupted as interrupted:
        logger.close()
        logger.print(
            f"{interrupted}: saved iteration {kept.summary()['iterations']} in {folder}; "
            f"go on with --resume {folder}"
        )
        comm.abort(128 + interrupted.signum)
    finally:
        logger.close()
        rollout.close()
    logger.print("  ".join(f"{name} {value}" for name, value in kept.summary().items()))
    return 0


def make_rollout(options: RunOptions, rank: int, nworkers: int) -> Rollout:
    """The lanes of one rank."""
    return Rollout(
        lambda: envs.make(options.env_id, **options.env_kwargs),
        lanes_of(rank, nworkers, options.num_envs),
        options.seed,
        steps=options.steps_per_env,
        episodes=range(rank, options.episodes_per_batch or 0, nworkers),
    )


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
        raise ValueError(
            f"no agent {algo!r} ({error}); expected a name in algos/, file.py:Class or "
            f"package.module:Class"
        ) from None
    agents = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Agent) and value is not Agent
    }
    if name not in agents and (name or len(agents) != 1):
        raise ValueError(f"{where} has no agent {name!r}: it has {sorted(agents)}")
    return agents[name] if name else next(iter(agents.values()))


def _try(argv: list[str], configs: Path | None) -> tuple[Plan, Path, str] | int:
    """What rank 0 found, or the exit code after it has said what is wrong."""
    try:
        return _prepare(argv, configs)
    except SystemExit as done:  # tyro has printed help or what is wrong with an argument
        return int(done.code or 0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _prepare(argv: list[str], configs: Path | None) -> tuple[Plan, Path, str]:
    """Read and check the settings; make the run's folder."""
    first = _read(argv, None)
    resume = Path(first.options.resume) if first.options.resume else None
    source = Path(first.options.config) if first.options.config else None
    if resume:
        source = resume / "config.toml"
    elif source is None and first.options.env_id:
        source = config.find(configs, first.options.algo, envs.resolve(first.options.env_id))
    plan = first if source is None else _read(argv, source)
    if not plan.options.env_id:
        raise ValueError("name an environment, such as: python train.py Walker2d (--help for more)")
    options = dataclasses.replace(plan.options, env_id=envs.resolve(plan.options.env_id))
    plan = Plan(options, plan.agent)
    options.check_ranks(comm.get_nworkers())
    envs.describe(envs.make(options.env_id, **options.env_kwargs))
    if resume:
        _check_unchanged(plan, _read([], source))
        checkpoint.read(resume / checkpoint.NAME)
    return plan, resume or _new_folder(options), f"settings: {source or 'defaults'}"


# What may differ when a run goes on: what does not change its curve, and how long it is.
_MAY_CHANGE = {"nprocs", "checkpoint_every", "total_steps", "num_episodes", "resume"}


def _check_unchanged(plan: Plan, before: Plan) -> None:
    """Refuse to go on with a run under other settings than its own.

    Raises:
        ValueError: listing what has changed.
    """
    old = dataclasses.asdict(before.options) | dataclasses.asdict(before.agent)
    new = dataclasses.asdict(plan.options) | dataclasses.asdict(plan.agent)
    changed = [
        f"{name} from {old.get(name)} to {new[name]}"
        for name in new.keys() - _MAY_CHANGE
        if new[name] != old.get(name)
    ]
    if changed:
        raise ValueError(
            f"a run goes on with its own settings: got another {', '.join(sorted(changed))}; leave "
            f"these out, or start a new run"
        )


def _read(argv: list[str], source: Path | None) -> Plan:
    """The command line, over a file, over defaults."""
    settings = config.load(source) if source else {}
    algo = _option(argv, "--algo") or settings.get("algo", RunOptions.algo)
    agent_class = load_agent(algo)
    defaults = config.apply(settings, RunOptions(), agent_class.Options(), source=str(source))
    unnamed = tyro.conf.arg(name="")
    both = dataclasses.make_dataclass(
        "Both",
        [
            ("options", Annotated[RunOptions, unnamed]),
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
    return Plan(parsed.options, parsed.agent)


def _option(argv: list[str], name: str) -> str | None:
    """The value of an option that has to be known before the others can be."""
    for word, value in zip(argv, [*argv, ""][1:], strict=True):
        if word == name:
            return value
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _new_folder(options: RunOptions) -> Path:
    algo = Path(options.algo.partition(":")[0]).stem
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{options.env_id.replace('/', '-')}-{algo}-seed{options.seed}-{stamp}"
    folder = Path(options.run_dir or f"runs/{name}")
    if (folder / "config.toml").exists():
        raise ValueError(f"{folder} holds a run already: choose another --run-dir, or --resume it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _record(nworkers: int) -> dict[str, Any]:
    """What else was so when the run was started."""
    packages = ("rank0rl", "numpy", "torch", "gymnasium", "mujoco", "mpi4py")
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "nprocs": nworkers,
        "command": shlex.join(sys.orig_argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "machine": platform.machine(),
        "versions": versions,
    }
