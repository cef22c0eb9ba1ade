"""The examples run, with the numbers of ranks and the output that they and the docs show."""

import ast
import importlib
import re
import runpy
import sys
from textwrap import dedent

import gymnasium as gym
import numpy as np
import pytest
from helpers import forks
from helpers.ranks import HERE, on_ranks, typed
from helpers.runs import mean_return, needs_onnx, train_here

import rank0rl
from rank0rl.algos.ppo import PPO, PPOOptions

ROOT = HERE.parent
EXAMPLES = ROOT / "examples"
RANKS = {
    "01_hello": 5,
    "02_point_to_point": 9,
    "03_broadcast": 10,
    "04_scatter": 10,
    "05_gather": 5,
    "06_reduce": 3,
    "07_allreduce": 3,
    "08_fork": 4,
}
LINE = r"iteration (\d+)  return (\S+)"

# Example -> what it prints in the end, and the least number that is printed there.
NUMBERED = {
    "01_train": (r"mean return of 10 new episodes: (\d+)", 150),
    "02_environment": (r"success: (\S+)", 0.9),
    "03_agent": (r"return +(\S+)  mean of the last 100 episodes", 80),
    "04_network": (r"return +(\S+)  mean of the last 100 episodes", 60),
    "05_memory": (r"remembered in (\d+)% of the last 100 episodes", 80),
    "06_curriculum": (r"distance: (\d+)", 20),
    "07_study": (r"\| CartPole-v1 \| reinforce lr=0.03 \| 2 \| (\S+) .*", 40),
    "08_script": (LINE.replace(r"(\d+)", r"\d+"), 40),
    "08_script_ranks": (LINE.replace(r"(\d+)", r"\d+"), 40),
    "09_several_machines": (r"return +(\S+)  mean of the last 100 episodes", 60),
    "10_export": (r"return with ONNX Runtime: (\d+)", 150),
}


def doc(path):
    """Return the docstring of a file."""
    return ast.get_docstring(ast.parse(path.read_text()))


def shown(name):
    """The command and the output in an example's docstring."""
    text = doc(EXAMPLES / "mpi" / f"{name}.py")
    command, output = [dedent(part) for part in text.split("\n\n") if part.startswith("    ")]
    return command, output


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", RANKS)
def test_an_mpi_example_prints_what_it_says(name):
    command, output = shown(name)
    start = "" if name == "08_fork" else f"mpiexec -n {RANKS[name]} "
    assert command == f"{start}python examples/mpi/{name}.py"
    lines = typed(command, env={"PYTHONUNBUFFERED": "1"})  # as in many containers
    assert sorted(lines) == sorted(output.splitlines())


def test_every_mpi_example_is_in_the_docs_as_it_is():
    assert sorted(RANKS) == sorted(path.stem for path in (EXAMPLES / "mpi").glob("*.py"))
    page = (ROOT / "docs" / "learn-mpi.md").read_text()
    for name in RANKS:
        for block in shown(name):
            assert f"\n```\n{block}\n```\n" in page, f"docs/learn-mpi.md, {name}: {block}"


def test_the_fork_example_imports_mpi_before_it_forks():
    text = (EXAMPLES / "mpi" / "08_fork.py").read_text()
    assert text.index("from mpi4py import MPI") < text.index("rank0rl.mpi_fork(4)")


def test_the_numbered_examples_are_short_and_in_the_docs():
    found = {path.stem: path for path in sorted(EXAMPLES.glob("[0-9]*.py"))}
    assert [*found] == [*NUMBERED]
    assert {name[:2] for name in found} == {f"{n:02}" for n in range(1, 11)}
    page = (ROOT / "docs" / "examples.md").read_text()
    for name, path in found.items():
        assert len(path.read_text().splitlines()) < 80, name
        assert f'--8<-- "examples/{name}.py"' in page, name
        assert f"\n| `{name}.py` |" in page, name
        assert f"\n    python examples/{name}.py" in doc(path), name


@pytest.fixture(params=NUMBERED)
def name(request):
    if request.param == "10_export":
        needs_onnx()
    return request.param


def test_a_numbered_example_can_be_imported(name):
    importlib.import_module(f"examples.{name}")


@pytest.mark.slow
def test_a_numbered_example_runs(name, tmp_path):
    lines = typed(f"python {EXAMPLES}/{name}.py", cwd=tmp_path)
    pattern, least = NUMBERED[name]
    found = [match[1] for line in lines if (match := re.fullmatch(pattern, line))]
    assert found, lines
    assert float(found[-1]) >= least, lines


@pytest.mark.slow
def test_the_agent_of_the_example_keeps_the_curve():
    done = forks.run("-m", "rank0rl", "check", "CartPole", "--algo", "examples/03_agent.py")
    assert done.returncode == 0, done.stdout
    assert "the same curve for every number of ranks: yes" in done.stdout


def on_rank_script():
    """Train as a rank, and return what was seen of each step."""
    script = importlib.import_module("examples.08_script_ranks")
    seen = {"updates": [], "obs": [], "mine": [], "nets": []}
    collect, update = script.collect, script.update

    def collect_(env, net, *args):
        seen["nets"].append(rank0rl.chksum(net))  # raises if ranks differ
        rows = collect(env, net, *args)
        seen["mine"].append(rows["obs"].tolist())
        return rows

    def update_(net, adam, batch, device):
        seen["updates"].append(len(batch["act"]))
        seen["obs"].append(batch["obs"].tolist())
        update(net, adam, batch, device)

    script.collect, script.update = collect_, update_
    sys.argv = ["08_script_ranks.py", "--nprocs", "2", "--iterations", "2", "--steps", "100"]
    try:
        script.main()
    finally:
        script.collect, script.update = collect, update
    return seen


def test_the_eight_edits_do_what_they_say():
    first, second = on_ranks(2, "test_examples:on_rank_script")
    assert second["updates"] == []  # edit 7
    assert first["mine"][0] != second["mine"][0]  # edit 4
    assert min(len(rows) for rows in first["mine"] + second["mine"]) >= 50  # half of the steps
    both = [mine + other for mine, other in zip(first["mine"], second["mine"], strict=True)]
    assert first["obs"] == both  # edit 6: rank 0's rows, then rank 1's
    assert first["updates"] == [len(rows) for rows in both]
    assert first["nets"] == second["nets"]  # edit 8, before the first rollout too
    assert len(set(first["nets"])) == 2


@pytest.mark.slow
def test_the_eight_edits_print_each_line_once():
    short = "--nprocs 2 --iterations 2 --steps 100"
    training, *iterations = typed(f"python examples/08_script_ranks.py {short}")
    assert training.startswith("training on c")  # edit 5: cpu, or cuda
    assert [re.fullmatch(LINE, line)[1] for line in iterations] == ["0", "1"]


def test_the_docs_show_each_step_as_it_is_in_the_file():
    page = (ROOT / "docs" / "own-script.md").read_text()
    lines = (EXAMPLES / "08_script_ranks.py").read_text().splitlines()
    rows = re.findall(r"^\| (\d) \| (.*?) \|", page, re.M)
    assert [number for number, _ in rows] == list("12345678")
    for number, shown_code in rows:
        for code in re.findall(r"`(.+?)`", shown_code):
            assert any(code in line and f"# edit {number}" in line for line in lines), code


@pytest.mark.parametrize("page", ["own-script", "drop-in"])
def test_the_code_on_a_page_compiles_and_has_names_that_exist(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert blocks
    for block in blocks:
        compile(block, page, "exec")
    assert set(re.findall(r"rank0rl\.(\w+)", text)) <= {*rank0rl.__all__, "compat", "mpi"}


class Two:
    """A parallel environment as PettingZoo's are: agent a is gone after one step, b is cut off after three."""

    possible_agents = ("a", "b")

    def observation_space(self, agent):
        return gym.spaces.Box(-9, 9, (2,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(3, start=4)

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, ["a", "b"]
        return {agent: np.full(2, seed % 7, np.float32) for agent in self.agents}, {}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        assert all(4 <= action <= 6 for action in actions.values())
        self.t += 1
        moved, self.agents = self.agents, ["b"] if self.t < 3 else []
        obs = {agent: np.full(2, self.t, np.float32) for agent in moved}
        over = {agent: agent == "a" for agent in moved}
        cut = {agent: agent == "b" and self.t == 3 for agent in moved}
        return obs, dict.fromkeys(moved, 1.5), over, cut, {}

    def close(self):
        pass


parallel_env = Two


def test_one_policy_moves_all_agents(tmp_path):
    env = runpy.run_path("examples/all_agents.py")["make"]("test_examples")
    env.reset(seed=3)
    act = {"a": 5, "b": 4}
    got = [env.step(act) for _ in range(3)]
    assert [rew for _, rew, *_ in got] == [3.0, 1.5, 1.5]
    assert [(over, cut) for _, _, over, cut, _ in got] == [(False, False)] * 2 + [(False, True)]
    assert [obs["a"].tolist() for obs, *_ in got] == [[1, 1], [0, 0], [0, 0]]
    size = {"num_envs": 2, "steps_per_batch": 16, "total_steps": 32}
    kwargs = {"env_id": "examples.all_agents:make", "env_kwargs": {"module": "test_examples"}}
    _, recorder = train_here(PPO, PPOOptions(hidden=(8,)), tmp_path, **kwargs, **size)
    assert recorder.state.progress.iteration == 2
    assert mean_return(recorder) == 6.0
