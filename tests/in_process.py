"""Train in this process, on one rank, without a command line."""

import numpy as np
from rank0rl.session import make_rollout

from rank0rl import envs, seeding
from rank0rl.mpi.threads import set_threads
from rank0rl.run.logger import Logger
from rank0rl.run.options import RunOptions
from rank0rl.run.recorder import Run
from rank0rl.run.state import State
from rank0rl.trainer import train


def train_here(agent_class, agent_options, folder, **options):
    """The agent, and what rank 0 kept, after a run."""
    run_options = RunOptions(**options)
    run_options = RunOptions(**{**options, "env_id": envs.resolve(run_options.env_id)})
    set_threads(1)
    rollout = make_rollout(run_options, 0, 1)
    rng = seeding.stream(run_options.seed, "init")
    agent = agent_class(rollout.spaces, agent_options, rng)
    run = Run(State(agent, run_options, {}), run_options, {}, Logger(folder, quiet=True))
    train(agent, rollout, run_options, run)
    return agent, run


def mean_return(run):
    return float(np.mean(run.state.progress.returns))
