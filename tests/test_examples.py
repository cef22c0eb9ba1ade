"""The examples run, with the numbers of ranks and the output that they and the docs show."""

import ast
import importlib.util
import re
import runpy
import shlex
import sys
from textwrap import dedent
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from in_process import mean_return, train_here
from on_ranks import HERE, on_ranks, typed

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


SHORT = "--iterations 2 --steps-per-batch 256 --epochs 2"
LEARNS = "--iterations 16 --seed 3"
LINE = r"iteration (\d+)  return (\S+)  steps/s \d+"


def shown(name):
    """The command and the output in an example's docstring."""
    text = ast.get_docstring(ast.parse((EXAMPLES / "mpi" / f"{name}.py").read_text()))
    command, output = [dedent(part) for part in text.split("\n\n") if part.startswith("    ")]
    return command, output


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


def loaded(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def serial():
    return loaded("ppo_serial")


def iterations(lines):
    """The mean return of each iteration; nothing but iterations is printed, each once."""
    found = [re.fullmatch(LINE, line).groups() for line in lines]
    assert [int(i) for i, _ in found] == list(range(len(found)))
    assert len(found) > 1
    return [float(ret) for _, ret in found]


IN_ONE_PROCESS = """
import runpy, sys
sys.argv[1:] = {args}
for name in ("serial", "ranks", "averaged"):
    runpy.run_path(f"examples/ppo_{{name}}.py", run_name="__main__")
print("mpi4py" in sys.modules)
"""


def test_ppo_in_one_file_runs_in_one_process_without_mpi():
    code = IN_ONE_PROCESS.format(args=SHORT.split())
    *lines, mpi = typed(f"python -c {shlex.quote(code)}")
    for start in (0, 2, 4):
        assert all(9 <= ret <= 256 for ret in iterations(lines[start : start + 2]))
    assert mpi == "False"


@pytest.mark.parametrize("name", ["ppo_ranks", "ppo_averaged"])
def test_ppo_in_one_file_runs_on_two_ranks(name):
    returns = iterations(typed(f"python examples/{name}.py --nprocs 2 {SHORT}"))
    assert all(9 <= ret <= 256 for ret in returns)


def on_rank_ppo():
    """Train as a rank, and what was seen of each step."""
    ppo = loaded("ppo_ranks")
    seen = {"updates": [], "first": [], "obs": [], "nets": []}
    collect, update = ppo.collect, ppo.update

    def collect_(env, net, now, steps, args):
        seen["nets"].append(rank0rl.chksum(net))  # raises if ranks differ
        rows, now = collect(env, net, now, steps, args)
        seen["first"].append(rows["obs"][0].tolist())
        return rows, now

    def update_(net, adam, batch, args):
        seen["updates"].append(len(batch["obs"]))
        seen["obs"].append(batch["obs"][::128].tolist())
        update(net, adam, batch, args)

    ppo.collect, ppo.update = collect_, update_
    sys.argv = ["ppo_ranks.py", "--nprocs", "2", *SHORT.split()]
    ppo.main()
    return seen


def test_the_eight_steps_do_what_they_say():
    first, second = on_ranks(2, "test_examples:on_rank_ppo")
    assert first["updates"] == [256, 256]
    assert second["updates"] == []  # step 7
    assert first["first"][0] != second["first"][0]  # step 4
    both = [list(rows) for rows in zip(first["first"], second["first"], strict=True)]
    assert first["obs"] == both  # step 6: rank 0's rows, then rank 1's
    assert first["nets"] == second["nets"]  # step 8, before the first rollout too
    assert len(set(first["nets"])) == 2


def drawn_batch(net, n):
    """Rows to learn from, in which the policy that acted was another one than net."""
    import torch

    rng = np.random.default_rng(0)
    obs = rng.normal(1, 3, (n, 4)).astype(np.float32)
    act = rng.integers(2, size=n)
    with torch.no_grad():
        logp = net.policy(torch.as_tensor(obs)).log_prob(torch.as_tensor(act)).numpy()
    adv, ret = (rng.normal(0, 5, (2, n)) + obs[:, 0]).astype(np.float32)
    return {"obs": obs, "act": act, "logp": logp + 0.1 * rng.normal(size=n), "adv": adv, "ret": ret}


def updated(ppo, rank, nworkers, steps=2):
    """Weights before and after gradient steps, each on all rows, of which this rank has a share."""
    import torch

    torch.manual_seed(0)
    net = ppo.ActorCritic(ppo.make_env("CartPole-v1"))
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-5)
    whole = drawn_batch(net, 600)
    mine = {key: x[rank::nworkers] for key, x in whole.items()}
    before = torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    args = SimpleNamespace(epochs=steps, minibatch_size=600, clip_ratio=0.2)
    ppo.update(net, adam, mine, args)
    after = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    return before, after, [x.tolist() for x in net.buffers()]


def on_rank_averaged():
    """One update of shares of known rows; then train, and count the gradient steps."""
    import torch

    ppo = loaded("ppo_averaged")
    _, after, scales = updated(ppo, rank0rl.rank, rank0rl.nworkers)
    nets, steps, first = [], [], []
    collect, step = ppo.collect, torch.optim.Adam.step

    def collect_(env, net, now, n, args):
        nets[:] = [net]
        steps.append(0)
        rows, now = collect(env, net, now, n, args)
        first.append(rows["obs"][0].tolist())
        return rows, now

    def step_(adam):
        steps[-1] += 1
        return step(adam)

    ppo.collect, torch.optim.Adam.step = collect_, step_
    sys.argv = ["ppo_averaged.py", "--nprocs", "2", *SHORT.split()]
    ppo.main()
    weights = [x.tolist() for x in (*nets[0].parameters(), *nets[0].buffers())]
    return {"after": after.tolist(), "scales": scales, "steps": steps, "first": first} | {
        "weights": weights
    }


def test_averaged_gradients_are_those_of_all_rows_and_keep_ranks_equal(serial):
    first, second = on_ranks(2, "test_examples:on_rank_averaged")
    before, after, scales = updated(serial, 0, 1)
    change = (after - before).abs()
    assert change.max() > 1e-3  # lr: the comparison below is of something
    assert first["after"] == second["after"]
    # Adam divides by the size of gradients, so that all that matters is below a step of lr = 1e-3.
    np.testing.assert_allclose(first["after"], after.numpy(), rtol=0, atol=2e-5)
    for mine, theirs in zip(first["scales"], scales, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert first["first"][0] != second["first"][0]  # each has its own episodes
    assert first["steps"] == second["steps"] == [8, 8]  # 2 epochs of 128 / 32 minibatches
    assert first["weights"] == second["weights"]


def test_the_docs_show_each_step_as_it_is_in_the_file():
    page = (ROOT / "docs" / "eight-steps.md").read_text()
    lines = (EXAMPLES / "ppo_ranks.py").read_text().splitlines()
    rows = re.findall(r"^\| (\d) \| (.*?) \|", page, re.M)
    assert [number for number, _ in rows] == list("12345678")
    for number, shown_code in rows:
        for code in re.findall(r"`(.+?)`", shown_code):
            assert any(code in line and f"# step {number}" in line for line in lines), code


@pytest.mark.parametrize("page", ["eight-steps", "drop-in"])
def test_the_code_on_a_page_compiles_and_has_names_that_exist(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert blocks
    for block in blocks:
        compile(block, page, "exec")
    assert set(re.findall(r"rank0rl\.(\w+)", text)) <= {*rank0rl.__all__, "compat", "mpi"}


def test_the_advantages_are_those_of_a_plain_sum(serial):
    rng = np.random.default_rng(0)
    T, gamma, lam = 9, 0.9, 0.8
    rew, val, next_val = rng.standard_normal((3, T))
    end = np.isin(np.arange(T), [3, 4, T - 1])
    delta = rew + gamma * next_val - val
    expected = np.zeros(T)
    for t in range(T):
        for k in range(t, T):
            expected[t] += (gamma * lam) ** (k - t) * delta[k]
            if end[k]:
                break
    adv = serial.gae(rew, val, next_val, end, gamma, lam)
    np.testing.assert_allclose(adv, expected)


def test_the_scale_is_that_of_all_rows(serial):
    import torch

    rows, scale = torch.randn(50, 3) * 4 + 1, serial.Scale(3)
    for part in rows.split([1, 30, 19]):
        scale.merge(part)
    torch.testing.assert_close(scale.mean, rows.mean(0))
    torch.testing.assert_close(scale.std(), rows.std(0, correction=0))


def test_what_is_cut_off_has_a_value_and_what_terminates_has_none(serial):
    """Eight steps of episodes of three, the first of them cut off, the second not, the third by the batch."""
    import gymnasium as gym
    import torch

    class Three(gym.Env):
        """Episodes of three steps, which are cut off and terminate in turn."""

        observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
        action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        episodes = 0

        def reset(self, seed=None, options=None):
            self.t, self.episodes = 0, self.episodes + 1
            return np.zeros(1, np.float32), {}

        def step(self, act):
            assert self.action_space.contains(act)
            self.t += 1
            end = self.t == 3
            cut = self.episodes % 2 == 1
            return np.full(1, self.t, np.float32), 1.0, end and not cut, end and cut, {}

    gym.register("rank0rl/Three-v0", Three)
    env = serial.make_env("rank0rl/Three-v0")
    net = serial.ActorCritic(env)
    args = SimpleNamespace(gamma=0.5, lam=0.8)
    now, _ = env.reset()
    rows, now = serial.collect(env, net, now, 8, args)
    with torch.no_grad():
        at = net.value(torch.arange(4.0)[:, None]).numpy()
    assert rows["obs"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    val = at[[0, 1, 2, 0, 1, 2, 0, 1]]
    next_val = np.array([at[1], at[2], at[3], at[1], at[2], 0, at[1], at[2]])
    end = np.array([0, 0, 1, 0, 0, 1, 0, 1], bool)
    adv = serial.gae(np.ones(8), val, next_val, end, args.gamma, args.lam)
    np.testing.assert_allclose(rows["adv"], adv, rtol=1e-5)
    np.testing.assert_allclose(rows["ret"], adv + val, rtol=1e-5)
    assert rows["returns"].tolist() == [3, 3]
    assert now.tolist() == [2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["ppo_serial.py", "ppo_ranks.py --nprocs 2", "ppo_averaged.py --nprocs 2"]
)
def test_ppo_in_one_file_learns(command):
    returns = iterations(typed(f"python examples/{command} {LEARNS}"))
    assert max(returns) > 450, returns


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
