"""Games of several agents: each agent is an env, the same on any number of ranks, resumed and replayed."""

import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import games
from helpers.ranks import HERE
from helpers.runs import curve, replay, resume, resume_on_ranks, sha, table, train, train_on_ranks

from rank0rl import seeding
from rank0rl.agent import NoOptions
from rank0rl.envs.block import Settings, make_block
from rank0rl.envs.games import agents_of
from rank0rl.envs.info import EpisodeInfo
from rank0rl.envs.make import make, watched
from rank0rl.envs.wrappers import ResetMethod
from rank0rl.policy import load
from rank0rl.rollout import FixedSteps, WholeEpisodes
from rank0rl.run.launch_options import Words
from rank0rl.run.plan import prepare
from rank0rl.tools.check import RandomAgent, check

HUNT = ["helpers.games:make_hunt", "--num-envs", "9", "--hidden", "8", "--minibatch-size", "32"]
STEPS = [*HUNT, "--steps-per-batch", "99", "--total-steps", "10000"]
EPISODES = [*HUNT, "--episodes-per-batch", "9", "-n", "10000"]
STOP = "--stop-after-iterations"
SEED = 5


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def rollout_of(indices=range(2), *, steps=0, episodes=None, **kwargs):
    block = make_block(lambda _: make("helpers.games:make_hunt", **kwargs), indices, SEED)
    if episodes is None:
        rollout = FixedSteps(block, steps)
    else:
        rollout = WholeEpisodes(block, lambda: iter(episodes))
    return rollout, RandomAgent(rollout.spaces, NoOptions(), None)


def played(steps, acts, seed_of):
    """Play games one after the other in a plain loop, with the actions of each agent; return its rows."""
    game = games.Hunt()
    acts = {name: iter(act) for name, act in zip(game.possible_agents, acts, strict=True)}
    rows = {name: [] for name in game.possible_agents}
    number = 0
    for _ in range(steps):
        if not game.agents:
            obs, _ = game.reset(seed=seed_of(number))
            number += 1
        old = obs
        obs, rew, terminated, truncated, _ = game.step({a: next(acts[a]) - 1 for a in game.agents})
        for a in rew:
            rows[a].append((*old[a], rew[a], terminated[a], truncated[a]))
    return [*rows.values()]


def rows_of(fragment):
    flags = np.stack([fragment.rew, fragment.terminated, fragment.truncated], axis=1)
    return [tuple(row) for row in np.concatenate([fragment.obs, flags], axis=1)]


def test_rows_are_those_of_a_plain_loop_over_two_iterations():
    rollout, agent = rollout_of(steps=7)
    found = [[] for _ in range(6)]
    acts = [[] for _ in range(6)]
    for iteration in (1, 2):
        for fragment in rollout.collect(agent, iteration)[0]:
            found[fragment.fragment_id] += rows_of(fragment)
            acts[fragment.fragment_id] += fragment.act.tolist()
    for first in (0, 3):
        seed_of = functools.partial(seeding.integer, SEED, "reset", first)
        assert found[first : first + 3] == played(14, acts[first : first + 3], seed_of)
    assert len({len(rows) for rows in found}) > 1


def test_episodes_are_those_of_a_plain_loop():
    rollout, agent = rollout_of(episodes=range(3))
    fragments, ended = rollout.collect(agent, 4)
    assert [fragment.fragment_id for fragment in fragments] == [*range(9)]
    for number in range(3):
        of = fragments[3 * number : 3 * number + 3]
        seed = seeding.integer(SEED, "reset", 4, number)
        steps = max(len(fragment.rew) for fragment in of)
        acts = [fragment.act for fragment in of]
        assert [*map(rows_of, of)] == played(steps, acts, lambda _, seed=seed: seed)
    returns = {f.fragment_id: f.rew.sum() for f in fragments}
    assert dict(zip(ended["fragment_id"].tolist(), ended["return"], strict=True)) == returns
    lengths = {f.fragment_id: len(f.rew) for f in fragments}
    assert dict(zip(ended["fragment_id"].tolist(), ended["length"], strict=True)) == lengths


def test_ends_of_a_fragment():
    rollout, agent = rollout_of(steps=30)
    for fragment in rollout.collect(agent, 1)[0]:
        over = fragment.terminated | fragment.truncated
        assert [*np.flatnonzero(over)] == [end for end in fragment.end if over[end]]
        assert fragment.end[-1] == len(fragment.rew) - 1
        for steps, after in zip(fragment.episodes(), fragment.end_obs, strict=True):
            t = [*fragment.obs[steps, 1], after[1]]
            assert t == [*range(int(t[0]), int(t[0]) + len(t))]  # no gap within an episode


def test_an_agent_that_is_gone_all_the_time_has_no_fragment():
    rollout, agent = rollout_of(steps=1)
    found = [{f.fragment_id for f in rollout.collect(agent, i)[0]} for i in range(1, 9)]
    assert any(len(each) < 6 for each in found)
    assert set.union(*found) == {*range(6)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(STEPS, id="steps"),
        pytest.param(EPISODES, id="episodes"),
    ],
)
def test_one_curve_for_any_number_of_ranks_resumed_and_replayed(args, tmp_path):
    more = ["--info", "place", "sum:place", "--eval-every", "2", "--eval-episodes", "2"]
    for n in (1, 3):
        train_on_ranks(tmp_path / str(n), *args, *more, STOP, "3", nprocs=n)
    train_on_ranks(tmp_path / "2", *args, *more, STOP, "2", "--gather-parts", "2", nprocs=2)
    resume_on_ranks(tmp_path / "2", STOP, "3", nprocs=3)
    rows = curve(tmp_path / "1")
    assert len(rows) == 3
    assert rows == curve(tmp_path / "2") == curve(tmp_path / "3")
    assert len({sha(tmp_path / str(n)) for n in (1, 2, 3)}) == 1
    assert float(rows[1]["place_mean"]) != float(rows[1]["place_sum_mean"])
    which = {"env" if args is STEPS else "episode": 4}
    for iteration in (1, 3):
        assert replay(tmp_path / "2", iteration, **which).stdout.count("the same data") == 2


@pytest.mark.slow
def test_overlap_with_fewer_envs_on_rank_0(tmp_path):
    args = [*STEPS, "--overlap", STOP, "3"]
    train_on_ranks(tmp_path / "1", *args, nprocs=1)
    train_on_ranks(tmp_path / "2", *args, "--rank0-envs", "3", nprocs=2)
    assert sha(tmp_path / "1") == sha(tmp_path / "2")


@pytest.mark.slow
def test_an_unfinished_game_is_longer_than_one_iteration(tmp_path):
    args = [*HUNT, "--steps-per-batch", "18", "--total-steps", "10000"]
    train(tmp_path / "whole", *args, STOP, "5")
    for made in (1, 2, 3):
        train(tmp_path / str(made), *args, STOP, str(made))
        resume_on_ranks(tmp_path / str(made), STOP, "5", nprocs=1)
        assert sha(tmp_path / str(made)) == sha(tmp_path / "whole")
    assert replay(tmp_path / "whole", 3, env=3).stdout.count("the same data") == 2
    done = replay(tmp_path / "whole", 3, env=4, expect=2)
    assert "env 4 is an agent that is gone in all of iteration 3" in done.stderr


@pytest.mark.slow
def test_a_game_longer_than_max_replay_steps_begins_anew(tmp_path):
    args = [*STEPS, "--max-replay-steps", "1"]
    train(tmp_path / "r", *args, STOP, "1")
    done = resume(tmp_path / "r", STOP, "2")
    assert "is longer than max_replay_steps" in done.stdout + done.stderr
    assert len(table(tmp_path / "r")) == 2


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--num-envs", "8"], "num_envs must be a multiple of 3.*--num-envs 6 or --num-envs 9"),
        (
            ["--episodes-per-batch", "2"],
            "episodes_per_batch must be a multiple of 3.*got 2; set --episodes-per-batch 3$",
        ),
        (["--rank0-envs", "1"], "rank0_envs must be a multiple of 3"),
        (["--env-processes"], "env_processes is for environments .*leave --env-processes out"),
        (["--env-retries", "2"], "env_retries is for"),
        (["--env-kwargs", "agents=1", "--env-retries", "2"], r"env_retries is for.*\(1 agent\)"),
        (["--on-env-error", "truncate"], "on_env_error is for"),
        (["--wrappers", "TimeAwareObservation"], "wrap them in the function that makes them"),
        (["--env-kwargs", 'sizes={"wolf 1": 3}'], "all agents of a game must have the same spaces"),
        (["--env-kwargs", "agents=0"], "must name its agents in possible_agents: got none"),
    ],
)
def test_what_does_not_fit_is_one_line(args, said, tmp_path):
    steps = [] if "--episodes-per-batch" in args else ["--steps-per-batch", "72"]
    done = train(tmp_path / "r", *HUNT, *steps, *args, expect=2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.search(said, lines[0]), lines


def test_every_rank_has_a_game():
    words = Words.read([*STEPS, "--rank0-envs", "6"])
    with pytest.raises(ValueError, match="rank0_envs must leave.*at most --rank0-envs 3"):
        prepare(words, None, 3)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("late", r"reset of helpers.games:make_hunt must return .*'wolf 1'.* but not come later"),
        ("gone", r"step of helpers.games:make_hunt .*each agent that acted.* leaves by terminated"),
        ("short", "step of helpers.games:make_hunt must return observations, rewards"),
        ("raises", "on purpose"),
    ],
)
def test_a_wrong_answer_names_the_game(answer, said):
    with pytest.raises((ValueError, ZeroDivisionError), match=said) as raised:
        rollout, agent = rollout_of(steps=5, answer=answer)
        rollout.collect(agent, 1)
    if answer != "late":
        place = (
            r"In fragment 0 of iteration 1: .*, episode with seed \d+, step \d, action \{'wolf 0'"
        )
        assert re.search(place, "".join(raised.value.__notes__))


def test_who_is_gone_may_take_any_choice_of_a_mask_that_allows_none():
    rollout, agent = rollout_of(steps=40, answer="masks")
    for fragment in rollout.collect(agent, 1)[0]:
        assert (fragment.act <= (fragment.obs[:, 1] % 2)).all()
    assert len(fragment.rew) < 40


def test_actions_of_several_choices_and_observations_reach_the_game():
    rollout, agent = rollout_of(steps=9, choices=[2, 3], agents=2)  # the game checks each action
    assert rollout.spaces.act.choices == (2, 3)
    assert {len(rollout.collect(agent, i)[0]) for i in (1, 2)} == {4}


def test_they_do_so_whatever_is_around_the_game():
    def made():
        return EpisodeInfo(lambda: make("helpers.games:make_hunt", choices=[2, 3]), ["place"])

    rollout = FixedSteps(make_block(lambda _: made(), range(2), SEED), 9)
    rollout.collect(RandomAgent(rollout.spaces, NoOptions(), None), 1)
    seen = rollout.envs[0].gym.unwrapped.game.parallel.seen
    assert {type(action) for actions in seen for action in actions.values()} == {tuple}


def test_a_game_is_closed_once():
    env = make("helpers.games:make_hunt")
    rollout = FixedSteps(make_block(lambda _: env, range(1), SEED), 1)
    rollout.close()
    assert env.unwrapped.game.parallel.closed == 1


def test_a_game_need_not_have_a_close():
    env = make("helpers.games:make_hunt")
    game = env.unwrapped.game
    game.parallel = SimpleNamespace(possible_agents=game.parallel.possible_agents)
    env.close()


def test_an_agent_does_not_step_by_itself():
    env = make("helpers.games:make_hunt")
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="cannot step by itself"):
        env.step(0)


TWO = ["examples.two_policies:make", "--algo", "examples/two_policies.py", "--minibatch-size", "64"]
TWO += ["--num-envs", "16", "--steps-per-batch", "1024"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_for_each_agent_learns_what_each_is_to_do(seed, tmp_path):
    train(tmp_path / "r", *TWO, "--total-steps", "20000", "--seed", str(seed))
    last = table(tmp_path / "r")[-1]
    assert min(float(last[f"return_{agent}_mean"]) for agent in ("left", "right")) > 9  # of 10


@pytest.mark.slow
def test_one_policy_for_both_does_not(tmp_path):
    train(tmp_path / "r", TWO[0], *TWO[3:], "--total-steps", "20000")
    assert float(table(tmp_path / "r")[-1]["return_mean"]) < 6


@pytest.mark.slow
def test_a_policy_for_each_agent_has_one_hash(tmp_path):
    more = ["--total-steps", "4096", "--eval-every", "2", "--eval-episodes", "2"]
    train(tmp_path / "1", *TWO, *more)
    train_on_ranks(tmp_path / "2", *TWO, *more, STOP, "2", nprocs=2)
    resume_on_ranks(tmp_path / "2", nprocs=2)
    assert curve(tmp_path / "1") == curve(tmp_path / "2")
    assert sha(tmp_path / "1") == sha(tmp_path / "2")
    assert {"eval_return_left", "eval_return_right"} < table(tmp_path / "1")[0].keys()


SELF = ["examples.self_play:make", "--algo", "examples/self_play.py", "--minibatch-size", "64"]
SELF += ["--num-envs", "16", "--steps-per-batch", "256", "--gamma", "0", "--lr", "3e-4"]
SELF += ["--entropy-coef", "linear:0.5:0.1"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_who_plays_against_past_selves_can_hardly_be_exploited(seed, tmp_path):
    train(tmp_path / "r", *SELF, "--total-steps", "50000", "--seed", str(seed))
    rows = table(tmp_path / "r")
    assert float(rows[0]["exploitability"]) == pytest.approx(1 / 3, abs=0.01)  # all three alike
    assert float(rows[-1]["exploitability"]) < 0.15


@pytest.mark.slow
def test_past_selves_are_the_same_on_all_ranks_and_resumed(tmp_path):
    train(tmp_path / "1", *SELF, "--total-steps", "2048")
    train_on_ranks(tmp_path / "2", *SELF, "--total-steps", "2048", STOP, "3", nprocs=2)
    resume_on_ranks(tmp_path / "2", nprocs=2)
    assert curve(tmp_path / "1") == curve(tmp_path / "2")
    assert sha(tmp_path / "1") == sha(tmp_path / "2")


@pytest.mark.parametrize("steps", [40, 0])
def test_the_returns_of_agents_are_theirs(steps):
    rollout, agent = rollout_of(steps=steps, episodes=None if steps else range(4))
    assert rollout.spaces.agents == ("wolf 0", "wolf 1", "wolf 2")
    ended = rollout.collect(agent, 1)[1]
    for i in range(3):
        own = ended["fragment_id"] % 3 == i
        np.testing.assert_array_equal(ended[f"return_wolf {i}"][own], ended["return"][own])
        assert np.isnan(ended[f"return_wolf {i}"][~own]).all()


def test_the_returns_of_very_many_agents_are_not_told_apart():
    assert rollout_of(range(1), steps=1, agents=33)[0].labels == []


def test_figures_of_each_agent():
    names = ["last", "sum:last"]

    def made():
        return EpisodeInfo(lambda: make("helpers.games:make_hunt"), names)

    envs_of_game = agents_of(made())
    assert [env.unwrapped.agent for env in envs_of_game] == ["wolf 0", "wolf 1", "wolf 2"]
    assert all(isinstance(env, EpisodeInfo) for env in envs_of_game)


def test_settings_reach_a_game_once():
    called = []

    def made():
        env = ResetMethod(lambda: make("helpers.games:make_hunt"), "harder")
        env._method = called.append
        return env

    rollout = WholeEpisodes(make_block(lambda _: made(), range(1), SEED), lambda: iter([0]))
    rollout.block.settings = Settings(1, '{"limit": 2}')
    rollout.collect(RandomAgent(rollout.spaces, NoOptions(), None), 1)
    assert called == [{"limit": 2}]


def test_a_film_goes_on_when_the_first_agent_is_gone():
    seen = []
    env = watched(make("helpers.games:make_hunt"), lambda env: seen.append(env.render()[0, 0, 0]))
    rollout = WholeEpisodes(make_block(lambda _: env, range(1), SEED), lambda: iter(range(4)))
    fragments, _ = rollout.collect(RandomAgent(rollout.spaces, NoOptions(), None), 1)
    longest = [max(len(f.rew) for f in fragments[3 * i : 3 * i + 3]) for i in range(4)]
    assert any(len(fragments[3 * i].rew) < longest[i] for i in range(4))
    assert seen == [20 * t for steps in longest for t in range(steps + 1)]


def test_check_compares_all_agents():
    assert not any(check(lambda: make("helpers.games:make_hunt"), steps=50).values())
    found = check(lambda: make("helpers.games:make_hunt", answer="moody"), steps=50)
    assert "differs from step" in found["with other global random numbers"]


@pytest.mark.slow
def test_a_policy_with_a_memory_is_resumed(tmp_path):
    args = [*HUNT, "--steps-per-batch", "27", "--total-steps", "10000", "--recurrent", "gru"]
    train(tmp_path / "1", *args, STOP, "3")
    train_on_ranks(tmp_path / "2", *args, STOP, "2", nprocs=2)
    resume_on_ranks(tmp_path / "2", STOP, "3", nprocs=1)
    assert sha(tmp_path / "1") == sha(tmp_path / "2")


def test_a_loaded_policy_acts_for_any_agent(tmp_path):
    train(tmp_path / "r", *STEPS, STOP, "1")
    policy = load(tmp_path / "r", trust=True)
    game = games.Hunt()
    obs, _ = game.reset(seed=3)
    acts = {agent: policy(its, deterministic=True) for agent, its in obs.items()}
    assert all(game.action_space(agent).contains(act) for agent, act in acts.items())
    game.step(acts)
    assert len(policy.evaluate(2)["return"]) == 6  # of each agent of two games
