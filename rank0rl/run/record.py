"""The record of a run, on rank 0: rows, checkpoints, summary, and the last words."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.batch import Batch, Gathered
from rank0rl.envs.info import label
from rank0rl.envs.retry import FAILURES
from rank0rl.launch import held, job
from rank0rl.mpi import weights
from rank0rl.run import checkpoint, files
from rank0rl.run.hooks import Record
from rank0rl.run.logger import Logger, short
from rank0rl.run.options import RunOptions
from rank0rl.run.signals import Interrupted
from rank0rl.run.state import Progress, State
from rank0rl.run.usage import PHASES, Phases

NOT_OF_THE_CURVE = frozenset(
    {
        *("seconds", "steps_per_s", "slowest_s", "fastest_s", "memory_mb"),
        *(f"{phase}_s" for phase in PHASES),
        *FAILURES,
    }
)
"""Columns that two runs with the same curve may differ in."""


def _of_episodes(progress: Progress, ended: Batch) -> dict[str, float]:
    """Return the figures of the last episodes, and the longest episode of this iteration; nan without any."""
    returns = progress.returns or [float("nan")]
    figures = {of.__name__: float(of(returns)) for of in (np.mean, np.std, np.min, np.max)}
    return {
        **{f"return_{name}": figure for name, figure in figures.items()},
        "length_mean": mean(progress.lengths),
        "longest": float(max(ended["length"], default=np.nan)),
    }


def _of_failures(told: Mapping[str, Any], columns: Sequence[str]) -> dict[str, float]:
    """Return the failures of environments, if the run began with an option to survive them."""
    if FAILURES[0] not in (columns or told):
        return {}
    return {name: float(told[name].sum()) if name in told else 0.0 for name in FAILURES}


def _of_ranks(told: Mapping[str, Any]) -> dict[str, float]:
    """Return the times of the slowest and the fastest rank, and the memory of all ranks."""
    return {
        "slowest_s": float(told["took_s"].max()),
        "fastest_s": float(told["took_s"].min()),
        "memory_mb": float(told["peak_mb"].sum()),
    }


def mean(values: Any) -> float:
    """Return the mean, nan if there are no values."""
    return float(np.mean(values)) if len(values) else float("nan")


def known_mean(values: Any) -> float:
    """Return the mean of the values that are not nan; nan if there are none."""
    return mean([value for value in values if not np.isnan(value)])


_NO_EPISODE = "no episode has ended"


def _console_line(
    state: State,
    seconds_left: float | None,
    steps_per_s: float,
    metrics: Mapping[str, float],
    info: Sequence[str],
) -> str:
    """Return the line of an iteration: 100 columns at most, without --info.

    Args:
        state: state of the run.
        seconds_left: seconds until the end of the run; None if they are not known yet.
        steps_per_s: rate of the iteration.
        metrics: numbers that the agent's update returned.
        info: figures of episodes to show.
    """
    progress, over = state.progress, min(state.share_over(), 1.0)
    ended = _NO_EPISODE
    if progress.returns:
        ended = f"return {mean(progress.returns):.5g}  length {mean(progress.lengths):.0f}"
    means = {name: known_mean(progress.infos[name]) for name in info}
    figures = {
        **{name: f"{metrics[name]:.2g}" for name in ("kl", "entropy") if name in metrics},
        **{name: f"{value:.3g}" for name, value in means.items()},
    }
    steps = f"{progress.steps:,}" if progress.steps < 1e7 else f"{progress.steps / 1e6:.1f}M"
    left = "" if seconds_left is None else f", {_clock(max(seconds_left, 0.0))} left"
    return (
        f"{progress.iteration}: {steps} steps ({over:.0%}{left})  {ended}  "
        + "".join(f"{name} {figure}  " for name, figure in figures.items())
        + f"{steps_per_s:,.0f}/s"
    )


def _phase_shares(seconds: float, phases: Mapping[str, float]) -> str:
    """Return the share of an iteration's time that each phase took."""
    found = {phase: phases.get(phase, 0.0) / seconds for phase in PHASES}
    return "".join(f"  {phase} {share:.0%}" for phase, share in found.items() if share >= 0.005)


def _console_table(summary: Mapping[str, Any], episodes: int, folder: Path) -> str:
    """Return the summary of a run as a table, with the number of episodes in its mean return."""
    ret = f"{short(summary['return_mean'])}  mean of the last {episodes} episodes"
    rows = {
        "return": ret if episodes else _NO_EPISODE,
        "best evaluation": short(summary["best_eval"]) if "best_eval" in summary else "",
        "steps": f"{summary['steps']:,} in {summary['iterations']:,} iterations and {summary['episodes']:,} episodes",
        "time": f"{_clock(summary['seconds'])}, {summary['steps_per_s']:,.0f} steps/s",
        "weights": summary["weights_sha256"],
        "folder": str(folder),
    }
    return "\n".join(f"{name:16}{text}" for name, text in rows.items() if text)


def _clock(seconds: float) -> str:
    """Return a time as 1:02:03 or 2:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


_HASH = 16  # digits of a hash in the CSV: 64 bits tell any two apart


class Recorder:
    """Keeps the last iteration boundary, and writes the run's files. Rank 0 only.

    Args:
        state: state of the run.
        options: options of the run.
        phases: seconds of each phase.
        about: first entries of the summary, such as env_id, algo and seed.
        logger: writes into the run's folder and on the console.
        resume_command: returns the command line that resumes the run.
    """

    def __init__(
        self,
        state: State,
        options: RunOptions,
        phases: Phases,
        about: Mapping[str, Any],
        logger: Logger,
        resume_command: Callable[[], str] = str,
    ) -> None:
        self.state = state
        self.saved: int | None = None
        """Iteration of the last checkpoint."""
        self._options, self._phases, self._about, self._logger = options, phases, about, logger
        self._folder, self._resume_command = logger.folder, resume_command
        self._boundary: dict[str, Any] = {}
        self._ended = state.ended()
        self._steps_before = state.progress.steps
        self._begun, self._first = time.monotonic(), state.progress.iteration
        self._paced: tuple[float, float] | None = None  # end of the first iteration, which compiles
        self._busy_s = np.zeros(about.get("nprocs", 1))  # of each rank in its rollouts
        self._longest_s = 0.0  # of the slowest one
        logger.go_on_after(state.progress.iteration)

    @property
    def iteration(self) -> int:
        """Number of iterations made."""
        return self.state.progress.iteration

    def begin(self) -> None:
        """Save the boundary that the run begins with. From here on the run can be resumed."""
        self._boundary = {**self.state.snapshot(), "rows_sha256": self._logger.rows_sha256}
        try:
            self.save()
        except job.Failure:
            self._boundary = {}  # do not try again on the way out
            raise
        job.resumable(self._folder)

    def over(self) -> bool:
        """Return True after the last iteration that the options ask for."""
        iterations, seconds = self._options.stop_after_iterations, self._options.stop_after_seconds
        return (
            bool(self.state.ended())
            or (iterations is not None and self.state.progress.iteration >= iterations)
            or (
                seconds is not None
                and self.state.progress.iteration > self._first  # every start gets on
                and time.monotonic() - self._begun >= seconds
            )
        )

    def record(self, seconds: float, batch: Gathered, metrics: Mapping[str, float]) -> None:
        """Count the iteration that has just ended; call the hooks, keep its boundary, write its row, show its line.

        Args:
            seconds: wall time of the iteration, and of the recording before it.
            batch: the batch that the agent learned from.
            metrics: numbers that the agent's update returned.
        """
        progress, phases = self.state.progress, self._phases.take()
        progress.add(batch.steps, batch.ended)
        steps_per_s = (progress.steps - self._steps_before) / seconds
        self._steps_before = progress.steps
        progress.seconds += seconds
        record = _record(progress, batch)
        took_s = batch.ranks["took_s"]
        if len(took_s) == len(
            self._busy_s
        ):  # a batch that was collected before a resume may be of others
            self._busy_s += took_s
            self._longest_s += float(took_s.max())
        failures = _of_failures(batch.ranks, self._logger.columns)
        record.add("failures", failures, repeats=False)
        speed = {f"{phase}_s": phases.get(phase, 0.0) for phase in PHASES}
        speed = {"steps_per_s": steps_per_s, **speed, **_of_ranks(batch.ranks)}
        record.add("speed", speed, repeats=False)
        record.add("update", metrics)
        saves = self._call_hooks(record)
        evaluated = record.groups["evaluation"].get("eval_return", "")
        is_best = self._is_best(evaluated)
        boundary = self.state.snapshot()
        weights_sha256 = weights.sha256_tensors(boundary["weights"])[:_HASH]
        record.groups["hashes"]["weights_sha256"] = weights_sha256
        writes = self._folder / "progress.csv"
        try:
            self._logger.row(record.row())
            if self._options.keep_batches:
                writes = Path(self._options.keep_batches, f"{progress.iteration:08d}.npz")
                files.write_arrays(writes, batch.rows)
        except OSError as error:
            raise job.Failure(f"cannot write {writes}: {error.strerror}") from error
        boundary["rows_sha256"] = self._logger.rows_sha256
        self._boundary = boundary  # once its row is written: resume goes on after the last row
        self._ended = self.state.ended()
        if is_best:
            checkpoint.save_best(self._folder, boundary)
        checkpoint_now = saves or progress.iteration % self._options.checkpoint_every == 0
        info = [label(name) for name in self._options.info]
        line = _console_line(self.state, self._seconds_left(), steps_per_s, metrics, info)
        if self._options.phases:
            line += _phase_shares(seconds, phases)
        self._note_missing_infos(batch.ended)
        if evaluated != "":
            line += f"  evaluated: return {evaluated:.1f}"
        self._logger.show(line, stays=checkpoint_now or evaluated != "")
        if checkpoint_now:
            self.save()

    def _call_hooks(self, record: Record) -> bool:
        """Call rank 0's hooks, and add the columns of all; return True if one asks for a checkpoint."""
        state, saves = self.state, False
        for hook in state.hooks:
            try:
                with held.user_code():
                    if not hook.on_every_rank:
                        hook.after(state.agent, state.progress.iteration, copy.copy(record))
                    record.add(hook.name, hook.columns())
            except Exception as error:
                number = state.progress.iteration
                error.add_note(f"In the hook {type(hook).__name__}, after iteration {number}.")
                raise
            saves, hook.saves = saves or hook.saves, False
        return saves

    def _seconds_left(self) -> float | None:
        """Return the seconds until the end, at the pace since the first iteration; None before its end."""
        now, over = time.monotonic(), self.state.share_over()
        if self._paced is None:
            self._paced = now, over
        since, share = self._paced
        return (1 - over) * (now - since) / (over - share) if over > share else None

    def save(self) -> None:
        """Write checkpoint and summary of the last boundary, even in the middle of an iteration.

        Raises:
            Failure: if the checkpoint cannot be written.
        """
        if not self._boundary or self.saved == self._boundary["progress"]["iteration"]:
            return
        iteration = self._boundary["progress"]["iteration"]
        keep = self._options.keep_checkpoints
        try:
            for path in (self._folder / "progress.csv", self._folder):
                if path.exists():
                    files.sync(path)  # a checkpoint is of use with its rows only
        except OSError as error:
            raise job.Failure(f"cannot write {path}: {error.strerror}") from error
        checkpoint.save(self._folder, iteration, self._boundary, keep)
        self.saved = iteration
        try:
            self._logger.summary(self.summary())
        except OSError as error:
            raise job.Failure(f"cannot write {error.filename}: {error.strerror}") from error

    def summary(self) -> dict[str, Any]:
        """Return the few numbers of the last boundary by which two runs are compared at a glance."""
        progress = self._boundary["progress"]
        seconds = progress["seconds"]
        return {
            **self._about,
            "iterations": progress["iteration"],
            "steps": progress["steps"],
            "episodes": progress["episodes"],
            "seconds": round(seconds, 3),
            "steps_per_s": round(progress["steps"] / seconds, 1) if seconds else 0.0,
            "return_mean": mean(progress["returns"]) if progress["returns"] else None,
            **({"best_eval": progress["best_eval"]} if self._options.eval_every else {}),
            "weights_sha256": weights.sha256_tensors(self._boundary["weights"]),
            **self._idle(),
            **({"updates": self.state.agent.updates} if self.state.agent.updates else {}),
            "ended": self._ended,
        }

    def _idle(self) -> dict[str, list[float]]:
        """Return the share of the rollouts' time in which each rank has waited for the slowest one, since the start."""
        if not self._longest_s or len(self._busy_s) == 1:
            return {}
        return {"idle_of_ranks": np.round(1 - self._busy_s / self._longest_s, 3).tolist()}

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """Print at the end what was saved and how to go on; tell the supervisor of a signal."""
        try:
            yield
        except BaseException as error:
            self._logger.close()
            how = "SIGINT" if isinstance(error, KeyboardInterrupt) else "failed"
            how = str(error) if isinstance(error, Interrupted) and not job.failed() else how
            self._logger.print(f"{how}: {self._what_is_saved()}")
            if isinstance(error, Interrupted):
                job.mark_interrupted(error.signum)
            raise
        self._logger.close()
        if self.state.share_over() < 1:
            why = f" ({self._ended})" * bool(self._ended)
            go_on = f"go on with: {self._resume_command()}"
            self._logger.print(f"stopped after iteration {self.saved}, as asked{why}; {go_on}")
        self._logger.print(
            _console_table(self.summary(), len(self.state.progress.returns), self._folder)
        )

    def _what_is_saved(self) -> str:
        if self.saved is None:
            return "nothing was saved"
        is_last = self.saved == self.state.progress.iteration and self.state.share_over() >= 1
        go_on = ", the last one" if is_last else f"; go on with: {self._resume_command()}"
        return f"saved iteration {self.saved}{go_on}"

    def _note_missing_infos(self, ended: Batch) -> None:
        """Print the figures of --info that are missing in all episodes of the first iteration with any."""
        progress = self.state.progress
        if not 0 < len(ended["return"]) == progress.episodes:
            return
        for name in map(label, self._options.info):
            if np.isnan(known_mean(progress.infos[name])):
                self._logger.print(
                    f"note: none of the first {progress.episodes} episodes had {name!r} in its info: "
                    f"if none ever has, the name in --info is another one"
                )

    def _is_best(self, evaluated: Any) -> bool:
        """Return True if an evaluation is the best so far, and keep its mean return, "" without one."""
        best = self.state.progress.best_eval
        is_best = evaluated != "" and evaluated > (-np.inf if best is None else best)
        if is_best:
            self.state.progress.best_eval = evaluated
        return bool(is_best)


def _record(progress: Progress, batch: Gathered) -> Record:
    """Return the columns of an iteration's row that are known from the progress and the batch."""
    record = Record()
    names = ("iteration", "steps", "episodes")
    record.add("run", {name: getattr(progress, name) for name in names})
    record.add("run", {"seconds": progress.seconds}, repeats=False)
    record.add("episodes", _of_episodes(progress, batch.ended))
    infos = {f"{name}_mean": known_mean(values) for name, values in progress.infos.items()}
    record.add("info", infos)
    record.add("curriculum", {"settings": batch.settings} if batch.settings else {})
    hashed = {"batch_sha256": batch.sha256[:_HASH], "weights_sha256": ""}  # the second comes later
    record.add("hashes", hashed, repeats=False)
    return record
