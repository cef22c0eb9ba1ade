"""Edges of the drop-in modules that scripts of the originals reach."""

import dataclasses
import os
import platform
import sys
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import HERE, on_ranks, run
from threadpoolctl import ThreadpoolController

from rank0rl.compat import average, evorl, mpi_pytorch, mpi_tf, mpi_tools, mpi_util
from rank0rl.mpi import comm, reduce, weights

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "IN_MPI")
SCRIPT = """
import os, sys, rank0rl
if rank0rl.mpi_fork(2) == "parent": sys.exit()
rank0rl.print0(*(os.environ.get(name) for name in sys.argv[1:]))
"""


@pytest.mark.parametrize(("more", "said"), [({}, "1 1 1"), ({"OMP_NUM_THREADS": "3"}, "3 1 1")])
def test_ranks_have_one_thread_unless_the_user_says_more(tmp_path, monkeypatch, more, said):
    (tmp_path / "s.py").write_text(SCRIPT)
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    done = run(
        [sys.executable, str(tmp_path / "s.py"), *THREADS],
        env={"PYTHONPATH": str(HERE.parent), **more},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == said


def test_a_rank_without_rows_is_told_what_to_do(tmp_path):
    (tmp_path / "s.py").write_text(
        "import sys, numpy as np, rank0rl\n"
        "if rank0rl.mpi_fork(2) == 'parent': sys.exit()\n"
        "d = rank0rl.rank0_accum_batches({'x': np.ones(3)})\n"
        "print(d['x'].max())\n"
    )
    done = run([sys.executable, str(tmp_path / "s.py")], env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 1
    assert "rank 1 of 2" in done.stderr
    assert "what needs rows belongs below if rank == 0" in done.stderr


def on_rank_bcast():
    said = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = torch.full((2, 3), float(comm.rank), dtype=dtype)
        out = comm.bcast(mine + 1 if comm.rank == 0 else mine)
        said.append([str(out.dtype), out.float().tolist(), mine.float().tolist()])
    read_only = torch.zeros(1).expand(3)
    said.append(comm.bcast(np.ones(3, np.float32) if comm.rank == 0 else read_only).tolist())
    said.append(type(comm.bcast(np.ones(2) if comm.rank == 0 else torch.zeros(3))).__name__)
    return said


def test_a_tensor_is_overwritten_in_place():
    ones, zeros = [[1.0] * 3] * 2, [[0.0] * 3] * 2
    names = ("torch.float32", "torch.bfloat16", "torch.int64")
    first, second = on_ranks(2, "test_edges:on_rank_bcast")
    assert first == [*([name, ones, zeros] for name in names), [1.0] * 3, "ndarray"]
    assert second == [*([name, ones, ones] for name in names), [1.0] * 3, "ndarray"]


@pytest.mark.parametrize("empty", [np.zeros(0), np.zeros((0, 3)), torch.zeros(2, 0)], ids=repr)
def test_empty_weights_have_a_hash(empty):
    assert len(weights.chksum(empty)) == 64
    assert weights.chksum({"a": empty, "b": np.ones(2)}) != weights.chksum({"b": np.zeros(2)})


def test_the_error_for_what_has_no_weights_names_the_module():
    with pytest.raises(
        TypeError, match=r"got object at '0'; pass the module, as in rank0_bcast_wts"
    ):
        weights.named_tensors(object(), "policy")


def on_rank_vmap():
    rows = np.array([1, 2, 1, 2])
    whole = evorl.shmap_vmap(lambda x: evorl.psum(x, "DP"), None, "DP", "DP")
    several = evorl.shmap_vmap(
        lambda x, y: evorl.pmax({"a": x * 2, "b": y, "c": 3.0}, "DP"), None, ("DP", None), "DP"
    )
    found = several(rows, np.array([5.0, 6.0]))
    grids = [whole(rows), whole(torch.tensor(rows)), whole(np.stack([rows, rows], 1))]
    return [*(x.tolist() for x in grids), {name: x.tolist() for name, x in found.items()}]


def test_a_sum_under_vmap_is_of_the_rows_of_all_ranks():
    said = [
        *([2, 4, 2, 4], [2, 4, 2, 4], [[2, 2], [4, 4], [2, 2], [4, 4]]),
        {"a": [2, 4, 2, 4], "b": [5.0, 6.0] * 2, "c": [3.0] * 4},
    ]
    assert on_ranks(2, "test_edges:on_rank_vmap") == [said, said]


def test_parameters_may_be_arrays():
    optimizer = evorl.TorchOptimizer(lambda params: torch.optim.SGD(params, lr=0.5))
    update = evorl.gradient_update(lambda p, x: (p["w"] * x).sum(), optimizer, None)
    params = {"w": np.ones(2, np.float32)}
    loss, new, _ = update(optimizer.init(params), params, 2.0)
    assert loss == 4.0
    assert new["w"].tolist() == [0.0, 0.0]
    assert params["w"].tolist() == [1.0, 1.0]


def test_gradients_may_be_arrays_too():
    optimizer = evorl.TorchOptimizer(lambda params: torch.optim.SGD(params, lr=0.5))
    params = {"w": torch.zeros(3)}
    changes, _ = optimizer.update({"w": np.ones(3)}, optimizer.init(params), params)
    assert changes["w"].tolist() == [-0.5] * 3


@dataclasses.dataclass(frozen=True)
class Derived:
    x: float
    twice: float = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", 2 * self.x)


def test_a_tree_may_have_fields_that_no_argument_sets():
    new = evorl.psum(Derived(np.float32(3)), "DP")
    assert (new.x, new.twice) == (3, 6)


def test_a_loss_is_minimized_over_what_it_depends_on():
    torch.manual_seed(0)
    net, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    before = [p.clone() for p in other.parameters()]
    optimizer = mpi_tf.MpiAdamOptimizer(0.1)
    losses = []
    for _ in range(20):
        loss = (net(torch.ones(3, 2)) ** 2).sum() + net.weight.square().sum()
        optimizer.minimize(loss)
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert {id(v) for v in optimizer.variables.values()} == {id(p) for p in net.parameters()}
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert mpi_tf.MpiAdamOptimizer().compute_gradients(torch.ones(())) == []


def on_rank_order():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    grads = mpi_tf.MpiAdamOptimizer().compute_gradients(net(torch.ones(1, 2)).sum())
    return [[*variable.shape] for _, variable in grads]


def test_what_a_loss_depends_on_has_one_order():
    first, second = on_ranks(2, "test_edges:on_rank_order")
    assert first == second
    assert sorted(first) == [[1], [1, 3], [3], [3, 2]]


@dataclasses.dataclass
class Tree:
    a: Any
    b: Any


MASKED = np.ma.array([1.0, 100.0], mask=[False, True])


@pytest.mark.parametrize(
    "call",
    [
        comm.bcast,
        reduce.all_reduce,
        mpi_tools.mpi_statistics_scalar,
        lambda x: average.RunningNorm((2,)).update(x[None]),
        lambda x: mpi_util.accum_batches([{"x": x}]),
        weights.chksum,
    ],
)
def test_masks_are_not_lost_in_silence(call):
    with pytest.raises((TypeError, ValueError), match="(?i)mask"):
        call(MASKED)


def on_rank_halves():
    half = torch.zeros(1, dtype=torch.bfloat16)
    sent = comm.bcast(torch.full((1,), 1.001) if comm.rank == 0 else half)
    whole = np.zeros((), np.int64)
    comm.bcast(Like() if comm.rank == 0 else whole)
    try:
        mpi_tools.allreduce(torch.ones(1), half)
    except ValueError as error:
        return type(sent).__name__, half.item(), whole.item(), str(error)


class Like:
    """Becomes an array, as those of JAX do."""

    def __array__(self, dtype=None, copy=None):
        return np.array(2.5)


def test_numbers_of_another_precision_are_not_overwritten():
    _, (kind, half, whole, error) = on_ranks(2, "test_edges:on_rank_halves")
    assert (kind, half, whole) == ("ndarray", 0.0, 0)
    assert "got torch.bfloat16, 1 and float32, 1" in error


def test_a_checksum_knows_names_and_not_their_order():
    ones, zeros = np.ones(2), np.zeros(2)
    sums = [
        weights.chksum(each)
        for each in ({"a": ones, "b": zeros}, {"b": zeros, "a": ones}, {"a": ones, "c": zeros})
    ]
    assert sums[0] == sums[1] != sums[2]


def test_an_optimizer_is_told_how_to_send_its_state():
    with pytest.raises(TypeError, match=r"got SGD at '0'.*optimizer\.state_dict\(\)\['state'\]"):
        weights.named_tensors(torch.optim.SGD([torch.ones(1)]))
    adam = torch.optim.Adam([torch.ones(1, requires_grad=True)])
    adam.param_groups[0]["params"][0].grad = torch.ones(1)
    adam.step()
    assert len(weights.named_tensors(adam.state_dict()["state"])) == 3


def test_no_gradient_is_lost_in_a_sum_over_ranks():
    weight = torch.ones(1, requires_grad=True)
    for collective in (evorl.psum, evorl.all_gather):
        with pytest.raises(ValueError, match=r"no gradient flows .* x\['a'\] has a graph"):
            collective({"a": 2 * weight}, "DP")
    assert evorl.pmean(weight, "DP").tolist() == [1.0]  # parameters, which have none
    assert evorl.pmean(np.int32(3), "DP").dtype == np.float32


def test_trees_of_any_form_may_be_mapped_at_once():
    twice = evorl.shmap_vmap(lambda s: dataclasses.replace(s, a=2 * s.a), None, "POP", "POP")
    found = twice(Tree(torch.arange(3.0), None))
    assert found.a.tolist() == [0, 2, 4]
    assert found.b is None
    weight = torch.ones(1, requires_grad=True)
    assert evorl.shmap_vmap(lambda x: x * weight[0], None, "POP", "POP")(np.ones(2)).tolist() == [
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(4, {0, 1, 2, 3}, 1), (4, {4}, 4), (1, {0}, 4)]
)
def test_ranks_that_share_cores_divide_them(monkeypatch, ranks, cores, threads):
    node = platform.node()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    each = [(node, {0, 1, 2, 3}), *[(node, cores)] * (ranks - 1), ("elsewhere", {0, 1, 2, 3})]
    monkeypatch.setattr(comm, "allgather_obj", lambda mine, what: each)
    before, after = torch.get_num_threads(), 0
    try:
        torch.set_num_threads(16)
        with ThreadpoolController().limit(limits=1, user_api="blas"):
            mpi_pytorch.setup_pytorch_for_mpi()
            after = torch.get_num_threads()
            blas = ThreadpoolController().select(user_api="blas").info()
    finally:
        torch.set_num_threads(before)
    assert after == threads
    assert {one["num_threads"] for one in blas} == {1}
