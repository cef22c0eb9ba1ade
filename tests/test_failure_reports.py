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


def test_a_package_that_the_users_code_misses_is_no_wrong_use(tmp_path, monkeypatch):
    (tmp_path / "late_import.py").write_text(
        "from helpers.envs import Count\n"
        "class Env(Count):\n    def step(self, action):\n        import nothing_like_it\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{tmp_path}")
    words = ["late_import:Env", "--num-envs", "2", "--steps-per-batch", "8", "--hidden", "8"]
    done = train(tmp_path / "r", *words, expect=1)
    assert "\nModuleNotFoundError: No module named 'nothing_like_it'\nIn fragment 0" in done.stderr


def test_what_one_rank_alone_refuses_ends_all(tmp_path, monkeypatch):
    (tmp_path / "picky.py").write_text(
        "from helpers.envs import NoiseAgent\n"
        "from rank0rl.mpi import comm\nfrom rank0rl.options import OptionError\n"
        "class Picky(NoiseAgent):\n    def __init__(self, *args):\n"
        "        if comm.get_rank():\n            raise OptionError('a package is missing')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    words = ["CartPole", "--algo", f"{tmp_path}/picky.py:Picky", "--num-envs", "2"]
    done = train(tmp_path / "r", *words, nprocs=2, expect=2)
    assert done.stderr.count("error: on rank 1: a package is missing") == 1
    assert not (tmp_path / "r").exists()


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
