"""One vector of which all parameters are views, and what makes them lose it."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from rank0rl.nets.actor_critic import ValueFunction
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.mlp import MLP
from rank0rl.nets.normalize import ObsNormalizer

OBS = np.random.default_rng(1).standard_normal((33, 5), dtype=np.float32)


def rng():
    return np.random.default_rng(0)


def train(module, flat, optimizer):
    for _ in range(5):
        flat.zero_grad() if flat else optimizer.zero_grad()
        module(torch.from_numpy(OBS)).square().mean().backward()
        if flat:
            flat.check(module)
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


def test_flat_parameters_train_as_separate_ones_do():
    plain, flattened = (MLP([5, 16, 3], rng(), 1.0) for _ in range(2))
    flat = Flat(flattened)
    a = train(plain, None, torch.optim.Adam(plain.parameters(), lr=0.01, fused=True))
    b = train(flattened, flat, torch.optim.Adam(flat.vectors, lr=0.01, fused=True))
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q)
    assert flat.vectors[0].numel() == sum(p.numel() for p in plain.parameters())


def test_flat_keeps_its_views_when_a_state_is_loaded_and_holds_buffers_and_dtypes():
    module = nn.ModuleList([ValueFunction((5,), (8,), rng()), ObsNormalizer((5,))])
    flat = Flat(module)
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    flat.check(module)
    storages = {t.untyped_storage().data_ptr() for t in module.state_dict().values()}
    assert len(storages) == 2  # float32 and float64


def test_adam_is_torchs_and_goes_on_from_its_state():
    flats, results = [], []
    for _ in range(3):
        flats.append(Flat(MLP([5, 16, 3], rng(), 1.0)))
    theirs = torch.optim.Adam(flats[0].vectors, lr=0.01, eps=1e-5, fused=True)
    ours, resumed = Adam(flats[1], eps=1e-5), Adam(flats[2], eps=1e-5)
    for i in range(6):
        grad = torch.from_numpy(np.random.default_rng(i).standard_normal(147, dtype=np.float32))
        for flat in flats:
            flat.vectors[0].grad.copy_(grad)
        theirs.step()
        ours.step(0.01)
        if i < 3:
            flats[2].vectors[0].data.copy_(flats[1].vectors[0].data)
            resumed.load(copy.deepcopy(ours.state()))
        else:
            resumed.step(0.01)
    results = [flat.vectors[0].detach() for flat in flats]
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[1])


BREAKERS = {
    "a cast": lambda m: m.double(),
    "gradients set to None": lambda m: m.zero_grad(),
    "a second derivative": lambda m: m(torch.ones(1, 5)).sum().backward(create_graph=True),
}


@pytest.mark.parametrize("name", BREAKERS)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_flat_notices_when_views_are_lost(name):
    mlp = MLP([5, 4, 1], rng(), 1.0)
    flat = Flat(mlp)
    flat.check(mlp)
    BREAKERS[name](mlp)
    with pytest.raises(RuntimeError, match="has left the flat vector"):
        flat.check(mlp)
