"""The scaling model against numbers by hand, what it names, and its files."""

import csv
import math
from dataclasses import replace

import pytest
from test_speedup import row

from rank0rl.scaling import model, prediction, prediction_table, speedup
from rank0rl.scaling.model import (
    BATCH,
    GROWS,
    LANES,
    Costs,
    Machines,
    crowded,
    helps,
    iteration,
    rate,
)

# A second on one rank: 80 lanes take 10 steps of a millisecond each, and rank 0 updates for 0.2 s.
PLAIN = Costs(80, 800, 0.0, 1e-3, 0.0, 0.2, 0.0, row_bytes=100.0, arrays=0, weights_bytes=0.0)
FREE = Machines(0.0, 0.0, math.inf, link_latency_s=0.0, link_bandwidth=math.inf)
RANKS = (1, 2, 4, 5, 8, 16, 20, 40, 80)


@pytest.fixture(autouse=True)
def nobody_sleeps(monkeypatch):
    monkeypatch.setattr(model, "POLL_S", 0.0)


def seconds(nprocs, costs=PLAIN, machines=FREE):
    return iteration(nprocs, costs, machines).seconds


def test_without_communication_it_is_amdahls_law():
    for n in RANKS:
        assert seconds(n) == pytest.approx(0.8 / n + 0.2)
        assert seconds(n, machines=replace(FREE, nodes=min(n, 4))) == pytest.approx(0.8 / n + 0.2)
        assert rate(n, PLAIN, FREE) == pytest.approx(800 / (0.8 / n + 0.2))


def test_lanes_cannot_be_cut_in_two_and_act_is_paid_by_every_rank():
    assert seconds(3) == pytest.approx(10 * 27e-3 + 0.2)
    costs = replace(PLAIN, act_s=5e-3, wait_s=2e-3)
    assert seconds(80, costs) == pytest.approx(10 * (5e-3 + 1e-3 + 2e-3) + 0.2)
    assert seconds(1, replace(costs, record_s=0.1)) == pytest.approx(10 * 0.245 + 0.3)


def test_with_overlap_the_update_takes_place_meanwhile():
    costs = replace(PLAIN, overlap=True)
    assert seconds(1, costs) == pytest.approx(1.0)
    assert seconds(2, costs) == pytest.approx(0.6)  # rank 0's own half, and the update
    assert seconds(2, replace(costs, rank0_envs=30)) == pytest.approx(0.5)
    assert seconds(5, replace(costs, rank0_envs=0)) == pytest.approx(0.2)
    assert seconds(5, replace(PLAIN, rank0_envs=0)) == pytest.approx(0.4)
    # Four ranks that collect, and one that updates, on two cores.
    crowd = replace(FREE, cores=2)
    assert seconds(5, replace(costs, rank0_envs=0), crowd) == pytest.approx(0.5)


def test_the_longest_episode_is_made_by_one_rank():
    costs = replace(PLAIN, longest=0.25)
    assert seconds(2, costs) == pytest.approx(0.4 + 0.2)
    assert seconds(8, costs) == pytest.approx(0.2 + 0.2)


def test_a_gather_brings_at_most_what_the_link_carries():
    costs = replace(PLAIN, num_envs=4096, steps=4096.0, lane_s=0.0, update_s=0.0)
    machines = replace(FREE, nodes=4096, link_bandwidth=1e6)
    assert rate(4096, costs, machines) == pytest.approx(1e6 / 100 * 4096 / 4095)
    # On two nodes of two, one rank's rows stay, one's move in the node, two come over the link.
    parts = iteration(4, PLAIN, replace(FREE, nodes=2, bandwidth=4e6, link_bandwidth=1e6))
    assert parts.gather == pytest.approx(20_000 / 4e6 + 40_000 / 1e6)
    assert iteration(1, PLAIN, replace(FREE, bandwidth=1.0)).gather == 0


def test_parts_travel_while_others_are_collected():
    costs = replace(PLAIN, act_s=1e-3, parts=4)
    parts = iteration(4, costs, replace(FREE, nodes=2, link_bandwidth=1e6))
    assert parts.collect == pytest.approx(10 * (4 + 20) * 1e-3)
    assert parts.gather == pytest.approx(40_000 / 1e6 / 4)
    # Of a link that is slow, the work begins when a quarter of the collecting is done.
    slow = replace(FREE, nodes=2, link_bandwidth=1e5)
    assert iteration(4, costs, slow).gather == pytest.approx(0.4 - 0.24 * 3 / 4)
    # Of two lanes, the last of four parts is one; and one rank has no parts.
    assert iteration(40, costs, replace(FREE, nodes=2, link_bandwidth=1e6)).gather == pytest.approx(
        40_000 / 1e6 / 2
    )
    assert seconds(1, costs) == pytest.approx(10 * (1 + 80) * 1e-3 + 0.2)
    assert helps(4, PLAIN, slow)["--gather-parts 4"] == pytest.approx(0.8 / 0.65)
    assert "--gather-parts 4" not in helps(4, PLAIN, FREE)


def test_an_update_takes_in_so_much_and_no_more():
    costs = replace(PLAIN, lane_s=0.0)
    assert rate(80, costs, FREE) == pytest.approx(800 / 0.2)
    assert rate(4096, model.grown(costs, 4096, GROWS), FREE) == pytest.approx(800 / 0.2)


def test_messages_and_trees():
    machines = Machines(1e-3, 1e-4, 1e6, nodes=4, link_latency_s=1e-2, link_bandwidth=1e5)
    costs = replace(PLAIN, arrays=5, weights_bytes=1000.0)
    parts = iteration(32, costs, machines)  # 8 a node: 3 hops within, 2 between
    assert parts.broadcast == pytest.approx(3 * (1e-3 + 1e-3) + 2 * (1e-2 + 1e-2))
    assert parts.exchange == pytest.approx(6 * 3e-3 + 2 * 2e-2)
    bytes_s = 800 / 32 * 100 * (7 / 1e6 + 24 / 1e5)
    assert parts.gather == pytest.approx(bytes_s + 3e-2)  # announced, asked for, and sent
    together = iteration(32, replace(costs, together=True), machines)
    assert together.exchange == pytest.approx(6 * (3e-3 + 2e-2))
    assert parts.messages == pytest.approx(5 * (7 + 3) * 1e-4)
    crowd = replace(machines, crowd_s=0.5, cores=2)
    assert iteration(32, costs, crowd).exchange == pytest.approx(parts.exchange + 3 * 0.5)
    one = iteration(1, costs, replace(machines, nodes=1))
    assert (one.exchange, one.messages, one.broadcast) == (0, 0, 0)


def test_who_waits_sleeps(monkeypatch):
    monkeypatch.setattr(model, "POLL_S", 1e-3)
    assert iteration(8, PLAIN, FREE).exchange == pytest.approx(3 * 0.5e-3)


def test_ranks_that_share_cores():
    assert crowded(1.0, 0.0, 6, 2) == 3.0
    assert crowded(1.0, 2.0, 2, 2) == 3.0
    # Two ranks, one core, p = 1, 2, 2 of none, one and both at it: 0.8 turns a second of both.
    assert crowded(1.0, 1.0, 2, 1) == pytest.approx(2.5)
    # Three ranks, two cores, p = 1, 3, 3, 1.5: (3 + 6 + 3) / 8.5 turns a second.
    assert crowded(1.0, 1.0, 3, 2) == pytest.approx(3 / (12 / 8.5))
    assert crowded(1.0, 5.0, 4096, 4) == pytest.approx(1024)
    assert crowded(0.0, 5.0, 8, 1) == 5.0
    slow = replace(FREE, cores=2, slower=1.5)
    assert iteration(4, PLAIN, slow).collect == pytest.approx(0.2 * 2 * 1.5)
    assert iteration(1, PLAIN, slow).collect == pytest.approx(0.8)


def test_averages_of_gradients():
    costs = replace(PLAIN, together=True, gradient_steps=100, minibatch=16, weights_bytes=100.0)
    machines = replace(FREE, latency_s=1e-3, bandwidth=1e6)
    parts = iteration(8, costs, machines)
    assert parts.update == pytest.approx(0.2 / 8 + 100 * 3 * 1.1e-3)
    assert parts.gather == parts.messages == parts.broadcast == 0
    # With fewer rows of a gradient step than ranks, there are fewer of these steps.
    assert iteration(32, costs, machines).update == pytest.approx(0.2 / 32 + 50 * 5 * 1.1e-3)


def test_it_is_monotonic():
    bandwidths = [seconds(8, machines=replace(FREE, bandwidth=b)) for b in (1e3, 1e4, 1e6)]
    assert bandwidths == sorted(bandwidths, reverse=True)
    links = [seconds(8, machines=replace(FREE, nodes=2, link_latency_s=x)) for x in (0, 1, 2)]
    assert links == sorted(links)
    rates = [rate(n, PLAIN, FREE) for n in RANKS]
    assert rates == sorted(rates)
    turns = [crowded(1.0, 3.0, n, 2) for n in range(1, 40)]
    assert turns == sorted(turns)
    assert all(t >= max(4.0, n / 2) - 1e-9 for n, t in enumerate(turns, 1))


@pytest.mark.parametrize(
    ("costs", "machines", "bound", "best"),
    [
        ({}, {}, "collecting", None),
        ({"update_s": 9.0}, {}, "rank 0's update", "averaging gradients"),
        ({"update_s": 0.05, "minibatch": 0}, {}, "collecting", "overlap"),
        ({"arrays": 9, "minibatch": 0}, {"message_s": 1e-2}, "messages to rank 0", "batches of 4"),
        ({}, {"bandwidth": 1e4}, "bandwidth into rank 0", "averaging gradients"),
        ({}, {"latency_s": 1.0}, "latency", "batches of 4 times"),
        ({"weights_bytes": 1e6}, {"bandwidth": 1e6}, "broadcast of weights", "batches of 4 times"),
        ({"record_s": 9.0}, {}, "rank 0's hash and record", None),
        ({"together": True}, {"latency_s": 1.0}, "update and averages", None),
    ],
)
def test_what_bounds_it_is_named_and_what_helps(costs, machines, bound, best):
    given = replace(PLAIN, update_s=1e-3, minibatch=64, gradient_steps=125)
    costs, machines = replace(given, **costs), replace(FREE, **machines)
    assert model.bound(iteration(8, costs, machines), costs) == bound
    found = [*helps(8, costs, machines).items()]
    assert [times for _, times in found] == sorted((times for _, times in found), reverse=True)
    assert all(times >= 1.05 for _, times in found)
    assert found == [] if best is None else found[0][0].startswith(best)


def test_the_lanes_of_rank_0_help():
    costs = replace(PLAIN, update_s=0.05)
    assert helps(8, costs, FREE) == {"overlap": pytest.approx(0.15 / 0.11)}  # 5 lanes, and 11
    equal = replace(costs, overlap=True)
    assert helps(8, equal, FREE) == {"other --rank0-envs": pytest.approx(0.15 / 0.11)}


def test_where_rank_0_becomes_the_bottleneck():
    assert model.crossing(lambda n: PLAIN, 80, FREE) == 5  # 16 lanes of 10 ms, and 0.2 s
    assert model.crossing(lambda n: PLAIN, 4, FREE) is None
    slow = replace(FREE, bandwidth=80_000 / 0.39)
    assert model.crossing(lambda n: PLAIN, 80, slow) == 3  # a gather of 0.26 s besides


def test_other_experiments():
    grows, batch = (model.grown(PLAIN, 320, name) for name in (GROWS, BATCH))
    assert (grows.steps, grows.update_s, grows.num_envs) == (3200, 0.8, 320)
    assert (batch.steps, batch.update_s, batch.num_envs) == (800, 0.2, 320)
    assert seconds(320, grows) == pytest.approx(10e-3 + 0.8)
    assert seconds(320, batch) == pytest.approx(2.5e-3 + 0.2)
    for n, machines in ((81, FREE), (2, replace(FREE, nodes=3))):
        with pytest.raises(ValueError, match=f"got {n} ranks"):
            iteration(n, PLAIN, machines)


FOUND = {
    "per_step": {"1": [0.016, 0.006], "4": [0.064, 0.009]},
    "row_bytes": 100.0,
    "arrays": 5,
    "weights_bytes": 1000,
}
SETTINGS = {"num_envs": 4, "epochs": 10, "minibatch_size": 64, "env_id": "E-v0", "algo": "ppo"}


def test_costs_follow_from_what_was_measured():
    first = row(1, 200.0, collect=0.7, process=0.1, update=0.2, hash=0.1, record=0.1)  # of 1.2 s
    costs = prediction.costs_of(first, SETTINGS, FOUND)
    # CPU of a step: 5 ms for act and 1 ms a lane; it waits for the rest of the time. 60 times
    # 64 ms would be 3.84 s, and 0.8 s were measured.
    times = 0.8 / 3.84
    found = [costs.act_s / times, costs.lane_s / times, costs.wait_s / times]
    assert found == pytest.approx([5e-3, 1e-3, 55e-3 / 4])
    assert costs.steps == pytest.approx(240)
    assert costs.gradient_steps == 40
    assert seconds(1, costs) == pytest.approx(1.2)
    together = replace(row(2, 200.0, collect=0.8, update=0.2, gather=0.5), update="allreduce")
    costs = prediction.costs_of(together, SETTINGS, FOUND)
    assert (costs.together, costs.update_s, costs.record_s) == (True, 0.4, 0)


def test_the_table_the_figures_and_the_picture(tmp_path):
    (tmp_path / "speedup.md").write_text("measured\n")
    rows = [row(1, 800.0, collect=0.8, update=0.2), row(2, 1300.0, collect=0.4, update=0.2)]
    machines = replace(FREE, nodes=2, link_bandwidth=1e9 / 8)
    found = prediction.of([40, 4096, 400], PLAIN, machines, rows)
    assert [(each.nprocs, each.experiment) for each in found.rows] == [
        *((40, LANES), (400, BATCH), (400, GROWS), (4096, GROWS))
    ]
    prediction_table.write(tmp_path, found, rows, "title")
    text = (tmp_path / "speedup.md").read_text()
    assert text.startswith("measured\n")
    assert "| 40 | 2 | same lanes | 80 | 800 | 3,6" in text
    assert "| rank 0's update (9" in text
    assert "from 4 ranks on, what rank 0 does alone takes longer" in text
    assert "the most of it is its update" in text
    assert "at most 1,250,000 steps/s (1 Gbit/s, 100 bytes a step)" in text
    assert "update takes in at most 4,000 steps/s" in text
    with (tmp_path / "predicted.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [each["nprocs"] for each in table if each["measured"]] == ["1", "2"]
    assert float(table[0]["predicted"]) == pytest.approx(800)
    assert float(table[0]["speedup"]) == pytest.approx(1)
    assert [each["nodes"] for each in table[:3]] == ["1", "1", "2"]  # 1 and 2 were measured on one
    assert (tmp_path / "predicted.png").stat().st_size > 10_000
    few = prediction.of([2], PLAIN, FREE, rows)
    assert few.notes[0].startswith("up to 2 ranks, collecting takes longer")


def test_ranks_exchange(monkeypatch):
    found = prediction._link(2)
    monkeypatch.setattr(prediction, "_link", lambda n: found)
    assert 0 < found["latency_s"] < found["exchange_s"] < 1
    assert 1e6 < found["bandwidth"] < 1e12
    machines = prediction.measured(FREE, [row(1, bare=100.0), row(2, bare=160.0)], 64)
    assert machines.slower == pytest.approx(1.25)
    assert machines.crowd_s == 0


def test_ranks_that_share_cores_are_measured_where_they_will(monkeypatch):
    monkeypatch.setattr(prediction.provenance, "cores", lambda: 2)
    least = {"latency_s": 1e-4, "message_s": 0.0, "bandwidth": 1.0, "least_exchange_s": 0.02}
    found = lambda n: {**least, "exchange_s": n / 100}  # noqa: E731
    monkeypatch.setattr(prediction, "_link", found)
    machines = prediction.measured(replace(FREE, cores=2), [row(1)], 8)
    assert machines.crowd_s == pytest.approx(0.02)
    assert machines.latency_s == pytest.approx(0.02 / model.COLLECTIVES)


def test_what_cannot_be_measured_is_said(tmp_path):
    with pytest.raises(prediction.CannotMeasureError, match=r"none failed: .*No module"):
        prediction._said(["-m", "rank0rl.none"], tmp_path)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--predict", "0"], "predict must"),
        (["--predict", "4", "--nodes", "8"], "every node has a rank"),
        (["--predict", "4", "--nodes", "0"], "nodes must"),
        (["--predict", "4", "--node-cores", "0"], "node_cores must"),
        (["--predict", "4", "--link-gbit", "0"], "link_gbit must"),
        (["--predict", "4", "--latency-us", "-1"], "latency_us must"),
    ],
)
def test_wrong_use(args, said, capsys):
    assert speedup.main(["CartPole", *args]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_no_number():
    with pytest.raises(SystemExit) as end:
        speedup.main(["CartPole", "--predict", "many"])
    assert end.value.code == 2
