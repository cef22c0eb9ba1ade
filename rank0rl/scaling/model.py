"""A model of an iteration's seconds on n ranks: what a step, an update and the network cost, added up.

With lanes and ranks per node as they fall out for n ranks, an iteration takes

    collect + exchange + messages + gather + update + broadcast + record

    collect    steps of a rank / its lanes x (act + lanes x (CPU + waiting of a lane's step)), of the
               slowest rank; where ranks outnumber cores, CPU is shared (`crowded`)
    exchange   collectives x log2(n) x latency: ranks agree on what moves, and wait for each other;
               between nodes, only collectives that begin when another one has ended
    messages   arrays x (ranks of its node, and other nodes) x what rank 0 needs to take in one
    gather     bytes of the other ranks / bandwidth into rank 0, within its node and over its link;
               in parts, all but the last of these travel while ranks collect; and they are asked for
    broadcast  log2(n) x (latency + bytes of weights / bandwidth)

and what rank 0 does alone: update, and record (put in order, hash, write). With overlap, the update
takes place while ranks collect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

COLLECTIVES = 6
"""Of an iteration, besides the weights: their layout, go on (2), what parts took, and layout and end of the
gather (2)."""
TRIPS = 2
"""Of these, what waits for others of them between nodes: what parts took, and the layout of the gather. Rank 0
sends the others behind one another, with the weights."""
ASKED = 3
"""Times that a large message goes over a link: it is announced, asked for, and sent."""
POLL_S = 1e-3
"""The longest sleep of a rank that waits: who forwards a message wakes up half of it late, in the mean."""
LANES = "same lanes"
BATCH = "same batch, a lane a rank"
GROWS = "batch grows with ranks"


@dataclass(frozen=True)
class Costs:
    """An experiment, and what it costs on a rank whose core is its own."""

    num_envs: int
    """Lanes of all ranks."""
    steps: float
    """Of a batch."""
    act_s: float
    """CPU of one step of a group of lanes, whatever their number: the call of act, mostly."""
    lane_s: float
    """CPU of one lane's step."""
    wait_s: float
    """Of one lane's step, in which other processes can have the core."""
    update_s: float
    """Of one batch, on one rank."""
    record_s: float
    """All else that rank 0 does alone."""
    row_bytes: float
    """That a step sends to rank 0."""
    arrays: int
    """In which they are."""
    weights_bytes: float
    """That rank 0 sends."""
    gradient_steps: int = 1
    """Of an update, each with an average over ranks in `together`."""
    minibatch: int = 0
    """Rows of such a step; 0 if it is not known."""
    longest: float = 0.0
    """In whole-episode batches, the share of the longest episode of a batch's steps."""
    rank0_envs: int | None = None
    """If not an equal share."""
    overlap: bool = False
    """Whether the update takes place while ranks collect."""
    parts: int = 1
    """In which a rank collects and sends its rows."""
    together: bool = False
    """Whether all ranks update, each on its share, and average gradients."""


@dataclass(frozen=True)
class Machines:
    """Equal nodes, and what is between ranks. Latency in seconds, bandwidth in bytes per second."""

    latency_s: float
    """Of one collective of two ranks of a node."""
    message_s: float
    """Of rank 0, to take in one array of one rank more."""
    bandwidth: float
    """Of a gather within a node."""
    nodes: int = 1
    """Over which ranks are spread evenly."""
    link_latency_s: float = 50e-6
    """The same between nodes."""
    link_bandwidth: float = 10e9 / 8
    """Of a node's link, one way."""
    cores: int | None = None
    """Of a node; None: one for each of its ranks."""
    slower: float = 1.0
    """How many times as long a step's CPU takes on a node whose other cores work as well."""
    crowd_s: float = 0.0
    """What all exchanges of an iteration take longer for each further rank that a core has."""

    def ranks(self, nprocs: int) -> int:
        """Of the fullest node."""
        return -(-nprocs // self.nodes)

    def share(self, nprocs: int) -> float:
        """How many ranks a core of the fullest node has, 1 at the least."""
        ranks = self.ranks(nprocs)
        return max(1.0, ranks / (self.cores or ranks))


@dataclass(frozen=True)
class Iteration:
    """Seconds of an iteration, by what takes them."""

    collect: float
    """Of the slowest rank."""
    rank0_collect: float
    """Of rank 0."""
    exchange: float
    messages: float
    gather: float
    update: float
    broadcast: float
    record: float
    overlap: bool
    floor: float = 0.0
    """Less is not possible for collect and update together: CPU of rank 0's node, over its cores."""

    @property
    def seconds(self) -> float:
        """Of all of it."""
        alone = self.exchange + self.messages + self.gather + self.broadcast + self.record
        if self.overlap:
            return alone + max(self.collect, self.rank0_collect + self.update, self.floor)
        return alone + self.collect + self.update

    @property
    def bound(self) -> str:
        """What takes the most."""
        return max(_BOUNDS, key=lambda name: getattr(self, name))

    @property
    def rank0_alone(self) -> float:
        """For which the other ranks wait, or would without overlap."""
        return self.messages + self.gather + self.update + self.record


_BOUNDS = {
    "collect": "collecting",
    "exchange": "latency",
    "messages": "messages to rank 0",
    "gather": "bandwidth into rank 0",
    "update": "rank 0's update",
    "broadcast": "broadcast of weights",
    "record": "rank 0's hash and record",
}


def bound(parts: Iteration, costs: Costs) -> str:
    """What takes the most of an iteration, in words."""
    if costs.together and parts.bound == "update":
        return "update and averages"
    return _BOUNDS[parts.bound]


def iteration(nprocs: int, costs: Costs, machines: Machines) -> Iteration:
    """Seconds of an iteration on so many ranks.

    Args:
        nprocs: ranks, from the number of nodes to that of lanes.
        costs: of the experiment.
        machines: and what is between them.

    Raises:
        ValueError: if a rank would have no lane, or a node no rank.

    Source: Amdahl 1967 for what ranks share; Thakur, Rabenseifner and Gropp 2005, "Optimization of
        collective communication operations in MPICH", for trees of messages, log2(n) (latency +
        bytes / bandwidth).
    """
    if not machines.nodes <= nprocs <= costs.num_envs:
        raise ValueError(
            f"every node has a rank and every rank a lane: got {nprocs} ranks on {machines.nodes} "
            f"nodes with {costs.num_envs} lanes"
        )
    mine, most = _lanes(nprocs, costs)
    update, averages = _update(nprocs, costs, machines)
    collect = _collect(nprocs, max(most, 0 if costs.overlap else mine), costs, machines)
    cores = machines.cores or machines.ranks(nprocs)
    busy = _cpu(nprocs, mine, costs) + (machines.ranks(nprocs) - 1) * _cpu(nprocs, most, costs)
    return Iteration(
        collect=collect,
        rank0_collect=_collect(nprocs, mine, costs, machines),
        exchange=_exchange(nprocs, costs, machines),
        messages=_messages(nprocs, costs, machines),
        gather=_gather(nprocs, most, collect, costs, machines),
        update=update + averages,
        broadcast=0.0 if costs.together else _tree(nprocs, costs.weights_bytes, machines),
        record=costs.record_s,
        overlap=costs.overlap and nprocs > 1,
        floor=(busy + update) / cores,
    )


def crowded(busy_s: float, idle_s: float, ranks: int, cores: int) -> float:
    """Mean time of a turn of ranks that each compute and then wait, over and over, on shared cores.

    The machine repairman's problem with processor sharing: k ranks that want a core get min(k, cores)
    of them, and p(k) / p(k-1) = (ranks - k + 1) busy / (idle min(k, cores)). Only means count, not how
    times are distributed.

    Args:
        busy_s: CPU of a turn.
        idle_s: the rest of it.
        ranks: on the node.
        cores: of the node.

    Source: Baskett, Chandy, Muntz and Palacios 1975, "Open, closed, and mixed networks of queues
        with different classes of customers", J. ACM 22(2), stations of types 2 and 3.
    """
    if ranks <= cores or busy_s <= 0:
        return busy_s + idle_s
    if idle_s <= 0:
        return busy_s * ranks / cores
    weight = whole = 1.0
    used = 0.0
    for k in range(1, ranks + 1):
        weight *= (ranks - k + 1) * busy_s / (idle_s * min(k, cores))
        whole += weight
        used += weight * min(k, cores)
        if whole > 1e100:  # only ratios count
            weight, whole, used = weight / whole, 1.0, used / whole
    return ranks * busy_s * whole / used


def grown(costs: Costs, num_envs: int, experiment: str) -> Costs:
    """Another experiment, with more lanes: the batch stays (`BATCH`), or grows with them (`GROWS`)."""
    times = num_envs / costs.num_envs if experiment == GROWS else 1.0
    return replace(_larger(costs, times), num_envs=num_envs)


def crossing(experiment: Callable[[int], Costs], most: int, machines: Machines) -> int | None:
    """The least number of ranks, if any up to `most`, whose collecting takes less than rank 0 alone does.

    Args:
        experiment: number of ranks -> its costs.
        most: ranks, at the most.
        machines: with as many nodes as there are ranks, at the most.
    """
    for nprocs in range(1, most + 1):
        nodes = replace(machines, nodes=min(machines.nodes, nprocs))
        parts = iteration(nprocs, experiment(nprocs), nodes)
        if parts.rank0_alone > parts.collect:
            return nprocs
    return None


def helps(nprocs: int, costs: Costs, machines: Machines) -> dict[str, float]:
    """What would raise the steps per second, the most first: change -> by how many times, if 1.05 or more.

    A batch four times as large takes an update four times as long: its gain is what is fixed. Overlap
    comes with the lanes for rank 0 that make the most of it.
    """
    changes: list[tuple[str, Costs, Machines]] = [
        ("batches of 4 times the steps", _larger(costs, 4.0), machines),
        ("--gather-parts 4", replace(costs, parts=4), machines),
    ]
    if not costs.together and nprocs > 1:
        name = "other --rank0-envs" if costs.overlap else "overlap"
        changes += [(name, each, machines) for each in _overlapped(nprocs, costs)]
    if not costs.together and costs.minibatch:
        together = replace(costs, together=True, overlap=False, rank0_envs=None)
        changes.append(("averaging gradients", together, machines))
    now = rate(nprocs, costs, machines)
    gains: dict[str, float] = {}
    for name, its, theirs in changes:
        gains[name] = max(gains.get(name, 0.0), rate(nprocs, its, theirs) / now)
    most = sorted(gains, key=lambda name: -gains[name])
    return {name: gains[name] for name in most if gains[name] >= 1.05}


def rate(nprocs: int, costs: Costs, machines: Machines) -> float:
    """Steps per second."""
    return costs.steps / iteration(nprocs, costs, machines).seconds


def _overlapped(nprocs: int, costs: Costs) -> list[Costs]:
    """With an equal share for rank 0, with none, and with what it has the time for."""
    lane = costs.steps / costs.num_envs * (costs.lane_s + costs.wait_s)
    less = costs.update_s * (nprocs - 1) / lane if lane else 0.0
    fair = max(0, int((costs.num_envs - less) / nprocs))
    return [replace(costs, overlap=True, rank0_envs=lanes) for lanes in (None, 0, fair)]


def _larger(costs: Costs, times: float) -> Costs:
    return replace(
        costs,
        steps=costs.steps * times,
        update_s=costs.update_s * times,
        record_s=costs.record_s * times,
        gradient_steps=math.ceil(costs.gradient_steps * times),
        longest=costs.longest / times,
    )


def _lanes(nprocs: int, costs: Costs) -> tuple[int, int]:
    """Of rank 0, and the most of another rank."""
    if costs.rank0_envs is None or nprocs == 1:
        most = -(-costs.num_envs // nprocs)
        return (costs.num_envs // nprocs if costs.overlap else most), most
    return costs.rank0_envs, -(-(costs.num_envs - costs.rank0_envs) // (nprocs - 1))


def _turns(nprocs: int, lanes: int, costs: Costs) -> float:
    """How often a rank with so many lanes steps them all."""
    if costs.longest:
        return costs.steps * max(1 / nprocs, min(1.0, costs.longest)) / lanes
    return costs.steps / costs.num_envs


def _cpu(nprocs: int, lanes: int, costs: Costs) -> float:
    """Of a rank with so many lanes, in an iteration."""
    return _turns(nprocs, lanes, costs) * _turn(nprocs, lanes, costs) if lanes else 0.0


def _turn(nprocs: int, lanes: int, costs: Costs) -> float:
    """CPU of a step of all lanes of a rank: every part of them calls act.

    One rank has no parts; with whole episodes all lanes step together, and a part is what has ended.
    """
    calls = 1 if nprocs == 1 or costs.longest else min(costs.parts, lanes)
    return calls * costs.act_s + lanes * costs.lane_s


def _collect(nprocs: int, lanes: int, costs: Costs, machines: Machines) -> float:
    if not lanes:
        return 0.0
    ranks = machines.ranks(nprocs)
    busy = _turn(nprocs, lanes, costs) * (machines.slower if ranks > 1 else 1.0)
    turn = crowded(busy, lanes * costs.wait_s, ranks, machines.cores or ranks)
    return _turns(nprocs, lanes, costs) * turn


def _hops(nprocs: int, machines: Machines) -> tuple[int, int]:
    """Steps of a tree over all ranks: within a node, and between nodes."""
    return math.ceil(math.log2(machines.ranks(nprocs))), math.ceil(math.log2(machines.nodes))


def _tree(nprocs: int, size: float, machines: Machines) -> float:
    """To bring so many bytes to all ranks, or their average: each step forwards all of them."""
    within, between = _hops(nprocs, machines)
    hop = machines.latency_s + size / machines.bandwidth
    return within * hop + between * (machines.link_latency_s + size / machines.link_bandwidth)


def _exchange(nprocs: int, costs: Costs, machines: Machines) -> float:
    if nprocs == 1:
        return 0.0
    within, between = _hops(nprocs, machines)
    wakes = POLL_S / 2 * (within + between)
    crowd = machines.crowd_s * (machines.share(nprocs) - 1)
    trips = (COLLECTIVES if costs.together else TRIPS) * between * machines.link_latency_s
    return COLLECTIVES * within * machines.latency_s + trips + wakes + crowd


def _messages(nprocs: int, costs: Costs, machines: Machines) -> float:
    arrays = 0 if costs.together else costs.arrays
    return arrays * (machines.ranks(nprocs) - 1 + machines.nodes - 1) * machines.message_s


def _gather(nprocs: int, lanes: int, collect_s: float, costs: Costs, machines: Machines) -> float:
    """What of the transfer comes after the last rank, of so many lanes, has collected."""
    if costs.together:
        return 0.0
    rows = costs.steps * costs.row_bytes / nprocs
    near = machines.ranks(nprocs)
    within = rows * (near - 1) / machines.bandwidth
    between = rows * (nprocs - near) / machines.link_bandwidth
    last = -(-lanes // costs.parts) / max(1, lanes)  # a lane is not cut in two
    asked = ASKED * machines.link_latency_s if machines.nodes > 1 else 0.0
    return within + asked + max(between * last, between - collect_s * (1 - last))


def _update(nprocs: int, costs: Costs, machines: Machines) -> tuple[float, float]:
    """Of the learners, and of averages between them."""
    if not costs.together or nprocs == 1:
        return costs.update_s, 0.0
    # A rank takes one row of a gradient step at the least: beyond that, there are fewer of these.
    steps = costs.gradient_steps * min(1.0, costs.minibatch / nprocs if costs.minibatch else 1.0)
    return costs.update_s / nprocs, steps * _tree(nprocs, costs.weights_bytes, machines)
