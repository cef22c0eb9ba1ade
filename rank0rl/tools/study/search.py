"""Search for settings with Optuna: each trial is a run, or a few, with settings that the trials before suggest.

The trials are in a journal file in the folder of the study, so that machines share a search, and a search
goes on where it was. Optuna does not say whether the process of a trial under way is alive: a claim does.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.launch import one_line
from rank0rl.options import flag
from rank0rl.run import files
from rank0rl.run.folder import read_run
from rank0rl.tools import figures
from rank0rl.tools.study.planned import Options, Planned, plan_run, seeds
from rank0rl.tools.study.results import TRIALS
from rank0rl.tools.study.training import Runs, Training, claim

_REPORTS = 20  # times in a run that it is compared with the trials before
_LOCK_S = 0.01  # between tries to lock the journal
_JOURNAL = 1 << 26  # bytes of the largest journal: 100,000 trials and more
_LOOK_S = 2.0  # between looks at the trials of other machines
_WARM_UP = 5  # of these, the first ones of each run, and trials that are never stopped early


def check(given: Options, rest: Sequence[str], source: Path | None = None) -> None:
    """Check the options of a search, and those of its runs. `source` is that of `plan_run`.

    Raises:
        ValueError: for several environments or agents, a wrong range, a setting that cannot be, or a
            seed that is to judge what it has chosen.
    """
    if len(given.envs) > 1 or len(given.algo) > 1 or given.grid:
        raise ValueError(
            "a search is of one environment and one agent, without --grid: got "
            f"{' '.join(given.envs)} with {' '.join(given.algo)}"
        )
    for name, text in _ranges(given).items():
        _suggester(name, text)
        ends = text.split("|") if "|" in text else text.removeprefix("log:").split(":")
        for end in ends:
            run = plan_run(given.envs[0], given.algo[0], {name: end}, 0, rest, source=source)
        value = {**vars(run.options), **vars(run.agent)}.get(name)
        if "|" not in text and isinstance(value, float) and all(map(_is_whole, ends)):
            floats = text.replace(":".join(ends), f"{ends[0]}.0:{ends[1]}")
            raise ValueError(
                f"--search {name}={text} would try whole numbers alone: write {floats}"
            )
    if both := {*seeds(given.seeds)} & {*seeds(given.search_seeds)}:
        raise ValueError(
            f"the seeds of a search must not be those of its results: got {sorted(both)} in --seeds "
            f"and in --search-seeds"
        )


def _ranges(given: Options) -> dict[str, str]:
    """Return setting -> range, as --search has them."""
    words = [word.partition("=") for word in given.search]
    ranges = {name.replace("-", "_"): text for name, _, text in words}
    if len(ranges) < len(words):
        raise ValueError(f"--search must have each setting once: got {' '.join(given.search)}")
    return ranges


def _is_whole(number: str) -> bool:
    return number.removeprefix("-").isdecimal()


def _suggester(name: str, text: str) -> Callable[[Any], Any]:
    """Return a function that suggests a trial's value of a setting, from 0.9:0.99, log:1e-5:1e-3, 1:20 or tanh|relu."""
    log = text.startswith("log:")
    if "|" in text and all(text.split("|")):
        return lambda trial: trial.suggest_categorical(name, text.split("|"))
    for kind, method in ((int, "suggest_int"), (float, "suggest_float")):
        try:
            low, high = map(kind, text.removeprefix("log:").split(":"))
        except ValueError:
            continue
        if low < high and (low > 0 or not log):
            return lambda trial: getattr(trial, method)(name, low, high, log=log)
    raise ValueError(
        f"--search takes NAME=LOW:HIGH, NAME=log:LOW:HIGH or NAME=A|B: got {name or '?'}={text}"
    )


def _as_word(value: Any) -> str:
    """Return a value as a word of the command line, a number with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _score(folder: Path, objective: str) -> float:
    """Return the value of a run: the mean return of its last 100 episodes if the objective is "final".

    Else it is the mean of its learning curve over all of its steps, where a run that ended early keeps
    its last return.
    """
    run = read_run(folder)
    ret, steps = run.column("return_mean"), run.column("steps")
    there = np.isfinite(ret)
    if not there.any():
        return -np.inf
    ret, steps = ret[there], steps[there]
    if objective == "final":
        return float(ret[-1])
    by_steps = "num_episodes" not in run.settings
    end = max(float(run.settings["total_steps"]) if by_steps else 0.0, steps[-1])
    if end == steps[0]:  # the first return came in the last row
        return float(ret[-1])
    ret, steps = np.append(ret, ret[-1]), np.append(steps, end)
    return float(np.trapezoid(ret, steps) / (end - steps[0]))


@dataclass(eq=False)
class _Trial:
    """A trial that this process has claimed."""

    of_optuna: Any
    release: Callable[[], None]  # gives up the claim
    reported: set[int]  # steps at which it has been compared with the trials before
    runs: list[str]
    left: set[str]  # runs that are not over
    verdict: str = "COMPLETE"  # "PRUNED" or "FAIL" once it is given up


class Search(Runs):
    """The runs of a search in the folder of a study; `rest` are options of every run.

    Raises:
        ValueError: if the folder holds another search, or Optuna is not installed.
    """

    name = "search"

    def __init__(self, given: Options, rest: Sequence[str], out: Path) -> None:
        optuna = _optuna()
        super().__init__([], out)
        self._given, self._rest = given, rest
        self._seeds = seeds(given.search_seeds)
        self._suggest = {name: _suggester(name, text) for name, text in _ranges(given).items()}
        kinds = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        self._study = optuna.create_study(
            storage=_storage(optuna, out / "search"),
            study_name="rank0rl",
            load_if_exists=True,
            direction="maximize",
            pruner=optuna.pruners.MedianPruner(_WARM_UP),
        )
        self._sampler = kinds[given.sampler]
        self._refuse_another(
            {
                **_ranges(given),
                **{name: str(getattr(given, name)) for name in ("envs", "algo", "objective")},
                "search_seeds": given.search_seeds,
                "options": shlex.join(word for word in rest if word != flag("trust")),
            }
        )
        over = [trial for trial in self._study.trials if trial.state.is_finished()]
        self.over = len(self._seeds) * len(over)
        self.total = given.trials * len(self._seeds)
        self._mine: dict[str, _Trial] = {}  # by run
        self._elsewhere = False
        self._looked = -_LOOK_S
        self._adopt()

    def take(self) -> Planned | None:
        """Return the next run, of a new trial if need be; None after the last trial."""
        trials = self._study.get_trials
        while not self._waiting and len(trials(deepcopy=False)) < self._given.trials:
            self._plan(self._study.ask())
        if not self._waiting:
            self._adopt()
        return self._waiting.pop(0) if self._waiting else None

    def waits(self) -> bool:
        """Return True if other machines train, whose trials may have to be taken over."""
        return bool(self._waiting or self._elsewhere)

    def stops(self, training: Training) -> bool:
        """Return True if the curve so far is below the median of the trials before."""
        trial = self._mine[training.planned.name]
        if trial.verdict != "COMPLETE":
            return True
        row = training.row()
        if row is None or not np.isfinite(float(row["return_mean"] or "nan")):
            return False
        which = self._seeds.index(training.planned.options.seed)
        part = int(_REPORTS * min(training.part, 1.0))
        step = which * (_REPORTS + 1) + part
        if step in trial.reported:
            return False
        trial.reported.add(step)
        trial.of_optuna.report(float(row["return_mean"]), step)
        if not self._given.prune or not _WARM_UP <= part < _REPORTS:
            return False
        # Optuna judges a trial at its last step, which may be one of another seed's run.
        if step < max(trial.reported) or not trial.of_optuna.should_prune():
            return False
        self._give_up(trial, "PRUNED")
        return True

    def done(self, run: Planned, code: int) -> None:
        """Tell Optuna the value of a trial when the last of its runs is over."""
        self.over += 1
        trial = self._mine[run.name]
        trial.left.discard(run.name)
        if code:
            self._give_up(trial, "FAIL")
        if not trial.left:
            self._tell(trial)

    def best(self) -> dict[str, str]:
        """Return the settings of the best trial, as the command line takes them.

        Raises:
            ValueError: if no trial has come to its end.
        """
        try:
            trial = self._study.best_trial
        except ValueError:
            raise ValueError(
                f"no trial of the search has come to its end: see {self.folder}"
            ) from None
        if trial.params.keys() != self._suggest.keys():
            raise ValueError(
                f"the best trial in {self.folder} is not one of this search: expected "
                f"{', '.join(self._suggest)}, got {', '.join(trial.params)}"
            )
        return {name: _as_word(value) for name, value in trial.params.items()}

    def write(self) -> None:
        """Write the trials to search.csv."""
        rows = [
            {
                "trial": trial.number,
                **{name: trial.params.get(name, "") for name in self._suggest},
                "value": "" if trial.value is None else trial.value,
                "state": trial.state.name.lower(),
            }
            for trial in self._study.trials
        ]
        if rows:
            figures.write_csv(self.folder / TRIALS, rows)

    def _refuse_another(self, what: dict[str, str]) -> None:
        """Raise ValueError if the trials in the journal are those of another search."""
        before = self._study.user_attrs.get("search")
        if before is None:
            self._study.set_user_attr("search", what)
        elif before != what:
            before = before if isinstance(before, dict) else {}
            changed = [name for name in {**before, **what} if before.get(name) != what.get(name)]
            raise ValueError(
                f"{self.folder} holds another search: {', '.join(changed)} differ; name another --out"
            )

    def _adopt(self) -> None:
        """Go on with the trials that are under way, and that no other machine has claimed."""
        from optuna.trial import Trial, TrialState

        if time.monotonic() < self._looked + _LOOK_S:
            return
        self._looked, self._elsewhere = time.monotonic(), False
        mine = {trial.of_optuna.number for trial in self._mine.values()}
        for frozen in self._study.get_trials(states=[TrialState.RUNNING]):
            if frozen.number not in mine:
                self._plan(Trial(self._study, frozen._trial_id))

    def _plan(self, of_optuna: Any) -> None:
        """Claim a trial, and let those of its runs wait that are not over."""
        number = of_optuna.number
        folder = f"search/{number:04d}"
        release = claim(self.folder, folder)
        if release is None:
            self._elsewhere = True
            return
        frozen = self._study.trials[number]
        if frozen.state.is_finished():  # by another machine, just now
            release()
            return
        # A seed of its own: a start, or a machine, must not begin with the trials of another one.
        self._study.sampler = self._sampler(seed=number)
        settings = {name: _as_word(of(of_optuna)) for name, of in self._suggest.items()}
        (env_id,), (algo,) = self._given.envs, self._given.algo
        verdict = "COMPLETE"
        try:
            runs = [
                plan_run(env_id, algo, settings, seed, self._rest, f"{folder}/seed{seed}")
                for seed in self._seeds
            ]
        except ValueError as error:  # settings that do not fit together
            print(one_line(f"trial {number} cannot be: {error}"), file=sys.stderr)
            runs, verdict = [], "FAIL"
        left = [run for run in runs if not run.ended(self.folder)]
        every, reported = [run.name for run in runs], {*frozen.intermediate_values}
        trial = _Trial(of_optuna, release, reported, every, {run.name for run in left}, verdict)
        self._mine |= dict.fromkeys(every, trial)
        self._waiting += left
        if not left:
            self._tell(trial)

    def _give_up(self, trial: _Trial, verdict: str) -> None:
        """Give up a trial: its runs that wait are not trained, and those in training are stopped."""
        if trial.verdict == "COMPLETE":
            trial.verdict = verdict
        for run in [run for run in self._waiting if run.name in trial.left]:
            self._waiting.remove(run)
            trial.left.discard(run.name)

    def _tell(self, trial: _Trial) -> None:
        """Finish a trial. Its value is the mean over its seeds."""
        from optuna.trial import TrialState

        value = None
        if trial.verdict == "COMPLETE":
            scores = [_score(self.folder / name, self._given.objective) for name in trial.runs]
            value = float(np.mean(scores))
        self._study.tell(trial.of_optuna, value, state=TrialState[trial.verdict])
        trial.release()


class _Lock:
    """The lock of Optuna's journal, which ends with its process. Optuna's own is a link that a kill leaves behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def acquire(self) -> bool:
        """Wait until no other process has the lock."""
        while not (release := claim(self._folder)):
            time.sleep(_LOCK_S)
        self.release = release
        return True


def _storage(optuna: Any, folder: Path) -> Any:
    """Return Optuna's storage of the trials in a folder, which may come from someone else.

    Raises:
        ValueError: if its journal cannot be read, or a file in the folder is a link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files.check_folder(folder)
    path = folder / "optuna.journal"
    lock = _Lock(folder)
    if path.exists():
        lock.acquire()
        try:
            written = files.read(path, "search", _JOURNAL)
            # A full disk or a power cut may have cut its last line short: the next one would be lost too.
            os.truncate(path, written.rfind(b"\n") + 1)
        finally:
            lock.release()
    try:
        file = optuna.storages.journal.JournalFileBackend(str(path), lock)
        return optuna.storages.JournalStorage(file)
    except Exception as error:  # whatever Optuna raises for what it did not write
        raise ValueError(
            f"cannot read search {path}: Optuna did not write it ({type(error).__name__}: {error})"
        ) from None


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError:
        raise ValueError(
            "--search needs Optuna, which is in the extra \"search\": run pip install -e '.[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
