"""Spinning Up's `mpi_tools` at 1, 2, 3 ranks, against NumPy on what all ranks have.

Tensors are in test_torch_modules.py, as it takes seconds to load torch on every rank.
"""

import json
import sys

import numpy as np
import pytest
from helpers.ranks import HERE, on_ranks, run

from rank0rl.compat import mpi_tools
from rank0rl.mpi import comm

RANKS = [1, 2, 3]
DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">f4"]


def part(rank, dtype):
    return (np.arange(6).reshape(2, 3) % 4 + rank).astype(dtype)


def same(a, b):
    """Of the same kind, dtype, shape and values."""
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(a, b)


def on_rank_ops():
    """Names of what is wrong: nothing, if all is as NumPy has it."""
    r, n = comm.rank, comm.nworkers
    wrong = []

    def check(name, got, expected):
        wrong.extend([] if same(got, expected) else [f"{name}: {got!r}, not {expected!r}"])

    for dtype in DTYPES:
        whole = np.stack([part(i, dtype) for i in range(n)])
        check(dtype, mpi_tools.mpi_sum(part(r, dtype)), whole.sum(0).astype(dtype))
        check(
            f"{dtype} prod", mpi_tools.mpi_op(part(r, dtype), "prod"), whole.prod(0).astype(dtype)
        )
        if not dtype.startswith("c"):
            check(
                f"{dtype} max", mpi_tools.mpi_op(part(r, dtype), "max"), whole.max(0).astype(dtype)
            )
            check(
                f"{dtype} min", mpi_tools.mpi_op(part(r, dtype), "MIN"), whole.min(0).astype(dtype)
            )
            mean = whole.mean(0, dtype="f8").astype(dtype if "f" in dtype else "f8")
            check(f"{dtype} avg", mpi_tools.mpi_avg(part(r, dtype)), mean)
    check("exact", mpi_tools.mpi_sum(2**53 + r), n * 2**53 + sum(range(n)))
    check("float", mpi_tools.mpi_sum(0.1), sum([0.1] * n))
    check("bool", mpi_tools.mpi_sum(r == 0), 1)
    check("numpy scalar", mpi_tools.mpi_avg(np.float32(r)), np.float32((n - 1) / 2))
    check("list", mpi_tools.mpi_sum([1, r]), np.array([n, sum(range(n))]))
    check("0-d array", mpi_tools.mpi_sum(np.array(1.5)), np.array(1.5 * n))
    check("empty", mpi_tools.mpi_sum(np.empty((0, 3), "f4")), np.empty((0, 3), "f4"))
    strided = n * part(0, "f8").T + sum(range(n))
    check("strided", mpi_tools.mpi_sum(part(r, "f8").T), strided)
    check("nan", np.isnan(mpi_tools.mpi_op(float("nan") if r == 0 else 1.0, "max")), True)
    check("types", [type(mpi_tools.mpi_sum(x)) for x in (1, 1.5)] == [int, float], True)
    return wrong


def on_rank_buffers():
    r, n = comm.rank, comm.nworkers
    total = sum(range(n))
    wrong = []

    def check(name, got, expected):
        wrong.extend([] if same(got, expected) else [f"{name}: {got!r}, not {expected!r}"])

    into = np.zeros((3, 2)).T  # not contiguous
    mpi_tools.allreduce(part(r, "f8"), into)
    check("allreduce", into, n * part(0, "f8") + total)
    number = np.zeros(1)
    mpi_tools.allreduce(1.5, number)
    check("number", number, np.array([1.5 * n]))
    if n > 1:
        from mpi4py import MPI

        mpi_tools.allreduce(MPI.IN_PLACE, number, op=MPI.PROD)
        check("in place", number, np.array([(1.5 * n) ** n]))
        check("MPI.MIN", mpi_tools.mpi_op(r + 1, MPI.MIN), 1)
    for root in range(n):
        for name, x in {
            "array": np.arange(3) + r,
            "strided": part(r, "f4").T[::2],
            "0-d": np.array(r),
            "empty": np.empty((0, 2)),
            "text": np.array([f"rank {r}"]),
            "bool": np.array([r == 0, True]),
        }.items():
            before, whole = x.copy(), comm.allgather_obj(x, "test", comm.world()) if n > 1 else [x]
            expected = whole[root].copy() if n > 1 else before
            mpi_tools.broadcast(x, root)
            check(f"broadcast {name} from {root}", x, expected)
    check("who", [mpi_tools.proc_id(), mpi_tools.num_procs()], [r, n])
    return wrong


ROWS = {1: [3], 2: [3, 0], 3: [3, 0, 5]}


def samples(rows):
    return [np.random.default_rng(r).normal(3, 2, (n, 2)) for r, n in enumerate(rows)]


def on_rank_statistics(rows):
    mine = samples(rows)[comm.rank]
    of = (mine, mine.astype(np.float32), mine.T, mine.ravel().tolist())
    several = [mpi_tools.mpi_statistics_scalar(x, with_min_and_max=True) for x in of]
    return [several, mpi_tools.mpi_statistics_scalar(mine), mpi_tools.mpi_statistics_scalar(2.0)]


class Wordless:
    """An object that cannot be printed."""

    def __repr__(self):
        raise RuntimeError("no words")


def wrong_uses():
    """On the last rank something else than on the others, or something wrong on all of them."""
    from mpi4py import MPI

    last = comm.rank == comm.nworkers - 1
    ok = np.zeros(2)
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    return {
        "unknown op": lambda: mpi_tools.mpi_op(1, "median"),
        "unknown MPI op": lambda: mpi_tools.mpi_op(1, MPI.LAND),
        "no op": lambda: mpi_tools.mpi_op(1, None),
        "ops": lambda: mpi_tools.mpi_op(1, "max" if last else "min"),
        "shapes": lambda: mpi_tools.mpi_sum(np.zeros(2 + last)),
        "text": lambda: mpi_tools.mpi_avg("word" if last else 1.0),
        "statistics": lambda: mpi_tools.mpi_statistics_scalar("word" if last else ok),
        "complex": lambda: mpi_tools.mpi_statistics_scalar(ok * 1j),
        "recvbuf": lambda: mpi_tools.allreduce(ok, np.zeros(3) if last else np.zeros(2)),
        "list": lambda: mpi_tools.allreduce(ok, [0, 0]),
        "mean of integers": lambda: mpi_tools.allreduce(np.ones(2, int), np.ones(2, int), "mean"),
        "broadcast list": lambda: mpi_tools.broadcast([1, 2] if last else ok),
        "broadcast frozen": lambda: mpi_tools.broadcast(frozen if last else ok),
        "broadcast objects": lambda: mpi_tools.broadcast(np.array([{}, None])),
        "broadcast shapes": lambda: mpi_tools.broadcast(np.zeros(2 + last)),
        "fields": lambda: mpi_tools.broadcast(np.zeros(2, "f8,i4" if last else "i4,f8")),
        "roots": lambda: mpi_tools.broadcast(ok, root=int(last)),
        "no root": lambda: mpi_tools.broadcast(ok, root=7),
        "wordless root": lambda: mpi_tools.broadcast(ok, root=Wordless() if last else 0),
        "wordless op": lambda: mpi_tools.mpi_op(1, Wordless() if last else "sum"),
    }


def on_rank_wrong():
    said = {}
    for name, use in wrong_uses().items():
        try:
            use()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return [said, mpi_tools.mpi_sum(1)]  # and nobody was left behind


def on_rank_tools(rows):
    parts = {"ops": on_rank_ops(), "buffers": on_rank_buffers()}
    parts["statistics"] = on_rank_statistics(rows)
    parts["wrong"] = on_rank_wrong() if comm.nworkers > 1 else None
    return parts


@pytest.mark.parametrize("n", RANKS)
def test_tools_are_as_numpy_on_what_all_ranks_have(n):
    """One job for all, because to start one takes seconds."""
    rows = ROWS[n]
    job = "test_mpi_tools:on_rank_tools"
    results = on_ranks(n, job, rows) if n > 1 else [on_rank_tools(rows)]
    assert [result["ops"] for result in results] == [[]] * n
    assert [result["buffers"] for result in results] == [[]] * n
    x = np.concatenate(samples(rows))
    expected = [x.mean(), x.std(), x.min(), x.max()]
    for result in results:
        several, two, constant = result["statistics"]
        for got in several:
            np.testing.assert_allclose(got, expected, rtol=1e-6)
        np.testing.assert_allclose(two, expected[:2], rtol=1e-12)
        assert list(constant) == [2.0, 0.0]
    if n > 1:
        same_errors([result["wrong"] for result in results], n)


def same_errors(results, n):
    said = results[0][0]
    assert results == [[said, n]] * n
    assert [name for name, text in said.items() if not text.startswith("ValueError: ")] == []
    assert "op must be one of sum, mean, prod, max, min: got 'median'" in said["unknown op"]
    assert f"rank {n - 1}: 'x': expected a number" in said["text"]
    assert f"'x' is <f8 (2,) on rank 0 and <f8 (3,) on rank {n - 1}" in said["broadcast shapes"]
    assert f"root must be a rank, 0 to {n - 1}: got 7" in said["no root"]
    assert f"rank {n - 1}: RuntimeError: no words" in said["wordless root"]
    assert "no words" in said["wordless op"]


SCRIPT = """
import sys
from rank0rl.compat import mpi_tools
assert mpi_tools.mpi_fork(1) is None
assert mpi_tools.mpi_fork(int(sys.argv[1]), bind_to_core="bound" in sys.argv) is None
if mpi_tools.proc_id() == 0:
    mpi_tools.msg(mpi_tools.mpi_sum(1), "ranks")
else:
    mpi_tools.mpi_sum(1)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("args", "code"), [(["2", "0", "bound"], 0), (["2", "3"], 3), (["1", "0"], 0)]
)
def test_mpi_fork_ends_the_original_process_with_the_jobs_code(args, code, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), *args]
    done = run(command, env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == [f"Message from 0: ranks \t {args[0]}"]


def test_a_single_process_loads_no_mpi():
    code = (
        "import json, sys, numpy as np\n"
        "from rank0rl.compat import evorl, mpi_pytorch, mpi_tf, mpi_tools, omnisafe\n"
        "x = np.zeros(2); mpi_tools.allreduce(np.ones(2), x); mpi_tools.broadcast(x)\n"
        "mpi_pytorch.setup_pytorch_for_mpi(); evorl.use_axes(DP=1)\n"
        "y = evorl.all_gather({'a': x}, 'DP')['a'].tolist()\n"
        "print(json.dumps([x.tolist(), y, evorl.get_process_id(), 'mpi4py' in sys.modules]))"
    )
    done = run([sys.executable, "-c", code], env={"PYTHONPATH": str(HERE.parent)})
    assert json.loads(done.stdout) == [[1, 1], [[1, 1]], 0, False], done.stderr
