"""Rows of speedup studies and costs of experiments whose figures are known in advance."""

import math

from rank0rl.run.usage import PHASES
from rank0rl.tools.speedup.cost_model import Costs, Machines
from rank0rl.tools.speedup.measured import Row

# A second on one rank: 80 envs take 10 steps of a millisecond each, and rank 0 updates for 0.2 s.
PLAIN = Costs(80, 800, 0.0, 1e-3, 0.0, 0.2, 0.0, row_bytes=100.0, arrays=0, weights_bytes=0.0)
FREE = Machines(0.0, 0.0, math.inf, link_latency_s=0.0, link_bandwidth=math.inf)


def row(
    nprocs, steps_per_s=1000.0, fractions=None, bare=None, slowest=None, fastest=None, **phases
):
    """Return the row of an iteration of a second, unless its phases say otherwise."""
    every = {phase: phases.get(phase, 0.0) for phase in PHASES}
    seconds = sum(every.values())
    slowest = slowest or every["collect"] + every["process"]
    return Row(
        nprocs=nprocs,
        steps_per_s=steps_per_s,
        steps_per_s_min=steps_per_s,
        steps_per_s_max=steps_per_s,
        seconds=seconds,
        phases=every,
        slowest_s=slowest,
        fastest_s=slowest if fastest is None else fastest,
        bare_steps_per_s=bare or 5000.0 * nprocs,
        return_mean=1.0,
        memory_mb=1.0,
        step_fractions=fractions or (1 / nprocs, 1 / nprocs),
        oversubscribed=nprocs > 4,
    )
