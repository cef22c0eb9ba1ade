"""`mpi_pytorch`, `mpi_tf`, `omnisafe`, and `mpi_tools` on tensors, at 1, 2, 3 ranks, against torch on what all ranks have."""

import os
import sys
import warnings

import numpy as np
import pytest
import torch
from helpers.ranks import HERE, on_ranks, run
from torch import nn

from rank0rl.compat import mpi_pytorch, mpi_tf, mpi_tools, omnisafe
from rank0rl.mpi import comm, weights, world
from rank0rl.mpi.threads import set_threads

RANKS = [1, pytest.param(2, marks=pytest.mark.slow), 3]


def net(seed, wide=4):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, wide), nn.Tanh(), nn.Linear(wide, 1), nn.BatchNorm1d(1))
    made.register_parameter("unused", nn.Parameter(torch.ones(2)))
    made.register_parameter("sometimes", nn.Parameter(torch.ones(2, 3).T.double()))
    return made


class Checks:
    """Names of what is not as expected."""

    def __init__(self):
        self.wrong = []

    def __call__(self, name, got, expected, close=False):
        good = type(got) is type(expected)
        if good and isinstance(got, torch.Tensor):
            good = (got.dtype, got.shape) == (expected.dtype, expected.shape)
            good = good and (torch.allclose if close else torch.equal)(got, expected)
        elif good:
            good = got == expected
        self.wrong += [] if good else [f"{name}: {got}, not {expected}"]


def filled_grads(r):
    module = net(0)
    for p in (module[0].weight, module[0].bias):
        p.grad = torch.full_like(p, float(r))
    module[2].weight.grad = torch.full((4, 1), float(r)).T  # not contiguous
    if r == 0:
        module.sometimes.grad = torch.full_like(module.sometimes, 6.0)
    return module


def on_rank_gradients_and_weights():
    r, n = comm.rank, comm.nworkers
    check = Checks()
    for average in (mpi_pytorch.mpi_avg_grads, omnisafe.avg_grads):
        module = filled_grads(r)
        before = module[0].weight.grad.data_ptr()
        average(module)
        for p in (module[0].weight, module[0].bias, module[2].weight):
            check("mean", p.grad, torch.full_like(p, (n - 1) / 2).detach())
        check("in place", module[0].weight.grad.data_ptr(), before)
        check("unused", module.unused.grad, None)
        check(
            "sometimes", module.sometimes.grad, torch.full_like(module.sometimes, 6.0 / n).detach()
        )
    x = torch.tensor(r + 1.0, requires_grad=True)
    (x**2).backward()
    omnisafe.avg_grads(x)
    check("0-d", x.grad, torch.tensor(n + 1.0))

    for sync in (mpi_pytorch.sync_params, omnisafe.sync_params, mpi_tf.sync_all_params):
        module = net(r)
        module[3].running_mean += r
        sync(module)
        for name, t in weights.named_tensors(net(0)).items():
            check(f"{sync.__name__} {name}", weights.named_tensors(module)[name], t)
    module, all_of_them = net(r), [net(i) for i in range(n)]
    module[3].num_batches_tracked += r
    omnisafe.avg_params(module=module)
    for name, p in module.named_parameters():
        mean = sum(dict(each.named_parameters())[name] for each in all_of_them) / n
        check(name, p.detach(), mean.detach(), close=True)
    check("counter", module[3].num_batches_tracked, torch.tensor(0))
    return check.wrong


def on_rank_tensors():
    r, n = comm.rank, comm.nworkers
    check = Checks()
    total, mean = float(sum(range(n))), (n - 1) / 2
    check("who", [omnisafe.get_rank(), omnisafe.world_size(), omnisafe.is_master()], [r, n, r == 0])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        for x in (torch.tensor(r, dtype=dtype), torch.full((2, 3), r, dtype=dtype).T):
            check(f"sum {dtype}", omnisafe.dist_sum(x), torch.full_like(x, total))
            check(f"avg {dtype}", omnisafe.dist_avg(x), torch.full_like(x, mean))
            omnisafe.avg_tensor(x)
            check(f"avg_tensor {dtype}", x, torch.full_like(x, mean))
    empty = torch.empty(0, 3)
    check("empty", omnisafe.dist_sum(empty), empty)
    x = torch.ones(2, dtype=torch.complex64) * (1 + 1j * r)
    check("conj", omnisafe.dist_sum(x.conj()), torch.ones(2, dtype=x.dtype) * (n - 1j * total))
    big = 2**53 + 1
    check("int64", omnisafe.dist_sum(torch.tensor([big])), torch.tensor([big * n]))
    check("number", omnisafe.dist_sum(r), torch.tensor(int(total)))
    check(
        "float", omnisafe.dist_avg(0.1), torch.tensor(0.1 * n / n, dtype=torch.float64), close=True
    )
    check("mean of integers", omnisafe.dist_avg(torch.tensor(r)), torch.tensor(mean).double())
    check("max", omnisafe.dist_max(torch.tensor([r, -r])), torch.tensor([n - 1, 0]))
    check("min", omnisafe.dist_min(torch.tensor([r, -r])), torch.tensor([0, 1 - n]))
    leaf = nn.Parameter(torch.tensor(float(r)))
    omnisafe.avg_tensor(leaf)
    check("leaf", leaf.detach(), torch.tensor(mean))
    from torch.distributed import ReduceOp

    one = torch.tensor(r + 1)
    ops = {"SUM": sum(range(n + 1)), "MAX": n, "MIN": 1, "PRODUCT": [1, 1, 2, 6][n]}
    for name, expected in ops.items():
        check(name, omnisafe.dist_op(one, getattr(ReduceOp, name)), torch.tensor(expected))
    check("AVG", omnisafe.dist_op(one.float(), ReduceOp.AVG), torch.tensor((n + 1) / 2))
    if n > 1:
        from mpi4py import MPI

        check("MPI", omnisafe.dist_op(one, MPI.PROD), torch.tensor([1, 1, 2, 6][n]))

    rows = [3, 0, 5]
    parts = [torch.arange(3.0 * k).reshape(k, 3) + k for k in rows[:n]]
    whole = torch.cat(parts)
    expected = (whole.mean(), whole.std(correction=0), whole.min(), whole.max())
    got = omnisafe.dist_statistics_scalar(parts[r], with_min_and_max=True)
    for k, (a, b) in enumerate(zip(got, expected, strict=True)):
        check(f"statistics {k}", a, b, close=True)
    two = omnisafe.dist_statistics_scalar(torch.tensor([1, 2]))
    check("two", two, (torch.tensor(1.5).double(), torch.tensor(0.5).double()))

    into = torch.zeros(3, 2).T
    mpi_tools.allreduce(torch.full((2, 3), float(r)), into, op="max")
    check("allreduce", into, torch.full((2, 3), n - 1.0))
    for root in range(n):
        for x in (torch.full((2, 3), r).T, torch.tensor(float(r), requires_grad=True)):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                mpi_tools.broadcast(x, root)
            check(f"broadcast from {root}", x.detach(), torch.full_like(x, root).detach())
    check("mpi_op", mpi_tools.mpi_op(torch.tensor(r), "max"), torch.tensor(n - 1))

    before = torch.get_num_threads()
    set_threads(2)
    omnisafe.setup_distributed()
    fair = max(1, len(os.sched_getaffinity(0)) // n)
    check("threads", torch.get_num_threads(), min(2, fair))
    set_threads(before)
    return check.wrong


def on_rank_collectives():
    """OmniSafe's collectives in place, on tensors that are not contiguous and that need a gradient."""
    r, n = comm.rank, comm.nworkers
    check = Checks()
    for dtype in (torch.bfloat16, torch.float64, torch.complex64, torch.int8):
        of_ranks = [torch.full((2, 3), i + 1).to(dtype).T for i in range(n)]
        total = torch.full((3, 2), sum(range(n + 1))).to(dtype)
        x = of_ranks[r].clone()
        omnisafe.all_reduce(x)
        check(f"all_reduce {dtype}", x, total)
        several = [torch.zeros(2, 3, dtype=dtype).T for _ in range(n)]
        omnisafe.all_gather(several, of_ranks[r])
        check(f"all_gather {dtype}", torch.stack(several), torch.stack(of_ranks))
        for root in range(n):
            x = of_ranks[r].clone()
            omnisafe.reduce(x, root)
            check(f"reduce {dtype} to {root}", x, total if r == root else of_ranks[r])
            several = [torch.zeros(3, 2, dtype=dtype) for _ in range(n)] if r == root else None
            omnisafe.gather(of_ranks[r], several, dst=root)
            if r == root:
                check(f"gather {dtype}", torch.stack(several), torch.stack(of_ranks))
            x = of_ranks[r].clone()
            omnisafe.broadcast(x, root)
            check(f"broadcast {dtype} from {root}", x, of_ranks[root])
            omnisafe.scatter(x, [i * total for i in range(n)] if r == root else None, root)
            check(f"scatter {dtype} from {root}", x, r * total)
    from torch.distributed import ReduceOp

    leaf = nn.Parameter(torch.tensor(float(r)))
    omnisafe.all_reduce(leaf, ReduceOp.MAX)
    check("MAX", leaf.detach(), torch.tensor(n - 1.0))
    omnisafe.all_reduce(leaf, op=ReduceOp.AVG, group=None, async_op=False)
    check("AVG", leaf.detach(), torch.tensor(n - 1.0))
    omnisafe.scatter(leaf, [leaf * i for i in range(n)] if r == 0 else [])
    check("leaf", leaf.detach(), torch.tensor((n - 1.0) * r))
    return check.wrong


def data(r):
    generator = torch.Generator().manual_seed(r)
    x = torch.randn(8, 2, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def on_rank_adam():
    r, n = comm.rank, comm.nworkers
    check = Checks()
    try:
        mpi_tf.sync_all_params()
    except ValueError as error:
        check("nothing known", "pass the modules" in str(error), True)
    mine, reference = model(r), model(0)
    mpi_tf.sync_all_params({"net": mine})
    optimizer = mpi_tf.MpiAdamOptimizer(learning_rate=0.01, beta2=0.99, check_every=5)
    adam = torch.optim.Adam(reference.parameters(), lr=0.01, betas=(0.9, 0.99))
    step = torch.tensor(0)
    wholes = [torch.cat(parts) for parts in zip(*map(data, range(n)), strict=True)]
    losses = []
    for _ in range(20):
        params = list(mine.parameters())
        if len(losses) % 2:
            optimizer.minimize(nn.functional.mse_loss(mine(data(r)[0]), data(r)[1]), step, params)
        else:
            loss = nn.functional.mse_loss(mine(data(r)[0]), data(r)[1])
            pairs = optimizer.compute_gradients(loss, params, gate_gradients=1)
            optimizer.apply_gradients(pairs, global_step=step, name="adam")
        adam.zero_grad()
        loss = nn.functional.mse_loss(reference(wholes[0]), wholes[1])
        loss.backward()
        adam.step()
        losses.append(loss.item())
    check("learns", losses[-1] < losses[0], True)
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        check("curve", a.detach(), b.detach(), close=True)
    check("global_step", step, torch.tensor(20))
    check("no trace", [p.grad for p in mine.parameters()], [None] * 4)

    used, unused, sometimes = (torch.full((2,), float(r), requires_grad=True) for _ in range(3))
    loss = used.sum() + (sometimes.sum() * n if r == 0 else 0)
    pairs = optimizer.compute_gradients(loss, [used, unused, sometimes])
    check("used", pairs[0][0], torch.ones(2))
    check("unused", pairs[1][0], None)
    check("sometimes", pairs[2][0], torch.ones(2))
    optimizer.apply_gradients(pairs)
    check("unused stays", unused.detach(), torch.full((2,), float(r)))
    check("from rank 0", used.detach(), torch.full((2,), -0.01), close=True)
    check("constant", optimizer.compute_gradients(torch.tensor(1.0), [used])[0][0], None)
    with torch.no_grad():
        used += r
    mpi_tf.sync_all_params()
    check("all variables", used.detach(), torch.full((2,), -0.01), close=True)
    return check.wrong


def wrong_uses():
    last = comm.rank == comm.nworkers - 1
    other, meta = net(0, wide=4 + last), net(0).to("meta") if last else net(0)
    for module in (other, meta):
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
    sparse = torch.zeros(2).to_sparse() if last else torch.zeros(2)
    drifted = torch.ones(3, requires_grad=True)
    optimizer = mpi_tf.MpiAdamOptimizer(check_every=2)

    def drift():
        optimizer.apply_gradients([(torch.ones(3), drifted)])
        with torch.no_grad():
            drifted[1] += 1e-6 * last
        optimizer.apply_gradients([(torch.ones(3), drifted)])

    return {
        "avg_grads shapes": lambda: mpi_pytorch.mpi_avg_grads(other),
        "avg_grads meta": lambda: omnisafe.avg_grads(meta),
        "sync shapes": lambda: mpi_pytorch.sync_params(other),
        "sync meta": lambda: omnisafe.sync_params(meta),
        "sync sparse": lambda: mpi_tf.sync_all_params(sparse),
        "avg_params shapes": lambda: omnisafe.avg_params(other),
        "avg_params meta": lambda: omnisafe.avg_params(meta),
        "dist_op": lambda: omnisafe.dist_op(torch.zeros(2), "median"),
        "dist_sum meta": lambda: omnisafe.dist_sum(
            torch.zeros(2, device="meta" if last else "cpu")
        ),
        "statistics meta": lambda: omnisafe.dist_statistics_scalar(meta.unused),
        "broadcast meta": lambda: mpi_tools.broadcast(meta.unused),
        "dist_sum shapes": lambda: omnisafe.dist_sum(torch.zeros(2 + last)),
        "dist_sum kinds": lambda: omnisafe.dist_sum([1.0] if last else torch.ones(1)),
        "avg_tensor integers": lambda: omnisafe.avg_tensor(torch.zeros(2, dtype=torch.int64)),
        "avg_tensor number": lambda: omnisafe.avg_tensor(1.0 if last else torch.zeros(())),
        "all_reduce group": lambda: omnisafe.all_reduce(torch.ones(2), group="some"),
        "reduce async": lambda: omnisafe.reduce(torch.ones(2), 0, async_op=last),
        "all_reduce op": lambda: omnisafe.all_reduce(torch.ones(2), "max" if last else "min"),
        "all_reduce bool": lambda: omnisafe.all_reduce(torch.ones(2, dtype=torch.bool)),
        "all_reduce expanded": lambda: omnisafe.all_reduce(
            torch.ones(1).expand(2) if last else torch.ones(2)
        ),
        "reduce dst": lambda: omnisafe.reduce(torch.ones(2), dst=int(last)),
        "reduce no dst": lambda: omnisafe.reduce(torch.ones(2), dst=None),
        "broadcast array": lambda: omnisafe.broadcast(np.ones(2), 0),
        "broadcast src": lambda: omnisafe.broadcast(torch.ones(2), src=int(last)),
        "broadcast shapes": lambda: omnisafe.broadcast(torch.ones(2 + last), 0),
        "all_gather list": lambda: omnisafe.all_gather(
            [torch.ones(2)] * (comm.nworkers - last), torch.ones(2)
        ),
        "all_gather shapes": lambda: omnisafe.all_gather(
            [torch.ones(2 + last)] * comm.nworkers, torch.ones(2)
        ),
        "gather nothing": lambda: omnisafe.gather(torch.ones(2)),
        "gather twice": lambda: omnisafe.gather(torch.ones(2), [torch.ones(2)] * comm.nworkers),
        "gather expanded": lambda: omnisafe.gather(
            torch.ones(2), None if comm.rank else [torch.ones(1).expand(2)] * comm.nworkers
        ),
        "scatter dtypes": lambda: omnisafe.scatter(
            torch.ones(2), None if comm.rank else [torch.ones(2).double()] * comm.nworkers
        ),
        "scatter meta": lambda: omnisafe.scatter(
            torch.ones(2), None if comm.rank else [torch.ones(2, device="meta")] * comm.nworkers
        ),
        "scatter src": lambda: omnisafe.scatter(torch.ones(2), src=comm.nworkers),
        "compute_gradients": lambda: mpi_tf.MpiAdamOptimizer().compute_gradients(
            torch.zeros(()), [torch.zeros(2 + last, requires_grad=True)]
        ),
        "nothing to apply": lambda: mpi_tf.MpiAdamOptimizer().apply_gradients([(None, drifted)]),
        "drift": drift,
    }


def on_rank_wrong():
    said = {}
    for name, use in wrong_uses().items():
        try:
            use()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return [said, omnisafe.dist_sum(1).item()]  # and nobody was left behind


def on_rank_alone():
    """Return what is raised if the last rank alone has no gradient, swallows that, and goes on."""
    last = comm.rank == comm.nworkers - 1
    variable, said = torch.ones(3, requires_grad=True), []
    pairs = [(None if last else torch.ones(3), variable)]
    for use in (
        lambda: mpi_tf.MpiAdamOptimizer().apply_gradients(pairs),
        lambda: omnisafe.dist_sum(1),
    ):
        try:
            use()
        except ValueError as error:
            said.append(str(error))
        if not last:
            break
    world.raised_alone().clear()  # the ranks live on
    return said


def on_rank_tools():
    parts = [
        on_rank_gradients_and_weights() + on_rank_collectives(),
        on_rank_adam(),
        on_rank_tensors(),
    ]
    return [*parts, *([on_rank_wrong(), on_rank_alone()] if comm.nworkers > 1 else [])]


@pytest.mark.parametrize("n", RANKS)
def test_tools_are_as_torch_on_what_all_ranks_have(n):
    """One job for all, because to start one takes seconds."""
    results = on_ranks(n, "test_torch_modules:on_rank_tools") if n > 1 else [on_rank_tools()]
    assert [result[:3] for result in results] == [[[], [], []]] * n
    if n > 1:
        same_errors([result[3] for result in results], n)
        why = f"an error on rank {n - 1} alone came before"
        *others, (first, second) = (result[4] for result in results)
        assert "expected a gradient for at least one variable" in first
        for text in [second, *(text for each in others for text in each)]:
            assert why in text
            assert first in text
        assert [len(each) for each in others] == [1] * (n - 1)


def same_errors(results, n):
    said = results[0][0]
    assert results == [[said, n]] * n
    assert [name for name, text in said.items() if not text.startswith("ValueError: ")] == []
    for name in ("avg_grads shapes", "sync shapes", "avg_params shapes"):
        assert "0.bias' is torch.float32 (4,)" in said[name]
        assert f"torch.float32 (5,) on rank {n - 1}" in said[name].replace(", cpu", "")
    for name in ("avg_grads meta", "sync meta", "avg_params meta"):
        assert "meta device" in said[name]
    for name in ("dist_sum meta", "statistics meta", "broadcast meta"):
        assert f"rank {n - 1}: " in said[name]
        assert "meta device" in said[name]
    assert "group must be None and async_op False" in said["all_reduce group"]
    assert f"rank {n - 1}: group must be None and async_op False" in said["reduce async"]
    assert f"'dst' is 0 on rank 0 and 1 on rank {n - 1}" in said["reduce dst"]
    assert f"'src' is 0 on rank 0 and 1 on rank {n - 1}" in said["broadcast src"]
    assert f"src must be a rank, 0 to {n - 1}: got {n}" in said["scatter src"]
    assert (
        f"must be a list of {n} tensors, one for each rank: got {n - 1}" in said["all_gather list"]
    )
    assert "rank 0: gather_list must be a list" in said["gather nothing"]
    assert "rank 1: gather_list must be None on all ranks but 0" in said["gather twice"]
    assert "scatter_list[0] must have the dtype and shape of" in said["scatter dtypes"]
    assert "weights, bit for bit: '0, of shape (3,)' is" in said["drift"]
    assert f"on rank {n - 1}" in said["drift"]


def test_an_unknown_keyword_is_an_error():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match="no keyword var_lists"):
        mpi_tf.MpiAdamOptimizer().compute_gradients(x.sum(), [x], var_lists=[])


NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]

SCRIPT = """
import os, platform, sys
from rank0rl.compat import omnisafe
from rank0rl.mpi import comm
args = [__file__, "other", "0"] if sys.argv[1] == "manual" else None
if args:
    parent = omnisafe.fork(2, "cpu", args)
else:
    parent = omnisafe.fork(2, False, use_number_of_threads=True, device="cpu")
if parent:
    print("parent", "RANK" in os.environ)
    sys.exit()
total = omnisafe.dist_sum(1).item()
found = comm.allgather_obj([os.environ[name] for name in NAMES], "variables")
here = platform.node()
assert found == [[str(rank), "2", str(rank), "2", here, "29500"] for rank in range(2)], found
if omnisafe.is_master():
    print(sys.argv[1], total)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "code", "out"),
    [
        (["manual", "7"], 0, ["other 2", "parent False"]),
        (["own", "3"], 3, ["own 2"]),
    ],
)
def test_fork_is_true_in_the_parent_of_a_job_that_succeeded(args, code, out, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace("NAMES", repr(NAMES)))
    command = [sys.executable, str(tmp_path / "script.py"), *args]
    done = run(command, env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == out


def test_fork_of_one_is_this_process():
    before = dict(os.environ)
    assert omnisafe.fork(1) is omnisafe.fork(1, "cpu") is omnisafe.fork(1, "cpu", ["x"]) is False
    assert {name: os.environ.get(name) for name in NAMES} == {
        name: before.get(name) for name in NAMES
    }
    for order in ({"device": "no such device"}, {"bind_to_core": "no such device"}):
        with pytest.raises(RuntimeError):
            omnisafe.fork(1, **order)


def test_the_variables_of_torchrun_on_two_hosts(monkeypatch):
    monkeypatch.setattr(comm, "hosts", lambda: ("a", "b", "a", "b", "b"))
    monkeypatch.setattr(os, "environ", {"MASTER_PORT": "1234", "RANK": "7"})
    of_ranks = []
    for rank in range(5):
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        omnisafe._set_variables_of_torchrun()
        of_ranks.append([os.environ[name] for name in NAMES])
    where = [("0", "2"), ("0", "3"), ("1", "2"), ("1", "3"), ("2", "3")]
    assert of_ranks == [[str(r), "5", *local, "a", "1234"] for r, local in enumerate(where)]
