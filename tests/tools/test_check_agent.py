"""`check ENV --algo AGENT` passes for the agents here, and says what is wrong with others."""

import pytest
import torch
from helpers.agents import liar

from rank0rl.tools import check

SMALL = ["--num-envs", "6", "--steps", "50", "--others", "1"]
CONDITIONS = ["repeated", "with evaluations", "on 2 ranks", "on 3 ranks", "stopped and resumed"]


def checked(capsys, *words):
    """Return the exit code, and condition -> finding of the agent, and what is said about CPUs."""
    code = check.main(["CartPole", *SMALL, *words])
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith("runs of a few iterations"))
    found = {line[:36].strip(): line[36:].strip() for line in lines[start + 1 : -2]}
    return code, found, lines[-1].partition("the same curve on every x86-64 CPU: ")[2]


@pytest.mark.parametrize("algo", ["ppo", "a2c", "es"])  # algos/test_agents.py tries all of them
@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_the_agents_here_are_honest(capsys, algo):
    batch = [] if algo == "es" else ["--steps-per-batch", "96"]
    code, found, by_cpu = checked(capsys, "--algo", algo, *batch)
    assert found == dict.fromkeys(CONDITIONS, "the same")
    assert (code, by_cpu) == (0, "yes, as far as functions of torch go")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_ranks_without_an_environment_are_not_tried(capsys):
    code, found, _ = checked(capsys, "--algo", "reinforce", "--num-envs", "2")
    assert (code, found) == (0, dict.fromkeys({*CONDITIONS} - {"on 3 ranks"}, "the same"))


LSTM = """
from torch import nn
from rank0rl.algos.ppo import PPO
class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lstm, self.out = nn.LSTM(inputs, 8), nn.Linear(8, outputs)
    def forward(self, x):
        return self.out(self.lstm(x[None])[0][0])
class WithLSTM(PPO):
    @staticmethod
    def make_networks(spaces, options, rng):
        return {"policy": Net(spaces.obs.size, spaces.act.size)}
"""


@pytest.mark.slow
def test_a_function_with_other_bits_on_other_cpus_is_named(capsys, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(LSTM)
    code, _, by_cpu = checked(capsys, "--algo", f"{file}:WithLSTM", "--steps-per-batch", "96")
    assert (code, by_cpu[:19]) == (0, "NO: torch's nn.LSTM")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_an_update_that_cannot_be_repeated_is_found(capsys, tmp_path):
    words = liar(tmp_path, process="self.cache = 1")
    file = tmp_path / "liar.py"
    file.write_text(
        file.read_text().replace("torch.randperm(", "np.random.default_rng().permutation(")
    )
    code, found, _ = checked(capsys, "--algo", words[2], "--steps-per-batch", "96")
    assert code == 1
    assert "weights differ from iteration 1 on, after the same rows" in found["repeated"]


def test_powers_that_are_square_roots_are_named():
    x = torch.rand(3)
    with check._Called() as called:
        _ = 2**x, x**2, x**x, x.sqrt()
        assert called.names == set()
        _ = x**0.5
        x.pow_(-0.5)
    assert called.names == {"pow(0.5)", "pow(-0.5)"}


@pytest.mark.parametrize("given", [["--hook=a.py:A", "b.py:B"], ["--hook", "a.py:A", "b.py:B"]])
def test_hooks_of_the_user_stay(given, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(check, "_trained", lambda words, *_: seen.extend(words) or "failed")
    assert check._by_cpu(["CartPole", *given, "--quiet"], tmp_path) == "not known"
    watch = "rank0rl.tools.check:_Watch"
    assert seen == ["CartPole", "--hook", watch, "a.py:A", "b.py:B", "--quiet"]


@pytest.mark.slow
def test_an_agent_that_fails_says_why(capsys, tmp_path):
    words = liar(tmp_path, act="np.random.random()")
    code, found, _ = checked(capsys, "--algo", words[2], "--steps-per-batch", "96")
    assert (code, [*found]) == (1, ["trained"])
    assert "act has drawn from NumPy's global random numbers" in found["trained"]


def test_options_of_training_need_an_agent(capsys):
    assert check.main(["CartPole", "--lr", "1"]) == 2
    assert "unknown options --lr 1: options of training need --algo" in capsys.readouterr().err


def test_each_line_is_printed_when_it_is_known(capsys, monkeypatch, tmp_path):
    trained, seen = [], []
    monkeypatch.setattr(check, "_trained", lambda words, run, *_: trained.append(run.name) or "")
    monkeypatch.setattr(check, "_difference_of_runs", lambda a, b: "")
    monkeypatch.setattr(check, "find_mpiexec", lambda: None)

    def findings():
        for found in check._check_agent([], tmp_path):
            seen.append((found[0], trained[-1], capsys.readouterr().out.strip()))
            yield found

    check._print(findings())
    assert [(condition, run) for condition, run, _ in seen[:2]] == [
        ("repeated", "repeated"),
        ("with evaluations", "with-evaluations"),
    ]
    assert seen[1][2].startswith("repeated")


def test_what_ranks_change_counts_although_the_agents_runs_do_not_show_it(capsys, monkeypatch):
    monkeypatch.setattr(check, "_conditions", lambda *_: [("repeated", "")])
    monkeypatch.setattr(check, "_check_ranks", lambda *_: ({"on 2 ranks": "other rows"}, None))
    monkeypatch.setattr(check, "_check_agent", lambda *_: [("on 2 ranks", "")])
    monkeypatch.setattr(check, "_by_cpu", lambda *_: "")
    assert check.main(["CartPole", *SMALL, "--algo", "ppo"]) == 1
    assert "the same curve for every number of ranks: NO" in capsys.readouterr().out
