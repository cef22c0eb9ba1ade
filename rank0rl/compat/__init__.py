"""The names of other projects' MPI tools, over the collectives of this one: change the import.

`mpi_util` is the work that rank0rl continues. `mpi_tools`, `mpi_pytorch` and `mpi_tf` are Spinning
Up's, `omnisafe` is OmniSafe's and `evorl` is EvoRL's. docs/names.md says, name by name, how these
differ from the originals.
"""

from __future__ import annotations

MPI_UTIL = {
    "mpi_fork": "launch.fork",
    "rank": "mpi.comm",
    "nworkers": "mpi.comm",
    "print0": "mpi.comm",
    "bcast": "mpi.comm",
    "rank0_accum_batches": "mpi.gather",
    "all_accum_batches": "mpi.gather",
    "accum_batches": "compat.mpi_util",
    "all_sum": "mpi.reduce",
    "all_mean": "mpi.reduce",
    "all_sum_scalar": "compat.mpi_util",
    "all_mean_scalar": "compat.mpi_util",
    "all_avg_wts": "compat.average",
    "steps_sec": "compat.mpi_util",
    "cumsum_steps": "compat.mpi_util",
    "timeit": "compat.mpi_util",
    "tf_config": "compat.mpi_util",
    "rank0_bcast_wts": "mpi.weights",
    "chksum": "mpi.weights",
    "set_global_seeds": "compat.mpi_util",
}
"""Name of mpi_util -> its module here."""

ABSENT = {
    "oldrank0_accum_batches": "use rank0_accum_batches",
    "xxxbcast": "use bcast",
    "pt_to_pt_bcast": "use bcast",
    "set_wt": "use rank0_bcast_wts, which overwrites weights in place",
    "cache": "leave it out: weights are overwritten in place, without TensorFlow's operations",
    "mpitype": "leave it out: arrays of any dtype can be sent",
    "tstart": "use what steps_sec returns",
    "lasttime": "use what timeit returns",
}
"""Name of mpi_util that is not here -> what to do instead."""


def no_attribute(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have, with what to do if mpi_util has it."""
    remedy = f": {ABSENT[name]}" if name in ABSENT else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{remedy}")
