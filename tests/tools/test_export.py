"""Policies in files that PyTorch or ONNX Runtime loads without rank0rl."""

import dataclasses
import sys
import textwrap

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import forks
from helpers.agents import AGENTS
from helpers.envs import ACT_SPACES
from helpers.ranks import HERE, run
from helpers.runs import SMALL, needs_onnx, train

from rank0rl.agent import Step
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.envs import make as envs
from rank0rl.envs import spaces
from rank0rl.policy import load
from rank0rl.tools import export as export_tool
from rank0rl.tools.export import _exported, export, main


def untrained(algo, env, **changed):
    """Make an agent whose weights and statistics are large enough to reach every bound and choice."""
    agent_class, options = AGENTS[algo]
    rng = np.random.default_rng(0)
    options = dataclasses.replace(options, **changed)
    agent = agent_class(spaces.describe(env), options, rng)
    with torch.no_grad():
        agent.policy.mlp.weights[-1].mul_(200)
        for bias in agent.policy.mlp.biases:
            bias.copy_(torch.from_numpy(rng.normal(0, 0.3, bias.shape)))
    if algo != "reinforce":
        agent.norm.merge(observations(env, 50))
    return agent


def observations(env, n):
    dtype = spaces.describe(env).obs.dtype
    return np.stack([env.observation_space.sample() for _ in range(n)]).astype(dtype)


def in_numpy(agent, env, obs, mask=None):
    """Return the most probable actions, computed in NumPy."""
    space = spaces.describe(env).act
    if not space.choices:
        noise = np.zeros((len(obs), space.size), np.float32)
        act, _ = agent.act(Step(obs, noise, np.arange(len(obs))))
        return np.clip(act, space.low, space.high)
    flat = obs.reshape(len(obs), -1).astype(np.float32)
    logits = agent.policy.mlp.numpy(agent.norm.numpy(obs) if hasattr(agent, "norm") else flat)
    if mask is not None:
        logits[~mask] = -np.inf
    best = np.stack(
        [logits[:, columns].argmax(axis=1) for columns in space.choice_slices()], axis=1
    )
    return spaces.to_env(best.reshape(-1, *space.shape), space)


CASES = [("ppo", "box", act) for act in ACT_SPACES]
CASES += [("ppo", obs, "box") for obs in ("box2d", "image", "scalar", "multi", "dict")]
CASES += [("trpo", "box", "multi"), ("klppo", "box", "box"), ("reinforce", "scalar", "discrete")]


@pytest.mark.fast(8)
@pytest.mark.parametrize(("algo", "obs", "act"), CASES)
def test_actions_are_those_of_the_numpy_path(algo, obs, act):
    env = envs.make("helpers.envs:Spaced-v0", obs=obs, act=act)
    env.observation_space.seed(0)
    agent = untrained(algo, env)
    program = _exported(agent, env)
    assert not program.constants  # weights are parameters, and there once
    policy = program.module()
    for n in (1, 7, 300):
        obs = observations(env, n)
        expected = in_numpy(agent, env, obs)
        got = policy(torch.from_numpy(obs)).numpy()
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert np.allclose(got, expected, atol=1e-5)
    if act == "box":
        assert (abs(got) == 0.5).any()
        assert (abs(got) < 0.5).any()
    if act == "discrete":
        assert set(got) == {-1, 0, 1}
    if act == "multi":
        assert got.min(axis=0).tolist() == [1, 0]
        assert got.max(axis=0).tolist() == [3, 1]
    agent.flat.check(agent.policy)  # the agent can go on learning
    assert all(p.requires_grad for p in agent.policy.parameters())


def test_choices_beside_floats_are_numbered_as_the_environment_numbers_them():
    choices, floats = gym.spaces.Discrete(3, start=5), gym.spaces.Box(-1, 1, (2,))
    env = envs.make("helpers.envs:Spaced-v0", obs="box")
    env.unwrapped.action_space = gym.spaces.Tuple((choices, floats))
    env = spaces.flatten(env.unwrapped)
    agent = PPO(spaces.describe(env), PPOOptions(hidden=(8,)), np.random.default_rng(0))
    obs = observations(env, 30)
    got = _exported(agent, env).module()(torch.from_numpy(obs)).numpy()
    step = Step(obs, np.zeros((30, agent.noise[1]), np.float32), np.arange(30), explore=False)
    assert np.allclose(got, agent.act(step)[0] + np.array([5, 0, 0]), atol=1e-5)


@pytest.mark.parametrize("options", [{"actions": "squashed"}, {"state_std": True}], ids=str)
def test_the_mode_of_every_distribution(options):
    env = envs.make("helpers.envs:Spaced-v0", obs="box", act="box")
    env.observation_space.seed(0)
    agent = PPO(spaces.describe(env), PPOOptions(hidden=(8,), **options), np.random.default_rng(0))
    obs = observations(env, 30)
    got = _exported(agent, env).module()(torch.from_numpy(obs)).numpy()
    assert np.allclose(got, in_numpy(agent, env, obs), atol=1e-5)


@pytest.mark.parametrize(("cell", "act"), [("gru", "box"), ("lstm", "discrete")])
def test_a_memory_goes_in_and_out(cell, act):
    env = envs.make("helpers.envs:Spaced-v0", obs="box", act=act)
    env.observation_space.seed(0)
    options = PPOOptions(hidden=(8,), recurrent=cell, memory_size=6)
    agent = PPO(spaces.describe(env), options, np.random.default_rng(0))
    policy = _exported(agent, env).module()
    memory = ours = np.zeros((3, agent.memory), np.float32)
    for _ in range(4):
        obs = observations(env, 3)
        got, memory = (x.numpy() for x in policy(*map(torch.from_numpy, (obs, memory))))
        noise = np.zeros((3, agent.noise[1]), np.float32)
        expected, extras = agent.act(Step(obs, noise, np.arange(3), memory=ours))
        ours = extras["memory"]
        assert np.allclose(memory, ours, atol=1e-5)
        if act == "box":
            assert np.allclose(got, np.clip(expected, -0.5, 0.5), atol=1e-5)


@pytest.mark.parametrize("act", ["discrete", "multi"])
def test_no_action_that_the_mask_forbids(act):
    env = envs.make("helpers.envs:Spaced-v0", act=act, masked=True)
    env.observation_space.seed(0)
    agent = untrained("ppo", env)
    policy = _exported(agent, env, masked=True).module()
    first = spaces.describe(env).act.first
    first = 0 if first is None else first
    for n in (1, 30):
        obs = observations(env, n)
        mask = np.ones((n, spaces.describe(env).act.size), bool)
        free = in_numpy(agent, env, obs, mask)
        mask[np.arange(n), np.reshape(free - first, (n, -1))[:, 0]] = False
        got = policy(torch.from_numpy(obs), torch.from_numpy(mask)).numpy()
        assert np.array_equal(got, in_numpy(agent, env, obs, mask))
        assert not (got == free).reshape(n, -1)[:, 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_the_lines_that_it_prints_load_it_without_rank0rl(masked, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    kwargs = ["--env-kwargs", "obs=dict", "act=multi", *["masked=1"] * masked]
    wrappers = ["--wrappers", "TimeLimit(max_episode_steps=5)"]
    train(tmp_path / "r", "helpers.envs:Spaced-v0", *kwargs, *wrappers, *SMALL[1:], "-n", "20")
    out = tmp_path / "policy.pt2"
    done = forks.run("-m", "rank0rl", "export", str(tmp_path / "r"), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # torch warns of parameters that share memory
    notes, lines = done.stdout.split("without rank0rl:\n")
    for fact in (
        "(N, 2) int64",
        "(N, 5) float32",
        "helpers.envs:Spaced-v0",
        "TimeLimit",
        "flatten(",
    ):
        assert fact in notes
    code = [
        "import sys",
        "sys.modules['rank0rl'] = sys.modules['algos'] = None",
        "import numpy as np",
        "for n in (1, 7):",
        "    obs = np.random.default_rng(n).normal(size=(n, 5))",
        "    mask = np.tile([0, 1, 0, 0, 1], (n, 1))",
        *lines.splitlines(),
        "    print(act.tolist())",
    ]
    loaded = run([sys.executable, "-c", "\n".join(code)], cwd=tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    policy = load(tmp_path / "r")
    agent, options = policy.agent, policy.options
    env = envs.make(options.env_id, **options.env_kwargs)
    for n, got in zip((1, 7), loaded.stdout.splitlines(), strict=True):
        obs = np.random.default_rng(n).normal(size=(n, 5)).astype(np.float32)
        mask = np.tile(np.array([0, 1, 0, 0, 1], bool), (n, 1)) if masked else None
        assert got == str(in_numpy(agent, env, obs, mask).tolist())


GRU, LSTM = ({"recurrent": cell, "memory_size": 6} for cell in ("gru", "lstm"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("obs", "act", "options", "masked"),
    [
        ("image", "box2d", {"state_std": True}, False),
        ("box", "box", {"actions": "beta"} | LSTM, False),
        ("multi", "discrete", {}, True),
        ("dict", "multi", GRU, True),
    ],
    ids=str,
)
def test_onnx_gives_the_actions_of_the_program(obs, act, options, masked, tmp_path):
    onnxruntime = needs_onnx()
    env = envs.make("helpers.envs:Spaced-v0", obs=obs, act=act, masked=masked)
    env.observation_space.seed(0)
    agent = untrained("ppo", env, **options)
    program = _exported(agent, env, masked)
    more = ["memory"] * bool(agent.memory) + ["mask"] * masked
    export_tool._save_onnx(program, tmp_path / "a.onnx", more)
    graph = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    assert [x.name for x in graph.get_inputs()] == ["obs", *more]
    assert {x.shape[0] for x in (*graph.get_inputs(), *graph.get_outputs())} == {"N"}
    rng, space = np.random.default_rng(0), spaces.describe(env).act
    for n in (1, 7, 300):
        x = {"memory": np.zeros((n, agent.memory), np.float32)}
        for _ in range(3):
            x["obs"] = observations(env, n)
            x["mask"] = rng.random((n, space.size)) < 0.5
            x["mask"][:, [columns.start for columns in space.choice_slices()]] = True
            given = {name: x[name] for name in ("obs", *more)}
            expected = program.module()(*map(torch.from_numpy, given.values()))
            expected = expected if agent.memory else (expected,)
            for got, one in zip(graph.run(None, given), expected, strict=True):
                assert (got.shape, got.dtype) == (one.shape, one.numpy().dtype)
                size = 1 + abs(one.numpy()).max()  # sums of hundreds of products round alike
                np.testing.assert_allclose(got, one, rtol=0, atol=1e-6 * size)
            x["memory"] = expected[-1].numpy()


@pytest.mark.slow
def test_the_lines_of_both_formats_give_the_same(tmp_path, monkeypatch, capsys):
    needs_onnx()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    kwargs = ["--env-kwargs", "obs=dict", "act=multi", "masked=1", *SMALL[1:]]
    train(tmp_path / "r", "helpers.envs:Spaced-v0", *kwargs, "--recurrent", "gru", "-n", "20")
    x = {"N": 7, "obs": np.random.default_rng(0).normal(size=(7, 5)), "mask": [[0, 1, 0, 0, 1]] * 7}
    seen = []
    for given in (["--format", "onnx"], ["--out", "policy.pt2"]):
        assert main(["r", *given]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        exec(textwrap.dedent(out.split("without rank0rl:\n")[1]), x)
        seen.append([np.asarray(x[name]) for name in ("act", "memory")])
    onnx, torch_s = seen
    assert onnx[0].tolist() == torch_s[0].tolist() == [[2, 1]] * 7
    assert np.allclose(onnx[1], torch_s[1], rtol=0, atol=1e-6)
    assert onnx[1].any()


class Bessel(torch.nn.Linear):
    def forward(self, x):
        return torch.special.bessel_j0(super().forward(x))


def test_what_onnx_cannot_hold(tmp_path):
    needs_onnx()
    env = envs.make("helpers.envs:Spaced-v0", act="box")
    agent = untrained("ppo", env)
    agent.mode = lambda: Bessel(3, 2)
    with pytest.raises(RuntimeError, match="^ONNX cannot hold this policy: .*bessel_j0"):
        export_tool._save_onnx(_exported(agent, env), tmp_path / "a.onnx", [])


def test_onnx_needs_its_packages(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "a.onnx")]) == 2
    assert 'pip install -e ".[onnx]"' in capsys.readouterr().err


def test_wrong_use(tmp_path, capsys):
    sizes = ["--population", "4", "--episodes-per-batch", "4", "--total-steps", "128"]
    train(tmp_path, "CartPole", "--algo", "cem", "--num-envs", "4", *sizes)
    for out, facts in (("a.pt2", ("CEM", "mode(")), ("a.pth", ("a.pth", ".pt2", ".onnx"))):
        assert main([str(tmp_path), "--out", str(tmp_path / out)]) == 2
        err = capsys.readouterr().err
        assert all(fact in err for fact in facts), err
    assert not (tmp_path / "a.pt2").exists()
    assert main([str(tmp_path), "--format", "onnx", "--out", "a.pt2"]) == 2
    assert "ends in .onnx: got a.pt2" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path):
    train(tmp_path, *SMALL, "--total-steps", "64")
    with pytest.raises(ValueError, match=r"none/a.pt2"):
        export(tmp_path, tmp_path / "none" / "a.pt2")


def test_what_an_agent_exports_has_the_shape_of_actions():
    env = envs.make("helpers.envs:Spaced-v0", act="box")
    agent = untrained("ppo", env)
    agent.mode = lambda: torch.nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"\(2, 2\) .*got \(2, 1\)"):
        _exported(agent, env)
    agent.mode = lambda: torch.nn.Linear(4, 2)
    with pytest.raises(
        ValueError, match=r"mode of PPO must take observations of shape \(2, 3\): Run"
    ):
        _exported(agent, env)
