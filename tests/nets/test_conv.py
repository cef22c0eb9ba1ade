"""Networks for images, against layers of torch."""

import numpy as np
import pytest
import torch
from some_policies import rng
from torch import nn

from rank0rl.nets.conv import image_notes, is_image, network
from rank0rl.nets.normalize import normalizer


@pytest.mark.parametrize("shape", [(12, 10, 3), (4, 12, 10)], ids=["last", "first"])
def test_a_convolution_gives_a_row_the_same_bits_whatever_rows_there_are(shape):
    net = network(shape, (8,), 3, rng(), 1.0)
    x = rng(2).random((9, 1, np.prod(shape)), dtype=np.float32)
    out = net.numpy(x)
    assert out.shape == (9, 1, 3)
    for size in (1, 2, 5):
        assert net.numpy(x[:size]).tobytes() == out[:size].tobytes()
    np.testing.assert_allclose(net(torch.from_numpy(x[:, 0])).detach(), out[:, 0], atol=1e-5)
    channels = torch.from_numpy(x[:, 0]).reshape(9, *shape)
    channels = channels.permute(0, 3, 1, 2) if shape[2] == 3 else channels
    for kernel, shift in zip(net.kernels, net.shifts, strict=True):
        layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], 3, stride=2, padding=1)
        layer.load_state_dict({"weight": kernel, "bias": shift})
        channels = torch.relu(layer(channels))
    expected = net.mlp(channels.flatten(1)).detach()
    np.testing.assert_allclose(expected, out[:, 0], atol=1e-5)


def test_what_is_an_image():
    assert is_image((84, 84, 3), "uint8")
    assert is_image((4, 84, 84), "uint8")
    for shape, dtype in (((84, 84, 3), "float32"), ((84, 84), "uint8"), ((3, 3, 3), "uint8")):
        assert not is_image(shape, dtype)
    norm, inputs = normalizer((8, 8, 1), "uint8")
    assert inputs == (8, 8, 1)
    pixels = np.array([0, 51, 255] + [0] * 61, np.uint8).reshape(1, 8, 8, 1)
    np.testing.assert_allclose(norm.numpy(pixels)[0, :3], [0, 0.2, 1])


@pytest.mark.parametrize(
    ("shape", "epochs", "device", "notes"),
    [
        ((12, 10, 3), 5, "cpu", 1),
        ((12, 10, 3), 4, "cpu", 0),
        ((12, 10, 3), 5, "cuda:1", 0),
        ((5,), 5, "cpu", 0),
    ],
)
def test_many_passes_over_images_on_a_cpu_are_noted(shape, epochs, device, notes):
    net = network(shape, (8,), 3, rng(), 1.0)
    assert len(image_notes([nn.Sequential(net), np.zeros(1)], epochs, device)) == notes
