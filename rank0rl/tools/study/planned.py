"""The runs of a study: every environment, agent, combination of settings and seed, as its options say."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from rank0rl import algos
from rank0rl.options import flag, names, option
from rank0rl.run import plan
from rank0rl.run.agents import short_name
from rank0rl.run.launch_options import Words
from rank0rl.run.options import RunOptions
from rank0rl.run.trust import ASKED, trusted
from rank0rl.tools.study.results import ending

_CHOSEN = {"resume", "run_dir", "seed", "nprocs", "keep_batches"}  # what a study says of each run
_ASKED = {*ASKED, *names(RunOptions, in_file=False)} - {"config"}  # options for command lines alone
_MOST = 10_000  # runs of a study
_SETTINGS = 1000  # runs of one seed: to check the command line of each takes 0.1 s


@dataclass(frozen=True)
class Options:
    """Train many runs on all cores, and compare them: study ENVIRONMENT ... or study FILE.toml.

    All other options go to every run.
    """

    envs: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Environments."""
    algo: tuple[str, ...] = ("ppo",)
    """Agents, as train takes them."""
    seeds: str = "0:5"
    """Seeds of every setting: 0:5 for 0 to 4, or 0,7,11."""
    grid: tuple[str, ...] = ()
    """Settings of which every combination is trained, such as lr=1e-4,3e-4 hidden="64 64,128 128"."""
    cores: int | None = option(None, "[1, inf)")
    """Number of cores. None: all that this process may use."""
    hosts: str | None = None
    """Machines that train the study, with their numbers of cores, such as a:8,b:8: this one first, the others by ssh. The folder must be on storage that they share."""
    minutes_to: tuple[float, ...] = ()
    """Mean returns, as in --stop-at-return. The table says after how many minutes of training they were reached."""
    out: str | None = None
    """Folder of the study. None: one under runs/ with the names of its environments and agents."""
    search: tuple[str, ...] = ()
    """Settings to search for with Optuna: lr=log:1e-5:1e-3 gamma=0.95:0.999 epochs=3:20 "hidden=64 64|256 256". Then the default settings and the best settings found are trained with the seeds of the study."""
    trials: int = option(50, "[1, inf)")
    """Number of trials of the search."""
    search_seeds: str = "100:101"
    """Seeds of every trial. They are never those of the study's results."""
    objective: Literal["final", "mean"] = "final"
    """Value of a trial: its final mean return, or the mean of its whole learning curve, which counts speed too."""
    sampler: Literal["tpe", "random"] = "tpe"
    """Sampler of Optuna, which chooses the settings of a trial."""
    prune: bool = True
    """Stop a trial early if its curve is below the median of the trials before it."""
    trust: bool = False
    """Import all code that a file of a study names. Without it, only Gymnasium's and rank0rl's own are imported."""
    train: str = ""
    """Options of every run in one string, for a file: "--total-steps 100000"."""


@dataclass(frozen=True)
class Planned:
    """A run that a study is to train."""

    name: str  # of its folder in the study's
    words: tuple[str, ...]  # command line of training, without the folder and the number of ranks
    options: RunOptions
    agent: Any = None  # options of the agent

    def ended(self, study: Path) -> bool:
        """Return True if the run has ended by itself, such as by "total_steps 1000" in its summary.json."""
        try:
            name, _, value = ending(study / self.name).partition(" ")
        except ValueError:  # a damaged file: the run writes it again
            return False
        now = getattr(self.options, name, None)
        return name == "hook" or value == (f"{now:g}" if isinstance(now, float) else str(now))

    def check(self, study: Path) -> None:
        """Check that the run in its folder, if there is one, has the same settings.

        Raises:
            ValueError: if a setting differs that may not change.
        """
        folder = study / self.name
        if not (folder / "config.toml").exists():
            return
        try:
            plan.check_same(self.options, self.agent, folder, self.words)
        except ValueError as error:
            raise ValueError(
                f"{folder} holds a run of other settings, so this is another study: name another --out "
                f"({error})"
            ) from None

    def curve(self) -> str:
        """Return all settings that can change its curve, as JSON."""
        every = {**vars(self.options), **(vars(self.agent) if self.agent else {})}
        same = names(RunOptions, changes_curve=False)
        kept = {name: value for name, value in every.items() if name not in same}
        return json.dumps(kept, sort_keys=True, default=repr)

    @property
    def most(self) -> int:
        """The most ranks that it can have."""
        envs, episodes = self.options.num_envs, self.options.episodes_per_batch
        rank0 = self.options.rank0_envs
        others = envs if rank0 is None else max(1, envs - rank0 + 1)
        return min(envs, others, episodes or envs) // self.options.agents

    def with_seed(self, seed: int) -> Planned:
        """Return the same run with another seed."""
        name = f"{self.name.removesuffix(str(self.options.seed))}{seed}"
        options = dataclasses.replace(self.options, seed=seed)
        return Planned(name, (*self.words[:-1], str(seed)), options, self.agent)

    def part(self, row: Mapping[str, str] | None) -> float:
        """Return the share of the run that is over after a row of its progress.csv."""
        if row is None:
            return 0.0
        if self.options.num_episodes is not None:
            return int(row["episodes"]) / self.options.num_episodes
        return int(row["steps"]) / self.options.total_steps


def planned(
    given: Options,
    rest: Sequence[str],
    found: Mapping[str, str] | None = None,
    source: Path | None = None,
) -> list[Planned]:
    """Return the runs of a study, seed by seed, so that every setting has its first seed early.

    Settings that a search has found are trained beside the defaults, in place of a grid. `source` is that of
    `plan_run`.

    Raises:
        ValueError: for wrong seeds or settings, too many of them, two runs that would be one, or code that is not
            trusted.
        SystemExit: for a wrong option of training, after tyro has printed what is wrong.
    """
    first, *others = seeds(given.seeds)
    grid = _values(given.grid)
    of_a_seed = math.prod(map(len, (given.envs, given.algo, *grid.values())))
    if of_a_seed > _SETTINGS or of_a_seed * (1 + len(others)) > _MOST:
        raise ValueError(
            f"a study must have at most {_MOST:,} runs, {_SETTINGS:,} of each seed: got {of_a_seed:,} of each of "
            f"{1 + len(others):,} seeds; make several studies of it"
        )
    runs: dict[str, Planned] = {}  # by curve
    envs, agents = _labels(given.envs, _short_env), _labels(given.algo, short_name)
    for env_id, algo in itertools.product(given.envs, given.algo):
        label = f"{envs[env_id]}-{agents[algo]}"
        for settings in _combined(grid) if found is None else [{}, found]:
            run = plan_run(env_id, algo, settings, first, rest, source=source, label=label)
            same = runs.setdefault(run.curve(), run)
            if same is not run and found is None:
                raise ValueError(
                    f"{same.name} and {run.name} have the same curve: leave one of them out of the study"
                )
    every = [*runs.values()]
    if twice := [name for name, n in Counter(run.name for run in every).items() if n > 1]:
        raise ValueError(f"two runs of the study would be called {twice[0]}: rename a file of them")
    return every + [run.with_seed(seed) for seed in others for run in every]


def _short_env(env_id: str) -> str:
    return env_id.rpartition(":")[2]


def _labels(names: Sequence[str], short: Callable[[str], str]) -> dict[str, str]:
    """Return names of code with short ones, or with long ones where the short ones are the same."""
    number = Counter(map(short, dict.fromkeys(names)))
    return {
        name: short(name) if number[short(name)] == 1 else name.replace(".py", "").strip("./")
        for name in names
    }


def unequal(runs: Sequence[Planned]) -> list[str]:
    """Return a line for each environment in which agents have different settings under the same name.

    Settings of a grid are the same for all agents.
    """
    each: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        agents = each.setdefault(run.options.env_id, {})
        agents.setdefault(run.options.algo, json.loads(run.curve()))
    lines = []
    for env_id, found in each.items():
        labels = _labels([*found], short_name)
        agents = {labels[algo]: its for algo, its in found.items()}
        names = {name for its in agents.values() for name in its} - {"algo"}
        values = {
            name: {agent: its[name] for agent, its in agents.items() if name in its}
            for name in names
        }
        differ = [
            f"{name} ({', '.join(f'{agent} {json.dumps(x)}' for agent, x in its.items())})"
            for name, its in sorted(values.items())
            if len({json.dumps(x) for x in its.values()}) > 1
        ]
        if differ:
            lines.append(
                f"on {env_id}, agents have different settings: {', '.join(differ)}; what the command line names, or "
                f"the file of --config, is the same for all"
            )
    return lines


def plan_run(
    env_id: str,
    algo: str,
    settings: Mapping[str, str],
    seed: int,
    rest: Sequence[str],
    name: str | None = None,
    source: Path | None = None,
    label: str = "",
) -> Planned:
    """Return a run, with its command line checked.

    Args:
        env_id: the environment.
        algo: the agent.
        settings: those in which runs of this agent differ.
        seed: the seed.
        rest: words of the command line that all runs share.
        name: name of its folder. None: one of all these.
        source: file of a study that names all this, if the user has not said that it is trusted.
        label: begins the name of its folder. "": the environment and the agent.

    Raises:
        ValueError: for an option that cannot be, or by which code of the file's choice would run.
        SystemExit: for a wrong option of training, after tyro has printed what is wrong.
    """
    for word in (env_id, algo):
        if word.startswith("-"):
            raise ValueError(
                f"an environment or an agent has no name like an option's: got {word!r}"
            )
    own = [word for name, value in settings.items() for word in _words(name, value)]
    words = (env_id, "--algo", algo, *own, *rest, "--seed", str(seed))
    of_all = Words(rest, {}).flags()
    if chosen := sorted((of_all | {*settings}) & _CHOSEN):
        raise ValueError(
            f"a study chooses seed, ranks and folders of each run, and resumes it: leave out "
            f"{', '.join(map(flag, chosen))}; see --seeds, --cores and --out"
        )
    if twice := sorted(of_all & {*settings}):
        raise ValueError(
            f"{', '.join(map(flag, twice))} would be the same in every run, and the study has values to "
            f"compare: leave one of them out"
        )
    if source:
        _check_trust(Words.read(words), source)
    options, agent = plan.options_of(words, algos.CONFIGS)
    if options.ranks_per_env > 1:
        raise ValueError(
            f"a study gives each rank one core: got ranks_per_env {options.ranks_per_env}; leave out --ranks-per-env, "
            f"or train each run by itself"
        )
    if name is None:
        parts = [label or f"{_short_env(env_id)}-{short_name(algo)}"]
        parts += [f"{name}={value}" for name, value in settings.items()]
        name = "-".join([*(re.sub(r"[^\w.=+-]+", "_", part) for part in parts), f"seed{seed}"])
    return Planned(name, words, options, agent)


def _check_trust(words: Words, source: Path) -> None:
    """Check that a file of a study, in these words, imports and reads nothing, and starts and sends nothing.

    A file that it names with --config is checked when it is read.

    Raises:
        ValueError: naming what it would import, or the options that only a command line may give.
    """
    trusted({"env_id": words.argv[0], "algo": words.given["algo"]}, str(source))
    if asked := sorted(words.flags() & _ASKED):
        again = shlex.join(["python", *sys.orig_argv[1:], "--trust"])
        raise ValueError(
            f"{source} has options by which code runs, files are read or rows are sent: "
            f"{', '.join(map(flag, asked))}; if you trust it, go on with: {again}"
        )


def seeds(text: str) -> list[int]:
    """Return the seeds of "0:5" (0 to 4) or of "0,7,11".

    Raises:
        ValueError: if the text names no seeds, one twice, or more than a study may have.
    """
    found: Sequence[int] = ()
    with contextlib.suppress(ValueError):
        low, colon, high = text.partition(":")
        found = range(int(low), int(high)) if colon else [int(x) for x in text.split(",")]
    # a range, which may be of 10^9 seeds, has a length that len() cannot always give
    if found and (number := found[-1] - found[0] + 1 if colon else len(found)) > _MOST:
        raise ValueError(f"a study must have at most {_MOST:,} seeds: got {number:,}")
    if not found or len(set(found)) < len(found) or min(found) < 0:
        raise ValueError(f"seeds must be numbers such as 0:5 or 0,7,11, each once: got {text!r}")
    return [*found]


def _values(grid: Sequence[str]) -> dict[str, list[str]]:
    """Return setting -> values of words such as lr=1e-4,3e-4.

    Raises:
        ValueError: if a setting has no value.
    """
    values: dict[str, list[str]] = {}
    for word in grid:
        name, _, text = word.partition("=")
        if not name or not all(text.split(",")):
            raise ValueError(f"a setting must be NAME=VALUE,VALUE,...: got {word!r}; see --grid")
        values[name.replace("-", "_")] = text.split(",")
    if len(values) < len(grid):
        raise ValueError(f"--grid must have each setting once: got {' '.join(grid)}")
    return values


def _combined(values: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Yield every combination of the values of settings; {} for no settings."""
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _words(name: str, value: Any) -> list[str]:
    """Return a setting as words of the command line. A value such as "64 64" is several words."""
    if value in ("true", "false"):
        return [flag(name if value == "true" else f"no_{name}")]
    words = str(value).split()
    if any(re.match(r"-[^\d.]", word) for word in words):
        raise ValueError(f"the value of a setting holds no options: got {name}={value!r}")
    return [flag(name), *words]
