"""The rows of a speedup study, its notes and its files, from runs that were never made."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.speedups import row

from rank0rl.run.folder import RunData
from rank0rl.run.usage import PHASES
from rank0rl.tools.speedup import outputs, speedup
from rank0rl.tools.speedup.measured import compare


def run_of(seconds, updates, hashes="same"):
    """Return a run with these seconds of updates. Its first iteration does not count."""
    rows = [
        {
            "steps": str(100 * (i + 1)),
            "seconds": str(seconds * i),
            "return_mean": str(i),
            **{f"{phase}_s": "0" for phase in PHASES},
            "update_s": str(update),
            "collect_s": str(seconds - update),
            "slowest_s": "0.2",
            "fastest_s": "0.1",
            "memory_mb": str(i),
            "longest": "20",
            "weights_sha256": hashes + str(i),
        }
        for i, update in enumerate(updates)
    ]
    settings = {"num_envs": 4, "episodes_per_batch": 20}
    return RunData(Path(), settings, [{"nprocs": 2}], rows)


def test_all_figures_are_of_the_median_run_as_far_as_all_have_come():
    runs = [run_of(0.6, [9, 0.1, 0.1]), run_of(0.6, [9, 0.5, 0.5, 9]), run_of(0.8, [9, 0.4, 0.4])]
    found = speedup._row([*runs, run_of(0.4, [9, 0.2, 0.2])], [1.0, 2.0, 9.0], 3)
    assert found.seconds == pytest.approx(0.6)
    assert found.unaccounted == pytest.approx(0)
    assert (found.steps_per_s_min, found.steps_per_s_max) == pytest.approx((125, 250))
    assert found.bare_steps_per_s == 2
    assert (found.return_mean, found.memory_mb) == (2, 2)
    assert (found.slowest_s, found.fastest_s) == pytest.approx((0.2, 0.1))
    assert found.step_fractions == (0.5, 0.5)


def test_another_curve_is_reported():
    same = [run_of(1, [1, 1]), run_of(2, [1, 1, 1])]
    text = speedup._same_curve(same, 2)
    assert "all 2 runs" in text
    assert "same1" in text
    text = speedup._same_curve([*same, run_of(1, [1, 1], "other")], 2)
    assert "NOT" in text
    assert "2 different weights" in text
    assert "one run" in speedup._same_curve(same[:1], 2)


def cells(folder):
    """Return the cells of the first table of speedup.md, a dict for each row."""
    lines = [
        line for line in (folder / "speedup.md").read_text().splitlines() if line.startswith("|")
    ]
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(head, each, strict=True)) for each in rows if len(each) == len(head)]


def test_the_files(tmp_path):
    rows = [row(1, 500.0, collect=0.8, update=0.199, record=0.001), row(2, 900.0, collect=0.5)]
    rows[0] = replace(rows[0], steps_per_s_min=400.0)
    rows = compare(rows, {})
    settings = {"env_id": "Walker2d-v5", "algo": "klppo", "episodes_per_batch": 20}
    about = {"command": "python ...", "machine": {"cores": 2}, "notes": ["a note"]}
    outputs.write(tmp_path, rows, {**about, "settings": settings})
    one, two = cells(tmp_path)
    assert one["steps/s (min to max)"] == "500 (400 to 500)"
    assert two["steps/s (min to max)"] == "900"
    assert two["efficiency"] == "0.90"
    assert two["published 2017: steps/s"] == "1,040"  # where the batch rule is the same
    text = (tmp_path / "speedup.md").read_text()
    assert "- a note" in text
    assert "evaluate" not in text  # a phase that took no time
    with (tmp_path / "speedup.csv").open(newline="") as file:
        assert [float(each["speedup"]) for each in csv.DictReader(file)] == [1, 1.8]
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
    outputs.write(tmp_path, rows, {**about, "settings": {**settings, "algo": "ppo"}})
    assert "published 2017: steps/s" not in cells(tmp_path)[0]
