"""Products with the Fisher matrix in compiled kernels against autograd."""

from typing import get_args

import pytest
import torch
from helpers.policies import KINDS, box, mask_for, policy_of, rng

from rank0rl.nets.autograd import fisher_by_autograd
from rank0rl.nets.flat import Flat
from rank0rl.nets.kernels.fisher import CompiledFisher
from rank0rl.nets.mlp import Activation
from rank0rl.nets.policies import GaussianPolicy
from rank0rl.nets.update import FisherProducts

N = 300  # rows: more than one block
CASES = [(kind, False) for kind in KINDS] + [("categorical", True), ("several", True)]
PRECISIONS = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = [
    torch.float32,
    pytest.param(torch.float64, marks=pytest.mark.slow),
]  # kernels are compiled for each


@pytest.mark.fast(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "masked"), CASES)
def test_products_are_those_of_autograd_and_the_same_for_every_number_of_threads(
    kind, masked, dtype
):
    policy = policy_of(kind).to(dtype)
    flat = Flat(policy)
    obs = torch.from_numpy(rng(2).standard_normal((N, 5))).to(dtype)
    mask = torch.from_numpy(mask_for(policy, N)) if masked else None
    v = torch.from_numpy(rng(3).standard_normal(len(flat.vectors[0]))).to(dtype)
    expected = fisher_by_autograd(policy, 0.3, obs, mask)(v)
    seen = []
    for threads in (1, 2, 3):
        product = FisherProducts(policy, flat, 0.3, threads)(obs, mask)
        product(torch.ones_like(v))  # it leaves nothing behind
        seen.append(product(v))
    scale = expected.abs().max()
    torch.testing.assert_close(seen[0] / scale, expected / scale, rtol=0, atol=PRECISIONS[dtype])
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_products_of_all_activations_and_of_layer_norm(activation, layer_norm, dtype):
    policy = GaussianPolicy(
        (5,), box(3), (19, 16, 21), rng(), activation=activation, layer_norm=layer_norm
    ).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(policy.parameters()):
            p.add_(0.2 * torch.from_numpy(rng(i).standard_normal(p.shape)))
    flat = Flat(policy)
    obs = torch.from_numpy(rng(2).standard_normal((N, 5))).to(dtype)
    v = torch.from_numpy(rng(3).standard_normal(len(flat.vectors[0]))).to(dtype)
    expected = fisher_by_autograd(policy, 0.3, obs)(v)
    compiled = CompiledFisher(policy, flat.vectors[0], 0.3, 2)
    scale = expected.abs().max()
    exact = 2 * PRECISIONS[dtype]
    torch.testing.assert_close(compiled(obs)(v) / scale, expected / scale, rtol=0, atol=exact)


def test_a_resumed_run_whose_policy_has_hardly_any_noise_has_products_in_kernels():
    policy = policy_of("categorical")
    flat = Flat(policy)
    obs = torch.from_numpy(rng(1).standard_normal((N, 5), dtype="f"))
    with torch.no_grad():
        policy.mlp.biases[-1][0] += 30
    before = flat.vectors[0].clone()
    products = FisherProducts(policy, flat, 0.0, 1)
    products(obs)
    assert products._fast
    assert torch.equal(flat.vectors[0], before)


def test_products_of_a_larger_network_do_not_depend_on_threads():
    policy = GaussianPolicy((17,), box(6), (64, 64), rng())
    flat = Flat(policy)
    obs = torch.from_numpy(rng(1).standard_normal((2500, 17), dtype="f"))
    v = torch.from_numpy(rng(2).standard_normal(len(flat.vectors[0]), dtype="f"))
    seen = [FisherProducts(policy, flat, 0.1, threads)(obs)(v) for threads in (1, 2, 3, 5, 8)]
    assert all(torch.equal(seen[0], other) for other in seen[1:])
    torch.testing.assert_close(
        seen[0], fisher_by_autograd(policy, 0.1, obs)(v), rtol=1e-3, atol=1e-4
    )
