"""Environments that give the same curve for every number of ranks, and what is wrong with others."""

import re

import pytest
from helpers import envs as toy_envs
from helpers import forks
from helpers.ranks import HERE

from rank0rl.envs import make as envs
from rank0rl.tools.check import check, main

pytestmark = pytest.mark.usefixtures("forked_python")

GOOD = [
    *("Acrobot", "Ant", "CartPole", "HalfCheetah", "Hopper", "InvertedDoublePendulum"),
    *("MountainCarContinuous", "Pendulum", "Reacher", "Swimmer", "Walker2d"),
]


@pytest.mark.fast(5)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", GOOD)
def test_these_are_the_same_under_all_conditions(name):
    env_id = envs.resolve(name)
    findings = check(lambda: envs.make(env_id), steps=300)
    assert len(findings) == 5
    assert not any(findings.values())


class Keeps(toy_envs.Endless):
    """Brings something along from one episode to the next."""

    episodes = 0

    def reset(self, **kwargs):
        super().reset(**kwargs)
        self.t = self.episodes
        self.episodes += 1
        return self._obs(), {}


class NumpyMoody(toy_envs.Endless):
    """Rewards with NumPy's global random numbers."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(toy_envs.np.random.random()), *rest


BAD = [
    (Keeps, "repeated in the same environment", ("obs", "step 0")),
    (
        toy_envs.Moody,
        "with other global random numbers",
        ("obs", "step 0", "Python's global random"),
    ),
    (
        NumpyMoody,
        "with other global random numbers",
        ("rew", "step 0", "np.random"),
    ),
    (toy_envs.Restless, "beside 2 other environments", ("obs", "step 2")),
    (toy_envs.normalized, "after any earlier use", ("NormalizeObservation",)),
]


@pytest.mark.parametrize(("make", "condition", "facts"), BAD)
def test_what_is_wrong_is_named(make, condition, facts):
    findings = check(make, steps=1000, others=2)
    assert all(fact in findings[condition] for fact in facts), findings[condition]
    before = list(findings)[: list(findings).index(condition)]
    if make is not toy_envs.normalized:
        assert not any(findings[name] for name in before)


class Fails(toy_envs.Endless):
    def step(self, action):
        raise ValueError("on purpose")


def test_an_error_of_the_environment_says_where(capsys, monkeypatch):
    monkeypatch.setattr(toy_envs, "Fails", Fails, raising=False)
    assert main(["helpers.envs:Fails", "--steps", "9"]) == 2
    said = capsys.readouterr().err
    assert re.search("error: on purpose\nIn fragment 0 of .* step 1, action", said), said


@pytest.mark.slow
def test_the_command(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    tool = ["-m", "rank0rl", "check"]
    good = forks.run(*tool, "CartPole", "--steps", "100")
    assert good.returncode == 0, good.stderr
    assert good.stdout.endswith("yes\n")
    bad = forks.run(*tool, "helpers.envs:Moody")
    assert bad.returncode == 1, bad.stderr
    assert "self.np_random" in bad.stdout
    assert bad.stdout.endswith("NO\n")
    wrong = forks.run(*tool, "CartPol")
    assert wrong.returncode == 2
    assert "CartPole" in wrong.stderr.replace("CartPol'", "")


def test_the_tools_are_listed():
    for args, code in ([[], 0], [["nonsense"], 2]):
        done = forks.run("-m", "rank0rl", *args)
        assert done.returncode == code
        listed = done.stdout + done.stderr
        assert all(tool in listed for tool in ("check", "doctor", "evaluate", "replay", "speedup"))


ON_RANKS = {
    "helpers.simulators:worldly": ("RuntimeError: MPI.COMM_WORLD.allreduce was called", None),
    "helpers.simulators:WorldlyInC": ("rows differ from iteration 1 on", None),
    "helpers.simulators:summed": ("the same", "NO, error: cannot make"),
    "examples.heat:make": ("the same", "yes"),
    "CartPole": ("the same", None),
    "helpers.games:make_hunt": ("the same", None),
}


@pytest.mark.parametrize("env_id", ON_RANKS)
@pytest.mark.slow
def test_ranks_and_programs_on_several_ranks(env_id, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    on_ranks, as_program = ON_RANKS[env_id]
    code = main([env_id, "--steps", "20"])
    said = capsys.readouterr().out
    assert code == (on_ranks != "the same")
    assert re.search(rf"  on 2 ranks +{re.escape(on_ranks)}", said), said
    assert ("--ranks-per-env 2" in said) == (as_program is not None)
    assert f"with --ranks-per-env 2: {as_program or ''}" in said or as_program is None
