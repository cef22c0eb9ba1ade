"""Which run trains on which cores, with runs that only pretend to train."""

from typing import ClassVar

import pytest

from rank0rl.run.options import RunOptions
from rank0rl.tools.study import training
from rank0rl.tools.study.planned import Planned
from rank0rl.tools.study.training import _Schedule

NEVER = 10**9


class Pretended:
    """A run that ends after so many turns of a core; two cores are twice as fast."""

    made: ClassVar = []
    work: ClassVar = {}
    codes: ClassVar = {}
    startup_s = 1.0

    def __init__(self, planned, folder, cores):
        self.planned, self.cores, self.next_cores = planned, list(cores), []
        self.given_up = False
        self._stopped = self._told = False
        Pretended.made.append((planned.name, [core[0] for core in cores]))

    def poll(self):
        if self._stopped:
            return 143
        Pretended.work[self.planned.name] -= len(self.cores)
        over = Pretended.work[self.planned.name] <= 0
        return Pretended.codes.get(self.planned.name, 0) if over else None

    def stop(self):
        self._stopped = True

    def wait(self):
        return 143

    def times(self):
        return Pretended.startup_s, Pretended.work[self.planned.name] / len(self.cores)


class Shown:
    """The console of a study, which shows nothing."""

    def __init__(self, show=lambda trainings: None):
        self.show = show

    def over(self, planned, code):
        pass


class Some:
    folder = None

    def __init__(self, names, stopped=()):
        self.waiting = [Planned(name, (), RunOptions(num_envs=4)) for name in names]
        self.ended, self.stopped = [], stopped

    def take(self):
        return self.waiting.pop(0) if self.waiting else None

    def waits(self):
        return bool(self.waiting)

    def stops(self, training):
        return training.planned.name in self.stopped

    def done(self, planned, code):
        self.ended.append((planned.name, code))


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    monkeypatch.setattr(training, "Training", Pretended)
    monkeypatch.setattr(training, "_TURN_S", 0.0)
    monkeypatch.setattr(Pretended, "made", [])
    monkeypatch.setattr(Pretended, "codes", {})
    monkeypatch.setattr(Pretended, "startup_s", 1.0)


def scheduled(work, cores, **more):
    Pretended.work = dict(work)
    some = Some(work, **more)
    _Schedule(some, [(i,) for i in range(cores)], Shown()).run()
    return some.ended, Pretended.made


def test_one_core_each_while_there_are_more_runs_than_cores():
    ended, made = scheduled({"a": 5, "b": 5, "c": 5, "d": 5}, cores=2)
    assert [cores for _, cores in made] == [[0], [1], [0], [1]]
    assert sorted(ended) == [(name, 0) for name in "abcd"]


def test_fewer_runs_than_cores_share_them_from_the_beginning():
    _, made = scheduled({"a": 50}, cores=6)
    assert made == [("a", [0, 1, 2, 3])]  # as many as it has environments


def test_the_last_run_goes_on_with_the_cores_that_are_free():
    ended, made = scheduled({"a": 5, "b": 100}, cores=2)
    assert made == [("a", [0]), ("b", [1]), ("b", [1, 0])]
    assert ended == [("a", 0), ("b", 0)]


def test_a_new_start_must_be_worth_it(monkeypatch):
    monkeypatch.setattr(Pretended, "startup_s", 40.0)
    _, made = scheduled({"a": 5, "b": 100}, cores=2)
    assert made == [("a", [0]), ("b", [1])]


def test_it_is_not_stopped_while_nobody_knows_how_long_it_takes(monkeypatch):
    monkeypatch.setattr(Pretended, "times", lambda self: None)
    _, made = scheduled({"a": 5, "b": 100}, cores=2)
    assert len(made) == 2


def test_a_run_that_fails_frees_its_core():
    Pretended.codes["a"] = 1
    ended, made = scheduled({"a": 2, "b": 4, "c": 4}, cores=1)
    assert ended == [("a", 1), ("b", 0), ("c", 0)]
    assert len(made) == 3


def test_a_run_that_is_stopped_early_is_no_failure():
    ended, _ = scheduled({"a": NEVER, "b": 3}, cores=1, stopped=("a",))
    assert ended == [("a", 0), ("b", 0)]


def test_a_run_that_someone_else_ended_has_failed():
    Pretended.codes["a"] = 143
    ended, _ = scheduled({"a": 2}, cores=1)
    assert ended == [("a", 143)]


def test_all_training_is_stopped_on_the_way_out(monkeypatch):
    stopped = []
    monkeypatch.setattr(Pretended, "stop", lambda self: stopped.append(self.planned.name))

    def show(trainings):
        raise KeyboardInterrupt

    Pretended.work = {"a": NEVER, "b": NEVER, "c": NEVER}
    with pytest.raises(KeyboardInterrupt):
        _Schedule(Some("abc"), [(0,), (1,)], Shown(show)).run()
    assert stopped == ["a", "b"]


def test_what_another_machine_has_left_is_trained():
    class Late(Some):
        turns = 3

        def take(self):
            Late.turns -= 1
            return super().take() if Late.turns < 0 else None

    Pretended.work = {"a": 2}
    late = Late("a")
    _Schedule(late, [(0,)], Shown()).run()
    assert late.ended == [("a", 0)]


def test_a_run_that_is_given_up_gets_no_more_cores(monkeypatch):
    """It takes a while to save, and meanwhile a core is free."""

    class Slow(Pretended):
        turns = 5

        def stop(self):
            self._told = True

        def poll(self):
            if self._told:
                Slow.turns -= 1
                return 143 if Slow.turns <= 0 else None
            return super().poll()

    monkeypatch.setattr(training, "Training", Slow)
    ended, made = scheduled({"a": 2, "b": 1000}, cores=2, stopped=("b",))
    assert sorted(ended) == [("a", 0), ("b", 0)]
    assert len(made) == 2
