"""Each option of a policy: the same curve on 1, 2 and 3 ranks, resumed in between, and what it refuses."""

import pytest
from helpers.ranks import HERE
from helpers.runs import curve, resume, sha, train

EXAMPLES = HERE.parent / "examples"
PENDULUM = ["Pendulum", "--steps-per-batch", "96"]
EPISODES = ["Pendulum", "--episodes-per-batch", "3"]
CASES = [
    pytest.param([*PENDULUM, "--actions", "squashed"], id="squashed"),
    pytest.param([*PENDULUM, "--actions", "beta", "--overlap"], id="beta, overlap"),
    pytest.param(
        [*PENDULUM, "--entropy-coef", "linear:0.01:0", "--clip-ratio", "cosine:0.3:0.1"],
        id="schedules",
    ),
    pytest.param([*PENDULUM, "--recurrent", "gru", "--chunk-steps", "7"], id="gru"),
    pytest.param(
        [*PENDULUM, "--activation", "silu", "--layer-norm", "--value-hidden", "8"],
        id="layers",
    ),
    pytest.param([*PENDULUM, "--algo", "OWN"], id="own networks"),
    pytest.param([*EPISODES, "--recurrent", "lstm", "--actions", "beta"], id="lstm"),
    pytest.param([*PENDULUM, "--recurrent", "lstm", "--overlap"], id="ahead"),
    pytest.param([*PENDULUM, "--algo", f"{EXAMPLES}/remember.py"], id="remember"),
    pytest.param([*EPISODES, "--actions", "squashed", "--state-std"], id="state"),
    pytest.param([*PENDULUM, "--actions", "squashed", "--entropy-coef", "0.01"], id="entropy"),
    pytest.param([*EPISODES, "--algo", "trpo", "--actions", "beta"], id="trpo"),
    pytest.param([*EPISODES, "--algo", "klppo", "--actions", "squashed"], id="klppo"),
]


OWN = """
from torch import nn
from rank0rl.algos.ppo import PPO

class Own(PPO):
    @staticmethod
    def make_networks(spaces, options, rng):
        policy = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        return {"policy": policy, "value": nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))}
"""


@pytest.mark.slow
@pytest.mark.parametrize("args", CASES)
def test_the_same_curve_on_any_number_of_ranks_and_resumed(args, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    (tmp_path / "own.py").write_text(OWN)
    env, *options = [arg.replace("OWN", f"{tmp_path}/own.py:Own") for arg in args]
    length = ["--num-envs", "4", "--total-steps"]
    length += ["384"] if "--steps-per-batch" in args else ["2400"]
    done = train(whole, env, *options, *length, nprocs=2 if "--overlap" in args else 1)
    assert done.stdout.count("one row at a time") == ("OWN" in args)
    train(parts, env, *options, *length, "--stop-after-iterations", "2", nprocs=3)
    resume(parts, nprocs=2)
    assert len(curve(whole)) == 4
    assert curve(parts) == curve(whole)
    assert sha(parts) == sha(whole)
    assert len({row["weights_sha256"] for row in curve(whole)}) == 4


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["CartPole", "--actions", "beta"], "actions here are choices"),
        (["Pendulum", "--actions", "beta", "--state-std"], "leave out --state-std"),
        (["Pendulum", "--actions", "cauchy"], "cauchy"),
        (["Pendulum", "--lr", "linear:1e-3"], "linear:START:END"),
        (["Pendulum", "--log-std", "nan"], "log_std must be in (-inf, inf)"),
        (
            ["CartPole", "--normalize", "minibatch", "--minibatch-size", "1"],
            "normalized alone is 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(args, said, tmp_path):
    done = train(tmp_path / "r", *args, nprocs=2, expect=2)
    assert said in done.stderr
    assert not (tmp_path / "r").exists()
