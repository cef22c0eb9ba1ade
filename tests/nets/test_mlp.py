"""MLPs: torch and NumPy over one memory, and gradients in closed form."""

import copy

import numpy as np
import pytest
import torch
from some_policies import KINDS, OBS, box, policy_of, rng
from torch import nn

from rank0rl.nets.flat import flatten_
from rank0rl.nets.mlp import MLP
from rank0rl.nets.normalize import ObsNormalizer
from rank0rl.nets.policies import GaussianPolicy
from rank0rl.nets.value import ValueFunction


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
