"""The names of other projects' MPI tools, over the collectives of this one: change the import.

`mpi_tools`, `mpi_pytorch`, `mpi_tf` are Spinning Up's, `omnisafe` is OmniSafe's and `evorl` EvoRL's.
docs/names.md says, name by name, where these differ from the originals.
"""
