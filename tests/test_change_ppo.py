"""The examples of docs/change-ppo.md: each edit has its effect, and one curve on any number of ranks."""

import importlib
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.ranks import HERE
from helpers.runs import curve, resume_on_ranks, sha, table, train, train_here, train_on_ranks

from examples.kl_penalty import KLPenalty
from examples.lagrange import Lagrange
from examples.rnd import RND
from examples.spo import SPO
from examples.symmetry import Symmetry
from rank0rl.agent import Fragment, Space, Spaces
from rank0rl.algos.ppo import PPO
from rank0rl.run.agents import load_agent

DOCS = HERE.parent / "docs"
PAGE, UPDATES = DOCS / "change-ppo.md", DOCS / "updates.md"
LOSS = "compiled, loss by torch (closed_form is of another loss)"
OWN_NETWORK = "by autograd (the loss depends on weights besides its arguments)"
HOW = {  # example -> how the page says that its updates are computed
    "spo": LOSS,
    "kl_penalty": LOSS,
    "lagrange": "compiled",
    "rnd": "compiled",
    "symmetry": OWN_NETWORK,
}
SMALL = ["Pendulum", "--num-envs", "4", "--steps-per-batch", "128", "--total-steps", "512"]
LAGRANGE = "examples.lagrange:Lagrange"
ENVS = {"lagrange": "examples.lagrange:make"}  # where it is not Pendulum
SPACES = Spaces(
    Space("box", (3,), "float32"),
    Space("box", (1,), "float32", low=-np.ones(1, "f"), high=np.ones(1, "f")),
)


def made(of, **options):
    return of(SPACES, of.Options(**options), np.random.default_rng(0))


def trained(of, folder, env_id="Pendulum", algo="ppo", total_steps=512, seed=0, **options):
    """Return the agent and the recorder of a short run."""
    folder.mkdir()
    size = {"num_envs": 4, "steps_per_batch": 128, "total_steps": total_steps, "seed": seed}
    return train_here(of, of.Options(**options), folder, env_id=env_id, algo=algo, **size)


def fragment(seed=0, T=20):
    rng = np.random.default_rng(seed)
    obs, act = (rng.standard_normal((T, n), dtype="f") for n in (3, 1))
    flags, end = np.zeros(T, bool), np.array([T - 1])
    extras = {"cost": rng.random(T)}
    return Fragment(0, obs, act, rng.standard_normal(T), flags, flags, end, obs[-1:], extras)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOW)
def test_one_hash_on_one_rank_and_stopped_and_resumed_on_two(name, tmp_path):
    whole, parts = tmp_path / "1", tmp_path / "2"
    args = [ENVS.get(name, SMALL[0]), *SMALL[1:], "--algo", f"examples/{name}.py"]
    done = train(whole, *args)
    assert f"updates: {HOW[name]}\n" in done.stdout
    train_on_ranks(parts, *args, "--stop-after-iterations", "2", nprocs=2)
    resume_on_ranks(parts, nprocs=2)
    assert curve(parts) == curve(whole)
    assert sha(parts) == sha(whole)


@pytest.mark.parametrize("name", HOW)
def test_the_page_has_each_example_its_command_and_what_the_console_says(name):
    doc = importlib.import_module(f"examples.{name}").__doc__
    command = re.search(r"^ {4}(python .*)$", doc, re.M)[1]
    section = re.search(
        rf"^## (?:(?!^## ).)*examples/{name}\.py.*?(?=^## |\Z)", PAGE.read_text(), re.M | re.S
    )
    assert section, name
    assert f"\n{command}\n" in section[0]
    assert f"`updates: {HOW[name]}`" in section[0]
    assert f'--8<-- "examples/{name}.py"' in section[0]


def test_spo_has_its_best_ratio_at_the_limit_and_pulls_back_what_is_beyond():
    ratio = torch.tensor([1.1, 1.2, 1.5, 0.9, 0.8, 0.5])
    adv = torch.tensor([2.0, 2.0, 2.0, -3.0, -3.0, -3.0])
    log_ratio = ratio.log().requires_grad_()
    rows = {"adv": adv, "ret": torch.zeros(6)}
    loss = made(SPO).loss(log_ratio, torch.zeros(()), torch.full((6,), 2.0), rows)
    objective = ratio * adv - adv.abs() / 0.4 * (ratio - 1) ** 2
    torch.testing.assert_close(loss, 0.5 * 4 - objective.mean())
    (slope,) = torch.autograd.grad(loss, log_ratio)
    assert (slope * adv).round(decimals=4).sign().tolist() == [-1, 0, 1, -1, 0, 1]


@pytest.mark.slow  # the compiler runs
def test_the_closed_form_on_the_page_is_that_of_spo(tmp_path):
    [code] = re.findall(r"^```python\n(import numpy.*?)^```$", UPDATES.read_text(), re.M | re.S)
    (tmp_path / "closed.py").write_text(code)
    words = [*SMALL, "--normalize", "minibatch", "--algo", f"{tmp_path / 'closed.py'}:CompiledSPO"]
    done = train(tmp_path / "run", *words)
    assert "updates: compiled\n" in done.stdout


def test_the_huber_loss_on_the_page_is_ppos_near_0_and_a_line_beyond_one_deviation(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    [code] = [block for block in blocks if "class Huber" in block]
    (tmp_path / "huber.py").write_text(code)
    huber, ppo = made(load_agent(f"{tmp_path / 'huber.py'}"), entropy_coef=0.1), made(PPO)
    log_ratio = torch.tensor([0.5, -0.5])
    for error, more in ((0.9, -0.1 * 2), (3.0, -0.1 * 2 - 0.5 * (3**2 - (2 * 3 - 1)))):
        value, rows = torch.full((2,), error), {"adv": torch.ones(2), "ret": torch.zeros(2)}
        given = log_ratio, torch.tensor(2.0), value, rows
        torch.testing.assert_close(huber.loss(*given), ppo.loss(*given) + more)


def test_a_kl_penalty_keeps_the_policy_near_and_a_weight_of_0_is_ppo(tmp_path):
    ways = {"ppo": (PPO, {}), "none": (KLPenalty, {"kl_coef": 0.0})}
    ways["much"] = (KLPenalty, {"kl_coef": 100.0})
    for name, (of, options) in ways.items():
        trained(of, tmp_path / name, lr=1e-2, **options)
    kl = {name: [float(row["kl"]) for row in table(tmp_path / name)] for name in ways}
    assert kl["none"] == kl["ppo"]
    assert kl["much"][-1] < kl["none"][-1] / 5


def test_a_multiplier_takes_the_cost_from_the_rewards_and_moves_towards_the_limit(tmp_path):
    agent, some = made(Lagrange), fragment()
    agent.multiplier[:] = 3
    rows = agent.process(some)
    np.testing.assert_array_equal(rows["cost"], some.extras["cost"])
    expected = made(PPO).process(replace(some, rew=some.rew - 3 * some.extras["cost"]))
    np.testing.assert_allclose(rows["adv"], expected["adv"], rtol=1e-5)

    limit = {"cost_limit": 0.5, "multiplier_lr": 2.0}
    trained(Lagrange, tmp_path / "run", ENVS["lagrange"], LAGRANGE, **limit)
    rows = table(tmp_path / "run")
    cost, multiplier = ([float(row[key]) for row in rows] for key in ("cost", "multiplier"))
    assert multiplier[0] == 0
    for i, now in enumerate(multiplier[1:]):
        assert now == pytest.approx(max(0, multiplier[i] + 2 * (cost[i] - 0.5)), rel=1e-4)
    assert max(multiplier) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_limit_on_a_cost_is_met_and_the_return_is_the_best_within_it(seed, tmp_path):
    limit = {"cost_limit": 0.25, "multiplier_lr": 0.2, "lr": "linear:3e-3:1e-4", "gamma": 0.0}
    trained(Lagrange, tmp_path / "run", "helpers.envs:Toll-v0", LAGRANGE, 20_000, seed, **limit)
    last = table(tmp_path / "run")[-20:]
    cost = np.mean([float(row["cost"]) for row in last])
    rew = np.mean([float(row["return_mean"]) / 10 for row in last])
    assert 0.24 < cost < 0.26
    assert -0.26 < rew < -0.24  # at best -0.25: the reward is -(a - 1)^2, the cost a^2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_curiosity_finds_what_ppo_does_not(seed, tmp_path):
    size = {"env_id": "helpers.envs:Doors-v0", "num_envs": 8, "steps_per_batch": 1024}
    size |= {"total_steps": 80_000, "seed": seed}
    means = []
    for of, more in ((RND, {"bonus_coef": 0.3}), (PPO, {})):
        folder = tmp_path / of.__name__
        folder.mkdir()
        train_here(of, of.Options(log_std=-1.0, gamma=0.995, **more), folder, **size)
        means.append(float(table(folder)[-1]["return_mean"]))
    assert means[0] > 5  # of 6
    assert means[1] < 0.5


def test_the_bonus_is_in_the_rewards_and_falls_where_the_agent_has_been():
    agent, seen, new = made(RND, bonus_lr=1e-2), fragment(0, 200), fragment(1, 200)
    new.obs += 3
    error = agent.process(seen)["error"]
    expected = made(PPO).process(replace(seen, rew=seen.rew + error))
    np.testing.assert_allclose(agent.process(seen)["ret"], expected["ret"], rtol=1e-3, atol=1e-3)
    agent.prepare()
    for i in range(8):
        agent.update(agent.process(seen), np.random.default_rng(i), 0.0)
    assert agent.process(seen)["error"].mean() < error.mean() / 5
    assert agent.process(new)["error"].mean() > 5 * agent.process(seen)["error"].mean()


def test_a_symmetry_loss_makes_the_policy_symmetric(tmp_path):
    obs, off = fragment(T=200).obs, []
    for coef in (0.0, 10.0):
        agent = trained(Symmetry, tmp_path / str(coef), lr=3e-3, symmetry_coef=coef)[0]
        mean, mirrored = (
            agent.policy.mlp.numpy(agent.norm.numpy(x))
            for x in (obs, obs * np.float32([1, -1, -1]))
        )
        off.append(np.square(mean + mirrored).mean() / np.square(mean - mirrored).mean())
    assert off[1] < off[0] / 3
