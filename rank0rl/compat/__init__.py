"""The names of other projects' MPI tools, over the collectives of this one: change the import.

`mpi_util` is the work that rank0rl continues. `mpi_tools`, `mpi_pytorch` and `mpi_tf` are Spinning
Up's, `omnisafe` is OmniSafe's and `evorl` is EvoRL's. docs/names.md says, name by name, how these
differ from the originals.
"""

from __future__ import annotations

# Names of mpi_util that are not here -> what to do instead.
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


def no_attribute(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have, with what to do if mpi_util has it."""
    remedy = f": {ABSENT[name]}" if name in ABSENT else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{remedy}")
