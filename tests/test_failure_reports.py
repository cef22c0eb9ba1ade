"""Report of a failure in the user's code: once, with all that is needed to repeat it."""

import pytest
from helpers.jobs import reports
from helpers.ranks import HERE
from helpers.runs import train

from rank0rl import seeding

# place -> what else the report says
PLACES = {
    "constructor": "While making the environment of env {env}.",
    "reset": "In fragment {env} of iteration 1: Breaks-v1, episode with seed {seed}, in its reset.",
    "step": "In fragment {env} of iteration 1: Breaks-v1, episode with seed {seed}, step 11, action [",
    "init": 'fail_at("init")',
    "act": "In fragment {env} of iteration 1: Breaks-v1, episode with seed {seed}, the agent acts in step 1",
    "process": "In process, of fragment {env} in iteration 1.",
    "update": "In update, of iteration 1; resuming the run repeats it.",
}
CASES = [
    pytest.param(place, rank, marks=[] if (place, rank) == ("act", 2) else pytest.mark.slow)
    for place in PLACES
    for rank in (0, 2, None)
    if place != "update" or rank == 0
]


@pytest.mark.parametrize(("place", "rank"), CASES)
def test_what_failed_where_and_how_to_repeat_it(place, rank, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("PLACE", place if rank is None else f"{place}:{rank}")
    args = [
        "helpers.faults:Breaks-v1",
        "--algo",
        f"{HERE}/helpers/faults.py:Agent",
        "--num-envs",
        "6",
    ]
    done = train(tmp_path / "r", *args, "--steps-per-batch", "120", nprocs=3, expect=1)
    err = done.stderr
    assert reports(err) == 1
    assert err.count("\nZeroDivisionError: on purpose") == 1
    [line] = [line for line in err.splitlines() if line.startswith("rank ") and "failed" in line]
    first = int(line.split()[1])
    assert rank is None or first == rank
    env = 2 * first
    seed = seeding.integer(0, "reset", env, 0)
    assert PLACES[place].format(env=env, seed=seed) in err
    replay = f"python -m rank0rl replay {tmp_path / 'r'} --iteration 1 --env {env}"
    assert (replay in err) == (place in ("reset", "step", "act", "process"))
