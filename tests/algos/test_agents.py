"""What holds for every agent: the same curve on any number of ranks, exact resume, plain files."""

import ast
import itertools
import re
import shutil
import sys

import numpy as np
import pytest
from helpers.ranks import HERE, run
from helpers.runs import curve, resume_on_ranks, sha, table, train, train_on_ranks

from rank0rl.agent import Step
from rank0rl.envs.make import make
from rank0rl.envs.spaces import describe
from rank0rl.rollout import check_processed
from rank0rl.run.agents import load_agent

ALGOS = sorted(path.stem for path in (HERE.parent / "algos").glob("[a-z]*.py"))
SIZES = {
    "ppo": ["--hidden", "8"],
    "trpo": ["--hidden", "8"],
    "klppo": ["--hidden", "8", "8", "--epochs", "4"],
    "reinforce": ["--hidden", "8"],
    "cem": ["--population", "6"],
    "a2c": ["--hidden", "8"],
    "es": ["--hidden", "8"],
    "cmaes": ["--population", "6"],
    "bc": ["--hidden", "8", "--steps", "5", "--data", "data.npz"],
}
BATCHES = {"steps": ["--steps-per-batch", "60"], "episodes": ["--episodes-per-batch", "6"]}
FAST = {("trpo", "CartPole", "episodes"), ("es", "CartPole", "episodes")}
CASES = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
    for case in itertools.product(SIZES, ("CartPole", "Hopper"), BATCHES)
    if case[::2] not in [(algo, "steps") for algo in ("es", "cmaes", "cem")]  # they refuse them
]


def write_data(path, env):
    """Write a few observations and actions to clone; return the path."""
    rng = np.random.default_rng(0)
    obs, act = {
        "CartPole": (rng.random((40, 4)), rng.integers(2, size=40)),
        "Hopper": (rng.random((40, 11)), rng.random((40, 3))),
    }[env]
    np.savez(path, obs=obs, act=act)
    return str(path)


def test_every_agent_has_its_case():
    assert set(SIZES) == set(ALGOS)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("algo", "env", "mode"), CASES)
def test_the_same_for_every_number_of_ranks_and_resumed(algo, env, mode, tmp_path):
    data = write_data(tmp_path / "data.npz", env)
    sizes = [word.replace("data.npz", data) for word in SIZES[algo]]
    args = [env, "--algo", algo, "--num-envs", "6", "--seed", "3", *sizes]
    config = ["--config", str(tmp_path / "c.toml")]
    (tmp_path / "c.toml").write_text("")
    args += [*BATCHES[mode], *config, "-n", "1000", "--checkpoint-every", "2"]
    stop = "--stop-after-iterations"
    train(tmp_path / "1", *args, stop, "4")
    threads = "--learner-threads"
    train_on_ranks(tmp_path / "3", *args, stop, "4", threads, "4", nprocs=3)
    train_on_ranks(tmp_path / "resumed", *args, stop, "2", threads, "1", nprocs=2)
    resume_on_ranks(tmp_path / "resumed", stop, "4", threads, "2", nprocs=3)
    one = curve(tmp_path / "1")
    assert len({row["weights_sha256"] for row in one}) == 4
    for other in ("3", "resumed"):
        assert curve(tmp_path / other) == one
        assert sha(tmp_path / other) == sha(tmp_path / "1")


LEARNS = {
    "reinforce": (["--episodes-per-batch", "20", "--total-steps", "200000"], 1, 300),
    "cem": (["--episodes-per-batch", "40", "--num-envs", "40", "-n", "2000", "--overlap"], 2, 300),
    "es": (["--episodes-per-batch", "64", "-n", "1600"], 2, 150),
    "cmaes": (["--episodes-per-batch", "16", "-n", "800"], 1, 400),
}  # algo -> options, number of ranks, return that it reaches


@pytest.mark.slow
@pytest.mark.parametrize("algo", LEARNS)
def test_a_copied_agent_runs_unchanged_and_learns(algo, tmp_path):
    file = shutil.copy(HERE.parent / "algos" / f"{algo}.py", tmp_path / f"my_{algo}.py")
    args, nprocs, expected = LEARNS[algo]
    name = {"reinforce": "Reinforce"}.get(algo, algo.upper())
    train(
        *(tmp_path / "r", "CartPole", "--algo", f"{file}:{name}", *args),
        nprocs=nprocs,
    )
    assert float(table(tmp_path / "r")[-1]["return_mean"]) > expected


def tree(algo):
    return ast.parse((HERE.parent / "algos" / f"{algo}.py").read_text())


@pytest.mark.parametrize("algo", ALGOS)
def test_agents_have_their_sections_in_the_same_order(algo):
    """Options, class, __init__, act, process, update, what is its own, modules, state, load, mode."""
    order = ["__init__", "act", "process", "update", "modules", "state", "load", "mode"]
    options, agent = (node for node in tree(algo).body if isinstance(node, ast.ClassDef))
    assert options.bases[0].id in ("CheckedOptions", "NetworkOptions")
    assert [base.id for base in agent.bases] == ["Agent"]
    methods = [node.name for node in agent.body if isinstance(node, ast.FunctionDef)]
    found = [name for name in methods if name in order]
    assert found == (order[:-1] if algo == "cem" else order)


@pytest.mark.parametrize("algo", ALGOS)
def test_agents_know_nothing_of_ranks(algo):
    """What they may import is the layers test's; here are the names that they read and make."""
    words = {"mpi", "mpi4py", "rank", "ranks", "nprocs", "nworkers", "comm", "bcast", "gather"}
    named = {
        name
        for node in ast.walk(tree(algo))
        for field in ("id", "attr", "arg", "name", "module")
        if isinstance(name := getattr(node, field, None), str)
    }
    assert "update" in named
    assert [name for name in sorted(named) if words & set(re.split(r"[_.]", name))] == []


def test_a_missing_method_is_named(tmp_path):
    (tmp_path / "half.py").write_text(
        "from rank0rl import Agent\n"
        "class Half(Agent):\n"
        "    def __init__(self, spaces, options, rng): pass\n"
        "    def act(self, step): pass\n"
        "    def process(self, fragment): pass\n"
    )
    with pytest.raises(ValueError, match=r"Half has no update and no modules: expected update\(se"):
        load_agent(f"{tmp_path / 'half.py'}:Half")
    command = [sys.executable, "train.py", "CartPole", "--algo", f"{tmp_path / 'half.py'}:Half"]
    done = run([*command, "--nprocs", "2", "--run-dir", str(tmp_path / "r")])
    assert done.returncode == 2
    assert done.stderr.count("Half has no update") == 1


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ([1, 2], TypeError, r"process must return a dict .* got \[1, 2\]"),
        ({"obs": [1, 2]}, TypeError, r"process must return .* got \{'obs': \[1, 2\]\}"),
        ({"obs": np.float32(1)}, TypeError, "process must return a dict"),
        ({"a": np.ones(2), "b": np.ones(3)}, ValueError, "same number of rows: got {'a': 2, 'b'"),
    ],
)
def test_what_process_returns_is_checked(rows, error, said):
    with pytest.raises(error, match=said):
        check_processed(rows)


@pytest.mark.parametrize("algo", [*ALGOS, "examples/03_agent.py:MyA2C"])
def test_the_most_probable_actions_do_not_depend_on_the_noise(algo):
    kind = load_agent(algo)
    agent = kind(describe(make("CartPole-v1")), kind.Options(), np.random.default_rng(0))
    obs, ids = np.random.default_rng(1).standard_normal((9, 4), np.float32), np.arange(9)
    drawn = [np.full((9, agent.noise[1]), number) for number in (0.01, 0.99)]
    acts = [agent.act(Step(obs, noise, ids, explore=False))[0] for noise in drawn]
    np.testing.assert_array_equal(*acts)
