"""Updates on another device: the same steps as at home, and clear errors where there is none."""

import numpy as np
import pytest
import torch
from helpers.runs import SMALL, curve, replay, resume, train, train_on_ranks

from rank0rl.agent import Space, Spaces
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.run import plan
from rank0rl.run.machine import check_device
from rank0rl.run.options import RunOptions

BOX = Space("box", (2,), "float32", low=-np.ones(2), high=np.ones(2))
CHOICE = Space("discrete", (), "int64", choices=(3,))
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batch(act, n):
    rng = np.random.default_rng(1)
    draw = {name: rng.standard_normal(n, dtype=np.float32) for name in ("adv", "val", "ret")}
    actions = rng.integers(0, 3, n) if act is CHOICE else rng.standard_normal((n, 2), np.float32)
    obs = rng.standard_normal((n, 4), dtype=np.float32)
    return {"obs": obs, "act": actions, "logp": -1.5 + 0.1 * draw["adv"], **draw}


def learned(device, act, rows, **options):
    agent = PPO(
        Spaces(Space("box", (4,), "float32"), act),
        PPOOptions(epochs=3, minibatch_size=16, lr=1e-3, **options),
        np.random.default_rng(0),
    )
    agent.device = device
    agent.prepare()
    for turn in range(2):
        metrics = agent.update(batch(act, rows), np.random.default_rng(turn), 0.1)
    tensors = dict(torch.nn.ModuleDict(agent.modules()).state_dict())
    return tensors | {f"adam/{k}": v[0] for k, v in agent.adam.state().items()}, metrics


OPTIONS = [
    {},
    {"normalize": "minibatch"},
    {"max_grad_norm": 0.01, "entropy_coef": 0.1},
    {"clip_ratio": 0.05, "target_kl": 1e-6},
]


@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("act", [BOX, CHOICE], ids=["box", "discrete"])
def test_an_update_on_another_device_is_the_same(device, options, act):
    home, metrics = learned("cpu", act, 50, **options)  # with a smaller last minibatch
    away, away_metrics = learned(device, act, 50, **options)
    for name, tensor in home.items():
        torch.testing.assert_close(away[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    for name, value in metrics.items():
        assert away_metrics[name] == pytest.approx(value, rel=1e-2, abs=1e-5), name


@pytest.mark.parametrize("device", ["tpu", "gpu", "cuda:x", ""])
def test_no_such_kind_of_device(device):
    with pytest.raises(ValueError, match="device must be cpu, cuda"):
        check_device(device)


def test_devices_that_this_machine_lacks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU that torch sees"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1")
    with pytest.raises(ValueError, match="cuda:0 to cuda:1"):
        check_device("cuda:2")


def test_an_agent_that_computes_on_cpus_only(monkeypatch):
    monkeypatch.setattr(plan, "check_device", lambda device: None)
    with pytest.raises(ValueError, match="reinforce computes on cpu only: got device 'cuda'"):
        plan._check_device(RunOptions(algo="reinforce", device="cuda"))
    plan._check_device(RunOptions(algo="ppo", device="cuda"))


def test_a_wrong_device_ends_the_run_before_it_begins(tmp_path):
    done = train(tmp_path / "r", *SMALL, "--device", "tpu", expect=2)
    assert done.stderr.count("device must be cpu, cuda") == 1
    assert not (tmp_path / "r" / "config.toml").exists()


@pytest.mark.slow
def test_a_run_on_another_device_is_replayed_and_goes_on_elsewhere(tmp_path):
    device = "cuda" if torch.cuda.is_available() else "cpu:0"
    args = [*SMALL, "--total-steps", "256", "--device", device, "--stop-after-iterations", "3"]
    train(tmp_path, *args)
    assert replay(tmp_path, 3, env=1).stdout.count("the same data") == 2
    done = resume(tmp_path, "--device", "cpu")
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert any(device in line for line in notes), notes


def test_a_run_on_another_device_is_the_same_for_every_number_of_ranks(tmp_path):
    device = "cuda" if torch.cuda.is_available() else "cpu:0"
    args = [*SMALL, "--total-steps", "192", "--device", device]
    train(tmp_path / "1", *args)
    train_on_ranks(tmp_path / "2", *args, nprocs=2)
    assert curve(tmp_path / "1") == curve(tmp_path / "2")
