"""Environments that are one program on several processes, which follow the first of them."""

import sys

import pytest
from helpers.ranks import HERE, run
from helpers.runs import SMALL, curve, resume, sha, table, train

ENV = "helpers.simulators:shared"
ARGS = [*SMALL[1:], "--hidden", "8", "--total-steps", "192"]
EVALUATED = ["--eval-every", "2", "--eval-episodes", "3"]


@pytest.fixture(autouse=True)
def _helpers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def grouped(folder, *args, n=1, m=1, **how):
    """Train on n ranks of m processes each."""
    return (
        train(folder, *args, "--ranks-per-env", str(m), nprocs=n, **how)
        if n > 1
        else _alone(folder, *args, m=m, **how)
    )


def _alone(folder, *args, m, expect=0):
    done = run(
        [sys.executable, "train.py", *args, "--run-dir", str(folder), "--ranks-per-env", str(m)]
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        train(folder, ENV, *ARGS, *EVALUATED)
    return folder


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "m"),
    [(1, 2), (2, 2), (4, 1), (1, 4), (2, 1)],
)
def test_one_curve_for_every_layout(alone, tmp_path, n, m):
    grouped(tmp_path, ENV, *ARGS, *EVALUATED, n=n, m=m)
    assert curve(tmp_path) == curve(alone)
    assert sha(tmp_path) == sha(alone)


@pytest.mark.slow
def test_it_is_stopped_and_resumed_with_another_layout(alone, tmp_path):
    done = grouped(tmp_path, ENV, *ARGS, *EVALUATED, "--stop-after-iterations", "1", n=2, m=2)
    assert "--nprocs 2 --ranks-per-env 2" in done.stdout
    resume(tmp_path)
    assert curve(tmp_path) == curve(alone)


@pytest.mark.slow
def test_an_error_in_another_process_is_one_of_the_environment(tmp_path):
    fails = ["--env-kwargs", "raises=[1,3]", "talks=false"]
    done = grouped(tmp_path, ENV, *ARGS, *fails, n=2, m=2, expect=1)
    assert "In process 1 of the group of rank" in done.stderr
    assert "OSError: on purpose" in done.stderr
    assert "step 3, action" in done.stderr


@pytest.mark.slow
def test_a_failed_step_is_repeated_in_all_processes(alone, tmp_path):
    fails = ["--env-kwargs", "raises=[1,5]", "talks=false", f'fails_once="{tmp_path / "once"}"']
    grouped(tmp_path / "r", ENV, *ARGS, *fails, "--env-retries", "1", n=2, m=2)
    assert table(tmp_path / "r")[0]["env_mended"] == "1"
    assert sha(tmp_path / "r") == sha(alone)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_process_that_waits_for_one_that_failed_ends_the_job(tmp_path, which):
    done = grouped(tmp_path, ENV, *ARGS, "--env-kwargs", f"raises=[{which},3]", n=2, m=2, expect=1)
    assert "OSError: on purpose" in done.stderr
    assert ("did not come back" if which else "has not come back") in done.stderr


@pytest.mark.slow
def test_what_cannot_be(tmp_path):
    for more, said in (
        (["--env-processes"], "leave out --env-processes or --ranks-per-env"),
        (["--hosts", "localhost:3"], "ranks_per_env=2 and 3 slots"),
    ):
        done = grouped(tmp_path / "r", ENV, *ARGS, *more, n=2, m=2, expect=2)
        assert said in done.stderr
    done = grouped(tmp_path / "r", "helpers.games:make_hunt", *ARGS, n=1, m=2, expect=2)
    assert "must be a gymnasium.Env" in done.stderr


SCRIPT = """
import sys
import numpy as np
import rank0rl
from helpers.simulators import Summed

if rank0rl.mpi_fork({n}, ranks_per_env={m}) == "parent":
    sys.exit()


class Mine(Summed):
    def __init__(self, place, length):
        assert (place.index, place.comm.size) == ({n} - 1, {m}) or place.index < {n} - 1
        super().__init__(place.comm, length)


env = rank0rl.group(Mine, length=4)
assert env.comm.size == {m}
env.reset(seed=3)
total = sum(env.step(np.zeros(1))[1] for _ in range(4))
print(f"{{rank0rl.rank}} of {{rank0rl.nworkers}}: {{rank0rl.all_sum(total)}}")
env.close()
"""


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2), (1, 2)])
def test_a_script(tmp_path, n, m):
    (tmp_path / "script.py").write_text(SCRIPT.format(n=n, m=m))
    done = run([sys.executable, str(tmp_path / "script.py")])
    assert done.returncode == 0, done.stderr
    expected = [f"{rank} of {n}: {10.0 * n}" for rank in range(n)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.fast(1)
@pytest.mark.parametrize(("n", "m"), [(2, 1), (2, 2)])
def test_the_world_of_all_ranks_is_not_that_of_an_environment(tmp_path, n, m):
    done = grouped(tmp_path, "helpers.simulators:worldly", *ARGS, n=n, m=m, expect=1)
    assert f"MPI.COMM_WORLD.allreduce was called, but all {n * m} processes" in done.stderr
    assert "place.comm" in done.stderr
    assert "--env-processes" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("args", [{"n": 1, "m": 1}, {"n": 1, "m": 2}, {"n": 2}])
def test_where_the_world_is_that_of_an_environment_it_may_use_it(alone, tmp_path, args):
    more = ["--env-processes"] if args["n"] > 1 else []
    grouped(tmp_path, "helpers.simulators:worldly", *ARGS, *more, **args)
    assert sha(tmp_path) == sha(alone)


HEAT = ["examples.heat:make", "--num-envs", "8"]
SHORT = [*HEAT, "--steps-per-batch", "160", "--minibatch-size", "40", "--total-steps", "320"]
LONG = [*HEAT, "--steps-per-batch", "1600", "--minibatch-size", "200", "--total-steps", "64000"]


@pytest.fixture(scope="module")
def heated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heated") / "run"
    train(folder, *SHORT)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "m"),
    [(2, 2), *(pytest.param(*nm, marks=SLOW) for nm in ((1, 2), (2, 1), (4, 1)))],
)
def test_a_rod_is_heated_in_any_number_of_parts(heated, tmp_path, n, m):
    grouped(tmp_path, *SHORT, "--stop-after-iterations", "1", n=n, m=m)
    resume(tmp_path, nprocs=3 - min(n, 2))
    assert sha(tmp_path) == sha(heated)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_heating_is_learned(tmp_path, seed):
    """Without control, the mean return is -44."""
    train(tmp_path, *LONG, "--seed", str(seed), nprocs=2)
    assert float(table(tmp_path)[-1]["return_mean"]) > -7
