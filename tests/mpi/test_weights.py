"""Weights of rank 0 on every rank."""

import numpy as np
import pytest
import torch
from helpers.ranks import on_ranks
from torch import nn

from rank0rl.compat import average
from rank0rl.mpi import comm, weights
from rank0rl.nets.actor_critic import ValueFunction
from rank0rl.nets.flat import Flat
from rank0rl.nets.normalize import ObsNormalizer


def build(rank, flat):
    rng = np.random.default_rng(rank)
    net = nn.ModuleDict({"v": ValueFunction((3,), (4,), rng), "n": ObsNormalizer((3,))})
    net["n"].merge(rng.normal(size=(9, 3)))
    if flat:
        Flat(net)
    strided = torch.full((4, 3), float(rank)).T
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(plain[0].weight, rank)
    nn.init.constant_(plain[0].bias, rank)
    plain[1].num_batches_tracked += rank
    return [net, {"plain": plain, "deep": {"array": np.arange(3) + rank, "strided": strided}}]


def sha256(*things):
    return weights.sha256_tensors(weights.named_tensors(*things))


def on_rank_broadcast(flat):
    things = build(comm.rank, flat)
    net = things[0]
    before = [p.data_ptr() for p in net.parameters()]
    weights.rank0_bcast_wts(*things)
    same_memory = before == [p.data_ptr() for p in net.parameters()]
    return [sha256(*things), same_memory]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("flat", [True, False])
def test_every_rank_has_the_weights_of_rank_0_in_place(n, flat):
    expected = sha256(*build(0, flat))
    assert sha256(*build(1, flat)) != expected
    assert on_ranks(n, "test_weights:on_rank_broadcast", flat) == [[expected, True]] * n


def on_rank_disagree():
    said = []
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    for other in (*OTHER.values(), fixed):
        try:
            weights.rank0_bcast_wts(other if comm.rank == 1 else nn.Linear(2, 3), label="policy")
        except ValueError as error:
            said.append(str(error))
    try:
        weights.chksum("weights" if comm.rank == 1 else np.zeros(2), label="policy")
    except ValueError as error:
        said.append(str(error))
    return [said, fixed.tolist()]


OTHER = {
    "'0.bias' is torch.float32 (3,) on rank 0 and torch.float32 (4,) on rank 1": nn.Linear(2, 4),
    "'0.bias' is torch.float32 (3,) on rank 0 and torch.float64": nn.Linear(2, 3).double(),
    "'0.bias' is torch.float32 (3,) on rank 0 and missing on": nn.Linear(2, 3, bias=False),
    "dicts and lists of them: got int at 'a'": {"a": 5},
    "two weights are called '1'": {1: np.zeros(1), "1": np.zeros(1)},
    "'0' is on the meta device": torch.zeros(2, device="meta"),
}


def test_other_shapes_dtypes_or_names_raise_the_same_error_on_every_rank():
    results = on_ranks(3, "test_weights:on_rank_disagree")
    assert results[0] == results[1] == results[2]
    said, fixed = results[0]
    expected = [*OTHER, "'0' is a read-only array; pass a copy", "dicts and lists of them: got str"]
    for message, words in zip(said, expected, strict=True):
        assert words in message
        assert "policy" in message
        assert "rank 1" in message
    assert fixed == [0, 0]


def on_rank_label():
    """Return what is said where the label comes last, as in mpi_util's scripts."""
    said, array = [], np.full(2, float(comm.rank))
    weights.rank0_bcast_wts(array, "val")
    average.all_avg_wts({"a": array}, [array], "val")
    weights.chksum(array, "val")
    for call in (weights.rank0_bcast_wts, average.all_avg_wts, weights.chksum):
        with pytest.raises(ValueError, match=" policy: ") as error:
            call(np.zeros(2 + comm.rank), "policy")
        said.append(str(error.value))
        for label in ({"label": "policy"}, {}):  # no second label, and no label without weights
            with pytest.raises(ValueError, match="dicts and lists of them: got str"):
                call(*[array] * len(label), "val", **label)
    return [said, array.tolist()]


def test_the_label_may_be_the_last_argument():
    first, second = on_ranks(2, "test_weights:on_rank_label")
    assert first == second
    assert first[1] == [0, 0]


def test_a_tensor_of_an_array_has_its_memory():
    array = np.zeros(2)
    weights.named_tensors({"a": array})["a"].fill_(5)
    assert array.tolist() == [5, 5]


def test_what_is_no_weight_is_named():
    with pytest.raises(TypeError, match="got int at 'a.b'"):
        weights.named_tensors({"a": {"b": 3}})


def test_an_empty_key_is_a_part_of_the_name():
    a, b, c = (torch.full((2,), float(i)) for i in range(3))
    found = weights.named_tensors({"": {"a": a, "": {"": b}}, "a": c, "net": {"": nn.Linear(1, 1)}})
    assert [*found] == [".a", "..", "a", "net..weight", "net..bias"]
    assert [found[name][0].item() for name in (".a", "..", "a")] == [0, 1, 2]


def on_rank_chksum(rank, value):
    net = nn.ModuleDict({"v": ValueFunction((3,), (4,), np.random.default_rng(0))})
    same = weights.chksum(net, {"array": np.arange(3)})
    if comm.rank == rank:
        net["v"].mlp.biases[0].data[1] += value
    weights.chksum(net, {"array": np.arange(3)}, label="nets")
    return same


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_weights_have_one_checksum_on_every_rank(n):
    [digest] = set(on_ranks(n, "test_weights:on_rank_chksum", 0, 0.0))
    assert len(digest) == 64


def test_drifted_weights_raise_on_every_rank_and_are_named():
    said = on_ranks(3, "test_weights:on_rank_chksum", 2, 1e-7)
    assert len({said["message"] for said in said}) == 1
    assert said[0]["raised"] == "ValueError"
    assert "chksum nets" in said[0]["message"]
    assert "the same weights, bit for bit: '0.v.mlp.biases.0' is" in said[0]["message"]
    assert "on rank 2" in said[0]["message"]


def on_rank_autograd(size):
    """Return what `backward` says on this rank after new weights have come."""
    net = nn.Linear(size, size)
    loss = net(torch.ones(1, size)).square().sum()
    weights.rank0_bcast_wts(net)
    loss.backward()
    return net.weight.grad is not None


@pytest.mark.parametrize("size", [2, 200])  # one message for all, and a message each
def test_new_weights_leave_autograd_alone_on_every_rank(size):
    assert on_ranks(2, "test_weights:on_rank_autograd", size) == [True, True]


def on_rank_shared():
    a, b = torch.zeros(2), torch.ones(2)
    with pytest.raises(ValueError, match="shared as") as error:
        weights.rank0_bcast_wts(a, a if comm.rank else b)
    with pytest.raises(ValueError, match="'0' is quantized"):
        weights.rank0_bcast_wts(torch.quantize_per_tensor(a, 0.1, 0, torch.qint8))
    weights.rank0_bcast_wts(a, a)
    x = torch.zeros(4)
    halves = (
        [x[:2], x[2:]] if comm.rank else [x[2:], x[:2]]
    )  # each rank has its own order of addresses
    weights.rank0_bcast_wts(*halves, *halves)
    net, own = torch.nn.Linear(3, 2), torch.full((8,), float(comm.rank))
    if not comm.rank:  # as vector_to_parameters does: views of one vector, without memory in common
        torch.nn.utils.vector_to_parameters(own, net.parameters())
    weights.rank0_bcast_wts(net)
    assert not any(p.any() for p in net.parameters())
    return str(error.value)


def test_tensors_must_share_memory_on_every_rank_or_on_none():
    first, second = on_ranks(2, "test_weights:on_rank_shared")
    assert first == second
