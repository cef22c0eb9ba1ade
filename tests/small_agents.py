"""The reference agents with networks small enough for tests."""

from rank0rl.algos.cem import CEM, CEMOptions
from rank0rl.algos.klppo import KLPPO, KLPPOOptions
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.algos.reinforce import Reinforce, ReinforceOptions
from rank0rl.algos.trpo import TRPO, TRPOOptions

AGENTS = {
    "ppo": (PPO, PPOOptions(hidden=(8,), epochs=1)),
    "trpo": (TRPO, TRPOOptions(hidden=(8,), value_epochs=1)),
    "klppo": (KLPPO, KLPPOOptions(hidden=(8, 8), value_hidden=(8, 8), epochs=2)),
    "reinforce": (Reinforce, ReinforceOptions(hidden=(8,))),
    "cem": (CEM, CEMOptions(population=4)),
}
