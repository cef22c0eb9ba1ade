"""Layers for images: their products, their gradients, and rows and threads that change no bit."""

import copy

import numpy as np
import pytest
import torch
from helpers.policies import rng
from helpers.ranks import HERE
from helpers.runs import sha, train_on_ranks
from torch import nn

from rank0rl.agent import Space, Spaces, Step
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.algos.trpo import TRPO, TRPOOptions
from rank0rl.nets.images import Convolutions, _Apply, _Layer, use_threads
from rank0rl.nets.policies import Mode

SHAPES = [(4, 84, 84), (36, 40, 3), (2, 36, 50), (10, 10, 4), (3, 12, 9), (16, 8, 1)]


def spaces_of(shape):
    return Spaces(Space("box", shape, "uint8"), Space("discrete", (), "int64", choices=(3,)))


def images(shape, n, seed=2):
    return rng(seed).integers(0, 256, (n, int(np.prod(shape))), dtype=np.uint8)


def in_torch(net, x, shape):
    """Return features and all gradients of the mean of their squares, by torch's own convolutions, in float64."""
    x = torch.from_numpy(x.reshape(-1, *shape) / 255)
    x = x.permute(0, 3, 1, 2) if shape[2] <= shape[0] else x
    parameters = []
    for layer, weight, bias in zip(net._layers, net.weights, net.biases, strict=True):
        conv = nn.Conv2d(x.shape[1], layer.outputs, layer.sides, layer.stride).double()
        kernel = weight.detach().reshape(*layer.sides, x.shape[1], -1).permute(3, 2, 0, 1)
        conv.load_state_dict({"weight": kernel, "bias": bias.detach()})
        x = torch.relu(conv(x))
        parameters.append((conv.weight, conv.bias))
    x = x.flatten(1)
    x.square().mean().backward()
    grads = [(w.grad.permute(2, 3, 1, 0).flatten(0, 2), b.grad) for w, b in parameters]
    return x.detach(), grads


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 35])
def test_features_and_gradients_are_those_of_torch(shape, n):
    net, x = Convolutions(shape, rng()), images(shape, n)
    with torch.no_grad():
        for bias in net.biases:
            bias.uniform_(-0.1, 0.1, generator=torch.manual_seed(1))
    out = net(torch.from_numpy(x))
    out.square().mean().backward()
    features, grads = in_torch(net, x, shape)
    assert out.shape == (n, net.size)
    np.testing.assert_allclose(out.detach(), features, atol=1e-5)
    np.testing.assert_allclose(net.numpy(x), features, atol=1e-5)
    np.testing.assert_allclose(net._by_torch(torch.from_numpy(x)).detach(), features, atol=1e-5)
    for weight, bias, (by_weight, by_bias) in zip(net.weights, net.biases, grads, strict=True):
        np.testing.assert_allclose(weight.grad, by_weight, atol=1e-5 * by_weight.abs().max())
        np.testing.assert_allclose(bias.grad, by_bias, atol=1e-5 * by_bias.abs().max())


def test_large_images_have_the_network_of_every_atari_agent():
    large, small = Convolutions((4, 84, 84), rng()), Convolutions((10, 10, 4), rng())
    assert [tuple(w.shape) for w in large.weights] == [
        *((8 * 8 * 4, 32), (4 * 4 * 32, 64), (3 * 3 * 64, 64)),
        (7 * 7 * 64, 512),
    ]
    assert sum(p.numel() for p in large.parameters()) == 1_684_128
    assert [tuple(w.shape) for w in small.weights] == [(3 * 3 * 4, 16), (8 * 8 * 16, 128)]
    assert Convolutions((36, 36, 1), rng()).weights[3].shape == (64, 512)  # one patch is left
    assert Convolutions((35, 99, 1), rng()).size == 128


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("image", "sides", "stride"),
    [
        ((8, 7, 2), (3, 3), 1),
        ((8, 6, 2), (4, 4), 2),
        ((9, 7, 1), (3, 3), 2),
        ((10, 11, 1), (5, 4), 3),
        ((3, 4, 2), (3, 4), 1),
    ],
)
def test_first_and_second_derivatives_are_those_of_differences(image, sides, stride):
    layer = _Layer(image, sides, stride, 3)
    draw = torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=draw, requires_grad=True)
        for shape in ((10, *image), (layer.inputs, 3), (3,))
    )

    def of(*args):
        return _Apply.apply(layer, 2, *args, None)

    assert torch.autograd.gradcheck(of, (x, weight, bias))
    assert torch.autograd.gradgradcheck(of, (x[:2], weight, bias))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_depends_on_the_others_or_on_its_place(shape):
    net, x = Convolutions(shape, rng()), images(shape, 9)
    rows = net.numpy(x)
    for n in range(1, 10):
        assert net.numpy(x[9 - n :]).tobytes() == rows[9 - n :].tobytes()
        assert net.numpy(x[:n, None]).tobytes() == rows[:n].tobytes()
    assert net.numpy(x[::-1]).tobytes() == rows[::-1].tobytes()


@pytest.mark.parametrize(("shape", "n"), [((4, 84, 84), 20), ((10, 10, 4), 300)])
def test_threads_change_no_bit(shape, n):
    net, x = Convolutions(shape, rng()), torch.from_numpy(images(shape, n))

    def computed(threads):
        one = copy.deepcopy(net)
        use_threads([nn.Sequential(one), np.zeros(1)], threads)
        out = one(x)
        grads = torch.autograd.grad(out.square().mean(), [*one.parameters()])
        return [t.detach().numpy().tobytes() for t in (out, *grads)]

    first = computed(1)
    for threads in (2, 4):
        assert computed(threads) == first


def test_an_error_in_any_thread_is_raised():
    layer = _Layer((10, 10, 4), (3, 3), 1, 16)
    with pytest.raises(ValueError, match="matmul"):
        layer.apply(3, np.zeros((50, 10, 10, 4)), np.zeros((35, 16)), None, None)


def test_ppo_shares_the_layers_and_acts_by_them():
    agent = PPO(spaces_of((36, 36, 2)), PPOOptions(), rng())
    assert [tuple(w.shape) for w in agent.policy.mlp.weights] == [(512, 3)]
    assert [tuple(w.shape) for w in agent.value.mlp.weights] == [(512, 1)]
    obs = images((36, 36, 2), 5).reshape(5, 36, 36, 2)
    noise = rng(3).random((5, 1), dtype=np.float32)
    act, extras = agent.act(Step(obs, noise, np.zeros(5)))
    x = agent.nets.shared.numpy(obs.reshape(5, -1))
    assert extras["features"].tobytes() == x.tobytes()
    assert act.tobytes() == agent.policy.act(x, noise)[0].tobytes()
    mode = agent.mode()
    assert isinstance(mode, Mode)
    best = agent.act(Step(obs, noise, np.zeros(5), explore=False))[0]
    assert mode(torch.from_numpy(obs.reshape(5, -1)).float()).tolist() == best.tolist()


@pytest.mark.parametrize(("kind", "options"), [(PPO, PPOOptions), (TRPO, TRPOOptions)])
def test_images_are_learned(kind, options):
    """The action that the brighter half of an image asks for is better."""
    shape = (12, 12, 1)
    more = {"lr": 1e-3, "epochs": 6} if kind is PPO else {}
    agent = kind(spaces_of(shape), options(**more), rng())
    agent.prepare()
    act = rng(4).integers(0, 3, 128)
    obs = images(shape, 128).reshape(-1, *shape) // 4
    obs[act == 1, :6] += 128
    policy, flat = agent.policy, obs.reshape(128, -1)
    x = agent.nets.shared.numpy(flat) if agent.nets.shared else flat
    adv = np.where(act == 1, 1, -1).astype(np.float32)
    logp = policy.log_prob(x, act)
    ret = np.where(act == 1, 3, 0).astype(np.float32)
    batch = {"obs": obs, "act": act, "logp": logp, "adv": adv, "val": 0 * adv, "ret": ret}
    agent.update(batch, rng(5), 0.0)
    x = agent.nets.shared.numpy(flat) if agent.nets.shared else flat
    gain = policy.log_prob(x, act) - logp
    assert gain[act == 1].mean() > 0.01
    assert gain[act != 1].mean() < gain[act == 1].mean()


def test_an_exported_policy_is_the_same():
    agent = PPO(spaces_of((2, 36, 40)), PPOOptions(), rng())
    x = torch.from_numpy(images((2, 36, 40), 50)).float()
    rows = ({0: torch.export.Dim("N", max=2**31)},)
    program = torch.export.export(agent.mode(), (x[:2],), dynamic_shapes=rows, strict=False)
    assert program.module()(x).tolist() == agent.mode()(x).tolist()


def test_trpo_has_layers_of_its_own_for_both():
    agent = TRPO(spaces_of((36, 36, 2)), TRPOOptions(), rng())
    assert agent.nets.shared is None
    assert not {*agent.policy.parameters()} & {*agent.value.parameters()}
    assert agent.policy.mlp.images.size == agent.value.mlp.images.size == 512


@pytest.mark.fast(1)
@pytest.mark.parametrize("obs", ["image", "frames"])
def test_one_curve_for_any_number_of_ranks_and_threads(obs, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    words = ["helpers.envs:Spaced-v0", "--env-kwargs", f"obs={obs}", "--num-envs", "3"]
    words += ["--steps-per-batch", "48", "--total-steps", "96", "--epochs", "2"]
    for n in (1, 2):
        more = ["--learner-threads", str(n + 1 if n == 2 else 1)]
        train_on_ranks(tmp_path / str(n), *words, *more, nprocs=n)
    assert sha(tmp_path / "1") == sha(tmp_path / "2")
