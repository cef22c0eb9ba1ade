"""Every common space: agents train on it, and the same on any number of ranks."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.agents import AGENTS
from helpers.envs import ACT_SPACES, OBS_SPACES, Count, Spaced
from helpers.ranks import HERE, run
from helpers.runs import curve, resume_on_ranks, sha, table, train, train_here, train_on_ranks

from rank0rl.agent import Fragment, Space, Spaces
from rank0rl.algos.a2c import A2C, A2COptions
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.envs.make import are_known_wrappers, make, resolve
from rank0rl.envs.spaces import (
    describe,
    flatten,
    mask_of,
    nested_actions,
    refuse_other_spaces,
    spaces_in_words,
    to_env,
)
from rank0rl.nets.normalize import ObsNormalizer
from rank0rl.policy import Policy, load
from rank0rl.run import settings
from rank0rl.run.options import RunOptions
from rank0rl.tools import check, export

MASKED = ("discrete", "multi", "multi2d")


def two_iterations(algo, folder, **env_kwargs):
    agent, run_of = train_here(
        *AGENTS[algo],
        folder,
        env_id="helpers.envs:Spaced-v0",
        env_kwargs=env_kwargs,
        num_envs=4,
        steps_per_batch=64,
        total_steps=128,
    )
    assert run_of.state.progress.iteration == 2
    return agent


@pytest.mark.fast(30)
@pytest.mark.parametrize("act", ACT_SPACES)
@pytest.mark.parametrize("obs", OBS_SPACES)
def test_agents_train_on_every_space(obs, act, tmp_path):
    two_iterations("ppo", tmp_path, obs=obs, act=act)


@pytest.mark.parametrize("act", ACT_SPACES)
@pytest.mark.parametrize("algo", ["trpo", "klppo", "reinforce"])
def test_other_agents_train_on_every_space_of_actions(algo, act, tmp_path):
    two_iterations(algo, tmp_path, obs="dict", act=act)


@pytest.mark.parametrize("act", ["box", "box2d", "scalar", "discrete"])
def test_cem_trains_on_boxes_and_single_choices(act, tmp_path):
    two_iterations("cem", tmp_path, obs="tuple", act=act)


@pytest.mark.parametrize("act", MASKED)
@pytest.mark.parametrize("algo", ["ppo", "trpo", "klppo", "a2c", "reinforce"])
def test_what_may_not_be_chosen_is_not_chosen(algo, act, tmp_path):
    two_iterations(algo, tmp_path, act=act, masked=True)  # the environment refuses it


@pytest.mark.parametrize("algo", ["a2c", "reinforce"])
def test_a_choice_that_is_never_allowed_learns_nothing(algo):
    agent_class, options = AGENTS[algo]
    spaces = Spaces(Space("box", (2,), "float32"), Space("discrete", (), "int64", choices=(3,)))
    agent = agent_class(spaces, options, np.random.default_rng(0))
    rng, mask, ends = np.random.default_rng(1), np.ones((8, 3), bool), np.arange(8) == 7
    mask[:, 2] = False
    obs, act = rng.standard_normal((9, 2), dtype=np.float32), np.arange(8) % 2
    fragment = Fragment(
        *(0, obs[:8], act, rng.random(8), ends, ~ends & ends, np.array([7]), obs[8:]),
        extras={"action_mask": mask},
    )
    before = agent.policy.mlp.biases[-1].detach().numpy().copy()
    agent.update(agent.process(fragment), rng, 0.0)
    changed = agent.policy.mlp.biases[-1].detach().numpy() != before
    assert changed.tolist() == [True, True, False]


@pytest.mark.slow
def test_an_agent_that_ignores_masks_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["helpers.envs:Spaced-v0", "--env-kwargs", "masked=1", "strict=0", "--algo"]
    said = {}
    for algo in ("cem", "reinforce"):
        sizes = ["--num-envs", "4", "--episodes-per-batch", "40", "--num-episodes", "80"]
        said[algo] = train(tmp_path / algo, *args, algo, *sizes, nprocs=2).stdout
    assert said["cem"].count('note: cem takes actions that info["action_mask"] forbids') == 1
    assert "action_mask" not in said["reinforce"]


@pytest.mark.parametrize("act", MASKED)
def test_the_mask_of_a_last_step_may_allow_nothing(act, monkeypatch, tmp_path):
    step = Spaced.step

    def ends(self, action):
        obs, rew, terminated, truncated, info = step(self, action)
        if terminated:
            info = {"action_mask": np.zeros(sum(map(len, masks_of(info))))}
        return obs, rew, terminated, truncated, info

    monkeypatch.setattr(Spaced, "step", ends)
    two_iterations("ppo", tmp_path, act=act, masked=True)


def masks_of(info):
    mask = info["action_mask"]
    return mask if isinstance(mask, tuple) else (mask,)


def test_an_agent_may_ignore_masks(tmp_path):
    size = {"num_envs": 2, "steps_per_batch": 8, "total_steps": 16}
    kwargs = {"env_id": "helpers.envs:Spaced-v0", "env_kwargs": {"masked": True, "strict": False}}
    train_here(A2C, A2COptions(hidden=(8,)), tmp_path, **kwargs, **size)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, "must come with every reset and every step"),
        (None, "must come with every reset and every step"),
        ({"action_mask": np.ones(2)}, r"one entry for each of 3 choices: got shape \(2,\)"),
        ({"action_mask": np.zeros(3)}, r"must allow at least one value of each choice.*\[0 0 0\]"),
    ],
)
def test_a_wrong_mask_is_told(info, said, monkeypatch, tmp_path):
    monkeypatch.setattr(Spaced, "step", lambda self, action: (np.ones(3), 0.0, False, False, info))
    with pytest.raises(ValueError, match=said):
        two_iterations("ppo", tmp_path, masked=True)


@pytest.mark.parametrize("when", ["in a step", "in the second reset"])
def test_a_mask_that_comes_late_is_refused(when, monkeypatch, tmp_path):
    begun, reset, step = [], Spaced.reset, Spaced.step

    def without(self, **kwargs):
        obs, info = reset(self, **kwargs)
        begun.append(self)
        return obs, info if begun.count(self) > 1 else {}

    monkeypatch.setattr(Spaced, "reset", without)
    if when != "in a step":
        monkeypatch.setattr(Spaced, "step", lambda *args: (*step(*args)[:4], {}))
    with pytest.raises(ValueError, match="or with none: the first reset gave none, and this info"):
        two_iterations("ppo", tmp_path, masked=True, strict=False)


def test_a_mask_of_choices_with_several_dimensions():
    space = gym.spaces.MultiDiscrete([[2, 3], [1, 2]])
    nested = ((np.ones(2), np.zeros(3)), (np.ones(1), np.ones(2)))
    space.sample(mask=tuple(tuple(m.astype(np.int8) for m in row) for row in nested))
    assert mask_of({"action_mask": nested}, 8).tolist() == [1, 1, 0, 0, 0, 1, 1, 1]


class Bare(gym.Env):
    """An environment with these spaces, or without one of them."""

    def __init__(self, **spaces):
        vars(self).update(spaces)


ONE = gym.spaces.Box(-1, 1, (1,), np.float32)


@pytest.mark.parametrize(
    ("spaces", "said"),
    [
        ({"action_space": ONE}, "gymnasium.Space as its observation_space: got None"),
        ({"observation_space": ONE, "action_space": 2}, "Space as its action_space: got 2"),
        ({"observation_space": ONE, "action_space": gym.spaces.Box(0, 1, (0,))}, "with 0$"),
        ({"observation_space": gym.spaces.Box(0, 1, (0,)), "action_space": ONE}, "a constant$"),
        ({"observation_space": ONE, "action_space": gym.spaces.Discrete(2**40)}, "actions must"),
        ({"observation_space": gym.spaces.Discrete(2**40), "action_space": ONE}, "become one-hot"),
        ({"observation_space": gym.spaces.Dict({}), "action_space": ONE}, "of fixed size"),
    ],
)
def test_spaces_that_cannot_be_are_refused(spaces, said, monkeypatch):
    monkeypatch.setattr("helpers.envs.make_count", lambda: Bare(**spaces))
    with pytest.raises(ValueError, match=said):
        describe(make("helpers.envs:make_count"))


@pytest.mark.parametrize("other", [{"at": 1, "from": 3}, {"at": 3, "to": 1}])
def test_environments_with_other_keys_are_refused(other, monkeypatch):
    words = []
    for sizes in ({"at": 1, "to": 3}, other):
        boxes = {key: gym.spaces.Box(-1, 1, (size,)) for key, size in sizes.items()}
        bare = Bare(observation_space=gym.spaces.Dict(boxes), action_space=ONE)
        monkeypatch.setattr("helpers.envs.make_count", lambda bare=bare: bare)
        words.append(spaces_in_words(make("helpers.envs:make_count")))
    refuse_other_spaces({0: words[0], 1: words[0]})
    with pytest.raises(ValueError, match="env 0 has .* {'at': 1, 'to': 3}; env 7 has"):
        refuse_other_spaces({0: words[0], 7: words[1]})


@pytest.mark.parametrize("act", ["discrete", "multi"])
def test_episodes_with_masks_repeat(act):
    made = lambda: make("helpers.envs:Spaced-v0", act=act, masked=True)  # noqa: E731
    findings = check.check(made, steps=50)
    assert not any(findings.values()), findings


@pytest.mark.slow
def test_float64_observations_keep_their_digits_until_the_mean_is_gone(tmp_path, monkeypatch):
    args = ["helpers.envs:Count-v0", "--env-kwargs", "offset=1e9", "--obs-dtype", "float64"]
    args += ["--num-envs", "4", "--steps-per-batch", "60", "--total-steps", "300", "--hidden", "8"]
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    for n, stop in ((1, 5), (2, 3)):
        train_on_ranks(tmp_path / str(n), *args, "--stop-after-iterations", str(stop), nprocs=n)
    resume_on_ranks(tmp_path / "2", nprocs=1)
    assert curve(tmp_path / "2") == curve(tmp_path / "1")
    policy = load(tmp_path / "1", trust=True)
    obs = np.array([[500, 1], [500, 2]]) + 1e9
    x = policy.agent.norm.numpy(obs)
    assert x.dtype == np.float32
    assert x[1, 1] - x[0, 1] > 0.5  # of t, which goes from 0 to 3
    np.testing.assert_array_equal(policy.agent.norm(torch.from_numpy(obs)).numpy(), x)
    export.export(tmp_path / "1", tmp_path / "policy.pt2", trust=True)
    exported = torch.export.load(tmp_path / "policy.pt2").module()
    best = policy(obs, deterministic=True)
    assert best[0] != best[1]
    np.testing.assert_allclose(exported(torch.from_numpy(obs)).numpy(), best, rtol=1e-5)


def test_a_part_of_a_normalizer_keeps_the_digits_too():
    norm = ObsNormalizer((3,))
    obs = np.random.default_rng(0).normal([0, 1e9, -1e9], 1.0, (50, 3))
    norm.merge(obs)
    x = torch.from_numpy(obs)
    np.testing.assert_array_equal(
        norm.part([slice(1, 3)])(x[:, 1:]).numpy(), norm(x)[:, 1:].numpy()
    )


def test_float64_is_refused_where_observations_have_no_more_digits():
    with pytest.raises(ValueError, match="those of CartPole-v1 are float32; leave the option out"):
        make("CartPole-v1", (), None, "float64")


@pytest.mark.parametrize(
    ("offset", "said"), [(0, ""), (1e9, "an observation changes at index 1, but")]
)
def test_check_finds_digits_that_float32_does_not_hold(offset, said):
    made = lambda: make("helpers.envs:Count-v0", offset=offset)  # noqa: E731
    assert check.lost_digits(made, 50, 0).startswith(said)
    assert bool(check.lost_digits(made, 50, 0)) == bool(said)


def test_flattened_observations_are_gymnasiums():
    env = make("helpers.envs:Spaced-v0", obs="dict")
    obs, _ = env.reset(seed=3)
    space = OBS_SPACES["dict"]
    assert env.observation_space.shape == (5,)
    assert sorted(obs[2:].tolist()) == [0, 0, 1]  # one-hot
    assert describe(env).obs.shape == (5,)
    assert set(space.spaces) == {"a", "b"}


def test_bounds_that_cannot_be_rounded_inwards_stay_bounds():
    env = Count()
    env.action_space = gym.spaces.Box(
        np.array([0.1, -1e300]), np.array([0.1, np.inf]), dtype=np.float64
    )
    env.observation_space = gym.spaces.Box(-0.1, 0.1, (1,), np.float64)
    its = describe(env)
    assert its.act.low.tolist() == [np.float32(0.1), -np.inf]
    assert its.act.high.tolist() == [np.float32(0.1), np.inf]
    assert its.obs.high.tolist() == [np.float32(0.1)]  # in which observations are rounded too


def test_clipped_actions_are_within_bounds_that_float32_does_not_hold():
    bounds = gym.spaces.Box(np.array([-0.1, -1.2]), np.array([0.1, 0.7]), dtype=np.float64)
    for space in (bounds, gym.spaces.Tuple([gym.spaces.Discrete(3), bounds])):
        env = Count()
        env.action_space = space
        flat = flatten(env)
        its = describe(flat).act
        nested = nested_actions(flat) or (lambda row: row)
        for far in (-9, 9):
            row = np.zeros((1, *its.shape), np.float32)
            row[:, -2:] = far
            assert space.contains(nested(to_env(row, its)[0]))


@pytest.mark.parametrize("act", ["integers", "choices", "floats"])
def test_a_policy_gives_actions_as_the_environment_takes_them(act, tmp_path):
    agent = two_iterations("ppo", tmp_path, obs="dict", act=act)
    kwargs = {"obs": "dict", "act": act}
    policy = Policy(agent, RunOptions(env_id="helpers.envs:Spaced-v0", env_kwargs=kwargs))
    env = Spaced("dict", act)
    obs, _ = env.reset(seed=0)
    assert env.action_space.contains(policy(obs))
    both = [policy.make_env().reset(seed=seed)[0] for seed in (0, 1)]
    assert all(map(env.action_space.contains, policy(np.stack(both))))
    env = policy.make_env()
    obs, _ = env.reset(seed=0)
    env.step(policy(obs))  # the environment asserts that it is an action


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "kwargs", [["obs=dict", "act=multi", "masked=true"], ["obs=tuple", "act=choices"]]
)
def test_dicts_and_masks_are_the_same_for_every_number_of_ranks_and_resumed(
    kwargs, tmp_path, monkeypatch
):
    args = ["helpers.envs:Spaced-v0", "--env-kwargs", *kwargs, "--num-envs", "6", "--hidden", "8"]
    args += ["--steps-per-batch", "60", "--total-steps", "300", "--checkpoint-every", "2"]
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    for n, stop in ((1, 5), (2, 3), (3, 5)):
        train_on_ranks(tmp_path / str(n), *args, "--stop-after-iterations", str(stop), nprocs=n)
    resume_on_ranks(tmp_path / "2", nprocs=3)
    for other in ("2", "3"):
        assert curve(tmp_path / other) == curve(tmp_path / "1")
        assert sha(tmp_path / other) == sha(tmp_path / "1")


@pytest.mark.slow
def test_ranks_with_other_spaces_end_with_one_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    size = ["--num-envs", "4", "--steps-per-batch", "8"]
    done = train(tmp_path / "r", "helpers.envs:Ranked-v0", *size, nprocs=2, expect=1)
    assert "env 0 has actions Discrete(2)" in done.stderr
    assert "env 2 has actions Discrete(3)" in done.stderr


def test_a_run_on_images_notes_that_updates_are_slow(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    words = ["helpers.envs:Spaced-v0", "--env-kwargs", "obs=image", "--num-envs", "2"]
    words += ["--steps-per-batch", "8", "--total-steps", "8", "--stop-after-iterations", "1"]
    done = train(tmp_path, *words)
    assert "note: updates on images are slow on a CPU" in done.stdout


def test_clipped_rewards_are_learned_from_and_raw_returns_recorded(tmp_path, monkeypatch):
    """As the file for Atari games has it; Count rewards 1, 2 and 3."""
    atari = settings.load(HERE.parent / "configs" / "ppo-ALE-Pong.toml")
    assert atari["epochs"] == 4
    wrappers = atari["wrappers"][1:3]
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    assert are_known_wrappers(wrappers[:1])
    words = ["helpers.envs:Count-v0", "--wrappers", *wrappers, "--info", *atari["info"]]
    words += ["--num-envs", "2", "--steps-per-batch", "16", "--total-steps", "16"]
    train(tmp_path, *words)
    [row] = table(tmp_path)
    assert float(row["return_mean"]) == 3.0
    assert float(row["raw_reward_sum_mean"]) == 6.0


@pytest.mark.slow
def test_wrappers_by_name(tmp_path):
    wrappers = ["TimeAwareObservation", "FrameStackObservation(stack_size=3)"]
    env = make("CartPole-v1", wrappers)
    assert env.observation_space.shape == (3, 5)
    train(
        *(tmp_path, "CartPole", "--wrappers", *wrappers, "--num-envs", "2"),
        *("--steps-per-batch", "32", "--total-steps", "64"),
    )
    assert len(table(tmp_path)) == 2


@pytest.mark.parametrize(
    ("wrapper", "reason"),
    [
        ("Nope", "no attribute 'Nope'"),
        ("no_such_module:X", "No module named"),
        ("FrameStackObservation(4)", "arguments must have names"),
        ("FrameStackObservation(size=4)", "unexpected keyword argument 'size'"),
        ("FrameStackObservation(stack_size=4", "never closed"),
        ("FrameStackObservation(stack_size=exit())", "malformed"),
    ],
)
def test_a_wrong_wrapper_is_named(wrapper, reason):
    with pytest.raises(ValueError, match=rf"cannot wrap CartPole-v1 in .*{reason}"):
        make("CartPole-v1", [wrapper])


def test_an_environment_that_a_function_makes():
    assert resolve("helpers.envs:make_count") == "helpers.envs:make_count"
    env = make("helpers.envs:make_count", length=9)
    assert env.base == 9
    with pytest.raises(ValueError, match="unexpected keyword argument 'size'"):
        make("helpers.envs:make_count", size=9)
    with pytest.raises(ValueError, match="module:EnvId-v0 or module:function"):
        resolve("helpers.envs:no_such_function")
    with pytest.raises(ValueError, match=r"must return a gymnasium.Env: got \("):
        make("helpers.envs:noise_of", agent=check)
    assert resolve("helpers.envs:Count") == "helpers.envs:Count-v0"  # registered, before its class


@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        ("helpers.envs:InTurn", "agents act in turn.*parallel_env.*docs/environments.md"),
    ],
)
def test_what_is_no_single_environment_is_named(env_id, said):
    with pytest.raises(ValueError, match=said):
        make(resolve(env_id))


SCRIPT = """
import gymnasium as gym
from rank0rl.cli import main
from helpers.envs import Count
gym.register("Mine-v0", Count)
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_environment_that_is_registered_in_a_script_only(nprocs, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "mine.py"), "Mine", "--nprocs", str(nprocs)]
    args = ["--num-envs", "2", "--steps-per-batch", "8", "--total-steps", "16"]
    path = {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
    done = run([*command, *args, "--run-dir", str(tmp_path / "r")], env=path)
    assert done.returncode == 0, done.stderr
    assert len(table(tmp_path / "r")) == 2


def test_extra_names_reach_process_and_update(tmp_path):
    class Costs(PPO):
        def act(self, step):
            act, _ = super().act(step)
            return act, {"cost": step.fragment_id.astype(np.float32)}

        def process(self, fragment):
            cost = fragment.extras["cost"]
            return {**super().process(fragment), "cost": cost, "hidden": np.ones((len(cost), 2, 3))}

        def update(self, batch, rng, progress):
            assert batch["cost"].tolist() == batch["fragment_id"].tolist()
            assert batch["hidden"].shape == (len(batch["cost"]), 2, 3)
            return super().update(batch, rng, progress)

    size = {"num_envs": 3, "steps_per_batch": 30, "total_steps": 60}
    train_here(Costs, PPOOptions(), tmp_path, env_id="helpers.envs:Count-v0", **size)
