"""The loop, through the command line: the same curve for every number of ranks."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.envs import NoiseAgent
from helpers.ranks import HERE, on_ranks
from helpers.runs import (
    SMALL,
    curve,
    resume_on_ranks,
    sha,
    table,
    train,
    train_here,
    train_on_ranks,
)

from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.batch import Gathered
from rank0rl.learner import Learner
from rank0rl.mpi import comm
from rank0rl.run.options import RunOptions
from rank0rl.run.shares import env_maker, make_rollout, make_shown
from rank0rl.run.usage import PHASES, Phases

MODES = {
    "steps": ["--steps-per-batch", "192"],
    "episodes": ["--episodes-per-batch", "5", "--num-episodes", "15"],
}


def assert_same_curves(folder, args, all_nprocs, iterations):
    """Batches and weights of every iteration, and all else that does not depend on time.

    With 1, 2, 4, ... learner threads for 1, 2, 3, ... ranks.
    """
    for n in all_nprocs:
        these = [*args, "--learner-threads", str(2 ** (n - 1))]
        these += ["--stop-after-iterations", str(iterations)]
        train_on_ranks(folder / str(n), *these, nprocs=n)
    curves = [curve(folder / str(n)) for n in all_nprocs]
    assert len({row["batch_sha256"] for row in curves[0]}) == iterations
    assert len({row["weights_sha256"] for row in curves[0]}) == iterations
    assert all(other == curves[0] for other in curves)
    assert len({sha(folder / str(n)) for n in all_nprocs}) == 1


@pytest.mark.parametrize("nprocs", [1, 3])
def test_the_last_episodes_are_those_that_ended_last(nprocs, tmp_path, monkeypatch):
    """360 episodes end, after one step in envs 0 to 3 (return 1), after two in envs 4 to 7 (return 3)."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["helpers.envs:Count-v0", "--env-kwargs-of", "helpers.envs:long_from_4_on"]
    args += ["--algo", f"{HERE}/helpers/envs.py:NoiseAgent", "--num-envs", "8"]
    args += ["--steps-per-batch", "480", "--total-steps", "480", "--gather-parts", "2"]
    train_on_ranks(tmp_path / "r", *args, nprocs=nprocs)
    ended = 8 * (8 * [1] + 4 * [3]) + 4 * [3]  # 16 steps, and 4 envs of the one before
    [row] = table(tmp_path / "r")
    assert row["episodes"] == "360"
    assert float(row["return_mean"]) == np.mean(ended)


def test_an_environment_may_have_arguments_index_and_options(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_indexed.py").write_text(
        "from helpers.envs import Count\n"
        "def make(index, options):\n    return Count(length=10 * options + index)\n"
        "def of(env):\n    return {'index': 3 + env, 'options': 2}\n"
    )
    args = {"env_id": "mine_indexed:make", "env_kwargs_of": f"{tmp_path}/mine_indexed.py:of"}
    options = RunOptions(**args, num_envs=2)
    assert [env.gym.unwrapped.base for env in make_rollout(options, 0, 1).envs] == [23, 24]
    assert env_maker(options)(1).unwrapped.base == 24
    assert make_shown(options, index=5, options=1).unwrapped.base == 15


@pytest.mark.fast(1)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_batches_and_weights_for_every_number_of_ranks(mode, tmp_path):
    algo = ["--algo", f"{HERE}/helpers/agents.py:MpiSeen", "--hidden", "32", "32"]
    args = ["Walker2d", *algo, "--num-envs", "3", "--total-steps", "576", *MODES[mode]]
    assert_same_curves(tmp_path, args, (1, 2, 3), 3)
    assert {row["mpi_loaded"] for row in table(tmp_path / "1")} == {"0"}
    assert {row["mpi_loaded"] for row in table(tmp_path / "2")} == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["steps", "episodes"])
@pytest.mark.parametrize("env", ["Walker2d", "CartPole", "Pendulum"])
def test_the_same_for_up_to_eight_ranks(env, mode, tmp_path):
    size = ["--steps-per-batch", "512"] if mode == "steps" else ["--episodes-per-batch", "10"]
    args = [env, "--num-envs", "8", "--total-steps", "100000", *size, "--drift-check-every", "1"]
    assert_same_curves(tmp_path, args, (1, 2, 3, 4, 8), 5)


class WaitsOnRank1(NoiseAgent):
    """Lets rank 1 act only when rank 0 has collected all episodes that it could get."""

    def __init__(self, file):
        super().__init__()
        self.file = Path(file)

    def act(self, step):
        while comm.rank and not self.file.exists():
            time.sleep(0.001)
        return super().act(step)


def on_rank_share(rank0_envs, file):
    options = RunOptions(
        "helpers.envs:Count-v0", num_envs=4, episodes_per_batch=40, rank0_envs=rank0_envs
    )
    rollout = make_rollout(options, comm.rank, comm.nworkers)
    comm.barrier()
    fragments, _ = rollout.collect(WaitsOnRank1(file), 1)
    Path(file).touch()
    return [fragment.fragment_id for fragment in fragments]


@pytest.mark.parametrize("rank0_envs", [None, 1])
def test_ranks_share_the_episodes_as_they_get_on(rank0_envs, tmp_path):
    file = str(tmp_path / "rank 0 is through")
    mine, others = on_ranks(2, "test_trainer:on_rank_share", rank0_envs, file)
    assert sorted(mine + others) == list(range(40))
    if rank0_envs is None:
        assert len(others) <= 10  # those it took before it had to wait
    else:
        assert len(mine) == 10 * rank0_envs


def on_rank_rounds(rank0_envs):
    options = RunOptions(
        "helpers.envs:Count-v0", num_envs=4, episodes_per_batch=9, rank0_envs=rank0_envs
    )
    rollout = make_rollout(options, comm.rank, comm.nworkers)
    ids = []
    for iteration in range(1, 6):
        fragments, _ = rollout.collect(NoiseAgent(), iteration)
        ids.append([fragment.fragment_id for fragment in fragments])
        comm.barrier()
    return ids


@pytest.mark.parametrize("rank0_envs", [0])
def test_ranks_share_the_episodes_in_every_iteration(rank0_envs):
    for mine, others in zip(*on_ranks(2, "test_trainer:on_rank_rounds", rank0_envs), strict=True):
        assert sorted(mine + others) == list(range(9))


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        (["--steps-per-batch", "80"], {"nprocs": 3, "args": ["--rank0-envs", "0"]}),
        (["--episodes-per-batch", "7"], {"nprocs": 2, "args": []}),
    ],
)
def test_rows_that_travel_while_others_are_collected(mode, ranks, tmp_path):
    args = ["CartPole", "--num-envs", "5", "--minibatch-size", "32", *mode]
    args += ["--stop-after-iterations", "5"]
    train(tmp_path / "1", *args)
    args += ["--gather-parts", "3", *ranks["args"]]
    train_on_ranks(tmp_path / "n", *args, nprocs=ranks["nprocs"])
    assert len(table(tmp_path / "1")) == 5
    assert curve(tmp_path / "n") == curve(tmp_path / "1")
    assert sha(tmp_path / "n") == sha(tmp_path / "1")


def on_rank_options(options):
    options = RunOptions("helpers.envs:Count-v0", **options)
    return make_rollout(options, comm.get_rank(), comm.get_nworkers()).nparts


@pytest.mark.parametrize(
    ("n", "options", "parts"),
    [
        (2, {"num_envs": 5, "gather_parts": 3}, 3),
        (2, {"num_envs": 5, "gather_parts": 9}, 3),  # envs are not cut in two
        (2, {"num_envs": 4, "episodes_per_batch": 9, "gather_parts": 9}, 4),
        (1, {"num_envs": 5, "gather_parts": 3}, 1),
    ],
)
def test_as_many_parts_as_asked_for_on_every_rank(n, options, parts):
    assert on_ranks(n, "test_trainer:on_rank_options", options) == [parts] * n


DRIFTS = """
from rank0rl.algos.ppo import PPO
from rank0rl.mpi import comm
class Drifts(PPO):
    calls = 0
    def process(self, fragment):
        type(self).calls += 1
        if self.calls in (7, 12) and comm.rank == 1:
            self.value.mlp.biases[1].data[3] += 1e-6
        return super().process(fragment)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["comm.rank == 1", "True"])
def test_weights_that_drift_are_found_out_and_named(where, tmp_path):
    (tmp_path / "drifts.py").write_text(DRIFTS.replace("comm.rank == 1", where))
    args = [*SMALL, "--algo", f"{tmp_path / 'drifts.py'}:Drifts", "--drift-check-every", "2"]
    nprocs = 3 if "rank" in where else 1
    done = train(tmp_path / "r", *args, nprocs=nprocs, expect=1)
    assert "'value.mlp.biases.1' has changed, and must not" in done.stderr
    assert f"rank {nprocs // 2}" in done.stderr or nprocs == 1


ITERATION = "iteration steps episodes seconds return_mean return_std return_min return_max length_mean longest"
SPEED = "slowest_s fastest_s memory_mb batch_sha256 weights_sha256"


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """Return the folder, the rows and the output of one run."""
    folder = tmp_path_factory.mktemp("run")
    done = train(folder, *SMALL, "--total-steps", "640", "--seed", "3", nprocs=2)
    return folder, table(folder), done.stdout


@pytest.mark.slow
def test_the_columns_of_a_run(a_run):
    names = [*ITERATION.split(), "steps_per_s", *(f"{phase}_s" for phase in PHASES), *SPEED.split()]
    assert list(a_run[1][0])[: len(names)] == names


def test_a_run_counts_iterations_and_steps(a_run):
    assert [int(row["iteration"]) for row in a_run[1]] == list(range(1, 11))
    assert [int(row["steps"]) for row in a_run[1]] == list(range(64, 641, 64))


def test_no_second_of_a_run_is_in_two_phases(a_run):
    for row in a_run[1]:
        phases = sum(float(row[f"{phase}_s"]) for phase in PHASES)
        assert phases * float(row["steps_per_s"]) <= 64.1


@pytest.mark.slow
def test_every_phase_that_runs_is_in_the_record(a_run):
    for phase in ("collect", "process", "wait", "gather", "hash", "update", "broadcast", "record"):
        assert sum(float(row[f"{phase}_s"]) for row in a_run[1]) > 0


def test_the_fastest_rank_takes_no_longer_than_the_slowest_nor_this_than_the_iteration(a_run):
    for row in a_run[1]:
        seconds = 64 / float(row["steps_per_s"])
        assert 0 < float(row["fastest_s"]) <= float(row["slowest_s"]) < seconds


def test_the_seconds_of_a_run_are_those_of_its_iterations(a_run):
    seconds = sum(64 / float(row["steps_per_s"]) for row in a_run[1])
    assert seconds == pytest.approx(float(a_run[1][-1]["seconds"]), rel=1e-3)


def test_the_summary_of_a_run_is_its_last_row_and_the_last_lines_of_the_console(a_run):
    folder, rows, out = a_run
    summary = json.loads((folder / "summary.json").read_text())
    about = {"env_id": "CartPole-v1", "algo": "ppo", "seed": 3, "nprocs": 2, "num_envs": 4}
    assert about.items() <= summary.items()
    assert (summary["iterations"], summary["steps"]) == (10, 640)
    assert summary["episodes"] == int(rows[-1]["episodes"])
    assert summary["return_mean"] == pytest.approx(float(rows[-1]["return_mean"]), rel=1e-5)
    last = {line[:16].strip(): line[16:] for line in out.splitlines()[-5:]}
    assert [*last] == ["return", "steps", "time", "weights", "folder"]
    assert last["weights"] == summary["weights_sha256"]
    assert last["steps"] == f"640 in 10 iterations and {summary['episodes']} episodes"


def test_torch_has_one_thread_and_the_agent_as_many_as_it_is_given(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import torch\n"
        "from rank0rl.algos.ppo import PPO\n"
        "torch.set_num_threads(2)\n"  # as an import of the user's may do
        "class Threads(PPO):\n"
        "    def update(self, *args):\n"
        "        n = torch.get_num_threads()\n"
        "        return {**super().update(*args), 'n': n, 'threads': self.threads}\n"
    )
    args = [*SMALL, "--total-steps", "128", "--algo", f"{agent}:Threads", "--learner-threads", "3"]
    train(tmp_path / "run", *args)
    assert [(row["n"], row["threads"]) for row in table(tmp_path / "run")] == [("1", "3")] * 2


BAD = """
from rank0rl.algos.ppo import PPO
from rank0rl.mpi import comm
class Bad(PPO):
    calls = 0
    def process(self, fragment):
        type(self).calls += 1
        if comm.rank == 1 and self.calls == 10:
            {what}
        return super().process(fragment)
"""


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("what", "code", "said", "ranks"),
    [
        ("raise ZeroDivisionError('on purpose')", 1, "ZeroDivisionError: on purpose", 2),
        ("import sys; sys.exit(3)", 3, "rank 1 called sys.exit(3)", 3),
    ],
)
def test_a_failing_rank_ends_the_job_with_its_reason_and_a_checkpoint(
    tmp_path, what, code, said, ranks
):
    (tmp_path / "bad.py").write_text(BAD.format(what=what))
    args = [*SMALL, "--algo", f"{tmp_path / 'bad.py'}:Bad"]
    args += ["--gather-parts", "2"]  # of 2 ranks, a part is on its way when rank 1 fails
    done = train(tmp_path / "r", *args, nprocs=ranks, expect=code)
    assert "rank 1" in done.stderr
    assert said in done.stderr
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["iterations"] == len(table(tmp_path / "r")) > 0


OWN = """
from dataclasses import dataclass
from rank0rl import Agent
from helpers.envs import NoiseAgent
@dataclass(frozen=True)
class Options:
    speed: float = 1.0
    \"\"\"How fast.\"\"\"
class Mine(NoiseAgent):
    Options = Options
    def __init__(self, spaces, options, rng):
        super().__init__(spaces, options, rng)
        self.options = options
    def update(self, batch, rng, progress):
        return {"speed": self.options.speed, "rows": len(batch["obs"])}
"""


def test_an_agent_and_an_environment_of_ones_own_on_two_ranks_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    (tmp_path / "mine.py").write_text(OWN)
    args = ["helpers.envs:Count-v0", "--algo", f"{tmp_path / 'mine.py'}:Mine", "--num-envs", "4"]
    args += ["--total-steps", "512", "--speed", "3"]
    train_on_ranks(tmp_path / "r", *args, nprocs=2)
    assert [(row["speed"], row["rows"]) for row in table(tmp_path / "r")] == [("3", "256")] * 2
    resume_on_ranks(tmp_path / "r", "--total-steps", "768", nprocs=2)
    assert [row["speed"] for row in table(tmp_path / "r")] == ["3"] * 3


def test_whole_runs_with_two_seeds_differ(tmp_path):
    size = {"num_envs": 4, "steps_per_batch": 64, "total_steps": 64}
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        train_here(PPO, PPOOptions(minibatch_size=32), folder, env_id="CartPole", seed=seed, **size)
    assert curve(tmp_path / "0") != curve(tmp_path / "1")
    assert np.isfinite(float(table(tmp_path / "0")[0]["kl"]))


@pytest.mark.parametrize(
    ("metrics", "weight", "said"),
    [
        (None, 0.0, "update must return a dict of name -> number, for the record: got None"),
        ({"loss": np.zeros(2)}, 0.0, "update must return a dict of name -> number"),
        ({"loss": None}, 0.0, "update must return a dict of name -> number"),
        ({"loss": "x,y"}, 0.0, "update must return a dict of name -> number"),
        ({"kl": "0.1"}, 0.0, "update must return a dict of name -> number"),
        (
            {**{f"metric_{i}": 0.1 for i in range(50)}, "loss": "none"},
            0.0,
            "for the record: got {'loss': 'none'}",
        ),
        ({1: 0.0}, 0.0, "update must return a dict of name -> number"),
        ({"a\nb": 0.0}, 0.0, "update must return a dict of name -> number"),
        ({"loss": 0.0}, np.nan, "'bias' holds nan: look for nan and inf in a loss of your own"),
        ({"loss": 0.0}, -np.inf, "'bias' holds inf"),
    ],
)
def test_what_an_update_leaves_is_checked(metrics, weight, said):
    learner = Learner(Leaves(metrics, weight), RunOptions(), Phases(), lambda: 0.0)
    with pytest.raises((TypeError, FloatingPointError), match=r"update|nan|inf") as info:
        learner.update(Gathered({}, {}, 0), 7)
    assert said in str(info.value)
    [note] = info.value.__notes__
    assert "iteration 7" in note


def test_weights_that_begin_infinite_may_stay_so():
    agent = Leaves({}, 1.0)
    learner = Learner(agent, RunOptions(), Phases(), lambda: 0.0)
    assert learner.update(Gathered({}, {}, 0), 1) == {}
    agent.mask[1] = np.nan
    with pytest.raises(FloatingPointError, match="'mask' holds nan"):
        learner.update(Gathered({}, {}, 0), 2)


class Leaves(NoiseAgent):
    """Returns these metrics from an update, and has this weight after it."""

    def __init__(self, metrics, weight):
        super().__init__()
        self.metrics, self.weight = metrics, weight
        self.bias, self.mask = np.zeros(2), np.array([0.0, -np.inf])

    def update(self, batch, rng, progress):
        self.bias[1] = self.weight
        return self.metrics

    def modules(self):
        return {"bias": self.bias, "mask": self.mask, "chosen": np.array([True])}
