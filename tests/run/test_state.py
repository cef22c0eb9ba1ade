from types import SimpleNamespace

import pytest

from rank0rl.run.options import RunOptions
from rank0rl.run.state import State


@pytest.mark.parametrize(
    ("total", "share"), [({"total_steps": 100}, 0.25), ({"num_episodes": 10}, 0.5)]
)
def test_the_share_of_a_run_is_of_steps_or_of_episodes(total, share):
    collector = SimpleNamespace(rollout=SimpleNamespace(labels=[]))
    state = State(None, collector, RunOptions(**total), {})
    state.progress.steps, state.progress.episodes = 20, 4
    assert state.share_over(5, 1) == share
