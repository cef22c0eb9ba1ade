"""Networks: two forward passes over one memory, oracles for log-probabilities."""

import copy

import numpy as np
import pytest
import torch
from test_policies import KINDS, policy_of
from torch import nn

from rank0rl.agent import Space
from rank0rl.nets.conv import is_image, network
from rank0rl.nets.flat import flatten_
from rank0rl.nets.mlp import MLP
from rank0rl.nets.normalize import Moments, ObsNormalizer, normalizer
from rank0rl.nets.policies import GaussianPolicy
from rank0rl.nets.value import ValueFunction


def box(n):
    return Space("box", (n,), "float32")


def rng(seed=0):
    return np.random.default_rng(seed)


OBS = rng(1).standard_normal((33, 5), dtype=np.float32)


def test_numpy_and_torch_agree_and_stay_so_when_weights_change_or_move():
    mlp = MLP([5, 16, 16, 3], rng(), 1.0)

    def same():
        np.testing.assert_allclose(
            mlp.numpy(OBS)[-1], mlp(torch.from_numpy(OBS)).detach().numpy(), atol=1e-6
        )

    same()
    with torch.no_grad():
        mlp.weights[0] += 1
    same()
    flatten_(mlp)
    same()
    with torch.no_grad():
        mlp.biases[1] += 1
    same()
    twin = copy.deepcopy(mlp)
    with torch.no_grad():
        mlp.weights[0] += 1
    same()
    assert np.abs(twin.numpy(OBS)[-1] - mlp.numpy(OBS)[-1]).max() > 0


def test_moments_of_parts_are_the_moments_of_the_whole():
    rows = rng().normal(100, 3, (60, 4))
    moments = Moments((4,))
    for part in np.split(rows, [1, 7, 30]):
        moments.merge(part)
    np.testing.assert_allclose(moments.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, rows.var(axis=0), rtol=1e-12)


def test_the_normalizer_begins_as_the_identity_and_then_scales():
    norm = ObsNormalizer((2, 2))
    obs = rng().normal(5, 2, (50, 2, 2)).astype(np.float32)
    np.testing.assert_array_equal(norm.numpy(obs), obs.reshape(50, 4))
    norm.merge(obs)
    scaled = norm.numpy(obs)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std(axis=0), 1, atol=1e-5)
    np.testing.assert_allclose(norm(torch.from_numpy(obs)), scaled, atol=1e-6)
    assert norm.numpy(obs + 1000).max() == 10


def test_new_returns_change_the_scale_of_values_and_not_the_values():
    value = ValueFunction((5,), (8,), rng())
    before = value.predict(OBS)
    value.merge(rng().normal(0, 50, 1000).astype(np.float32))
    assert value.scale == pytest.approx(50, rel=0.1)
    np.testing.assert_allclose(value.predict(OBS), before, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        value(torch.from_numpy(OBS)).detach() * value.scale, before, rtol=1e-4, atol=1e-5
    )


PRECISIONS = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("which", ["value", *KINDS])
def test_gradients_in_closed_form_are_those_of_autograd(which, dtype):
    module = ValueFunction((5,), (16, 16), rng()) if which == "value" else policy_of(which)
    module.to(dtype)
    flat = flatten_(module)
    x = rng(5).standard_normal((33, 5)).astype(str(dtype).removeprefix("torch."))
    weight = rng(6).standard_normal(33).astype(x.dtype)
    act = x[:, :3] if which in ("gaussian", "rows") else rng(7).integers(0, 2, (33, 3))
    act = act[:, 0] if which == "categorical" else act
    flat.zero_grad()
    if which == "value":
        (module(torch.from_numpy(x)).square() * torch.from_numpy(weight)).sum().backward()
    else:
        now = module.distribution(torch.from_numpy(x))
        logp, entropy = module.logp(now, torch.from_numpy(act)), module.entropy(now)
        ((logp.exp() * torch.from_numpy(weight)).sum() + 0.7 * entropy).backward()
    expected = [v.grad.clone() for v in flat.vectors if v.grad is not None]
    for vector in flat.vectors:
        vector.grad.fill_(7.0)  # written over, not added to
    if which == "value":
        val, pullback = module.numpy(x)
        pullback(2 * val * weight)
    else:
        numpy_logp, numpy_entropy, pullback = module.numpy(x, act)
        np.testing.assert_allclose(numpy_logp, logp.detach(), rtol=1e-4, atol=1e-5)
        assert numpy_entropy == pytest.approx(entropy.item(), rel=1e-5)
        pullback(np.exp(numpy_logp) * weight, 0.7)
    flat.check()
    for vector, grad in zip(flat.vectors, expected, strict=True):
        scale = grad.abs().max()
        assert ((vector.grad - grad).abs().max() / scale) < PRECISIONS[dtype]


def test_gradients_need_a_place():
    mlp = MLP([5, 4, 1], rng(), 1.0)
    with pytest.raises(ValueError, match="flatten_ the module first"):
        mlp.backward(mlp.numpy(OBS), np.ones((33, 1), np.float32))


@pytest.mark.parametrize("hidden", [8, 64, 128, 256, 1024])
def test_a_copy_acts_with_its_own_weights(hidden):
    policy, norm = GaussianPolicy((5,), box(2), (hidden,), rng()), ObsNormalizer((5,))
    flatten_(nn.ModuleList([policy, norm]))
    noise = np.ones((33, 2), np.float32)
    before = policy.act(norm.numpy(OBS), noise)
    both = copy.deepcopy(nn.ModuleList([policy, norm]))
    del policy, norm
    flatten_(both)
    policy, norm = both
    assert policy.act(norm.numpy(OBS), noise).tobytes() == before.tobytes()
    with torch.no_grad():
        policy.log_std.fill_(1)
        policy.mlp.biases[-1].fill_(5)
        norm.shift.fill_(1)
    mean = policy.mlp(norm(torch.from_numpy(OBS))).detach().numpy()
    np.testing.assert_allclose(policy.act(norm.numpy(OBS), noise), mean + np.e, atol=1e-5)
    state = {name: tensor + 1 for name, tensor in norm.state_dict().items()}
    norm.load_state_dict(state, assign=True)
    np.testing.assert_allclose(norm.numpy(OBS), norm(torch.from_numpy(OBS)), atol=1e-6)


@pytest.mark.parametrize("shape", [(12, 10, 3), (4, 12, 10)], ids=["last", "first"])
def test_a_convolution_gives_a_row_the_same_bits_whatever_rows_there_are(shape):
    net = network(shape, (8,), 3, rng(), 1.0)
    x = rng(2).random((9, 1, np.prod(shape)), dtype=np.float32)
    [out] = net.numpy(x)
    assert out.shape == (9, 1, 3)
    for size in (1, 2, 5):
        assert net.numpy(x[:size])[0].tobytes() == out[:size].tobytes()
    np.testing.assert_allclose(net(torch.from_numpy(x[:, 0])).detach(), out[:, 0], atol=1e-5)
    channels = torch.from_numpy(x[:, 0]).reshape(9, *shape)
    channels = channels.permute(0, 3, 1, 2) if shape[2] == 3 else channels
    for kernel, shift in zip(net.kernels, net.shifts, strict=True):
        layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], 3, stride=2, padding=1)
        layer.load_state_dict({"weight": kernel, "bias": shift})
        channels = torch.relu(layer(channels))
    expected = net.mlp(channels.flatten(1)).detach()
    np.testing.assert_allclose(expected, out[:, 0], atol=1e-5)
    with pytest.raises(NotImplementedError, match="autograd"):
        net.backward([], out)


def test_what_is_an_image():
    assert is_image((84, 84, 3), "uint8")
    assert is_image((4, 84, 84), "uint8")
    for shape, dtype in (((84, 84, 3), "float32"), ((84, 84), "uint8"), ((3, 3, 3), "uint8")):
        assert not is_image(shape, dtype)
    norm, inputs = normalizer((8, 8, 1), "uint8")
    assert inputs == (8, 8, 1)
    pixels = np.array([0, 51, 255] + [0] * 61, np.uint8).reshape(1, 8, 8, 1)
    np.testing.assert_allclose(norm.numpy(pixels)[0, :3], [0, 0.2, 1])
