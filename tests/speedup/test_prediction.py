"""Predictions: what is measured for them, their rows and notes, and their files."""

import csv
import json
from dataclasses import replace

import pytest
from helpers.speedups import FREE, PLAIN, row

from rank0rl.tools.speedup import cost_model, outputs, probes, speedup
from rank0rl.tools.speedup.cost_model import (
    LARGER_BATCH,
    SAME,
    SAME_BATCH,
    _changes_that_help,
    _grown,
    _limited,
    _rate,
    iteration,
)

FOUND = {
    "per_step": {"1": [0.016, 0.006], "4": [0.064, 0.009]},
    "row_bytes": 100.0,
    "arrays": 5,
    "weights_bytes": 1000,
}
SETTINGS = {"num_envs": 4, "env_id": "E-v0", "algo": "ppo"}


@pytest.fixture
def nobody_sleeps(monkeypatch):
    monkeypatch.setattr(cost_model, "POLL_S", 0.0)


def test_costs_follow_from_what_was_measured(nobody_sleeps):
    first = row(1, 200.0, collect=0.7, process=0.1, update=0.2, hash=0.1, record=0.1)  # of 1.2 s
    costs = cost_model._costs_of(first, SETTINGS, FOUND)
    # CPU of a step: 5 ms for act and 1 ms an env; it waits for the rest of the time. 60 times
    # 64 ms would be 3.84 s, and 0.8 s were measured.
    times = 0.8 / 3.84
    found = [costs.act_s / times, costs.env_s / times, costs.wait_s / times]
    assert found == pytest.approx([5e-3, 1e-3, 55e-3 / 4])
    assert costs.steps == pytest.approx(240)
    assert iteration(1, costs, FREE).seconds == pytest.approx(1.2)


def test_rows_notes_and_files(tmp_path, nobody_sleeps):
    (tmp_path / "speedup.md").write_text("measured\n")
    rows = [row(1, 800.0, collect=0.8, update=0.2), row(2, 1300.0, collect=0.4, update=0.2)]
    machines = replace(FREE, nodes=2, link_bandwidth=1e9 / 8)
    found = cost_model._predicted([40, 4096, 400], PLAIN, machines, rows)
    assert [(each.nprocs, each.experiment) for each in found.rows] == [
        (40, SAME),
        (400, SAME_BATCH),
        (400, LARGER_BATCH),
        (4096, LARGER_BATCH),
    ]
    assert [each.iteration.largest for each in found.rows] == ["update"] * 4
    crossing, link, update, assumed = found.notes
    assert "from 4 ranks" in crossing
    assert "rank 0's update" in crossing
    assert all(number in link for number in ("1,250,000 steps/s", "1 Gbit/s", "100 bytes"))
    assert "4,000 steps/s" in update
    assert all(option in assumed for option in ("--latency-us", "--link-gbit"))
    outputs.write_prediction(tmp_path, found, rows, "title")
    text = (tmp_path / "speedup.md").read_text()
    assert text.startswith("measured\n")
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    assert [line[1].strip() for line in lines[1:]] == ["40", "400", "400", "4,096"]
    assert all(note in text for note in found.notes)
    with (tmp_path / "predicted.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [each["nprocs"] for each in table if each["measured"]] == ["1", "2"]
    assert float(table[0]["predicted"]) == pytest.approx(800)
    assert float(table[0]["speedup"]) == pytest.approx(1)
    assert [each["nodes"] for each in table[:3]] == ["1", "1", "2"]  # 1 and 2 were measured on one
    assert (tmp_path / "predicted.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "predicted.json").read_text())["notes"] == found.notes
    few = cost_model._predicted([2], PLAIN, FREE, rows)
    assert "up to 2 ranks" in few.notes[0]


@pytest.mark.parametrize(
    ("costs", "machines", "best"),
    [
        ({}, {}, None),
        ({"update_s": 0.05}, {}, "overlap"),
        ({"arrays": 9}, {"message_s": 1e-2}, "batches of 4 times the steps"),
        ({}, {"latency_s": 1.0}, "batches of 4 times the steps"),
        ({"weights_bytes": 1e6}, {"bandwidth": 1e6}, "batches of 4 times the steps"),
        ({"record_s": 9.0}, {}, None),
    ],
)
def test_changes_that_help_are_named_the_best_first(costs, machines, best, nobody_sleeps):
    costs = replace(PLAIN, **{"update_s": 1e-3, **costs})
    found = _changes_that_help(8, costs, replace(FREE, **machines))
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert all(times >= 1.05 for times in found.values())
    assert next(iter(found), None) == best


def test_the_number_of_envs_of_rank_0_helps(nobody_sleeps):
    costs = replace(PLAIN, update_s=0.05)
    assert _changes_that_help(8, costs, FREE) == {
        "overlap": pytest.approx(0.15 / 0.11)
    }  # 5 envs, and 11
    equal = replace(costs, overlap=True)
    assert _changes_that_help(8, equal, FREE) == {"other --rank0-envs": pytest.approx(0.15 / 0.11)}


def test_parts_help_where_the_link_is_slow(nobody_sleeps):
    slow = replace(FREE, nodes=2, link_bandwidth=1e5)
    # Three quarters of the rows, 0.3 s, travel in the last 0.15 s of collecting; 0.25 s are left.
    assert _changes_that_help(4, PLAIN, slow)["--gather-parts 4"] == pytest.approx(0.8 / 0.65)
    assert "--gather-parts 4" not in _changes_that_help(4, PLAIN, FREE)


def test_the_number_of_ranks_from_which_rank_0_is_the_bottleneck(nobody_sleeps):
    assert "from 5 ranks on," in _limited(PLAIN, FREE, 80)  # 16 envs of 10 ms, and 0.2 s
    assert "up to 4 ranks, collecting takes longer" in _limited(PLAIN, FREE, 4)
    slow = replace(FREE, bandwidth=80_000 / 0.39)
    assert "from 3 ranks on," in _limited(PLAIN, slow, 80)  # a gather of 0.26 s besides


def test_more_envs(nobody_sleeps):
    larger, same = (_grown(PLAIN, 320, name) for name in (LARGER_BATCH, SAME_BATCH))
    assert (larger.steps, larger.update_s, larger.num_envs) == (3200, 0.8, 320)
    assert (same.steps, same.update_s, same.num_envs) == (800, 0.2, 320)
    assert iteration(320, larger, FREE).seconds == pytest.approx(10e-3 + 0.8)
    assert iteration(320, same, FREE).seconds == pytest.approx(2.5e-3 + 0.2)


def test_an_update_limits_the_rate_of_any_number_of_ranks(nobody_sleeps):
    costs = replace(PLAIN, env_s=0.0)
    assert _rate(80, costs, FREE) == pytest.approx(800 / 0.2)
    assert _rate(4096, _grown(costs, 4096, LARGER_BATCH), FREE) == pytest.approx(800 / 0.2)


def test_ranks_exchange(monkeypatch):
    found = probes.exchange_costs(2)
    seconds = {"latency_s", "message_s", "exchange_s", "least_exchange_s"}
    assert found.keys() == {"bandwidth"} | seconds
    assert found["least_exchange_s"] <= found["exchange_s"]
    monkeypatch.setattr(probes, "exchange_costs", lambda n: found)
    machines = cost_model._measured(FREE, [row(1, bare=100.0), row(2, bare=160.0)], 64)
    assert machines.bandwidth == found["bandwidth"]
    assert machines.slower == pytest.approx(1.25)
    assert machines.crowd_s == 0


def test_ranks_that_share_cores_are_measured_where_they_will(monkeypatch):
    monkeypatch.setattr(cost_model, "available_cores", lambda: [(0,), (1,)])
    monkeypatch.setattr(cost_model, "POLL_S", 0.0)
    least = {"latency_s": 1e-4, "message_s": 0.0, "bandwidth": 1.0, "least_exchange_s": 0.02}
    monkeypatch.setattr(probes, "exchange_costs", lambda n: {**least, "exchange_s": n / 100})
    machines = cost_model._measured(replace(FREE, cores=2), [row(1)], 8)
    assert machines.crowd_s == pytest.approx(0.02)
    assert machines.latency_s == pytest.approx(0.02 / cost_model.COLLECTIVES)


def test_a_measurement_that_fails_is_named(tmp_path):
    with pytest.raises(probes.FailedError, match="collect .*none .* failed: .*config.toml"):
        probes.collect_costs(tmp_path / "none", tmp_path)


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--predict", "0"], "predict"),
        (["--predict", "4", "--nodes", "8"], "--nodes 8"),
        (["--predict", "4", "--nodes", "0"], "nodes"),
        (["--predict", "4", "--node-cores", "0"], "node_cores"),
        (["--predict", "4", "--link-gbit", "0"], "link_gbit"),
        (["--predict", "4", "--latency-us", "-1"], "latency_us"),
    ],
)
def test_wrong_use(args, option, capsys):
    assert speedup.main(["CartPole", *args]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert option in line


def test_no_number():
    with pytest.raises(SystemExit) as end:
        speedup.main(["CartPole", "--predict", "many"])
    assert end.value.code == 2
