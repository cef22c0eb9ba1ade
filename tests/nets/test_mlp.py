"""MLPs: torch and NumPy over one memory, and gradients in closed form."""

import copy

import numpy as np
import pytest
import torch
from helpers.policies import OBS, box, drawn_by, rng
from torch import nn

from rank0rl.nets.flat import Flat
from rank0rl.nets.mlp import MLP
from rank0rl.nets.normalize import ObsNormalizer
from rank0rl.nets.policies import GaussianPolicy


def test_numpy_and_torch_agree_and_stay_so_when_weights_change_or_move():
    mlp = MLP([5, 16, 16, 3], rng(), 1.0)

    def same():
        np.testing.assert_allclose(
            mlp.numpy(OBS), mlp(torch.from_numpy(OBS)).detach().numpy(), atol=1e-6
        )

    same()
    with torch.no_grad():
        mlp.weights[0] += 1
    same()
    Flat(mlp)
    same()
    with torch.no_grad():
        mlp.biases[1] += 1
    same()
    twin = copy.deepcopy(mlp)
    with torch.no_grad():
        mlp.weights[0] += 1
    same()
    assert np.abs(twin.numpy(OBS)[-1] - mlp.numpy(OBS)).max() > 0


@pytest.mark.parametrize("hidden", [8, 64, 128, 256, 1024])
def test_a_copy_acts_with_its_own_weights(hidden):
    policy, norm = GaussianPolicy((5,), box(2), (hidden,), rng()), ObsNormalizer((5,))
    Flat(nn.ModuleList([policy, norm]))
    noise = np.ones((33, 2), np.float32)
    before = drawn_by(policy, norm.numpy(OBS), noise)
    both = copy.deepcopy(nn.ModuleList([policy, norm]))
    del policy, norm
    Flat(both)
    policy, norm = both
    assert drawn_by(policy, norm.numpy(OBS), noise).tobytes() == before.tobytes()
    with torch.no_grad():
        policy.log_std.fill_(1)
        policy.mlp.biases[-1].fill_(5)
        norm.shift.fill_(1)
    mean = policy.mlp(norm(torch.from_numpy(OBS))).detach().numpy()
    np.testing.assert_allclose(drawn_by(policy, norm.numpy(OBS), noise), mean + np.e, atol=1e-5)
    state = {name: tensor + 1 for name, tensor in norm.state_dict().items()}
    norm.load_state_dict(state, assign=True)
    np.testing.assert_allclose(norm.numpy(OBS), norm(torch.from_numpy(OBS)), atol=1e-6)
