"""PPO whose update takes a tenth of a second and can be interrupted for certain."""

import os
import signal
import time

from rank0rl.algos.ppo import PPO


class SlowPPO(PPO):
    """Receives SIGTERM in mid-update, once the share END_AT of the run is over."""

    def update(self, batch, rng, progress):
        metrics = super().update(batch, rng, progress)
        time.sleep(0.1)
        if progress >= float(os.environ.get("END_AT", "inf")):
            os.kill(os.getpid(), signal.SIGTERM)  # weights and Adam's moments have changed already
        return metrics
