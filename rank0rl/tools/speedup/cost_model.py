"""Cost model of a cluster: the seconds of one iteration on n ranks, from what a step, an update and the network cost.

It predicts how fast training is. It is no model in the sense of reinforcement learning. An iteration takes

    collect + exchange + messages + gather + update + broadcast + record

    collect    steps of a rank / its envs x (act + envs x (CPU + waiting of one env's step)), for the
               slowest rank; where ranks outnumber cores, they share the CPU
    exchange   collectives x log2(n) x latency: ranks agree on what moves, and wait for each other;
               between nodes, only the collectives that cannot begin before another one has ended
    messages   arrays x (ranks of rank 0's node, and other nodes) x what rank 0 needs to receive one
    gather     bytes of the other ranks / bandwidth into rank 0, within its node and over its link;
               with several parts, all but the last part travel while ranks collect
    broadcast  log2(n) x (latency + bytes of weights / bandwidth)

and what rank 0 does alone: update, and record (put in order, hash, write). With overlap, the update
takes place while ranks collect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COLLECTIVES = 6
"""Collectives of an iteration besides the broadcast of the weights: layout of the weights, go on (2), times of
the ranks, and layout and end of the gather (2)."""
POLL_S = 1e-3
"""Longest sleep of a waiting rank, in seconds. A rank that forwards a message wakes up half of it late, on average."""

# Collectives that wait for other nodes: times of the ranks, and layout of the gather. Rank 0 sends the
# others one after another, with the weights.
_TRIPS = 2
_ASKED = 3  # trips of a large message over a link: it is announced, asked for, and sent


@dataclass(frozen=True)
class Costs:
    """Size of an experiment, and what it costs on a rank that has a core to itself."""

    num_envs: int  # of all ranks
    steps: float  # of a batch
    act_s: float  # CPU seconds of a step of a rank's envs whatever their number: mostly the call of act
    env_s: float  # CPU seconds of one env's step
    wait_s: float  # seconds of one env's step in which other processes can have the core
    update_s: float  # of rank 0
    record_s: float  # of all else that rank 0 does alone
    row_bytes: float  # that a step sends to rank 0
    arrays: int  # that a rank sends to rank 0
    weights_bytes: float  # that rank 0 sends
    longest: float = 0.0  # longest episode's fraction of a whole-episode batch; 0 for other batches
    rank0_envs: int | None = None  # if not an equal number
    overlap: bool = False  # True if the update takes place while ranks collect
    parts: int = 1  # in which a rank collects and sends its rows


@dataclass(frozen=True)
class Machines:
    """Equal nodes, and the network between ranks. Latency is in seconds, bandwidth in bytes per second."""

    latency_s: float = 0.0  # of one collective of two ranks of a node
    message_s: float = 0.0  # that rank 0 needs to receive one array of one more rank
    bandwidth: float = math.inf  # of a gather within a node
    nodes: int = 1  # over which ranks are spread evenly
    link_latency_s: float = 50e-6
    link_bandwidth: float = 10e9 / 8  # of a node's link, one way
    cores: int | None = None  # of a node. None: one for each of its ranks
    slower: float = 1.0  # factor of a step's CPU time on a node whose other cores work as well
    crowd_s: float = 0.0  # that an iteration's exchanges take longer for each further rank per core

    def ranks(self, nprocs: int) -> int:
        """Return the number of ranks on the fullest node."""
        return -(-nprocs // self.nodes)


@dataclass(frozen=True)
class Iteration:
    """Seconds of an iteration, and of what it consists of."""

    seconds: float
    collect: float  # of the slowest rank
    exchange: float
    messages: float
    gather: float
    update: float
    broadcast: float
    record: float

    @property
    def largest(self) -> str:
        """Name of the field that takes the most seconds."""
        return max(_BOUNDS, key=lambda name: getattr(self, name))

    @property
    def bound(self) -> str:
        """Words for what takes the most seconds."""
        return _BOUNDS[self.largest]

    @property
    def rank0_alone(self) -> float:
        """Seconds for which the other ranks wait for rank 0, or would without overlap."""
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


def iteration(nprocs: int, costs: Costs, machines: Machines) -> Iteration:
    """Return the seconds of an iteration on so many ranks.

    Args:
        nprocs: number of ranks, from the number of nodes to the number of envs.
        costs: size and costs of the experiment.
        machines: nodes and network.

    Raises:
        ValueError: if a rank would have no env, or a node no rank.

    Source: Amdahl 1967 for what ranks share; Thakur, Rabenseifner and Gropp 2005, "Optimization of
        collective communication operations in MPICH", for trees of messages, log2(n) (latency +
        bytes / bandwidth).
    """
    if not machines.nodes <= nprocs <= costs.num_envs:
        raise ValueError(
            f"every node needs a rank and every rank needs an env: got {nprocs} ranks on "
            f"{machines.nodes} nodes with {costs.num_envs} envs; choose a number of ranks in between"
        )
    mine, most = _envs(nprocs, costs)
    collect = _collect(nprocs, max(most, 0 if costs.overlap else mine), costs, machines)
    exchange = _exchange(nprocs, machines)
    messages = costs.arrays * (machines.ranks(nprocs) + machines.nodes - 2) * machines.message_s
    gather = _gather(nprocs, most, collect, costs, machines)
    broadcast = _tree(nprocs, costs.weights_bytes, machines)
    seconds = exchange + messages + gather + broadcast + costs.record_s
    if costs.overlap and nprocs > 1:
        rank0 = _collect(nprocs, mine, costs, machines) + costs.update_s
        near = machines.ranks(nprocs)
        busy = _cpu(nprocs, mine, costs) + (near - 1) * _cpu(nprocs, most, costs) + costs.update_s
        seconds += max(collect, rank0, busy / (machines.cores or near))
    else:
        seconds = seconds + collect + costs.update_s
    return Iteration(
        seconds, collect, exchange, messages, gather, costs.update_s, broadcast, costs.record_s
    )


def rate(nprocs: int, costs: Costs, machines: Machines) -> float:
    """Return the steps per second of all ranks."""
    return costs.steps / iteration(nprocs, costs, machines).seconds


def _envs(nprocs: int, costs: Costs) -> tuple[int, int]:
    """Return the number of envs of rank 0, and the largest number of another rank."""
    if costs.rank0_envs is None or nprocs == 1:
        most = -(-costs.num_envs // nprocs)
        return (costs.num_envs // nprocs if costs.overlap else most), most
    return costs.rank0_envs, -(-(costs.num_envs - costs.rank0_envs) // (nprocs - 1))


def _turns(nprocs: int, envs: int, costs: Costs) -> float:
    """Return how often a rank with so many envs steps all of them."""
    if costs.longest:
        return costs.steps * max(1 / nprocs, min(1.0, costs.longest)) / envs
    return costs.steps / costs.num_envs


def _turn(nprocs: int, envs: int, costs: Costs) -> float:
    """Return the CPU seconds of one step of all envs of a rank. Each of its parts calls act.

    One rank has no parts. In whole-episode batches all envs of a rank step together, and a part is
    what has ended.
    """
    calls = 1 if nprocs == 1 or costs.longest else min(costs.parts, envs)
    return calls * costs.act_s + envs * costs.env_s


def _cpu(nprocs: int, envs: int, costs: Costs) -> float:
    """Return the CPU seconds of a rank with so many envs in an iteration."""
    return _turns(nprocs, envs, costs) * _turn(nprocs, envs, costs) if envs else 0.0


def _collect(nprocs: int, envs: int, costs: Costs, machines: Machines) -> float:
    if not envs:
        return 0.0
    ranks = machines.ranks(nprocs)
    busy = _turn(nprocs, envs, costs) * (machines.slower if ranks > 1 else 1.0)
    turn = _crowded(busy, envs * costs.wait_s, ranks, machines.cores or ranks)
    return _turns(nprocs, envs, costs) * turn


def _crowded(busy_s: float, idle_s: float, ranks: int, cores: int) -> float:
    """Return the mean seconds of a turn of ranks that compute, then wait, over and over, on shared cores.

    This is the machine repairman's problem with processor sharing: k ranks that want a core get
    min(k, cores) of them, and p(k) / p(k-1) = (ranks - k + 1) busy / (idle min(k, cores)). Only means
    count, not how times are distributed.

    Args:
        busy_s: CPU seconds of a turn.
        idle_s: the other seconds of a turn.
        ranks: number of ranks on the node.
        cores: number of cores of the node.

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


def _hops(nprocs: int, machines: Machines) -> tuple[int, int]:
    """Return the steps of a tree over all ranks: within a node, and between nodes."""
    return math.ceil(math.log2(machines.ranks(nprocs))), math.ceil(math.log2(machines.nodes))


def _tree(nprocs: int, size: float, machines: Machines) -> float:
    """Return the seconds to bring so many bytes to all ranks. Each hop forwards all of them."""
    within, between = _hops(nprocs, machines)
    hop = machines.latency_s + size / machines.bandwidth
    return within * hop + between * (machines.link_latency_s + size / machines.link_bandwidth)


def _exchange(nprocs: int, machines: Machines) -> float:
    if nprocs == 1:
        return 0.0
    within, between = _hops(nprocs, machines)
    ranks = machines.ranks(nprocs)
    wakes = POLL_S / 2 * (within + between)
    crowd = machines.crowd_s * (max(1.0, ranks / (machines.cores or ranks)) - 1)
    trips = _TRIPS * between * machines.link_latency_s
    return COLLECTIVES * within * machines.latency_s + trips + wakes + crowd


def _gather(nprocs: int, envs: int, collect_s: float, costs: Costs, machines: Machines) -> float:
    """Return the seconds of the transfer after the last rank, with so many envs, has collected."""
    rows = costs.steps * costs.row_bytes / nprocs
    near = machines.ranks(nprocs)
    within = rows * (near - 1) / machines.bandwidth
    between = rows * (nprocs - near) / machines.link_bandwidth
    last = -(-envs // costs.parts) / max(1, envs)  # an env is not cut in two
    asked = _ASKED * machines.link_latency_s if machines.nodes > 1 else 0.0
    return within + asked + max(between * last, between - collect_s * (1 - last))
