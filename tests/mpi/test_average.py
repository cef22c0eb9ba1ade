"""Weights and gradients averaged over ranks, against the whole data, at 1, 2, 3 ranks."""

import numpy as np
import pytest
import torch
from helpers.ranks import on_ranks
from torch import nn

import rank0rl
from rank0rl.compat import average
from rank0rl.mpi import comm, weights

RANKS = [1, pytest.param(2, marks=pytest.mark.slow), 3]


class Net(nn.Module):
    """Parameters of two dtypes, one that nobody uses, one that only rank 0 uses, a 0-d one, and buffers."""

    def __init__(self, seed):
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(3, 4, generator=rng).T)  # not contiguous
        self.large = nn.Parameter(torch.randn(100, 60, generator=rng))
        self.turned = nn.Parameter(torch.randn(60, 100, generator=rng).T)
        self.wide = nn.Parameter(torch.randn(2, generator=rng, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.zeros(2))
        self.of_rank0 = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("mask", torch.tensor([seed == 0]))
        self.register_buffer("phase", torch.tensor([1j * seed]))

    def loss(self, rank):
        x = torch.full((5, 4), float(rank + 1))
        loss = (x @ self.w).square().mean() * self.scale + self.wide.sum() * rank
        loss = loss + ((self.large + self.turned) * (rank + 1)).square().mean()
        loss = loss + self.narrow.float().sum() * rank
        return loss + self.of_rank0.sum() if rank == 0 else loss


def on_rank_gradients():
    net = Net(0)
    net.loss(comm.rank).backward()
    average.all_avg_grads(net)
    whole = Net(0)
    (sum(whole.loss(rank) for rank in range(comm.nworkers)) / comm.nworkers).backward()
    wrong = []
    for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            wrong += [] if p.grad is q.grad else [name]
        elif not torch.allclose(p.grad, q.grad) or p.grad.dtype != q.grad.dtype:
            wrong.append(name)
    single = torch.tensor(1.0, requires_grad=True)
    single.grad = torch.tensor(2.0 * (comm.rank + 1))
    average.all_avg_grads(single)
    params = nn.ParameterDict({name: nn.Parameter(torch.zeros(40_000)) for name in "abc"})
    params["a"].grad = torch.full((40_000,), comm.rank + 1.0)
    params["b"].grad = params["a"].grad.view(-1) if comm.rank == 0 else params["a"].grad.clone()
    params["c"].grad = params["a"].grad
    average.all_avg_grads(params)
    tied = {x for p in params.values() for x in p.grad.tolist()}
    wrong += [] if tied == {(comm.nworkers + 1) / 2} else [f"tied: {tied}"]
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return [wrong, single.grad.item(), weights.sha256_tensors(grads)]


@pytest.mark.parametrize("n", RANKS)
def test_gradients_are_those_of_the_whole_data_the_same_bits_on_every_rank(n):
    results = on_ranks(n, "test_average:on_rank_gradients")
    assert results == [[[], n + 1.0, results[0][2]]] * n


def on_rank_weights():
    net, same = Net(comm.rank), Net(7).w  # float32: float64 has nothing wider to add in
    extra = {"array": np.arange(3.0) * comm.rank, "ints": np.full(2, comm.rank)}
    rank0rl.all_avg_wts(net, extra, label="net")
    before = weights.sha256_tensors({"same": same})
    rank0rl.all_avg_wts(same)
    nets = [Net(rank) for rank in range(comm.nworkers)]
    wrong = []
    for name, t in weights.named_tensors(net).items():
        each = [weights.named_tensors(other)[name] for other in nets]
        counts = t.dtype in (torch.int64, torch.bool)
        mean = each[0] if counts else torch.stack(each).to(torch.complex128).mean(0).to(t.dtype)
        if not torch.allclose(t, mean) or t.dtype != mean.dtype:
            wrong.append(name)
    tied = np.full(5000, 1.0 * comm.rank), np.full(5000, 1.0 * comm.rank, np.float32)
    for array in tied:
        rank0rl.all_avg_wts({"a": array, "b": array}, [array])
        wrong += [] if (array == (comm.nworkers - 1) / 2).all() else ["tied"]
    turned = {"x": np.full(2, 1.0), "y": np.full(2, 2.0)}
    turned = dict(sorted(turned.items(), reverse=comm.rank == 1))
    rank0rl.all_avg_wts(turned)
    rank0rl.rank0_bcast_wts(turned)
    wrong += [] if (turned["x"][0], turned["y"][0]) == (1, 2) else ["another order of names"]
    return [
        wrong,
        {name: array.tolist() for name, array in extra.items()},
        weights.sha256_tensors({"same": same}) == before,
        rank0rl.chksum(net),
    ]


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("n", RANKS)
def test_weights_are_the_mean_and_equal_ones_keep_their_bits(n):
    results = on_ranks(n, "test_average:on_rank_weights")
    m = (n - 1) / 2
    expected = [[], {"array": [0, m, 2 * m], "ints": [0, 0]}, True, results[0][3]]
    assert results == [expected] * n


WRONG = {
    "shapes": "'weight' is torch.float32 (2, 2), cpu on rank 0 and torch.float32 (2, 3), cpu on rank 1",
    "device": " is on the meta device, where it has no data",
    "sparse": "rank 1: '0' is sparse: a tensor must be dense and hold data",
    "expanded": "rank 1: '0' is expanded, so that numbers share memory",
    "conjugate": "rank 1: '0' is a view that conjugates or negates another tensor",
    "row wise": "rank 1: '0' is sparse: a tensor must be dense and hold data",
    "names": "'bias' is torch.float32 (2,), cpu on rank 0 and missing on rank 1",
    "read-only": "rank 1: weights are overwritten in place: '0' is a read-only array",
    "number": "rank 1: ",
}


def on_rank_wrong():
    last, said = comm.rank == 1, []
    sparse = torch.zeros(2, 2, requires_grad=True)
    sparse.grad = torch.eye(2).to_sparse() if last else torch.eye(2)
    fixed = np.zeros(2)
    fixed.flags.writeable = not last
    grads = {
        "read-only": fixed,
        "expanded": torch.ones(1, 2).expand(2, 2) if last else torch.ones(2, 2),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj() if last else torch.ones(2) * 1j,
        "row wise": torch.eye(2).to_sparse_csr() if last else torch.eye(2),
    }
    things = {
        "shapes": nn.Linear(3 if last else 2, 2),
        "device": nn.Linear(2, 2, device="meta" if last else "cpu"),
        "sparse": sparse,
        "names": nn.Linear(2, 2, bias=not last),
        "number": 5 if last else nn.Linear(2, 2),
    }
    for name in WRONG:
        calls = [average.all_avg_grads, rank0rl.all_avg_wts]
        thing = things.get(name, grads.get(name))
        calls = calls[1:] if name in grads else calls[:1] if name == "sparse" else calls
        for call in calls:
            try:
                call(thing)
                said.append("nothing")
            except ValueError as error:
                said.append(str(error).replace("'0.", "'"))
    return said


def test_wrong_use_is_the_same_error_on_every_rank():
    first, second = on_ranks(2, "test_average:on_rank_wrong")
    assert first == second
    twice = ("shapes", "device", "names", "number")
    expected = [words for name, words in WRONG.items() for _ in range(1 + (name in twice))]
    for message, words in zip(first, expected, strict=True):
        assert words in message
