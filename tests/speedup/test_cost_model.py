"""The cost model against numbers by hand."""

from dataclasses import replace

import pytest
from helpers.speedups import FREE, PLAIN

from rank0rl.tools.speedup import cost_model
from rank0rl.tools.speedup.cost_model import Machines, _crowded, _rate, iteration

RANKS = (1, 2, 4, 5, 8, 16, 20, 40, 80)


@pytest.fixture(autouse=True)
def nobody_sleeps(monkeypatch):
    monkeypatch.setattr(cost_model, "POLL_S", 0.0)


def seconds(nprocs, costs=PLAIN, machines=FREE):
    return iteration(nprocs, costs, machines).seconds


def test_without_communication_it_is_amdahls_law():
    for n in RANKS:
        assert seconds(n) == pytest.approx(0.8 / n + 0.2)
        assert seconds(n, machines=replace(FREE, nodes=min(n, 4))) == pytest.approx(0.8 / n + 0.2)
        assert _rate(n, PLAIN, FREE) == pytest.approx(800 / (0.8 / n + 0.2))


def test_envs_cannot_be_cut_in_two_and_every_rank_pays_for_act():
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
    costs = replace(PLAIN, num_envs=4096, steps=4096.0, env_s=0.0, update_s=0.0)
    machines = replace(FREE, nodes=4096, link_bandwidth=1e6)
    assert _rate(4096, costs, machines) == pytest.approx(1e6 / 100 * 4096 / 4095)
    # On two nodes of two, one rank's rows stay, one's move in the node, two come over the link.
    took = iteration(4, PLAIN, replace(FREE, nodes=2, bandwidth=4e6, link_bandwidth=1e6))
    assert took.gather == pytest.approx(20_000 / 4e6 + 40_000 / 1e6)
    assert iteration(1, PLAIN, replace(FREE, bandwidth=1.0)).gather == 0


def test_parts_travel_while_others_are_collected():
    costs = replace(PLAIN, act_s=1e-3, parts=4)
    took = iteration(4, costs, replace(FREE, nodes=2, link_bandwidth=1e6))
    assert took.collect == pytest.approx(10 * (4 + 20) * 1e-3)
    assert took.gather == pytest.approx(40_000 / 1e6 / 4)
    # A slow link begins to work when a quarter of the collecting is done.
    slow = replace(FREE, nodes=2, link_bandwidth=1e5)
    assert iteration(4, costs, slow).gather == pytest.approx(0.4 - 0.24 * 3 / 4)
    # With two envs, the last of four parts is one env; and one rank has no parts.
    assert iteration(40, costs, replace(FREE, nodes=2, link_bandwidth=1e6)).gather == pytest.approx(
        40_000 / 1e6 / 2
    )
    assert seconds(1, costs) == pytest.approx(10 * (1 + 80) * 1e-3 + 0.2)


def test_messages_and_trees():
    machines = Machines(1e-3, 1e-4, 1e6, nodes=4, link_latency_s=1e-2, link_bandwidth=1e5)
    costs = replace(PLAIN, arrays=5, weights_bytes=1000.0)
    took = iteration(32, costs, machines)  # 8 a node: 3 hops within, 2 between
    assert took.broadcast == pytest.approx(3 * (1e-3 + 1e-3) + 2 * (1e-2 + 1e-2))
    assert took.exchange == pytest.approx(6 * 3e-3 + 2 * 2e-2)
    bytes_s = 800 / 32 * 100 * (7 / 1e6 + 24 / 1e5)
    assert took.gather == pytest.approx(bytes_s + 3e-2)  # announced, asked for, and sent
    assert took.messages == pytest.approx(5 * (7 + 3) * 1e-4)
    crowd = replace(machines, crowd_s=0.5, cores=2)
    assert iteration(32, costs, crowd).exchange == pytest.approx(took.exchange + 3 * 0.5)
    one = iteration(1, costs, replace(machines, nodes=1))
    assert (one.exchange, one.messages, one.broadcast) == (0, 0, 0)


def test_a_waiting_rank_sleeps(monkeypatch):
    monkeypatch.setattr(cost_model, "POLL_S", 1e-3)
    assert iteration(8, PLAIN, FREE).exchange == pytest.approx(3 * 0.5e-3)


def test_ranks_that_share_cores():
    assert _crowded(1.0, 0.0, 6, 2) == 3.0
    assert _crowded(1.0, 2.0, 2, 2) == 3.0
    # Two ranks, one core, p = 1, 2, 2 of none, one and both at it: 0.8 turns a second of both.
    assert _crowded(1.0, 1.0, 2, 1) == pytest.approx(2.5)
    # Three ranks, two cores, p = 1, 3, 3, 1.5: (3 + 6 + 3) / 8.5 turns a second.
    assert _crowded(1.0, 1.0, 3, 2) == pytest.approx(3 / (12 / 8.5))
    assert _crowded(1.0, 5.0, 4096, 4) == pytest.approx(1024)
    assert _crowded(0.0, 5.0, 8, 1) == 5.0
    slow = replace(FREE, cores=2, slower=1.5)
    assert iteration(4, PLAIN, slow).collect == pytest.approx(0.2 * 2 * 1.5)
    assert iteration(1, PLAIN, slow).collect == pytest.approx(0.8)


def test_it_is_monotonic():
    bandwidths = [seconds(8, machines=replace(FREE, bandwidth=b)) for b in (1e3, 1e4, 1e6)]
    assert bandwidths == sorted(bandwidths, reverse=True)
    links = [seconds(8, machines=replace(FREE, nodes=2, link_latency_s=x)) for x in (0, 1, 2)]
    assert links == sorted(links)
    rates = [_rate(n, PLAIN, FREE) for n in RANKS]
    assert rates == sorted(rates)
    turns = [_crowded(1.0, 3.0, n, 2) for n in range(1, 40)]
    assert turns == sorted(turns)
    assert all(t >= max(4.0, n / 2) - 1e-9 for n, t in enumerate(turns, 1))


@pytest.mark.parametrize(
    ("largest", "costs", "machines"),
    [
        ("collect", {}, {}),
        ("update", {"update_s": 9.0}, {}),
        ("messages", {"arrays": 9}, {"message_s": 1e-2}),
        ("gather", {}, {"bandwidth": 1e4}),
        ("exchange", {}, {"latency_s": 1.0}),
        ("broadcast", {"weights_bytes": 1e6}, {"bandwidth": 1e6}),
        ("record", {"record_s": 9.0}, {}),
    ],
)
def test_the_largest_cost_is_named(largest, costs, machines):
    took = iteration(8, replace(PLAIN, **{"update_s": 1e-3, **costs}), replace(FREE, **machines))
    assert took.largest == largest
