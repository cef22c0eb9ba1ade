"""From a run to a dataset, from a dataset to a clone, from the clone to a run; and batches that are kept."""

import os
import zipfile
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import envs, forks
from helpers.runs import SMALL, curve, mean_return, replay, resume, sha, table, train, train_here

from rank0rl.agent import Space, Spaces, Step
from rank0rl.algos.bc import BC, BCOptions
from rank0rl.envs import demonstrations
from rank0rl.envs.spaces import describe, flatten
from rank0rl.options import OptionError
from rank0rl.run import checkpoint

CHOICES = Spaces(Space("box", (2,), "float32"), Space("discrete", (), "int64", choices=(3,)))
BOX = Spaces(Space("box", (2,), "float32"), Space("box", (1,), "float32"))


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


def record(run, name, *args, expect=0):
    done = forks.run("-m", "rank0rl", "record", str(run), "--minari", name, *args)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def weights(run):
    return checkpoint.read(checkpoint.latest(run))["weights"]


@pytest.mark.slow
def test_from_a_run_to_a_dataset_to_a_clone_to_a_run(tmp_path):
    train(tmp_path / "r", *SMALL, "--total-steps", "128")
    names = ["toy/cartpole-v0", "toy/cartpole-v1"]
    said = [
        record(tmp_path / "r", name, "--episodes", "70", "--nprocs", nprocs).stdout
        for name, nprocs in zip(names, "13", strict=True)
    ]
    digests = {line.split("sha256 ")[1].strip() for line in said}
    assert len(digests) == 1, said
    import minari

    one, other = (minari.load_dataset(name) for name in names)
    assert one.total_episodes == 70
    assert digests.pop() in one.spec.description if hasattr(one.spec, "description") else True
    for a, b in zip(one.iterate_episodes(), other.iterate_episodes(), strict=True):
        assert a.observations.tobytes() == b.observations.tobytes()
        assert a.actions.tobytes() == b.actions.tobytes()
        assert len(a.observations) == len(a.actions) + 1 == len(a.rewards) + 1
        assert a.terminations[-1] or a.truncations[-1]
        assert not a.terminations[:-1].any()
    refused = record(tmp_path / "r", names[0], expect=2).stderr
    assert "already: choose another name" in refused
    assert "walker2d/ppo-v0" in record(tmp_path / "r", "no name", expect=2).stderr

    clone = [*SMALL[:-2], "--algo", "bc", "--data", names[0], "--steps", "5"]
    clone += ["--total-steps", "256", "--checkpoint-every", "1"]
    train(tmp_path / "1", *clone)
    train(tmp_path / "3", *clone, "--stop-after-iterations", "2", nprocs=3)
    resume(tmp_path / "3", nprocs=2)
    assert curve(tmp_path / "3") == curve(tmp_path / "1")
    assert sha(tmp_path / "3") == sha(tmp_path / "1")
    losses = [float(row["loss"]) for row in table(tmp_path / "1")]
    assert losses[-1] < losses[0]
    assert replay(tmp_path / "1", 2, env=1).stdout.count("the same data") == 2

    os.rename(tmp_path / "datasets", tmp_path / "gone")  # who acts needs no data
    done = forks.run("-m", "rank0rl", "evaluate", str(tmp_path / "1"), "--episodes", "2")
    assert done.returncode == 0, done.stderr
    done = resume(tmp_path / "1", "--total-steps", "512", expect=2)
    assert "no such Minari dataset here" in done.stderr

    after = [*SMALL, "--init-from", str(tmp_path / "1"), "--total-steps", "192"]
    train(tmp_path / "p1", *after)
    train(tmp_path / "p3", *after, "--stop-after-iterations", "1", nprocs=3)
    resume(tmp_path / "p3", nprocs=2)
    assert curve(tmp_path / "p3") == curve(tmp_path / "p1")
    assert replay(tmp_path / "p1", 1, env=1).stdout.count("the same data") == 2
    train(tmp_path / "none", *SMALL, "--total-steps", "192")
    assert sha(tmp_path / "none") != sha(tmp_path / "p1")


@pytest.mark.slow
def test_a_dataset_has_what_the_agent_reads_from_infos(tmp_path):
    minari = pytest.importorskip("minari")
    lagrange = ["--algo", "examples.lagrange:Lagrange", "--hidden", "8"]
    size = ["--num-envs", "2", "--steps-per-batch", "64", "--total-steps", "64"]
    train(tmp_path / "r", "examples.lagrange:make", *lagrange, *size)
    record(tmp_path / "r", "toy/torque-v0", "--episodes", "2", "--trust")
    [first, _] = minari.load_dataset("toy/torque-v0").iterate_episodes()
    np.testing.assert_allclose(first.infos["cost"], first.actions[:, 0] ** 2, rtol=1e-5)


def test_a_run_begins_with_all_weights_of_another_and_nothing_else(tmp_path):
    train(tmp_path / "a", *SMALL, "--total-steps", "128")
    init = ["--init-from", str(tmp_path / "a"), "--total-steps", "128", "--lr", "1e-9"]
    train(tmp_path / "b", *SMALL, *init, "--seed", "7")
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    torch.testing.assert_close(a["policy.mlp.weights.0"], b["policy.mlp.weights.0"])
    assert b["norm.moments.count"] == 2 * a["norm.moments.count"]
    begun = checkpoint.read(tmp_path / "b" / "checkpoints" / "00000002.pt")
    assert begun["progress"]["steps"] == 128
    [steps] = begun["agent"]["adam"]["steps"].values()
    assert steps == 2 * 5 * 2  # iterations, epochs and minibatches of this run alone


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--hidden", "8"],
            "'policy.mlp.weights.0' is float32 of shape (4, 128) there and float32 of shape (4, 8) here",
        ),
        pytest.param(
            ["--algo", "cem", "--population", "5", "--episodes-per-batch", "5"],
            "is absent there and float32 of shape (5, 4, 2) here",
            marks=pytest.mark.slow,
        ),
        (["--init-from", "nowhere"], "there is none in"),
    ],
)
def test_weights_that_do_not_fit_are_refused_on_every_rank(args, said, tmp_path):
    train(tmp_path / "a", *SMALL, "--total-steps", "64")
    one = ["CartPole", "--num-envs", "4"] if "cem" in args else SMALL
    done = train(
        tmp_path / "b", *one, "--init-from", str(tmp_path / "a"), *args, nprocs=2, expect=2
    )
    assert said in done.stderr
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_cmaes_begins_around_the_center_of_another_run(tmp_path):
    args = ["CartPole", "--algo", "cmaes", "--population", "4", "--episodes-per-batch", "4", "-n"]
    train(tmp_path / "a", *args, "8")
    train(tmp_path / "b", *args, "12", "--init-from", str(tmp_path / "a"), "--std", "1e-6")
    train(tmp_path / "c", *args, "12", "--init-from", str(tmp_path / "a"), "--std", "1e-6")
    a, b = (weights(tmp_path / name)["policy.weights.0"] for name in "ab")
    torch.testing.assert_close(a, b, atol=1e-3, rtol=0)
    assert sha(tmp_path / "b") == sha(tmp_path / "c")


@pytest.mark.slow
def test_batches_are_kept_and_cloned(tmp_path):
    kept = tmp_path / "kept" / "here"
    args = [*SMALL, "--total-steps", "192", "--keep-batches", str(kept)]
    train(tmp_path / "r", *args, "--stop-after-iterations", "2", nprocs=2)
    first = {file.name: file.read_bytes() for file in kept.iterdir()}
    assert sorted(first) == ["00000001.npz", "00000002.npz"]
    resume(tmp_path / "r")
    assert len([*kept.iterdir()]) == 2  # a checkpoint of someone else names no folder to write to
    args[-1] = str(tmp_path / "again")
    train(tmp_path / "one", *args)
    again = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert "batches in it already" in train(tmp_path / "two", *args, expect=2).stderr
    assert first.items() <= again.items()
    assert len(again) == 3
    with np.load(kept / "00000001.npz") as rows:
        assert {"obs", "act", "adv", "fragment_id"} <= {*rows}
        assert rows["fragment_id"].tolist() == sorted(rows["fragment_id"].tolist())
    assert len(demonstrations.read(str(tmp_path / "again"), checked_spaces())["obs"]) == 192
    done = train(
        tmp_path / "x", *SMALL, "--keep-batches", str(tmp_path / "r/progress.csv"), expect=2
    )
    assert "cannot be a folder" in done.stderr


def checked_spaces():
    return Spaces(Space("box", (4,), "float32"), Space("discrete", (), "int64", choices=(2,)))


def write(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def test_data_that_do_not_fit_are_refused(tmp_path):
    obs = np.zeros((5, 2))

    def refused(source, match, spaces=CHOICES):
        with pytest.raises(OptionError, match=match):
            demonstrations.read(str(source), spaces)

    good = write(tmp_path / "good.npz", obs=obs, act=np.array([0, 1, 2, 0, 1], np.int32))
    read = demonstrations.read(good, CHOICES)
    assert (read["obs"].dtype, read["act"].dtype) == (np.float32, np.int64)
    refused(good, r"'act' must be float32 \('N', 1\)", BOX)
    refused(write(tmp_path / "a.npz", obs=obs, act=np.full(5, 3)), "this environment takes")
    refused(write(tmp_path / "b.npz", obs=obs[:, :1], act=np.zeros(5, int)), "'obs' must be")
    refused(write(tmp_path / "c.npz", obs=obs, act=np.zeros(4, int)), "'act' must be")
    refused(write(tmp_path / "d.npz", obs=obs * np.nan, act=np.zeros(5, int)), "'obs' must be")
    refused(write(tmp_path / "e.npz", obs=obs), "the arrays obs and act")
    refused(write(tmp_path / "f.npz", obs=np.array([{}]), act=obs), "the arrays obs and act")
    refused(write(tmp_path / "h.npz", obs=obs, act=np.array(3)), "'act' must be")
    refused(write(tmp_path / "i.npz", obs=obs[:0], act=np.zeros(0, int)), "no rows in it")
    refused(write(tmp_path / "j.npz", obs=obs + 1e300, act=np.zeros(5, int)), "'obs' must be")
    bytes_in = Spaces(Space("box", (2,), "uint8"), CHOICES.act)
    refused(write(tmp_path / "k.npz", obs=obs + 0.5, act=np.zeros(5, int)), "uint8", bytes_in)
    os.mkfifo(tmp_path / "l.npz")
    refused(tmp_path / "l.npz", "not a regular file")
    (tmp_path / "g.npz").write_bytes(b"no zip")
    refused(tmp_path / "g.npz", "must be an .npz file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no .npz file in this folder")
    refused("toy/none-v0", "no such Minari dataset here")


def test_choices_of_a_file_have_the_environments_numbers_and_those_of_a_batch_begin_at_0(tmp_path):
    env = gym.Env()
    env.observation_space = gym.spaces.Box(-1, 1, (2,))
    for space, acts in (
        (gym.spaces.Discrete(3, start=1), [1, 3, 2]),
        (gym.spaces.MultiDiscrete([3, 2], start=[1, -1]), [[1, 0], [3, -1], [2, 0]]),
    ):
        env.action_space = space
        obs, act, from_0 = np.zeros((3, 2)), np.array(acts), np.array(acts) - space.start
        of_env = write(tmp_path / "env.npz", obs=obs, act=act)
        kept = write(tmp_path / "kept.npz", obs=obs, act=from_0, fragment_id=np.zeros(3, int))
        for data in (of_env, kept):
            assert demonstrations.read(data, describe(env))["act"].tolist() == from_0.tolist()
        below = write(tmp_path / "below.npz", obs=obs, act=act - 1)
        with pytest.raises(OptionError, match="this environment takes"):
            demonstrations.read(below, describe(env))


def test_a_clone_learns_what_the_data_do(tmp_path):
    rng = np.random.default_rng(0)
    obs = rng.random((500, 4)) > 0.5
    obs = np.eye(4)[rng.integers(4, size=500)]
    data = write(tmp_path / "data.npz", obs=obs, act=obs.argmax(axis=1))
    (tmp_path / "r").mkdir()
    kwargs = {"env_id": "helpers.envs:Identity-v0", "num_envs": 4, "steps_per_batch": 80}
    agent, run = train_here(
        BC, BCOptions(data=data, steps=100), tmp_path / "r", total_steps=400, **kwargs
    )
    assert mean_return(run) > 8  # of 10; chance is 2.5
    np.testing.assert_allclose(agent.norm.shift, obs.mean(axis=0), atol=1e-6)


def test_a_clone_of_normal_actions_has_their_spread():
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((4000, 2)).astype(np.float32)
    act = obs[:, :1] + 0.3 * rng.standard_normal((4000, 1)).astype(np.float32)
    agent = BC.__new__(BC)
    agent.options = BCOptions(data="x")
    agent.nets = agent.options.networks(BOX, rng)
    from rank0rl.nets.flat import Adam, Flat

    agent.flat = Flat(agent.policy)
    agent.adam = Adam(agent.flat)
    for step in range(600):
        few = rng.integers(4000, size=256)
        agent.clone({"obs": obs[few], "act": act[few]}, 3e-3)
    std = agent.policy.log_std.exp().item()
    assert abs(std - 0.3) < 0.03, std


@pytest.mark.slow
def test_what_bc_cannot_do_is_refused(tmp_path):
    for args, said in ((["--data", ""], "needs data"), (["--actions", "beta"], "--actions normal")):
        data = ["--data", "x", *args]
        done = train(tmp_path / "r", "Pendulum", "--algo", "bc", *data, nprocs=2, expect=2)
        assert said in done.stderr
        assert not (tmp_path / "r").exists()


def test_choices_of_a_mixed_action_have_the_environments_numbers(tmp_path):
    env = envs.Count()
    env.action_space = gym.spaces.Dict(
        a=gym.spaces.Discrete(3, start=1), b=gym.spaces.Box(-1, 1, (1,))
    )
    spaces = describe(flatten(env))
    obs, act = np.zeros((2, *spaces.obs.shape), np.float32), np.float32([[1, 0.5], [3, -0.5]])
    data = write(tmp_path / "mixed.npz", obs=obs, act=act)
    assert demonstrations.read(data, spaces)["act"].tolist() == [[0, 0.5], [2, -0.5]]


def test_images_are_cloned_too(tmp_path):
    obs = np.random.default_rng(0).integers(256, size=(8, 40, 40, 1), dtype=np.uint8)
    data = write(tmp_path / "images.npz", obs=obs, act=np.arange(8) % 3)
    spaces = Spaces(Space("box", (40, 40, 1), "uint8"), CHOICES.act)
    agent = BC(spaces, BCOptions(data=data, steps=2, hidden=(8,)), np.random.default_rng(0))
    agent.prepare()
    batch = {"obs": obs, "val": np.zeros(8, np.float32), "ret": np.arange(8, dtype=np.float32)}
    assert np.isfinite(agent.update(batch, np.random.default_rng(0), 0.0)["loss"])


def test_choices_and_floats_are_cloned_together(tmp_path):
    obs = np.random.default_rng(0).standard_normal((500, 2)).astype(np.float32)
    choice = (obs[:, 0] > 0).astype(np.float32)
    data = write(tmp_path / "both.npz", obs=obs, act=np.stack([choice, obs[:, 1] / 9], axis=1))
    low, high = np.array([0, -1], np.float32), np.array([1, 1], np.float32)
    act = Space("hybrid", (2,), "float32", choices=(2,), low=low, high=high)
    spaces = Spaces(Space("box", (2,), "float32"), act)
    agent = BC(spaces, BCOptions(data=data, steps=600), np.random.default_rng(0))
    agent.prepare()
    batch = {"obs": obs, "val": np.zeros(500, np.float32), "ret": np.zeros(500, np.float32)}
    agent.update(batch, np.random.default_rng(0), 0.0)
    noise = np.zeros((500, agent.noise[1]), np.float32)
    chosen, _ = agent.act(Step(obs, noise, np.zeros(500), explore=False))
    assert (chosen[:, 0] == choice).mean() > 0.95
    assert np.abs(chosen[:, 1] - obs[:, 1] / 9).mean() < 0.05


def test_a_dataset_of_integers_is_one_of_choices(monkeypatch):
    """Choices are numbered from 0 here, and an environment's integers from their lowest."""
    minari = pytest.importorskip("minari")
    env = gym.Env()
    env.observation_space = gym.spaces.Box(-1, 1, (2,))
    env.action_space = gym.spaces.Box(2, 4, (1,), np.uint8)
    episode = SimpleNamespace(observations=np.ones((3, 2)), actions=np.array([[2], [4]], np.uint8))
    dataset = type("Dataset", (), {"__iter__": lambda self: iter([episode])})()
    dataset.action_space = env.action_space
    monkeypatch.setattr(minari, "load_dataset", lambda name: dataset)
    rows = demonstrations.read("some/data-v0", describe(flatten(env)))
    assert rows["act"].tolist() == [[0], [2]]


def test_an_array_that_says_to_be_huge_is_one_line(tmp_path):
    header = (
        "{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000, 2), }".ljust(117) + "\n"
    )
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as file:
        file.writestr("obs.npy", array)
        file.writestr("act.npy", array)
    with pytest.raises(OptionError, match="must be an .npz file with the arrays obs and act"):
        demonstrations.read(str(tmp_path / "d.npz"), CHOICES)
