"""The speedup study: what it measures, what it concludes, and that ranks do make a run faster."""

import csv
import json
import math
import sys
from dataclasses import replace

import pytest
from on_ranks import HERE, run

from rank0rl.run import provenance
from rank0rl.run.timing import PHASES
from rank0rl.scaling import _bare, speedup, speedup_table
from rank0rl.scaling.advice import Row, Work, advice, compare, shares, unaccounted

ENV = {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
PLAIN = Work()
SLEEPS = ["toy_envs:Sleeps-v0", "--num-envs", "4", "--hidden", "8", "--epochs", "1"]


def row(
    nprocs,
    steps_per_s=1000.0,
    shares=None,
    bare=None,
    slowest=None,
    fastest=None,
    how="rank0",
    **phases,
):
    """Of an iteration of a second, unless its phases say otherwise."""
    every = {phase: phases.get(phase, 0.0) for phase in PHASES}
    seconds = sum(every.values())
    slowest = slowest or every["collect"] + every["process"]
    return Row(
        *(nprocs, steps_per_s, steps_per_s, steps_per_s, seconds, every),
        *(slowest, slowest if fastest is None else fastest),
        bare_steps_per_s=bare or 5000.0 * nprocs,
        return_mean=1.0,
        memory_mb=1.0,
        shares=shares or (1 / nprocs, 1 / nprocs),
        update=how,
        oversubscribed=nprocs > 4,
    )


def columns(name, rows, work=PLAIN):
    compare(rows, work)
    return [r.columns[name] for r in rows]


def test_the_ceiling_is_amdahls_with_the_largest_share():
    first = row(1, collect=0.7, process=0.1, update=0.2)
    rows = [first, row(2, 1500.0, collect=0.4, update=0.2), row(4, 2000.0, (0.2, 0.375), wait=1.0)]
    for name in ("ceiling", "expected"):
        assert columns(name, rows) == pytest.approx([1, 1 / 0.6, 1 / (0.2 + 0.3)])
    assert columns("speedup", rows) == pytest.approx([1, 1.5, 2])
    assert columns("efficiency", rows) == pytest.approx([1, 0.75, 0.5])


def test_ranks_that_update_together_share_that_too_and_are_compared():
    first = row(1, collect=0.6, update=0.4)
    two = {"collect": 0.3, "update": 0.4}
    rows = [first, row(2, 1200.0, **two), row(2, 1500.0, how="allreduce", collect=0.3, update=0.2)]
    assert columns("ceiling", rows) == pytest.approx([1, 1 / 0.7, 1 / 0.5])
    said = advice(rows, PLAIN)
    assert said[1].startswith(
        "--update allreduce makes 1.25 times the steps per second of rank 0's"
    )
    alone = [row(2, how="allreduce", collect=0.5, update=0.5), row(4, how="allreduce", collect=1.0)]
    assert columns("ceiling", alone) == pytest.approx([1, 2])
    assert advice(alone, PLAIN) == ["nothing stands out: more ranks, where there are more cores"]


def test_what_is_expected_takes_in_that_processes_slow_each_other_down():
    for bare, share in ((8000.0, 0.5), (12000.0, 0.4), (float("nan"), 0.4)):
        rows = [row(1, collect=0.8, update=0.2), row(2, bare=bare, collect=0.4, update=0.2)]
        assert columns("ceiling", rows)[1] == pytest.approx(1 / 0.6)
        assert columns("expected", rows)[1] == pytest.approx(1 / (0.2 + share))


def test_two_ranks_may_be_what_the_others_are_compared_with():
    rows = [row(2, collect=0.3, wait=0.1, slowest=0.4, update=0.6), row(4, collect=1.0)]
    assert columns("ceiling", rows) == pytest.approx([1, 1 / 0.8])


def test_with_overlap_rank_0_learns_while_the_others_collect():
    one = row(1, collect=0.6, update=0.4)
    lanes = [one, row(2, shares=(11 / 32, 21 / 32), wait=1.0), row(2, shares=(0.0, 1.0), wait=1.0)]
    asked = Work(overlap=True, rank0_envs=True)
    slowest = [1.0, 0.4 + 0.6 * 11 / 32, 0.6]
    assert columns("ceiling", lanes, asked) == pytest.approx([1 / s for s in slowest])
    equal = [one, row(2, collect=0.3, update=0.4)]
    assert columns("ceiling", equal, Work(overlap=True)) == pytest.approx([1, 1 / 0.7])
    episodes = Work(overlap=True, episodes=True)
    assert columns("ceiling", equal, episodes) == pytest.approx([1, 2])


def test_the_shares():
    assert shares(4, [3, 3, 2, 2]) == (0.3, 0.3)
    assert shares(4, [2, 3, 3, 2]) == (0.2, 0.3)
    assert shares(1, [8]) == (1, 0)
    assert shares(4, [3, 3, 2, 2], longest_episode=0.1) == (0.25, 0.25)
    assert shares(4, [3, 3, 2, 2], longest_episode=0.5) == (0.5, 0.5)


SLOW = {"slowest": 0.9, "fastest": 0.3, "collect": 0.5, "wait": 0.5}
CASES = {
    "the update": (row(2, collect=0.5, update=0.5), PLAIN, "rank 0's update takes 50% of the"),
    "overlap": (row(2, collect=0.5, update=0.5), PLAIN, "or --overlap with fewer --rank0-envs"),
    "its lanes": (
        row(2, (1000.0), (0.4, 0.6), collect=0.5, update=0.5),
        Work(overlap=True, rank0_envs=True),
        "or fewer --rank0-envs, so that",
    ),
    "moving": (row(2, collect=0.8, gather=0.2), PLAIN, "moving data takes 20%"),
    "lanes": (row(4, shares=(0.2, 0.4), collect=1.0), PLAIN, "--num-envs that is a multiple"),
    "asked for": (
        row(4, shares=(0.1, 0.3), collect=1.0),
        Work(rank0_envs=True),
        "nothing stands out",
    ),
    "episodes": (
        row(4, shares=(0.5, 0.5), collect=1.0),
        Work(episodes=True),
        "more --episodes-per-batch",
    ),
    "imbalance": (row(2, **SLOW), PLAIN, "(--episodes-per-batch), which ranks share"),
    "slow ranks": (row(2, **SLOW), Work(episodes=True), "is not its own: fewer ranks"),
    "meanwhile": (row(2, **SLOW), Work(overlap=True), "nothing stands out"),
    "a little": (row(2, collect=1.0, fastest=0.85), PLAIN, "nothing stands out"),
    "nothing": (row(2, collect=1.0), PLAIN, "nothing stands out"),
}


@pytest.mark.parametrize("case", CASES)
def test_advice_names_what_bounds_the_speedup(case):
    last, work, wanted = CASES[case]
    rows = [row(1, collect=1.0), last]
    compare(rows, work)
    said = advice(rows, work)
    assert len(said) == 1
    assert wanted in said[0]


def test_advice_begins_with_the_largest_and_speaks_of_ranks_within_the_cores():
    rows = [row(1, collect=1.0), row(4, 3000.0, collect=0.5, update=0.3, gather=0.2)]
    rows.append(row(8, 2000.0, collect=0.1, update=0.9))
    compare(rows, PLAIN)
    said = advice(rows, PLAIN)
    assert ["update takes 30%" in said[0], "moving" in said[1], "4 ranks are the most" in said[2]]
    only = row(8, collect=0.5, update=0.5)
    assert "on 8 ranks" in advice([only, row(16, collect=1.0)], PLAIN)[0]


def test_a_disturbed_measurement_is_said_to_be_one():
    rows = [row(1, collect=0.9, update=0.1), row(2, collect=0.5, update=0.13)]
    assert "the update took 1.30 times as long on 2 ranks as on 1 rank" in advice(rows, PLAIN)[0]
    rows = [row(1, collect=0.9, update=0.1), row(2, collect=0.9, update=0.11)]
    assert "nothing stands out" in advice(rows, PLAIN)[0]


def run_of(seconds, updates, hashes="same", update="rank0"):
    """Its rows: the first does not count."""
    rows = [
        {
            "steps": str(100 * (i + 1)),
            "seconds": str(seconds * i),
            "return_mean": str(i),
            **{f"{phase}_s": "0" for phase in PHASES},
            "update_s": str(update),
            "collect_s": str(seconds - update),
            "slowest_s": "0.1",
            "fastest_s": "0.1",
            "memory_mb": str(i),
            "longest": "20",
            "weights_sha256": hashes + str(i),
        }
        for i, update in enumerate(updates)
    ]
    settings = {"num_envs": 4, "episodes_per_batch": 20, "update": update}
    return speedup._Run(2, settings, rows)


def test_all_figures_are_of_the_median_run_as_far_as_all_have_come():
    runs = [run_of(0.6, [9, 0.1, 0.1]), run_of(0.6, [9, 0.5, 0.5, 9]), run_of(0.8, [9, 0.4, 0.4])]
    found = speedup._row([*runs, run_of(0.4, [9, 0.2, 0.2])], [1.0, 2.0, 9.0], 3)
    assert found.seconds == pytest.approx(0.6)
    assert unaccounted(found) == pytest.approx(0)
    assert (found.steps_per_s_min, found.steps_per_s_max) == pytest.approx((125, 250))
    assert found.bare_steps_per_s == 2
    assert (found.return_mean, found.memory_mb) == (2, 2)
    assert found.shares == (0.5, 0.5)


def test_another_curve_is_said_aloud():
    same = [run_of(1, [1, 1]), run_of(2, [1, 1, 1])]
    [said] = speedup._same_curve(same, 2)
    assert "is the same in all 2 runs: weights" in said
    other = run_of(1, [1, 1], "other")
    [said] = speedup._same_curve([*same, other], 2)
    assert "NOT the same in all runs: 2 different" in said
    together = replace(other, settings={**other.settings, "update": "allreduce"})
    first, second = speedup._same_curve([*same, together], 2)
    assert "is the same in all 2 runs: weights" in first
    assert "the curve is of one run on 2 ranks with --update allreduce: weights" in second


def test_more_threads_are_tried_where_the_update_takes_long(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "cores", lambda: 2)
    given = speedup.Options(seconds=3.0)
    for update, wanted in ((0.1, "80% shorter"), (0.6, "takes 1.20 times as long")):
        tried = []

        def train(given, rest, nprocs, folder, *more, update=update, tried=tried):
            tried.append((given.iterations, given.seconds, nprocs, more))
            return run_of(1, [9, update, update])

        monkeypatch.setattr(speedup, "_train", train)
        rows = [row(1, collect=1.0), row(2, collect=0.5, update=0.5), row(8, collect=1.0)]
        [said] = speedup._learner_threads(given, ["CartPole"], rows, 5, tmp_path)
        assert wanted in said
        assert tried == [(4, None, 2, ("--learner-threads", "2"))]
    assert not [*speedup._learner_threads(given, ["--learner-threads", "2"], rows, 5, tmp_path)]
    rows = [row(1, collect=1.0), row(2, collect=0.95, update=0.05)]
    assert not [*speedup._learner_threads(given, [], rows, 5, tmp_path)]


def test_cores_are_counted_once():
    assert 1 <= provenance.cores() <= 1024


def test_the_table(tmp_path):
    rows = [row(1, 500.0, collect=0.8, update=0.199, record=0.001), row(2, 900.0, collect=0.5)]
    rows[0] = replace(rows[0], steps_per_s_min=400.0)
    compare(rows, PLAIN)
    settings = {"env_id": "Walker2d-v5", "algo": "klppo", "episodes_per_batch": 20}
    about = {"command": "python ...", "machine": {"cores": 2}, "notes": ["a note"]}
    speedup_table.write(tmp_path, rows, {**about, "settings": settings})
    text = (tmp_path / "speedup.md").read_text()
    assert "| 2 | 900 | 1.80 | 0.90 |" in text
    assert "| 1 | 500 (400 to 500) | 1.00 |" in text
    assert "| 1,040 | 1.90 |" in text  # of the published table, where the batch rule is the same
    assert "- a note" in text
    assert "evaluate" not in text
    assert (tmp_path / "speedup.png").stat().st_size > 10_000
    speedup_table.write(tmp_path, rows, {**about, "settings": {**settings, "algo": "ppo"}})
    assert "1,040" not in (tmp_path / "speedup.md").read_text()


def study(*args, expect=0):
    command = [sys.executable, "-m", "rank0rl", "speedup", *map(str, args)]
    done = run(command, 200, env=ENV)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def rows_of(folder):
    with (folder / "speedup.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_study(tmp_path):
    args = [*SLEEPS, "--steps-per-batch", "80", "--nprocs", 1, 4, "--iterations", 3]
    done = study(*args, "--repeats", 1, "--out", tmp_path / "s")
    one, four = rows_of(tmp_path / "s")
    assert four["return_mean"] == one["return_mean"]
    assert 1 < float(four["speedup"]) < float(four["ceiling"]) < 4
    about = json.loads((tmp_path / "s" / "speedup.json").read_text())
    assert "the curve is the same in all 2 runs" in about["notes"][0]
    assert about["machine"]["mpi"] != "none"
    assert "| 4" in done.stdout


@pytest.mark.slow
def test_four_ranks_on_environments_that_wait(tmp_path):
    args = [*SLEEPS, "--steps-per-batch", "400", "--nprocs", 1, 4, "--iterations", 4]
    study(*args, "--repeats", 1, "--out", tmp_path / "s")
    one, four = rows_of(tmp_path / "s")
    assert float(four["speedup"]) >= 3.6
    assert float(four["bare_steps_per_s"]) > 3.6 * float(one["bare_steps_per_s"])
    for each in (one, four):
        named = sum(float(each[f"{phase}_s"]) for phase in PHASES)
        assert named == pytest.approx(float(each["seconds"]), rel=0.02)


@pytest.mark.slow
def test_a_slow_lane_is_named_as_imbalance(tmp_path):
    args = [*SLEEPS, "--env-kwargs", "slow=10", "step_s=0.001", "--steps-per-batch", "160"]
    args += ["--nprocs", 1, 2, "--seconds", 3, "--repeats", 1, "--out", tmp_path]
    assert "imbalance: the slowest rank works" in study(*args).stdout


def test_wrong_use(tmp_path, capsys):
    for args, code, said in (
        ([], 2, "name an environment"),
        (["CartPole", "--repeats", 0], 2, "repeats must"),
        (["CartPole", "--script", "none.py"], 2, "none.py"),
        (["CartPole", "--num-envs", 2, "--nprocs", 1, 3, "--out", tmp_path], 1, "nprocs=3"),
    ):
        assert speedup.main([*map(str, args)]) == code
        assert said in capsys.readouterr().err


def test_a_run_that_is_over_at_once_and_one_that_fails(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / "2-1"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "progress.csv").write_text("iteration\n1\n")
    for script, said in (("", "made 1 iterations"), ("raise ValueError('on purpose')", "on purp")):
        (tmp_path / "s.py").write_text(script)
        args = ["CartPole", "--script", str(tmp_path / "s.py"), "--out", str(tmp_path)]
        assert speedup.main(args) == 1
        assert said in capsys.readouterr().err


def test_environments_that_refuse_actions(tmp_path):
    settings = {"env_id": "toy_envs:Spaced-v0", "wrappers": [], "env_kwargs": {"masked": True}}
    assert _bare.rate(settings, 2, 0.2, HERE) > 100
    assert math.isnan(_bare.rate({**settings, "env_id": "Nothing-v0"}, 2, 0.2, HERE))


@pytest.mark.slow
def test_environments_that_cannot_be_made_elsewhere(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import gymnasium, rank0rl.cli, toy_envs\n"
        "gymnasium.register('Own-v0', toy_envs.Count)\n"
        "rank0rl.cli.main()\n"
    )
    args = ["--num-envs", 2, "--steps-per-batch", 64, "--iterations", 1, "--repeats", 1]
    done = study("Own", "--script", script, *args, "--out", tmp_path / "own")
    assert "could not be measured alone" in done.stdout
    for each in rows_of(tmp_path / "own"):
        assert each["expected"] == each["ceiling"]
