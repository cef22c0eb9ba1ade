"""Vector environments as games: the same on any number of ranks, resumed and replayed."""

import pytest
from helpers import games
from helpers.ranks import HERE
from helpers.runs import curve, replay, resume_on_ranks, sha, train, train_on_ranks

from rank0rl import seeding
from rank0rl.agent import NoOptions
from rank0rl.envs.block import make_block
from rank0rl.envs.info import EpisodeInfo
from rank0rl.envs.make import make, resolve
from rank0rl.envs.spaces import flatten
from rank0rl.rollout import FixedSteps, WholeEpisodes
from rank0rl.tools.check import RandomAgent, check

SEED = 5
WALKS = ["helpers.games:make_walks", "--hidden", "8", "--minibatch-size", "32", "--num-envs", "9"]
ARGS = [*WALKS, "--steps-per-batch", "99", "--total-steps", "10000", "--info", "place"]
STOP = "--stop-after-iterations"


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def collected(env_id="helpers.games:make_walks", **kwargs):
    def made():
        return EpisodeInfo(lambda: make(resolve(env_id), **kwargs), ["place", "sum:place"])

    block = make_block(lambda _: made(), range(2), SEED)
    rollout = WholeEpisodes(block, lambda: iter(range(4)), info=["place"])
    return rollout.collect(RandomAgent(rollout.spaces, NoOptions(), None), 1)


@pytest.mark.parametrize(
    "made", [{}, {"mode": "SameStep"}, {"both": True}, {"env_id": "helpers.games:Walks-v0"}]
)
def test_episodes_are_those_of_single_environments(made):
    fragments, ended = collected(**made, num_envs=3)
    assert [fragment.fragment_id for fragment in fragments] == [*range(12)]
    places = dict(zip(ended["fragment_id"].tolist(), ended["place"], strict=True))
    for fragment in fragments:
        number, i = divmod(fragment.fragment_id, 3)
        env = flatten(games.Walk())
        obs, _ = env.reset(seed=seeding.integer(SEED, "reset", 1, number) + i)
        for t, action in enumerate(fragment.act):
            assert fragment.obs[t].tolist() == obs.tolist()
            obs, rew, terminated, truncated, info = env.step(action - 1)
            found = fragment.rew[t], fragment.terminated[t], fragment.truncated[t]
            assert found == (rew, terminated, truncated)
        assert terminated or truncated
        assert fragment.end_obs[0].tolist() == obs.tolist()  # not that of the next episode
        assert places[fragment.fragment_id] == info["place"]


@pytest.mark.slow
def test_one_curve_for_any_number_of_ranks_resumed_and_replayed(tmp_path):
    for n in (1, 3):
        train_on_ranks(tmp_path / str(n), *ARGS, STOP, "3", nprocs=n)
    train_on_ranks(tmp_path / "2", *ARGS, STOP, "2", nprocs=2)
    resume_on_ranks(tmp_path / "2", STOP, "3", nprocs=1)
    assert curve(tmp_path / "1") == curve(tmp_path / "2") == curve(tmp_path / "3")
    train(tmp_path / "same", *ARGS, "--env-kwargs", "mode=SameStep", STOP, "3")
    assert len({sha(tmp_path / name) for name in ("1", "2", "3", "same")}) == 1
    assert replay(tmp_path / "2", 2, env=4).stdout.count("the same data") == 2


def test_check_of_a_vector_environment():
    assert not any(check(lambda: make("helpers.games:make_walks"), steps=50).values())


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"mode": "Disabled"}, "must reset by itself.*AutoresetMode.DISABLED.*NextStep"),
        ({"kind": "NoSeed"}, "two resets with the same seed.*EnvPool ignores.*name the single"),
        ({"kind": "Masked"}, "masks need single environments.*make_walks gives.*name its single"),
    ],
)
def test_a_vector_environment_that_cannot_be_used_is_refused(kwargs, said):
    with pytest.raises(ValueError, match=said):
        make("helpers.games:make_walks", **kwargs)


def test_gymnasiums_own_vector_environment():
    block = make_block(lambda _: make("helpers.games:make_carts"), range(2), SEED)
    rollout = FixedSteps(block, 60)
    assert rollout.spaces.obs.shape == (4,)
    fragments, ended = rollout.collect(RandomAgent(rollout.spaces, NoOptions(), None), 1)
    assert len(fragments) == 4
    assert (ended["return"] == ended["length"]).all()
