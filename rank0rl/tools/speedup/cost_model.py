"""Cost model of a cluster, and what it predicts: the seconds of one iteration on n ranks.

It is no model in the sense of reinforcement learning. Its costs come from measurements. An iteration takes

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rank0rl.run.machine import available_cores
from rank0rl.tools.speedup import probes
from rank0rl.tools.speedup.measured import Row, ranks, within_cores

SAME = "same experiment"
SAME_BATCH = "same batch, one env a rank"
LARGER_BATCH = "batch grows with ranks"

# Layout of the weights, go on (2), times of the ranks, and layout and end of the gather (2).
COLLECTIVES = 6  # of an iteration, besides the broadcast of the weights
# Longest sleep of a waiting rank, in seconds. A rank that forwards a message wakes up half of it late.
POLL_S = 1e-3
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
        """Name of the field that takes the most seconds, a key of `BOUNDS`."""
        return max(BOUNDS, key=lambda name: getattr(self, name))

    @property
    def rank0_alone(self) -> float:
        """Seconds for which the other ranks wait for rank 0, or would without overlap."""
        return sum(getattr(self, name) for name in ALONE)


BOUNDS = {
    "collect": "collecting",
    "exchange": "latency",
    "messages": "messages to rank 0",
    "gather": "bandwidth into rank 0",
    "update": "rank 0's update",
    "broadcast": "broadcast of weights",
    "record": "rank 0's hash and record",
}
ALONE = ("messages", "gather", "update", "record")  # those that rank 0 does alone


def iteration(nprocs: int, costs: Costs, machines: Machines) -> Iteration:
    """Return the seconds of an iteration on so many ranks: every node has a rank, and every rank an env.

    Source: Amdahl 1967 for what ranks share; Thakur, Rabenseifner and Gropp 2005, "Optimization of
        collective communication operations in MPICH", for trees of messages, log2(n) (latency +
        bytes / bandwidth).
    """
    assert machines.nodes <= nprocs <= costs.num_envs
    mine, most = _envs(nprocs, costs)
    collect = _collect(nprocs, max(most, 0 if costs.overlap else mine), costs, machines)
    exchange = _exchange(nprocs, machines)
    messages = costs.arrays * (machines.ranks(nprocs) + machines.nodes - 2) * machines.message_s
    gather = _gather(nprocs, most, collect, costs, machines)
    within, between = _hops(nprocs, machines)  # each hop of the broadcast forwards all weights
    broadcast = within * (machines.latency_s + costs.weights_bytes / machines.bandwidth)
    broadcast += between * (machines.link_latency_s + costs.weights_bytes / machines.link_bandwidth)
    seconds = exchange + messages + gather + broadcast + costs.record_s
    if costs.overlap and nprocs > 1:
        rank0 = _collect(nprocs, mine, costs, machines) + costs.update_s
        near = machines.ranks(nprocs)
        busy = _cpu(nprocs, mine, costs) + (near - 1) * _cpu(nprocs, most, costs) + costs.update_s
        seconds += max(collect, rank0, busy / (machines.cores or near))
    else:
        seconds = seconds + collect + costs.update_s
    update, record = costs.update_s, costs.record_s
    return Iteration(seconds, collect, exchange, messages, gather, update, broadcast, record)


def _rate(nprocs: int, costs: Costs, machines: Machines) -> float:
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
    """Return the CPU seconds of one step of all envs of a rank. Each of its parts calls act."""
    # One rank has no parts. A part of a whole-episode batch is what has ended: all envs step together.
    calls = 1 if nprocs == 1 or costs.longest else min(costs.parts, envs)
    return calls * costs.act_s + envs * costs.env_s


def _cpu(nprocs: int, envs: int, costs: Costs) -> float:
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


@dataclass(frozen=True)
class Predicted:
    """Predicted figures of one number of ranks."""

    nprocs: int
    nodes: int
    experiment: str  # SAME, SAME_BATCH or LARGER_BATCH: what it keeps of the measured experiment
    costs: Costs
    iteration: Iteration
    speedup: float  # over the first measured row
    helps: dict[str, float]  # change -> factor by which it would raise the steps per second


@dataclass(frozen=True)
class Prediction:
    """All predicted rows, and what they follow from."""

    costs: Costs
    rows: list[Predicted]  # of the numbers of ranks that the user asked for
    curve: list[Predicted]  # of 1, 2, 4 ... ranks, and of these
    notes: list[str]


def predict(
    counts: Sequence[int],
    machines: Machines,
    rows: Sequence[Row],
    settings: Mapping[str, Any],
    found: Mapping[str, Any],
) -> Prediction:
    """Predict the steps per second of these numbers of ranks, on machines as a user describes them.

    All costs follow from the first row, its settings, and what `probes.collect_costs` has found for it.
    """
    costs = _costs_of(rows[0], settings, found)
    return _predicted(counts, costs, _measured(machines, rows, max(counts)), rows)


def _costs_of(row: Row, settings: Mapping[str, Any], found: Mapping[str, Any]) -> Costs:
    """Return the costs of an iteration of a measured row.

    A step of one env takes act + env, and a step of B envs takes act + B env. The time that the row
    took with all envs in training is kept: these figures only divide it.
    """
    (one, (_, cpu)), (envs, (wall, all_cpu)) = sorted(
        (int(envs), times) for envs, times in found["per_step"].items()
    )
    env = max(0.0, (all_cpu - cpu) / (envs - one))
    act = max(0.0, cpu - one * env)
    wait = max(0.0, wall - act - envs * env) / envs
    if row.nprocs == 1:  # its gather is a sort
        record = max(0.0, row.seconds - row.slowest_s - row.phases["update"])
    else:
        record = sum(row.phases[phase] for phase in ("hash", "evaluate", "record"))
    shared = "episodes_per_batch" in settings and row.nprocs > 1
    costs = Costs(
        num_envs=settings["num_envs"],
        steps=round(row.steps_per_s * row.seconds),
        act_s=act,
        env_s=env,
        wait_s=wait,
        update_s=row.phases["update"],
        record_s=record,
        row_bytes=found["row_bytes"],
        arrays=found["arrays"],
        weights_bytes=found["weights_bytes"],
        longest=max(row.step_fractions) if shared else 0.0,
        rank0_envs=settings.get("rank0_envs"),
        overlap=bool(settings.get("overlap")),
        parts=settings.get("gather_parts", 1),
    )
    times = row.slowest_s / iteration(row.nprocs, costs, Machines()).collect
    return replace(costs, act_s=act * times, env_s=env * times, wait_s=wait * times)


def _measured(machines: Machines, rows: Sequence[Row], most: int) -> Machines:
    """Return the machines with what ranks need for an exchange here, if `most` ranks are to be predicted."""
    two, cores = probes.exchange_costs(2), machines.cores
    # An iteration's own exchange, averaged over its collectives, with ranks of one node.
    sent = two["least_exchange_s"] - probes.EXCHANGED * two["message_s"] - POLL_S / 2
    machines = replace(
        machines,
        latency_s=max(two["latency_s"], sent / COLLECTIVES),
        message_s=two["message_s"],
        bandwidth=two["bandwidth"],
        slower=within_cores(rows).slowdown(rows[0]),
    )
    if cores is None or machines.ranks(most) <= cores:
        return machines
    here = len(available_cores())
    crowd = probes.exchange_costs(2 * max(2, here))
    further = 2 * max(2, here) / here - max(1, 2 / here)
    return replace(machines, crowd_s=max(0.0, crowd["exchange_s"] - two["exchange_s"]) / further)


def _predicted(
    counts: Sequence[int], costs: Costs, machines: Machines, rows: Sequence[Row]
) -> Prediction:
    # In the curve, numbers of ranks up to the largest measured one are on one node, as they were run.
    most, first = max(counts), rows[0].steps_per_s
    here, measured = replace(machines, nodes=1), [row.nprocs for row in rows]
    powers = [2**i for i in range(math.ceil(math.log2(most)) + 1)]
    drawn = {n for n in (*powers, *counts, *measured, min(costs.num_envs, most)) if n <= most}
    asked: list[Predicted] = []
    curve: list[Predicted] = []
    for n in sorted({*counts}):
        asked += _each(n, costs, machines, first)
    for n in sorted(drawn):
        curve += _each(n, costs, here if n <= max(measured) else machines, first)
    return Prediction(costs, asked, curve, _notes(costs, machines, most))


def _each(nprocs: int, costs: Costs, machines: Machines, first: float) -> Iterable[Predicted]:
    """Yield a row for each experiment that so many ranks can make."""
    machines = replace(machines, nodes=min(machines.nodes, nprocs))
    names = [SAME]
    if nprocs > costs.num_envs:
        # In the same batch, every env makes at least one step.
        names = [SAME_BATCH, LARGER_BATCH] if nprocs <= costs.steps else [LARGER_BATCH]
    for name in names:
        these = costs if name == SAME else _grown(costs, nprocs, name)
        took = iteration(nprocs, these, machines)
        speedup = these.steps / took.seconds / first
        helps = _changes_that_help(nprocs, these, machines)
        yield Predicted(nprocs, machines.nodes, name, these, took, speedup, helps)


def _grown(costs: Costs, num_envs: int, experiment: str) -> Costs:
    """Return the costs with more envs: the batch stays (`SAME_BATCH`) or grows with them (`LARGER_BATCH`)."""
    times = num_envs / costs.num_envs if experiment == LARGER_BATCH else 1.0
    return replace(_larger(costs, times), num_envs=num_envs)


def _larger(costs: Costs, times: float) -> Costs:
    return replace(
        costs,
        steps=costs.steps * times,
        update_s=costs.update_s * times,
        record_s=costs.record_s * times,
        longest=costs.longest / times,
    )


def _changes_that_help(nprocs: int, costs: Costs, machines: Machines) -> dict[str, float]:
    """Return the changes that would raise the steps per second, the best first: change -> factor, if 1.05 or more.

    A batch four times as large takes an update four times as long: it gains only on what is fixed.
    Overlap comes with the number of envs for rank 0 that makes the most of it.
    """
    changes: dict[str, list[Costs]] = {
        "batches of 4 times the steps": [_larger(costs, 4.0)],
        "--gather-parts 4": [replace(costs, parts=4)],
    }
    if nprocs > 1:
        changes["other --rank0-envs" if costs.overlap else "overlap"] = _overlapped(nprocs, costs)
    now = _rate(nprocs, costs, machines)
    gains = {
        name: max(_rate(nprocs, changed, machines) / now for changed in these)
        for name, these in changes.items()
    }
    best = sorted(gains, key=lambda name: -gains[name])
    return {name: gains[name] for name in best if gains[name] >= 1.05}


def _overlapped(nprocs: int, costs: Costs) -> list[Costs]:
    """Return costs with overlap: an equal number of envs for rank 0, none, and as many as it has time for."""
    env = costs.steps / costs.num_envs * (costs.env_s + costs.wait_s)
    less = costs.update_s * (nprocs - 1) / env if env else 0.0
    fair = max(0, int((costs.num_envs - less) / nprocs))
    return [replace(costs, overlap=True, rank0_envs=envs) for envs in (None, 0, fair)]


def _notes(costs: Costs, machines: Machines, most: int) -> list[str]:
    """Return sentences on where rank 0 becomes the limit, on the limits, and on what is assumed."""
    gbit = f"{8e-9 * machines.link_bandwidth:g} Gbit/s"
    notes, between = [_limited(costs, machines, most)], ""
    if machines.nodes > 1:
        notes.append(
            f"rank 0's link can receive at most {machines.link_bandwidth / costs.row_bytes:,.0f} steps/s "
            f"({gbit}, {costs.row_bytes:.0f} bytes a step)"
        )
        between = (
            f". Given by --latency-us and --link-gbit: {1e6 * machines.link_latency_s:g} us and "
            f"{gbit} between nodes"
        )
    if costs.update_s:
        rate = costs.steps / costs.update_s
        notes.append(f"rank 0's update can process at most {rate:,.0f} steps/s")
    cores = "a core for each of its ranks" if machines.cores is None else f"{machines.cores} cores"
    notes.append(
        f"assumed: every node is this machine, with {cores}, each as fast as here. Measured here: "
        f"{1e6 * machines.latency_s:.0f} us a collective, {1e6 * machines.message_s:.1f} us a "
        f"message, {machines.bandwidth / 1e9:.2f} GB/s into rank 0{between}"
    )
    return notes


def _limited(costs: Costs, machines: Machines, most: int) -> str:
    """Return a sentence that names the least number of ranks, up to `most`, from which rank 0 is the limit."""
    for nprocs in range(1, most + 1):
        these = costs if nprocs <= costs.num_envs else _grown(costs, nprocs, LARGER_BATCH)
        took = iteration(nprocs, these, replace(machines, nodes=min(machines.nodes, nprocs)))
        if took.rank0_alone > took.collect:
            alone = max(ALONE, key=lambda name: getattr(took, name))
            which = f" ({LARGER_BATCH})" if nprocs > costs.num_envs else ""
            return (
                f"from {ranks(nprocs)} on{which}, what rank 0 does alone takes longer than "
                f"collecting; most of it is {BOUNDS[alone]}"
            )
    return f"up to {most:,} ranks, collecting takes longer than what rank 0 does alone"
