"""Envs and fragments, on environments whose numbers are known in advance."""

import time

import gymnasium as gym
import numpy as np
import pytest
from helpers import envs
from helpers.envs import NoiseAgent

from rank0rl import seeding
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.envs.block import envs_of, make_block
from rank0rl.envs.resume import restore
from rank0rl.rollout import ENDED_AT, FixedSteps, WholeEpisodes
from rank0rl.run.state import Unfinished

SEED = 5


def make(indices=range(2), *, steps=0, episodes=None, cuts=(), **kwargs):
    block = make_block(lambda _: envs.Count(**kwargs), indices, SEED)
    if episodes is None:
        return FixedSteps(block, steps, cuts)
    return WholeEpisodes(block, lambda: iter(episodes), cuts=cuts)


def under_way(rollout):
    """Episode and steps so far of each env."""
    return [(env.episode, int(rollout.block.length[env.row])) for env in rollout.envs]


def first_seen(env, episode):
    return seeding.integer(SEED, "reset", env, episode) % 1000


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
def test_envs_are_contiguous_blocks_that_differ_by_one_at_most(n):
    blocks = [envs_of(r, n, 8) for r in range(n)]
    assert [env for block in blocks for env in block] == list(range(8))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_a_fragment_of_fixed_steps_by_hand():
    fragments, ended = make(steps=5).collect(NoiseAgent(), 0)
    f = fragments[1]
    a, b = first_seen(1, 0), first_seen(1, 1)
    assert f.fragment_id == 1
    assert f.obs.tolist() == [[a, 0], [a, 1], [a, 2], [b, 0], [b, 1]]
    assert f.rew.tolist() == [1, 2, 3, 1, 2]
    assert f.terminated.tolist() == [False, False, True, False, False]
    assert not f.truncated.any()
    assert f.end.tolist() == [2, 4]
    assert f.end_obs.tolist() == [[a, 3], [b, 2]]  # after the step, not after the reset
    assert f.episodes() == [slice(0, 3), slice(3, 5)]
    assert {name: array.tolist() for name, array in ended.items()} == {
        "fragment_id": [0, 1],
        "return": [6, 6],
        "length": [3, 3],
        ENDED_AT: [2, 2],
    }


def test_a_fragment_s_actions_are_not_those_that_an_episode_is_repeated_with():
    rollout = make(steps=2)
    fragments, _ = rollout.collect(NoiseAgent(), 0)
    taken = rollout.unfinished()["act"].copy()
    fragments[0].act[:] = 99
    assert (rollout.unfinished()["act"] == taken).all()


def test_a_time_limit_is_no_terminal_state_and_an_end_at_the_cut_is_one_part():
    fragments, _ = make(steps=3, truncate=True).collect(NoiseAgent(), 0)
    assert fragments[0].truncated.tolist() == [False, False, True]
    assert not fragments[0].terminated.any()
    assert fragments[0].end.tolist() == [2]


def test_episodes_go_on_from_one_iteration_to_the_next():
    rollout, agent = make(steps=2), NoiseAgent()
    for iteration in range(3):
        fragments, ended = rollout.collect(agent, iteration)
    a, b = first_seen(0, 1), first_seen(0, 1)
    assert fragments[0].obs.tolist() == [[a, 1], [b, 2]]
    assert ended["return"].tolist() == [6, 6]
    assert ended["length"].tolist() == [3, 3]


def gathered(rollouts):
    parts = [rollout.unfinished() for rollout in rollouts]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
def test_restored_envs_go_on_in_the_middle_of_their_episodes(iterations):
    """Episodes of 3 to 9 steps in fragments of 4: cut once, twice, not at all."""
    agent, split = NoiseAgent(), [range(3), range(3, 5)]
    rollouts = [make(indices, steps=4, vary=True) for indices in split]
    unfinished = Unfinished(10_000)
    for iteration in range(iterations):
        for rollout in rollouts:
            rollout.collect(agent, iteration)
        unfinished.add(gathered(rollouts))
    loaded = Unfinished(10_000)
    loaded.load(unfinished.all())
    resumed = [make(indices, steps=4, vary=True) for indices in (range(1), range(1, 5))]
    for rollout in resumed:
        assert restore(rollout.block, loaded.all()) == {}
    for iteration in range(iterations, iterations + 3):
        went_on = [f for rollout in rollouts for f in rollout.collect(agent, iteration)[0]]
        again = [f for rollout in resumed for f in rollout.collect(agent, iteration)[0]]
        for f, g in zip(went_on, again, strict=True):
            assert f.obs.tobytes() == g.obs.tobytes()
            assert f.act.tobytes() == g.act.tobytes()
    went_on, again = (
        [
            env
            for r in these
            for env in zip(under_way(r), r.unfinished()["ret"].tolist(), strict=True)
        ]
        for these in (rollouts, resumed)
    )
    assert went_on == again


def test_an_environment_that_does_not_repeat_is_named_and_begins_afresh():
    rollout, unfinished = make(steps=2), Unfinished(10_000)
    rollout.collect(NoiseAgent(), 0)
    unfinished.add(rollout.unfinished())
    other = make(steps=2, length=2)  # ends where the first one goes on
    indices = unfinished.all()
    assert list(restore(other.block, indices)) == [0, 1]
    indices["obs"][1] += 1
    again = make(steps=2)
    strays = restore(again.block, indices)
    assert list(strays) == [1]
    assert "does not repeat an episode from its seed and actions" in strays[1]
    assert under_way(again) == [(0, 2), (1, 0)]


def test_no_actions_are_kept_of_an_episode_that_is_too_long_to_repeat():
    rollout, unfinished = make(range(2), steps=4, length=100), Unfinished(6)
    for iteration in range(3):
        rollout.collect(NoiseAgent(), iteration)
        unfinished.add(rollout.unfinished())
        assert len(unfinished.all()["act"]) == [8, 0, 0][iteration]
    loaded = Unfinished(6)
    loaded.load(unfinished.all())
    again = make(range(2), steps=4, length=100)
    strays = restore(again.block, loaded.all())
    assert strays == dict.fromkeys(
        (0, 1), "its episode of 12 steps is longer than max_replay_steps"
    )
    had_states = {**loaded.all(), "state_bytes": np.ones(2, np.int64)}
    strays = restore(make(range(2), steps=4, length=100).block, had_states)
    assert strays == dict.fromkeys((0, 1), "its environment has no get_state and set_state now")
    assert under_way(again) == [(1, 0), (1, 0)]


def test_no_two_envs_iterations_or_neighbouring_seeds_share_noise():
    """The first 100 actions of all indices, of runs with seeds 0, 1 and 2, differ pairwise."""
    agent = NoiseAgent()
    drawn = set()
    for seed in range(3):
        rollout = FixedSteps(make_block(lambda _: envs.Count(), range(32), seed), 100)
        for iteration in range(2):
            fragments, _ = rollout.collect(agent, iteration)
            drawn |= {value for f in fragments for value in f.act.ravel().tolist()}
    # 19,200 normal numbers in float32: by chance some few are equal, whole streams would be fewer
    assert len(drawn) > 0.99 * 3 * 32 * 2 * 100


def test_noise_and_fragment_id_are_the_fragments_own():
    fragments, _ = make(range(3, 5), steps=4).collect(NoiseAgent(), 2)
    noise = seeding.stream(SEED, "act", 2, 4).standard_normal((4, 1)).astype(np.float32)
    assert fragments[1].extras["noise"].tolist() == noise.tolist()
    assert fragments[1].extras["whose"].tolist() == [4] * 4


def test_actions_are_clipped_for_the_environment_and_kept_as_they_were():
    rollout = make(range(1), steps=50)
    fragments, _ = rollout.collect(NoiseAgent(), 0)
    seen = np.array(rollout.envs[0].gym.seen)
    assert np.abs(fragments[0].act).max() > 1
    assert seen.tolist() == np.clip(fragments[0].act, -1, 1).tolist()


def test_choices_begin_where_the_space_begins():
    rollout = make(range(1), steps=4, action_start=-1)

    class Choose(NoiseAgent):
        def act(self, step):
            return np.array([1]), {}

    fragments, _ = rollout.collect(Choose(), 0)
    assert fragments[0].act.tolist() == [1] * 4
    assert [int(a) for a in rollout.envs[0].gym.seen] == [0] * 4


def test_whole_episodes_are_fragments_of_their_own_whatever_envs_collect_them():
    def episodes(indices, numbers):
        rollout = make(
            indices, episodes=numbers, vary=True, length=300
        )  # longer than a noise block
        fragments, ended = rollout.collect(NoiseAgent(), 4)
        assert ended["return"].sum() == sum(f.rew.sum() for f in fragments)
        return fragments

    alone = episodes(range(1), range(11))
    shared = episodes(range(3), range(0, 11, 2)) + episodes(range(3, 5), range(1, 11, 2))
    assert [f.fragment_id for f in alone] == list(range(11))
    for fragment in shared:
        twin = alone[fragment.fragment_id]
        assert fragment.obs[0, 0] == seeding.integer(SEED, "reset", 4, fragment.fragment_id) % 1000
        assert fragment.end.tolist() == [len(fragment.rew) - 1]
        assert fragment.terminated[-1]
        for name in ("obs", "act", "rew", "terminated", "end_obs"):
            assert getattr(fragment, name).tobytes() == getattr(twin, name).tobytes()


class Slow(envs.Count):
    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "under_way"),
    [(envs.Count, [[0], [1, 2], [3, 4], [5]]), (Slow, [[0], [1], [2], [3], [4], [5]])],
)
def test_no_more_episodes_are_under_way_than_at_once(env, under_way):
    """One, until it is known how long a step takes; then as many as asked for, unless it is long."""
    drawn = iter(range(6))
    rollout = WholeEpisodes(make_block(lambda _: env(), range(4), SEED), lambda: drawn, at_once=2)
    seen = []

    class Watch(NoiseAgent):
        def act(self, step):
            seen.append(step.fragment_id.tolist())
            return super().act(step)

    rollout.collect(Watch(), 1)
    assert seen[::3] == under_way  # of three steps each


def bits(fragment):
    names = ("obs", "act", "rew", "terminated", "truncated", "end", "end_obs")
    return [fragment.fragment_id, *(getattr(fragment, name).tobytes() for name in names)]


@pytest.mark.parametrize(
    ("mode", "cuts", "sizes"),
    [
        ({"steps": 4}, [2, 3], [2, 1, 2]),
        ({"steps": 4}, [0, 0], [0, 0, 5]),
        ({"episodes": range(11)}, [4, 6], [5, 5, 1]),  # five indices end at the same time
        ({"episodes": range(5)}, [1, 2, 3, 4], [0, 0, 0, 0, 5]),
        ({"episodes": []}, [1], [0, 0]),
    ],
)
def test_parts_are_what_is_collected_and_the_last_has_a_fragment(mode, cuts, sizes):
    whole = make(range(5), **mode)
    cut = make(range(5), cuts=cuts, **mode)
    for iteration in range(2):
        fragments, ended = whole.collect(NoiseAgent(), iteration)
        parts = list(cut.parts(NoiseAgent(), iteration))
        assert [len(part) for part in parts] == sizes
        together = sorted((f for part in parts for f in part), key=lambda f: f.fragment_id)
        assert [bits(f) for f in together] == [bits(f) for f in fragments]
        assert sorted(cut.ended()["fragment_id"].tolist()) == sorted(ended["fragment_id"].tolist())
    for name, array in whole.unfinished().items():
        assert array.tobytes() == cut.unfinished()[name].tobytes()


def test_a_rank_without_envs_has_as_many_parts_as_the_others():
    nothing = make(range(0), steps=4, cuts=[0, 0])
    assert list(nothing.parts(NoiseAgent(), 1)) == [[], [], []]


def test_a_rank_without_envs_knows_the_spaces_and_collects_nothing():
    rollout = make(range(0), steps=4)
    assert repr(rollout.spaces) == repr(make(steps=4).spaces)
    fragments, ended = rollout.collect(NoiseAgent(), 1)
    assert fragments == []
    assert [len(array) for array in ended.values()] == [0, 0, 0, 0]
    assert rollout.unfinished() == {}
    rollout.close()


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1"])
def test_a_env_is_bit_for_bit_the_same_alone_and_among_others(env_id):
    def collect(indices):
        rollout = FixedSteps(make_block(lambda _: gym.make(env_id), indices, SEED), 40)
        agent = PPO(rollout.spaces, PPOOptions(), np.random.default_rng(0))
        return [agent.process(f) for i in range(2) for f in rollout.collect(agent, i)[0]]

    among, alone = collect(range(9)), collect(range(6, 7))
    for rows, twin in zip(among[6::9], alone, strict=True):
        assert all(rows[name].tobytes() == twin[name].tobytes() for name in twin)


@pytest.mark.parametrize(
    ("act", "extra", "said"),
    [
        (np.zeros((2, 3)), np.zeros(2), "actions as an array of shape (2, 1)"),
        (np.zeros(2), np.zeros(2), "actions as an array of shape (2, 1)"),
        ([[0.0], [0.0]], np.zeros(2), "got <class 'list'>"),
        (np.zeros((2, 1)), np.zeros((3, 2)), "'noise' as an array of shape (2, 2)"),
        (np.zeros((2, 1)), 0.0, "'noise' as an array of shape (2,)"),
    ],
)
def test_what_an_agent_acts_is_checked(act, extra, said):
    class Wrong(NoiseAgent):
        def act(self, step):
            return act, {"noise": extra}

    with pytest.raises(ValueError, match=r"act must return") as info:
        make(steps=5).collect(Wrong(), 0)
    assert said in str(info.value)


@pytest.mark.parametrize("name", ["obs", "act", "rew", "terminated", "truncated"])
def test_an_extra_cannot_take_the_place_of_what_a_fragment_has(name):
    class Wrong(NoiseAgent):
        def act(self, step):
            return step.noise, {name: 2 * step.noise, "at": step.noise}

    with pytest.raises(ValueError, match=rf"names of its own: a fragment has \['{name}'\]"):
        make(steps=5).collect(Wrong(), 0)


class Answers(envs.Count):
    """Answers to the step of this number, 0 for the reset, as a function changes its answer."""

    def __init__(self, change, at=1, dtype=np.float32, shape=(3,)):
        super().__init__(length=4)
        self.observation_space = gym.spaces.Box(0, 100, shape, dtype)
        self.change, self.at = change, at

    def reset(self, **kwargs):
        super().reset(**kwargs)
        answer = self._zeros(), {}
        return self.change(*answer) if self.at == 0 else answer

    def step(self, action):
        _, rew, terminated, truncated, info = super().step(action)
        answer = self._zeros(), rew, terminated, truncated, info
        return self.change(*answer) if self.t == self.at else answer

    def _zeros(self):
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)


def answering(change, mode="steps", **kwargs):
    """Two envs, the second of which answers as it should not."""
    made = iter([lambda *answer: answer, change])
    block = make_block(lambda _: Answers(next(made), **kwargs), range(2), SEED)
    return FixedSteps(block, 3) if mode == "steps" else WholeEpisodes(block, lambda: iter(range(2)))


def with_obs(obs):
    return lambda _, *rest: (obs, *rest)


# changed answer, number of the step, further arguments -> what the error says
WRONG = [
    (with_obs(np.zeros(1)), 1, {}, "float64 (1,)"),
    (with_obs(0.5), 1, {}, "got 0.5"),
    (with_obs(np.zeros(3, complex)), 1, {}, "complex128 (3,)"),
    (with_obs(np.array([300.5, 0, 0])), 1, {"dtype": np.uint8}, "numbers of uint8"),
    (with_obs([-1, 0, 0]), 1, {"dtype": np.uint8}, "got [-1, 0, 0]"),
    (with_obs([[0], [0, 1], 0]), 1, {}, "got [[0], [0, 1], 0]"),
    (with_obs(np.zeros(4)), 3, {}, "float64 (4,)"),  # at a later step
    (lambda o, r, *rest: (o, "1", *rest), 1, {}, "the reward must be real numbers"),
    (lambda o, r, *rest: (o, np.ones(1), *rest), 1, {}, "float64 (1,)"),
    (lambda o, r, *rest: (o, None, *rest), 1, {}, "the reward"),
    (lambda o, r, *rest: (o, np.ones(1), *rest), 3, {}, "the reward"),
    (lambda o, r, t, *rest: (o, r, "no", *rest), 1, {}, "terminated must be True or False"),
    (lambda o, r, t, *rest: (o, r, "no", *rest), 3, {}, "terminated must be True or False"),
    (lambda o, r, t, c, i: (o, r, t, "no", i), 2, {}, "truncated must be True or False"),
    (lambda o, r, t, c, i: (o, r, t, i), 1, {}, "step must return an observation, reward"),
    (lambda o, r, t, c, i: (o, r, t, i), 3, {}, "step must return an observation, reward"),
    (lambda *answer: None, 1, {}, "step must return an observation, reward"),
    (lambda *answer: (*answer[:4], ["x"]), 1, {}, "an info, which is a dict"),
    (with_obs(np.zeros(1)), 0, {}, "float64 (1,)"),
    (lambda obs, info: obs, 0, {}, "reset must return an observation and an info"),
    (lambda obs, info: obs, 0, {"shape": (2,)}, "reset must return an observation and an info"),
    (lambda obs, info: (obs, None), 0, {}, "reset must return an observation and an info"),
]


@pytest.mark.parametrize("mode", ["steps", "episodes"])
@pytest.mark.parametrize(("change", "at", "kwargs", "said"), WRONG)
def test_a_wrong_answer_is_one_error_that_names_env_seed_and_step(mode, change, at, kwargs, said):
    with pytest.raises(ValueError) as error:
        answering(change, mode, at=at, **kwargs).collect(NoiseAgent(), 1)
    key = (1, 0) if mode == "steps" else (1, 1)
    where = f"In fragment 1 of iteration 1: Answers, episode with seed {seeding.integer(SEED, 'reset', *key)}"
    what = f"step {at}, action [" if at else "in its reset"
    assert said in str(error.value)
    assert [note.partition(", action [")[0] for note in error.value.__notes__] == [
        f"{where}, {what}".partition(", action [")[0] + ("" if at else ".")
    ]
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


LEGAL = [
    (with_obs(np.full(3, 1 / 3)), {}),
    (with_obs([1, 2, 3]), {}),
    (with_obs(np.array([1, 2, 3])), {"dtype": np.uint8}),
    (with_obs([1.0, 2.0, 3.0]), {"dtype": np.uint8}),
    (with_obs(np.float64(0.1)), {"shape": ()}),
    (lambda o, r, t, c, i: (o, np.float32(r), np.bool_(t), np.bool_(c), i), {}),
    (lambda o, r, t, c, i: (o, np.array(r), np.array(t), 0, i), {}),
    (lambda o, r, t, c, i: [o, 2**70, int(t), False, None], {}),
]


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(("change", "kwargs"), LEGAL)
def test_what_can_be_taken_without_a_loss_is_taken(change, kwargs, at):
    answering(change, at=at, **kwargs).collect(NoiseAgent(), 1)


INFINITE = with_obs(np.array([0, np.inf, 0]))
NAN = lambda o, r, *rest: (o, float("nan"), *rest)  # noqa: E731


@pytest.mark.parametrize("mode", ["steps", "episodes"])
@pytest.mark.parametrize(
    ("change", "at", "iteration"),
    [(INFINITE, 0, 1), (INFINITE, 3, 1), (INFINITE, 4, 2), (NAN, 1, 1), (NAN, 3, 1), (NAN, 4, 2)],
)
def test_what_is_not_finite_is_found_in_its_iteration(mode, change, at, iteration):
    rollout = answering(change, mode, at=at)
    with pytest.raises(ValueError, match="finite numbers: the (observation|reward) is") as error:
        for number in range(1, 3):
            rollout.collect(NoiseAgent(), number)
    key, found = ((1, 0), iteration) if mode == "steps" else ((1, 1), 1)
    seed = seeding.integer(SEED, "reset", *key)
    [note] = error.value.__notes__
    assert f"In fragment 1 of iteration {found}: Answers, episode with seed {seed}, " in note
    assert (f"step {at}, action [" if at else "in its reset") in note
    assert rollout.failed_at == (found, 1)


def test_what_act_returns_has_the_same_names_in_every_step():
    class Forgets(NoiseAgent):
        def act(self, step):
            act, extras = super().act(step)
            self.calls = getattr(self, "calls", 0) + 1
            return act, extras if self.calls < 3 else {"whose": extras["whose"]}

    rollout = make(steps=4)
    with pytest.raises(ValueError, match=r"same names in every step: \['noise'\] came in some"):
        rollout.collect(Forgets(rollout.spaces), 1)


def test_all_envs_must_have_the_same_spaces():
    sizes = iter([2, 2, 3])

    class Sized(envs.Count):
        def __init__(self):
            super().__init__(action_start=0)
            self.action_space = gym.spaces.Discrete(next(sizes))

    with pytest.raises(ValueError, match=r"env 4 has .*Discrete\(2\).*; env 6 has .*Discrete\(3\)"):
        make_block(lambda _: Sized(), range(4, 7), SEED)


class Remembering(NoiseAgent):
    """Its memory counts the steps of an episode, and what it has seen there."""

    memory = 2

    def act(self, step):
        act, extras = super().act(step)
        new = np.stack([step.memory[:, 0] + 1, step.obs[:, 1]], axis=1).astype(np.float32)
        return act, {**extras, "memory": new}


def test_a_memory_goes_from_step_to_step_and_begins_with_zeros():
    rollout, agent = make(steps=5), Remembering()
    f = rollout.collect(agent, 0)[0][1]
    assert f.extras["memory"].tolist() == [[0, 0], [1, 0], [2, 1], [0, 0], [1, 0]]
    assert f.end_memory.tolist() == [[3, 2], [2, 1]]
    g = rollout.collect(agent, 1)[0][1]  # the episode goes on
    assert g.extras["memory"][:2].tolist() == [[2, 1], [0, 0]]
    [f, g] = make(range(1), episodes=[3, 8]).collect(agent, 0)[0]
    for each in (f, g):
        assert each.extras["memory"].tolist() == [[0, 0], [1, 0], [2, 1]]
        assert each.end_memory.tolist() == [[3, 2]]


def test_a_memory_at_a_boundary_is_kept_and_restored():
    one, other, agent = make(steps=5), make(steps=5), Remembering()
    one.collect(agent, 0)
    unfinished = Unfinished(100)
    unfinished.add(one.unfinished())
    assert restore(other.block, unfinished.all()) == {}
    for a, b in zip(one.collect(agent, 1)[0], other.collect(agent, 1)[0], strict=True):
        assert a.extras["memory"].tobytes() == b.extras["memory"].tobytes()
        assert a.extras["memory"][0].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda memory: memory[:, :1], r"float32 \(2, 1\)"),
        (lambda memory: memory.astype(float), r"float64 \(2, 2\)"),
        (lambda memory: None, "NoneType"),
    ],
)
def test_a_memory_of_another_kind_is_refused(wrong, got):
    class Wrong(Remembering):
        def act(self, step):
            return np.zeros((len(step.obs), 1), "f"), {"memory": wrong(step.memory)}

    with pytest.raises(ValueError, match=rf'extra "memory" as float32 \(2, 2\).*{got}'):
        make(steps=5).collect(Wrong(), 0)


class Named(envs.Count):
    """Has attributes with names that mean something else elsewhere."""

    agent_names = ("north", "south")

    def begin_step(self, action):
        raise AssertionError


def test_names_of_an_environment_mean_nothing_here():
    rollout = FixedSteps(make_block(lambda _: Named(length=4), range(2), SEED), 8)
    rollout.collect(NoiseAgent(rollout.spaces, None, None), 1)
    assert rollout.labels == []
    assert rollout.spaces.agents == ()
