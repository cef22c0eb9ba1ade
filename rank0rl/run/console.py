"""Lines of a run on the console: one for each iteration, and a table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rank0rl.run import columns
from rank0rl.run.columns import mean
from rank0rl.run.logger import short
from rank0rl.run.state import State
from rank0rl.run.timing import PHASES

_OF_UPDATE = ("kl", "entropy")


def line(
    state: State, seconds_left: float | None, steps_per_s: float, metrics: Mapping[str, float]
) -> str:
    """Return the line of an iteration: 100 columns at most, without --info.

    Args:
        state: state of the run.
        seconds_left: until the end of the run; None if not known yet.
        steps_per_s: rate of the iteration.
        metrics: what the agent's update returned.
    """
    progress, over = state.progress, min(state.share_over(), 1.0)
    means = {name: columns.known_mean(values) for name, values in progress.infos.items()}
    figures = {
        "return": f"{mean(progress.returns):.5g}",
        "length": f"{mean(progress.lengths):.0f}",
        **{name: f"{metrics[name]:.2g}" for name in _OF_UPDATE if name in metrics},
        **{name: f"{value:.3g}" for name, value in means.items()},
    }
    steps = f"{progress.steps:,}" if progress.steps < 1e7 else f"{progress.steps / 1e6:.1f}M"
    left = "" if seconds_left is None else f", {_clock(max(seconds_left, 0.0))} left"
    return (
        f"{progress.iteration}: {steps} steps ({over:.0%}{left})  "
        + "".join(f"{name} {figure}  " for name, figure in figures.items())
        + f"{steps_per_s:,.0f}/s"
    )


def shares(seconds: float, phases: Mapping[str, float]) -> str:
    """Return the share of an iteration's time that each phase took."""
    found = {phase: phases.get(phase, 0.0) / seconds for phase in PHASES}
    return "".join(f"  {phase} {share:.0%}" for phase, share in found.items() if share >= 0.005)


def table(summary: Mapping[str, Any], episodes: int, folder: Path) -> str:
    """Return the summary of a run as a table.

    Args:
        summary: summary of the run.
        episodes: number of episodes in its mean return.
        folder: folder of the run.
    """
    nprocs = summary.get("nprocs", 1)
    ranks = f"{nprocs} rank{'s' * (nprocs > 1)}"
    rows = {
        "return": f"{short(summary['return_mean'])}  mean of the last {episodes} episodes",
        "best evaluation": short(summary["best_eval"]) if "best_eval" in summary else "",
        "steps": f"{summary['steps']:,} in {summary['iterations']:,} iterations and {summary['episodes']:,} episodes",
        "time": f"{_clock(summary['seconds'])}, {summary['steps_per_s']:,.0f} steps/s on {ranks}",
        "weights": summary["weights_sha256"],
        "folder": str(folder),
    }
    return "\n".join(f"{name:16}{text}" for name, text in rows.items() if text)


def _clock(seconds: float) -> str:
    """Return a time as 1:02:03 or 2:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
