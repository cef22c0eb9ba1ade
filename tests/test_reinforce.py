"""REINFORCE: small, plain, and it learns."""

from pathlib import Path

import pytest
from in_process import mean_return, train_here

import algos.reinforce
from algos.reinforce import Reinforce, ReinforceOptions


def test_the_agent_to_copy_is_small_and_free_of_mpi():
    text = Path(algos.reinforce.__file__).read_text()
    code = [line for line in text.splitlines() if line.strip()]
    assert len(code) < 60
    assert "mpi" not in text.lower()
    assert "rank" not in text.replace("rank0rl", "")


@pytest.mark.parametrize("batch", [{"steps_per_batch": 400}, {"episodes_per_batch": 40}])
def test_it_learns_in_both_batch_modes(tmp_path, batch):
    kwargs = {"env_id": "toy_envs:Identity-v0", "num_envs": 4, "total_steps": 40000}
    options = ReinforceOptions(gamma=0.0, lr=0.05)
    _, run = train_here(Reinforce, options, tmp_path, **kwargs, **batch)
    assert mean_return(run) > 8  # of 10; chance is 2.5
