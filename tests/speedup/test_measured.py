"""Ceilings of a speedup by hand, and the advice that follows from rows."""

import pytest
from helpers.speedups import row

from rank0rl.tools.speedup.measured import advice, compare
from rank0rl.tools.speedup.speedup import _step_fractions


def work(overlap=False, rank0_envs=False, episodes=False):
    """Return the settings of a run that spreads its work like this."""
    own = {"rank0_envs": 1} if rank0_envs else {}
    return {"overlap": overlap, **own, **({"episodes_per_batch": 8} if episodes else {})}


PLAIN = work()


def columns(name, rows, given=PLAIN):
    return [getattr(row, name) for row in compare(rows, given)]


def test_the_ceiling_is_amdahls_with_the_largest_fraction():
    first = row(1, collect=0.7, process=0.1, update=0.2)
    rows = [first, row(2, 1500.0, collect=0.4, update=0.2), row(4, 2000.0, (0.2, 0.375), wait=1.0)]
    for name in ("ceiling", "expected"):
        assert columns(name, rows) == pytest.approx([1, 1 / 0.6, 1 / (0.2 + 0.3)])
    assert columns("speedup", rows) == pytest.approx([1, 1.5, 2])
    assert columns("efficiency", rows) == pytest.approx([1, 0.75, 0.5])


def test_expected_accounts_for_processes_that_slow_each_other_down():
    for bare, shared in ((8000.0, 0.5), (12000.0, 0.4), (float("nan"), 0.4)):
        rows = [row(1, collect=0.8, update=0.2), row(2, bare=bare, collect=0.4, update=0.2)]
        assert columns("ceiling", rows)[1] == pytest.approx(1 / 0.6)
        assert columns("expected", rows)[1] == pytest.approx(1 / (0.2 + shared))


def test_two_ranks_may_be_what_the_others_are_compared_with():
    rows = [row(2, collect=0.3, wait=0.1, slowest=0.4, update=0.6), row(4, collect=1.0)]
    assert columns("ceiling", rows) == pytest.approx([1, 1 / 0.8])


def test_with_overlap_rank_0_learns_while_the_others_collect():
    one = row(1, collect=0.6, update=0.4)
    uneven = [row(2, fractions=each, wait=1.0) for each in ((11 / 32, 21 / 32), (0.0, 1.0))]
    slowest = [1.0, 0.4 + 0.6 * 11 / 32, 0.6]
    found = columns("ceiling", [one, *uneven], work(overlap=True, rank0_envs=True))
    assert found == pytest.approx([1 / s for s in slowest])
    equal = [one, row(2, collect=0.3, update=0.4)]
    assert columns("ceiling", equal, work(overlap=True)) == pytest.approx([1, 1 / 0.7])
    episodes = work(overlap=True, episodes=True)
    assert columns("ceiling", equal, episodes) == pytest.approx([1, 2])


def test_fractions_of_the_steps():
    assert _step_fractions(4, [3, 3, 2, 2]) == (0.3, 0.3)
    assert _step_fractions(4, [2, 3, 3, 2]) == (0.2, 0.3)
    assert _step_fractions(1, [8]) == (1, 0)
    assert _step_fractions(4, [3, 3, 2, 2], longest_episode=0.1) == (0.25, 0.25)
    assert _step_fractions(4, [3, 3, 2, 2], longest_episode=0.5) == (0.5, 0.5)


SLOW = {"slowest": 0.9, "fastest": 0.3, "collect": 0.5, "wait": 0.5}
NOTHING = {"more ranks"}
CASES = {
    "the update": (row(2, collect=0.5, update=0.5), PLAIN, {"update takes 50%", "--overlap"}),
    "envs of rank 0": (
        row(2, 1000.0, (0.4, 0.6), collect=0.5, update=0.5),
        work(overlap=True, rank0_envs=True),
        {"update takes 50%", "fewer --rank0-envs"},
    ),
    "moving": (row(2, collect=0.8, gather=0.2), PLAIN, {"moving data takes 20%"}),
    "uneven": (row(4, fractions=(0.2, 0.4), collect=1.0), PLAIN, {"--num-envs", "--nprocs"}),
    "asked for": (
        row(4, fractions=(0.1, 0.3), collect=1.0),
        work(rank0_envs=True),
        NOTHING,
    ),
    "episodes": (
        row(4, fractions=(0.5, 0.5), collect=1.0),
        work(episodes=True),
        {"--episodes-per-batch"},
    ),
    "imbalance": (row(2, **SLOW), PLAIN, {"3.0 times", "--episodes-per-batch", "fewer ranks"}),
    "slow ranks": (row(2, **SLOW), work(episodes=True), {"3.0 times", "fewer ranks"}),
    "meanwhile": (row(2, **SLOW), work(overlap=True), NOTHING),
    "a little": (row(2, collect=1.0, fastest=0.85), PLAIN, NOTHING),
    "nothing": (row(2, collect=1.0), PLAIN, NOTHING),
}


@pytest.mark.parametrize("case", CASES)
def test_advice_names_what_limits_the_speedup(case):
    last, given, wanted = CASES[case]
    rows = [row(1, collect=1.0), last]
    [text] = advice(rows, given)
    assert all(fact in text for fact in wanted)


def test_advice_begins_with_the_largest_and_speaks_of_ranks_within_the_cores():
    rows = [row(1, collect=1.0), row(4, 3000.0, collect=0.5, update=0.3, gather=0.2)]
    rows.append(row(8, 2000.0, collect=0.1, update=0.9))
    update, moving, crowd = advice(rows, PLAIN)
    assert "update takes 30%" in update
    assert "20%" in moving
    assert "4 ranks" in crowd
    only = row(8, collect=0.5, update=0.5)
    assert "8 ranks" in advice([only, row(16, collect=1.0)], PLAIN)[0]


def test_a_disturbed_measurement_is_called_one():
    rows = [row(1, collect=0.9, update=0.1), row(2, collect=0.5, update=0.13)]
    first = advice(rows, PLAIN)[0]
    assert all(fact in first for fact in ("1.30 times", "2 ranks", "1 rank,", "--repeats"))
    rows = [row(1, collect=0.9, update=0.1), row(2, collect=0.9, update=0.11)]
    assert not any("times" in text for text in advice(rows, PLAIN))
