"""PPO that records whether mpi4py was loaded."""

import sys

from rank0rl.algos.ppo import PPO


class MpiSeen(PPO):
    def update(self, *args):
        return {**super().update(*args), "mpi_loaded": int("mpi4py" in sys.modules)}
