"""Edges of the drop-in modules that scripts of the originals reach."""

import sys

import numpy as np
import pytest
import torch
from helpers.ranks import HERE, on_ranks, run

from rank0rl.compat import evorl, mpi_tf
from rank0rl.mpi import comm, weights

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
