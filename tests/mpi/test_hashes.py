"""Hashes: what they see, and that they never change."""

import numpy as np
import torch
from torch import nn

from rank0rl.mpi import agreement, weights


def test_the_hash_of_arrays_sees_names_dtypes_shapes_and_values_but_not_the_order_of_names():
    x, y = np.arange(6.0).reshape(2, 3), np.array([True, False])
    digest = weights.sha256_arrays({"x": x, "y": y})
    assert digest == weights.sha256_arrays({"y": y, "x": np.asfortranarray(x)})
    others = [
        {"x": x, "z": y},
        {"x": x.astype(np.float32), "y": y},
        {"x": x.view(np.int64), "y": y},
        {"x": x.reshape(3, 2), "y": y},
        {"x": x, "y": ~y},
        {"x": x[:0], "y": y[:0]},
    ]
    assert len({digest, *(weights.sha256_arrays(other) for other in others)}) == 7


def test_the_hash_of_tensors_sees_names_dtypes_shapes_and_values():
    x = torch.zeros(4)
    things = [{"a": x}, {"b": x}, {"a": x + 1}, {"a": x.reshape(2, 2)}, {"a": x.view(torch.int32)}]
    assert len({weights.sha256_tensors(thing) for thing in things}) == 5


def test_hashes_are_those_of_earlier_versions():
    x, y = np.arange(6.0).reshape(2, 3), np.array([True, False])
    assert weights.sha256_arrays({"y": y, "x": x})[:16] == "678f1863e61e3b15"
    net = nn.Linear(2, 1)
    nn.init.constant_(net.weight, 0.5)
    nn.init.zeros_(net.bias)
    tensors = weights.named_tensors(net, {"a": np.arange(3), "deep": [torch.zeros(2)]})
    assert [*tensors] == ["0.weight", "0.bias", "1.a", "1.deep.0"]
    assert weights.sha256_tensors(tensors)[:16] == "1f0578843123a833"
    assert weights.sha256_each(tensors)["1.a"][:16] == "ab27d1515a55c26e"
    assert agreement._hash64(("x", 1)) == -7801300634818289600
