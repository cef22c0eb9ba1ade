"""Train in this process, on one rank, without a command line."""

import numpy as np

from rank0rl import seeding
from rank0rl.collector import Collector, make_rollout
from rank0rl.envs.make import resolve
from rank0rl.learner import Learner
from rank0rl.mpi.threads import set_threads
from rank0rl.run.logger import Logger
from rank0rl.run.options import RunOptions
from rank0rl.run.record import Recorder
from rank0rl.run.run import Run
from rank0rl.run.state import State
from rank0rl.run.timing import Phases
from rank0rl.trainer import train


def train_here(agent_class, agent_options, folder, **options):
    """Return the agent and rank 0's recorder after a run."""
    run_options = RunOptions(**options)
    run_options = RunOptions(**{**options, "env_id": resolve(run_options.env_id)})
    set_threads(1)
    rollout = make_rollout(run_options, 0, 1)
    agent = agent_class(rollout.spaces, agent_options, seeding.stream(run_options.seed, "init"))
    phases = Phases()
    collector = Collector(agent, rollout, run_options, phases)
    state = State(agent, collector, run_options, {})
    recorder = Recorder(state, run_options, phases, {}, Logger(folder, quiet=True))
    run = Run(phases, recorder)
    learner = Learner(agent, run_options, phases, state.share_over)
    learner.prepare()
    train(agent, collector, learner, run)
    return agent, recorder


def mean_return(recorder):
    return float(np.mean(recorder.state.progress.returns))
