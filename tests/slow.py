"""PPO with an update of a tenth of a second, so that a test can interrupt it."""

import time

from algos.ppo import PPO


class SlowPPO(PPO):
    def update(self, *args):
        time.sleep(0.1)
        return super().update(*args)
