"""Reference agents, one file each. They know nothing of MPI; `rank0rl` finds them by name."""
