"""Reference agents, one file each. They know nothing of MPI; `rank0rl` finds them by name."""

from pathlib import Path

CONFIGS = Path(__file__).parent.with_name("configs")
"""TOML files of settings of agents and environments, one of which is loaded by itself: see `find_config`."""
