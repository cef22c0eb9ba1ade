"""Layers for `act`: the same bits for any number of rows, and torch's values and gradients."""

import pytest
import torch
from torch import nn

from rank0rl.nets.layers import GRU, Linear

torch.manual_seed(0)
X, MEMORY = torch.randn(67, 17), torch.randn(67, 24)
LAYERS = {
    "linear": (Linear(17, 33), (X,)),
    "no bias": (Linear(17, 33, bias=False), (X,)),
    "tanh": (nn.Sequential(Linear(17, 64), nn.Tanh(), Linear(64, 6)), (X,)),
    "relu": (nn.Sequential(Linear(17, 64), nn.ReLU(), Linear(64, 6)), (X,)),
    "gru": (GRU(17, 24), (X, MEMORY)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_row_depends_on_how_many_there_are(name):
    layer, given = LAYERS[name]
    with torch.no_grad():
        all_rows = layer(*given)
        for count in (1, 2, 3, 8, 31):
            for start in range(0, 67 - count, 7):
                rows = layer(*(x[start : start + count] for x in given))
                assert torch.equal(rows, all_rows[start : start + count]), count


@pytest.mark.parametrize("name", LAYERS)
def test_values_with_gradients_are_those_without(name):
    layer, given = LAYERS[name]
    with torch.no_grad():
        rows = layer(*given)
    with_gradients = layer(*given)
    assert with_gradients.requires_grad
    torch.testing.assert_close(with_gradients.detach(), rows, rtol=1e-5, atol=1e-6)


def test_the_gru_is_torchs():
    ours, torchs = LAYERS["gru"][0], nn.GRUCell(17, 24)
    torchs.load_state_dict(
        {
            "weight_ih": ours.of_inputs.weight,
            "bias_ih": ours.of_inputs.bias,
            "weight_hh": ours.of_memory.weight,
            "bias_hh": ours.of_memory.bias,
        }
    )
    torch.testing.assert_close(ours(X, MEMORY), torchs(X, MEMORY))
