"""The runs of benchmarks/results/ that have ended, as the tables and the picture of docs/results.md need them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from theme import DOCS

from rank0rl.run.folder import RunData, read_run
from rank0rl.tools.study.results import ending

RESULTS = DOCS.parent / "benchmarks" / "results"
STUDIES = {  # folder of benchmarks/results/v5 -> column
    "ppo": "PPO",
    "ppo-tuned": "PPO, tuned",
    "ppo-3M": "PPO, tuned, 3M steps",
    "ppo-10M": "PPO, tuned, 10M steps",
    "trpo": "TRPO",
    "klppo": "KL-PPO",
    "es": "ES",
    "cmaes": "CMA-ES",
}
AGENTS = {"ppo": "PPO", "a2c": "A2C", "reinforce": "REINFORCE", "es": "ES", "cmaes": "CMA-ES"}
TITLES = {"minatar.gym:BaseEnv": "MinAtar Breakout"}
RIVALS = {"sb3": "stable-baselines3 PPO", "cleanrl": "CleanRL-style PPO"}


@dataclass(frozen=True)
class Run:
    """A run, as the tables need it."""

    steps: np.ndarray
    ret: np.ndarray
    """Mean return of the last 100 episodes."""
    seconds: np.ndarray
    command: str = ""
    sha256: str = ""
    commit: str = ""

    @property
    def known(self) -> np.ndarray:
        """Rows with a return: none has one before the first episode has ended."""
        return np.isfinite(self.ret)

    @property
    def last(self) -> float:
        """Mean return at the end."""
        return float(self.ret[-1])


Runs = dict[str, dict[str, list[Run]]]
"""Task -> column -> runs, by seed."""


def mujoco() -> Runs:
    """Read the runs on MuJoCo's tasks, ours and those of other libraries."""
    runs: Runs = {}
    for folder, column in STUDIES.items():
        for task, run in ended("v5", folder):
            runs.setdefault(task.removesuffix("-v5"), {}).setdefault(column, []).append(run)
    for path in sorted((RESULTS / "rivals").glob("*.csv"), key=seed_of):
        name, task, _ = path.stem.split("-")
        rows = np.loadtxt(path, delimiter=",", skiprows=1)
        runs.setdefault(task, {}).setdefault(RIVALS[name], []).append(Run(*rows.T))
    return dict(sorted(runs.items()))


def other_tasks() -> Runs:
    """Read the runs on other tasks; here a column is an agent."""
    runs: Runs = {}
    for task, run in ended("other_tasks", "*"):
        words = run.command.split()
        agent = AGENTS[words[words.index("--algo") + 1]]
        runs.setdefault(TITLES.get(task, task), {}).setdefault(agent, []).append(run)
    return dict(sorted(runs.items()))


def ended(*folders: str) -> Iterator[tuple[str, Run]]:
    """Yield task and run of the runs of studies that have ended, by task and seed."""
    for path in sorted(RESULTS.glob("/".join([*folders, "*", "progress.csv"])), key=seed_of):
        run = read_run(path.parent)
        if ending(run.folder):
            columns = (run.column(name) for name in ("steps", "return_mean", "seconds"))
            sha256, commit = run.rows[-1]["weights_sha256"], run.starts[0]["commit"]
            yield run.settings["env_id"], Run(*columns, command(run), sha256, commit)


def seed_of(path: Path) -> tuple[str, int]:
    """Return the key by which runs are sorted: their name, then their seed."""
    stem = path.parent.name if path.name == "progress.csv" else path.stem
    name, _, seed = stem.rpartition("-seed")
    return name, int(seed)


def command(run: RunData) -> str:
    """Return the command that trains this run again, with train.py on two ranks."""
    words = run.starts[0]["command"].removeprefix("python -m rank0rl train ").split()
    words[words.index("--nprocs") + 1] = "2"
    return " ".join(["python", "train.py", *words])
