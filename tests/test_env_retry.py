"""An environment that fails is made anew, and its episode repeated: the curve is the same."""

import gymnasium as gym
import numpy as np
import pytest
from helpers import envs
from helpers.ranks import HERE
from helpers.runs import curve, resume, sha, table, train, train_here, train_on_ranks

from rank0rl.agent import NoOptions
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.envs.block import make_block
from rank0rl.envs.info import GAVE_UP, InfoError, StepInfo
from rank0rl.envs.retry import FAILURES, RetriedEnv, take_failures
from rank0rl.rollout import FixedSteps, WholeEpisodes
from rank0rl.tools.check import RandomAgent

SEED = 3
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*its episode is repeated"),
    pytest.mark.filterwarnings("ignore:.*it is made anew"),
]


class Fails(envs.Count):
    """Tells a function each step before it is made, -1 for making and 0 for the reset, so that it may raise."""

    def __init__(self, fails, **kwargs):
        self.fails = fails
        fails(-1)
        super().__init__(**{"length": 5, **kwargs})

    def reset(self, **kwargs):
        self.fails(0)
        return super().reset(**kwargs)

    def step(self, action):
        self.fails(self.t + 1)
        return super().step(action)

    def close(self):
        raise ZeroDivisionError("closing fails too")


class Tells(gym.Wrapper):
    """Tells a cost of each step."""

    def step(self, action):
        *answer, info = super().step(action)
        return (*answer, {**info, "cost": 7.0})


class Plan:
    """Raises at these steps, in this order."""

    def __init__(self, *steps):
        self.steps, self.calls = list(steps), []

    def __call__(self, step):
        self.calls.append(step)
        if self.steps and self.steps[0] == step:
            del self.steps[0]
            raise ZeroDivisionError(f"on purpose in {step}")


def retried(plan, retries=2, truncate=False, max_steps=100, **kwargs):
    return RetriedEnv(lambda: Fails(plan, **kwargs), retries, truncate, max_steps)


def episode(env, seed=11):
    answers = [env.reset(seed=seed)]
    while len(answers) == 1 or not (answers[-1][2] or answers[-1][3]):
        answers.append(env.step(np.array([0.5], np.float32)))
    return [[np.array(part).tolist() for part in answer] for answer in answers]


@pytest.mark.parametrize(
    ("steps", "mended"),
    [
        ([0], 1),
        ([3], 1),
        ([3, 3], 2),
        ([3, -1, 0, 1, 3], 5),  # while it is repeated, too
        ([3, 2, 2, 5, 5], 5),
    ],
)
def test_an_episode_goes_on_as_if_nothing_had_failed(steps, mended):
    plan = Plan(*steps)
    env = retried(plan)
    assert episode(env) == episode(envs.Count(length=5))
    assert plan.steps == []
    assert take_failures([env]) == {"env_mended": mended, "env_truncated": 0}
    assert take_failures([env]) == {"env_mended": 0, "env_truncated": 0}
    assert episode(env, 12) == episode(envs.Count(length=5), 12)


class Overwrites(Fails):
    """Writes into its action, before it fails."""

    def step(self, action):
        action -= 1
        obs, *rest = super().step(action)
        return obs + action, *rest


@pytest.mark.parametrize("step", [1, 3])
def test_an_action_that_a_step_overwrites_is_given_again_as_it_was(step):
    plan = Plan(step)
    env = RetriedEnv(lambda: Overwrites(plan), 2, False, 100)
    assert episode(env) == episode(Overwrites(Plan()))
    assert not plan.steps


class Pops(Fails):
    """Takes a reset option out of the dict, before it fails."""

    def reset(self, *, seed=None, options=None):
        self.x = options.pop("x")
        return super().reset(seed=seed)


def test_reset_options_that_a_reset_changes_are_given_again_as_they_were():
    env = RetriedEnv(lambda plan=Plan(0): Pops(plan), 2, False, 100)
    env.reset(seed=1, options={"x": 2})
    assert env.unwrapped.x == 2


def test_an_environment_that_cannot_be_made_is_made_again():
    env = retried(Plan(-1, -1))
    assert take_failures([env])["env_mended"] == 2
    assert episode(env) == episode(envs.Count(length=5))
    for plan, retries in ((Plan(-1, -1, -1), 2), (Plan(-1), 0)):
        with pytest.raises(ZeroDivisionError):
            retried(plan, retries)
        assert plan.calls == [-1] * (retries + 1)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("retries", [0, 2])
def test_a_step_that_goes_on_failing_raises_its_error(step, retries):
    plan = Plan(*[step] * 9)
    with pytest.raises(ZeroDivisionError, match=f"on purpose in {step}") as error:
        episode(retried(plan, retries))
    assert plan.calls.count(step) == retries + 1
    notes = getattr(error.value, "__notes__", [])
    assert ["--env-retries is 2" in note for note in notes] == [True] * bool(retries)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_step_that_goes_on_failing_can_end_the_episode(retries):
    plan = Plan(*[3] * (retries + 1))
    env = retried(plan, retries, truncate=True)
    *before, last = episode(env)
    assert before == episode(envs.Count(length=5))[:3]
    assert last == [before[-1][0], 0.0, False, True, {GAVE_UP: True}]
    assert take_failures([env]) == {"env_mended": 0, "env_truncated": 1}
    made = plan.calls.count(-1)
    assert episode(env, 12) == episode(envs.Count(length=5), 12)
    assert plan.calls.count(-1) == made + 1  # the one that failed is not used again


def test_an_agent_reads_the_numbers_of_the_last_step_where_none_can_be_made():
    """Also in the first step of an episode, whose reset has told none."""
    plan = Plan()
    env = StepInfo(lambda: RetriedEnv(lambda: Tells(Fails(plan)), 0, True, 100), ("cost",))
    episode(env)
    plan.steps[:] = [1]
    *_, last = episode(env)
    assert last[1:4] == [0.0, False, True]
    assert env.step_info == {"cost": 0.0}
    episode(env)
    assert env.step_info == {"cost": 7.0}
    first = StepInfo(lambda: RetriedEnv(lambda: Tells(Fails(Plan(1))), 0, True, 100), ("cost",))
    with pytest.raises(InfoError, match="its first step failed"):
        episode(first)


def test_a_reset_that_goes_on_failing_cannot_be_truncated():
    with pytest.raises(ZeroDivisionError):
        episode(retried(Plan(0, 0, 0), truncate=True))


def test_longer_episodes_are_not_repeated():
    episode(retried(Plan(3), max_steps=2))  # two steps are over when the third fails
    with pytest.raises(ZeroDivisionError) as error:
        episode(retried(Plan(4), max_steps=2))
    assert "--max-replay-steps" in error.value.__notes__[0]


@pytest.mark.parametrize("toy", [envs.Moody, envs.Latent])
def test_a_repetition_that_differs_is_an_error(toy):
    class FailsOnce(toy):
        fails = iter([3])

        def step(self, action):
            if self.t == 3 and next(FailsOnce.fails, None):
                raise ZeroDivisionError("on purpose")
            return super().step(action)

    env = RetriedEnv(FailsOnce, 2, truncate=True, max_steps=100)
    env.reset(seed=1)
    with pytest.raises(RuntimeError, match=r"after a failure in step 4 .*rank0rl check"):
        for _ in range(5):
            env.step(np.zeros(1))


def test_a_failure_is_told_once():
    with pytest.warns(RuntimeWarning, match="Fails raised ZeroDivisionError: on purpose in 3"):
        episode(retried(Plan(3)))


@pytest.mark.parametrize("mode", ["steps", "episodes"])
def test_rollouts_are_those_of_the_undisturbed_environment(mode):
    flaky, plain = (
        FixedSteps(block, 300) if mode == "steps" else WholeEpisodes(block, lambda: iter(range(20)))
        for block in (
            make_block(lambda _: RetriedEnv(envs.Flaky, 3, False, 500), range(3), SEED),
            make_block(lambda _: gym.make("CartPole-v1"), range(3), SEED),
        )
    )
    agent = RandomAgent(plain.spaces, NoOptions(), None)
    for iteration in range(1, 3):
        mine, others = (r.collect(agent, iteration)[0] for r in (flaky, plain))
        for f, g in zip(mine, others, strict=True):
            for name in ("obs", "act", "rew", "terminated", "truncated", "end_obs"):
                assert getattr(f, name).tobytes() == getattr(g, name).tobytes()
    assert take_failures(env.gym for env in flaky.envs)["env_mended"] > 5


SIZE = {"num_envs": 6, "steps_per_batch": 300, "total_steps": 900}
ARGS = [word for name, n in SIZE.items() for word in (f"--{name.replace('_', '-')}", str(n))]
FLAKY = ["helpers.envs:Flaky-v0", *ARGS, "--env-retries", "3"]


def failures(folder):
    return [sum(float(row[name]) for row in table(folder)) for name in FAILURES]


def test_a_run_on_two_ranks_has_the_undisturbed_curve(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    _, undisturbed = train_here(PPO, PPOOptions(), tmp_path, env_id="CartPole", **SIZE)
    (defaults := tmp_path / "defaults.toml").touch()
    train_on_ranks(tmp_path / "r", *FLAKY, "--config", str(defaults), nprocs=2)
    whole = undisturbed.summary()["weights_sha256"]
    assert sha(tmp_path / "r") == whole
    assert failures(tmp_path / "r")[0] > 0
    assert not set(FAILURES) & set(table(tmp_path)[0])  # no column without the option


def breaks(folder, nprocs, *args):
    command = ["helpers.envs:Breaks-v0", *ARGS, "--env-retries", "1", "--on-env-error", "truncate"]
    train(folder, *command, *args, nprocs=nprocs)


@pytest.mark.slow
def test_truncated_episodes_are_the_same_for_every_nprocs_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    breaks(tmp_path / "1", 1)
    breaks(tmp_path / "3", 3)
    breaks(tmp_path / "2", 2, "--stop-after-iterations", "1")
    resume(tmp_path / "2", nprocs=3)
    assert failures(tmp_path / "1") == [0, 1]
    for other in ("2", "3"):
        assert curve(tmp_path / other) == curve(tmp_path / "1")
        assert sha(tmp_path / other) == sha(tmp_path / "1")


@pytest.mark.slow
def test_a_failed_run_goes_on_with_retries(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    size = ["--steps-per-batch", "120"]  # it fails in the second iteration
    train(tmp_path / "r", "helpers.envs:Breaks-v0", *ARGS, *size, expect=1)
    resume(tmp_path / "r", "--on-env-error", "truncate")
    breaks(tmp_path / "whole", 1, *size)
    assert sha(tmp_path / "r") == sha(tmp_path / "whole")
    assert failures(tmp_path / "whole") == [0, 1]
    assert FAILURES[0] not in table(tmp_path / "r")[0]  # the header was written before


RAISES = ["helpers.envs:Flaky-v0", "--env-kwargs", "share=0.001"]
# Raises, exits, crashes, and hangs for as long as the timeout lets it.
FAULTY = ["helpers.faults:make_faulty", "--env-kwargs", "log={log}", "kinds={kinds}", "rate=0.0005"]
KINDS = '["raise","exit","segfault","hang"]'
IN_PROCESSES = [*FAULTY, "--env-processes", "--step-timeout", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("env", [RAISES, IN_PROCESSES], ids=["here", "processes"])
def test_30_000_steps_have_the_undisturbed_hash(env, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    size = ["--total-steps", "30000"]
    train(tmp_path / "plain", "CartPole", *size)
    for nprocs in (1, 2, 3):
        run_dir = tmp_path / str(nprocs)
        faulty = [word.format(log=tmp_path / f"log{nprocs}", kinds=KINDS) for word in env]
        train(run_dir, *faulty, "--env-retries", "3", *size, nprocs=nprocs)
        assert sha(run_dir) == sha(tmp_path / "plain")
        assert failures(run_dir)[0] > 9
        assert failures(run_dir)[1] == 0
