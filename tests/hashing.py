"""PPO that records hashes of the gathered batch, and whether mpi4py was loaded."""

import hashlib
import sys

from algos.ppo import PPO
from rank0rl import weights


class HashingPPO(PPO):
    def update(self, batch, rng, progress):
        digest = hashlib.sha256()
        for name in sorted(batch):
            digest.update(f"{name} {batch[name].dtype} {batch[name].shape}".encode())
            digest.update(batch[name].tobytes())
        metrics = super().update(batch, rng, progress)
        return {
            **metrics,
            "batch_sha": int(digest.hexdigest()[:15], 16),
            "weights_sha": int(weights.sha256(self.modules())[:15], 16),
            "mpi_loaded": int("mpi4py" in sys.modules),
        }
