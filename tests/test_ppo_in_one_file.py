"""PPO in one file, with gathered rows and with averaged gradients: it runs, computes what it says, and learns."""

import importlib.util
import re
import shlex
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.ranks import HERE, on_ranks, typed

import rank0rl

EXAMPLES = HERE.parent / "examples"
SHORT = "--iterations 2 --steps-per-batch 256 --epochs 2"
LEARNS = "--iterations 16 --seed 3"
LINE = r"iteration (\d+)  return (\S+)  steps/s \d+"


def loaded(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gathered():
    return loaded("ppo_gathered")


def iterations(lines):
    """The mean return of each iteration; nothing but iterations is printed, each once."""
    found = [re.fullmatch(LINE, line).groups() for line in lines]
    assert [int(i) for i, _ in found] == list(range(len(found)))
    assert len(found) > 1
    return [float(ret) for _, ret in found]


IN_ONE_PROCESS = """
import runpy, sys
sys.argv[1:] = {args}
for name in ("gathered", "averaged"):
    runpy.run_path(f"examples/ppo_{{name}}.py", run_name="__main__")
print("mpi4py" in sys.modules)
"""


@pytest.mark.slow
def test_ppo_in_one_file_runs_in_one_process_without_mpi():
    code = IN_ONE_PROCESS.format(args=SHORT.split())
    *lines, mpi = typed(f"python -c {shlex.quote(code)}")
    for start in (0, 2):
        assert all(9 <= ret <= 256 for ret in iterations(lines[start : start + 2]))
    assert mpi == "False"


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


def test_averaged_gradients_are_those_of_all_rows_and_keep_ranks_equal(gathered):
    first, second = on_ranks(2, "test_ppo_in_one_file:on_rank_averaged")
    before, after, scales = updated(gathered, 0, 1)
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


def test_the_advantages_are_those_of_a_plain_sum(gathered):
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
    adv = gathered.gae(rew, val, next_val, end, gamma, lam)
    np.testing.assert_allclose(adv, expected)


def test_the_scale_is_that_of_all_rows(gathered):
    import torch

    rows, scale = torch.randn(50, 3) * 4 + 1, gathered.Scale(3)
    for part in rows.split([1, 30, 19]):
        scale.merge(part)
    torch.testing.assert_close(scale.mean, rows.mean(0))
    torch.testing.assert_close(scale.std(), rows.std(0, correction=0))


def test_what_is_cut_off_has_a_value_and_what_terminates_has_none(gathered):
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
    env = gathered.make_env("rank0rl/Three-v0")
    net = gathered.ActorCritic(env)
    args = SimpleNamespace(gamma=0.5, lam=0.8)
    now, _ = env.reset()
    rows, now = gathered.collect(env, net, now, 8, args)
    with torch.no_grad():
        at = net.value(torch.arange(4.0)[:, None]).numpy()
    assert rows["obs"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    val = at[[0, 1, 2, 0, 1, 2, 0, 1]]
    next_val = np.array([at[1], at[2], at[3], at[1], at[2], 0, at[1], at[2]])
    end = np.array([0, 0, 1, 0, 0, 1, 0, 1], bool)
    adv = gathered.gae(np.ones(8), val, next_val, end, args.gamma, args.lam)
    np.testing.assert_allclose(rows["adv"], adv, rtol=1e-5)
    np.testing.assert_allclose(rows["ret"], adv + val, rtol=1e-5)
    assert rows["returns"].tolist() == [3, 3]
    assert now.tolist() == [2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["ppo_gathered.py", "ppo_gathered.py --nprocs 2", "ppo_averaged.py --nprocs 2"],
)
def test_ppo_in_one_file_learns(command):
    returns = iterations(typed(f"python examples/{command} {LEARNS}"))
    assert max(returns) > 450, returns
