"""The names of other projects' MPI tools, over the collectives of this one: change the import.

`mpi_util` is the work that rank0rl continues. `mpi_tools`, `mpi_pytorch` and `mpi_tf` are Spinning
Up's, `omnisafe` is OmniSafe's and `evorl` is EvoRL's. docs/names.md says, name by name, how these
differ from the originals.
"""
