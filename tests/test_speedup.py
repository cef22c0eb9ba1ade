"""The speedup study: what it measures, what it concludes, and that ranks do make a run faster."""

import csv
import json
import sys

import pytest
from on_ranks import HERE, run

from rank0rl import provenance, scaling, speedup_table
from rank0rl.scaling import Row, advice, compare, largest_share
from rank0rl.timing import PHASES

ENV = {"PYTHONPATH": str(HERE)}
SLEEPS = ["toy_envs:Sleeps-v0", "--num-envs", "4", "--hidden", "8", "--epochs", "1"]


def row(nprocs, steps_per_s=1000.0, share=None, bare=None, slowest=None, fastest=1.0, **phases):
    """Of an iteration of a second, unless its phases say otherwise."""
    every = {phase: phases.get(phase, 0.0) for phase in PHASES}
    seconds = sum(every.values())
    return Row(
        *(
            nprocs,
            steps_per_s,
            steps_per_s,
            steps_per_s,
            seconds,
            every,
            slowest or fastest,
            fastest,
        ),
        bare_steps_per_s=bare or 5000.0 * nprocs,
        return_mean=1.0,
        memory_mb=1.0,
        largest_share=share or 1 / nprocs,
        oversubscribed=nprocs > 4,
    )


def test_the_ceiling_is_amdahls_with_the_largest_share():
    first = row(1, collect=0.7, process=0.1, update=0.2)
    rows = [first, row(2, 1500.0, collect=0.4, update=0.2), row(4, 2000.0, 0.375, collect=0.3)]
    compare(rows, overlap=False)
    assert [r.columns["ceiling"] for r in rows] == pytest.approx([1, 1 / 0.6, 1 / (0.2 + 0.3)])
    assert [r.columns["expected"] for r in rows] == pytest.approx([1, 1 / 0.6, 1 / (0.2 + 0.3)])
    assert [r.columns["speedup"] for r in rows] == pytest.approx([1, 1.5, 2])
    assert [r.columns["efficiency"] for r in rows] == pytest.approx([1, 0.75, 0.5])


def test_what_is_expected_takes_in_that_processes_slow_each_other_down():
    rows = [row(1, collect=0.8, update=0.2), row(2, bare=8000.0, collect=0.4, update=0.2)]
    compare(rows, overlap=False)
    assert rows[1].columns["ceiling"] == pytest.approx(1 / 0.6)
    assert rows[1].columns["expected"] == pytest.approx(1 / (0.2 + 0.8 * 5 / 8))


def test_with_overlap_the_update_is_shared_work():
    rows = [row(1, collect=0.6, update=0.4), row(2, collect=0.5), row(4, collect=0.5)]
    compare(rows, overlap=True)
    assert [r.columns["ceiling"] for r in rows] == pytest.approx([1, 2, 2.5])


def test_the_largest_share():
    assert largest_share(4, [3, 3, 2, 2]) == 0.3
    assert largest_share(4, [3, 3, 2, 2], longest_episode=0.1) == 0.25
    assert largest_share(4, [3, 3, 2, 2], longest_episode=0.5) == 0.5


CASES = {
    "the update": (row(2, collect=0.5, update=0.5), "rank 0's update takes 50% of the time on 2 r"),
    "moving": (row(2, collect=0.8, gather=0.2), "moving data takes 20%"),
    "lanes": (row(4, share=0.4, collect=1.0), "--num-envs that is a multiple"),
    "imbalance": (row(2, slowest=0.9, fastest=0.3, collect=0.5, wait=0.5), "imbalance: the slow"),
    "nothing": (row(2, collect=1.0), "nothing stands out"),
}


@pytest.mark.parametrize("case", CASES)
def test_advice_names_what_bounds_the_speedup(case):
    last, wanted = CASES[case]
    rows = [row(1, collect=1.0), last]
    compare(rows, overlap=False)
    said = advice(rows, overlap=False, episodes=False)
    assert len(said) == 1
    assert wanted in said[0]


def test_advice_begins_with_the_largest_and_speaks_of_ranks_within_the_cores():
    rows = [row(1, collect=1.0), row(4, 3000.0, collect=0.5, update=0.3, gather=0.2)]
    rows.append(row(8, 2000.0, collect=0.1, update=0.9))
    compare(rows, overlap=False)
    said = advice(rows, overlap=True, episodes=False)
    assert ["update takes 30%" in said[0], "moving" in said[1], "4 ranks are the most" in said[2]]
    assert "--overlap" not in said[0]
    longer = row(4, share=0.5, collect=1.0)
    assert "--episodes-per-batch" in advice([longer], overlap=False, episodes=True)[0]


def test_cores_are_counted_once():
    assert 1 <= provenance.cores() <= 1024


def test_the_table(tmp_path):
    rows = [row(1, 500.0, collect=0.8, update=0.199, record=0.001), row(2, 900.0, collect=0.5)]
    compare(rows, overlap=False)
    settings = {"env_id": "Walker2d-v5", "algo": "klppo", "episodes_per_batch": 20}
    about = {"command": "python ...", "machine": {"cores": 2}, "notes": ["a note"]}
    speedup_table.write(tmp_path, rows, {**about, "settings": settings})
    text = (tmp_path / "speedup.md").read_text()
    assert "| 2 | 900 (900 to 900) | 1.80 | 0.90 |" in text
    assert "| 1,040 | 1.90 |" in text  # of the published table, where the batch rule is the same
    assert "- a note" in text
    assert "evaluate" not in text
    assert (tmp_path / "speedup.png").stat().st_size > 10_000
    speedup_table.write(tmp_path, rows, {**about, "settings": {**settings, "algo": "ppo"}})
    assert "1,040" not in (tmp_path / "speedup.md").read_text()


def speedup(*args, expect=0):
    command = [sys.executable, "-m", "rank0rl", "speedup", *map(str, args)]
    done = run(command, 200, env=ENV)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def rows_of(folder):
    with (folder / "speedup.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_study(tmp_path):
    args = [*SLEEPS, "--steps-per-batch", "80", "--nprocs", 1, 4, "--iterations", 3]
    done = speedup(*args, "--repeats", 1, "--out", tmp_path / "s")
    one, four = rows_of(tmp_path / "s")
    assert four["return_mean"] == one["return_mean"]
    for each in (one, four):
        named = sum(float(each[f"{phase}_s"]) for phase in PHASES)
        assert named == pytest.approx(float(each["seconds"]), rel=0.05)
    assert 1 < float(four["speedup"]) < float(four["ceiling"]) < 4
    about = json.loads((tmp_path / "s" / "speedup.json").read_text())
    assert "the curve is the same in all 2 runs" in about["notes"][0]
    assert about["machine"]["mpi"] != "none"
    assert "| 4" in done.stdout


@pytest.mark.slow
def test_four_ranks_on_environments_that_wait(tmp_path):
    args = [*SLEEPS, "--steps-per-batch", "400", "--nprocs", 1, 4, "--iterations", 4]
    speedup(*args, "--repeats", 1, "--out", tmp_path / "s")
    one, four = rows_of(tmp_path / "s")
    assert float(four["speedup"]) >= 3.6
    assert float(four["bare_steps_per_s"]) > 3.6 * float(one["bare_steps_per_s"])


def test_a_slow_lane_is_named_as_imbalance(tmp_path):
    args = [*SLEEPS, "--env-kwargs", "slow=10", "step_s=0.001", "--steps-per-batch", "160"]
    args += ["--nprocs", 1, 2, "--seconds", 3, "--repeats", 1, "--out", tmp_path]
    assert "imbalance: the slowest rank works" in speedup(*args).stdout


def test_wrong_use(tmp_path):
    for args, code, said in (
        ([], 2, "name an environment"),
        (["CartPole", "--repeats", 0], 2, "repeats must"),
        (["CartPole", "--script", "none.py"], 2, "none.py"),
        (["CartPole", "--gamma", 7, "--out", tmp_path], 1, "gamma must"),
        (["CartPole", "--iterations", 3, "--total-steps", 10, "--out", tmp_path], 1, "made 1 iter"),
    ):
        assert said in speedup(*args, expect=code).stderr


def test_time_in_no_phase():
    assert scaling.unaccounted(row(1, collect=1.0)) == 0
