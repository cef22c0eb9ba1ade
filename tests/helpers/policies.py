"""A policy of each kind, far from uniform, and what drives it."""

import numpy as np
import torch

from rank0rl.agent import Space
from rank0rl.nets.actor_critic import ValueFunction
from rank0rl.nets.policies import BetaPolicy, CategoricalPolicy, GaussianPolicy, StateStdPolicy

CHOICE = Space("discrete", (), "int64", choices=(4,))
SEVERAL = Space("discrete", (3,), "int64", choices=(4, 2, 3))
BOUNDED = Space("box", (3,), "float32", low=np.float32([-2, 0, -1]), high=np.float32([2, 1, 3]))
IN_KERNELS = ["gaussian", "rows", "categorical", "several", "state", "state rows", "beta"]
KINDS = [*IN_KERNELS, "squashed", "squashed state"]


def box(n):
    return Space("box", (n,), "float32")


def rng(seed=0):
    return np.random.default_rng(seed)


OBS = rng(1).standard_normal((33, 5), dtype=np.float32)


def policy_of(kind, seed=0):
    """Return a policy for observations of 5 numbers."""
    policy = {
        "gaussian": lambda: GaussianPolicy((5,), box(3), (16, 16), rng(seed), log_std=-0.3),
        "rows": lambda: GaussianPolicy((5,), box(3), (16, 16), rng(seed), log_std=-0.3, rows=4),
        "categorical": lambda: CategoricalPolicy((5,), CHOICE, (16, 16), rng(seed)),
        "several": lambda: CategoricalPolicy((5,), SEVERAL, (16, 16), rng(seed)),
        "squashed": lambda: GaussianPolicy((5,), BOUNDED, (16, 16), rng(seed), -0.3, squash=True),
        "state": lambda: StateStdPolicy((5,), box(3), (16, 16), rng(seed), log_std=-0.3),
        "state rows": lambda: StateStdPolicy((5,), box(3), (16, 16), rng(seed), -0.3, rows=4),
        "squashed state": lambda: StateStdPolicy(
            (5,), BOUNDED, (16, 16), rng(seed), -0.7, squash=True
        ),
        "beta": lambda: BetaPolicy((5,), BOUNDED, (16, 16), rng(seed)),
    }[kind]()
    with torch.no_grad():
        policy.mlp.weights[-1] *= 50 if "state" in kind else 100  # far from uniform
    return policy


def not_zero(value):
    """Return a value function, after its predictions have been moved away from 0."""
    value.mlp.weights[-1].data.normal_(generator=torch.Generator().manual_seed(0))
    return value


def value_of(*shape, **layers):
    """Return a value function whose predictions are far from 0."""
    return not_zero(ValueFunction(*shape, **layers))


def drawn_by(policy, x, noise, mask=None):
    """Return what the policy's probabilities are about: the draws, or else the actions."""
    act, extras = policy.act(x, noise, mask)
    return extras.get("draw", act)


def noise_for(policy, rows, seed=2):
    """Return noise for the policy's `act`, (rows, k)."""
    kind, k = policy.noise
    draw = rng(seed).standard_normal if kind == "normal" else rng(seed).random
    return draw((rows, k), dtype=np.float32)


def mask_for(policy, rows):
    """Return a mask that leaves at least one value of each choice, and not all."""
    mask = rng(3).random((rows, policy.space.size)) < 0.5
    for columns in policy.space.choice_slices():
        one = columns.start + rng(4).integers(0, columns.stop - columns.start, rows)
        mask[np.arange(rows), one] = True
    return mask


def compare_with_samples(p, q, log_slope=lambda act: 0.0, n=40_000):
    """Compare E[-log p] and E[log p - log q] over actions of p with what is exact, within three standard errors."""
    one = np.repeat(OBS[:1], n, axis=0)
    x, act = torch.from_numpy(one), torch.from_numpy(drawn_by(p, one, noise_for(p, n)))
    with torch.no_grad():
        of_p, of_q = p.distribution(x), q.distribution(x)
        surprise = -p.logp(of_p, act) + log_slope(act)
        apart = p.logp(of_p, act) - q.logp(of_q, act)
        kl = p.kl(of_p, of_q)
        for samples, exact in ((surprise, p.entropy(of_p)), (apart, kl.mean())):
            error = samples.double().std() / n**0.5
            assert abs(samples.double().mean() - exact) < 3 * error + 1e-5
        assert kl.min() > 0.01
        torch.testing.assert_close(p.kl(of_p, of_p), torch.zeros(n), atol=1e-5, rtol=0)
