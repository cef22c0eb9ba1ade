"""Products in kernels: one chain of multiply-adds for each number, whatever the shapes and the layouts."""

import ctypes
import itertools
import json
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from numba.core.errors import TypingError

from rank0rl.nets.kernels.compiler import fma, kernel
from rank0rl.nets.kernels.products import dot, matmul, product

SHAPES = [
    (1, 1, 1),
    (5, 3, 1),
    (6, 8, 8),
    (7, 9, 2),
    (13, 16, 7),
    (12, 300, 16),
    (64, 17, 33),
    (20, 513, 40),
    (25, 130, 28),
    (3, 0, 4),
    (3, 0, 1),
    (0, 3, 4),
    (4, 3, 0),
]
TYPES = [np.float32, np.float64]
IN_MEMORY = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "A": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
}


@kernel
def compute(a, b, out):
    product(a, b, out)


@kernel
def one_by_one(a, b, out):
    for i in range(len(out)):
        for j in range(out.shape[1]):
            out[i, j] = 0
            for k in range(len(b)):
                out[i, j] = fma(a[i, k], b[k, j], out[i, j])


@kernel
def inner_product(x, y):
    return dot(x, y)


def result(function, a, b):
    """Return a b from a buffer whose numbers beside the result must stay."""
    n, columns = len(a), b.shape[1]
    buffer = np.full(n * columns + 64, 7, a.dtype)
    out = buffer[32 : 32 + n * columns].reshape(n, columns)
    function(a, b, out)
    assert (buffer[:32] == 7).all()
    assert (buffer[len(buffer) - 32 :] == 7).all()
    return out


@pytest.mark.fast(4)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("of_a", "of_b"), [*itertools.product("CFA", "CF")])
def test_numbers_are_one_chain_each(of_a, of_b, dtype):
    rng = np.random.default_rng(0)
    for n, m, columns in SHAPES:
        a = IN_MEMORY[of_a](rng.standard_normal((n, m)).astype(dtype))
        b = IN_MEMORY[of_b](rng.standard_normal((m, columns)).astype(dtype))
        got, wanted = result(compute, a, b), result(one_by_one, a, b)
        if columns > 1:
            assert got.tobytes() == wanted.tobytes()
        else:
            assert np.allclose(got, wanted, atol=1e-5)


def test_a_product_with_one_column_is_made_of_eight_chains():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((9, 21), dtype=np.float32), rng.standard_normal(21, dtype=np.float32)
    assert (result(compute, a, b[:, None])[:, 0] == [inner_product(row, b) for row in a]).all()


def test_numpy_gets_the_same_product():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((9, 21)), rng.standard_normal((30, 21))
    assert matmul(a, b.T).tobytes() == result(compute, a, b.T).tobytes()
    assert np.allclose(matmul(a, b.T), a @ b.T)


def test_products_within_a_chain_are_not_rounded():
    x = np.float32(1) + np.float32(2**-20)
    a, b = np.float32([[-(x * x), x]]), np.array([[1, 1], [x, x]], np.float32)
    assert (result(compute, a, b) == 2**-40).all()


@pytest.mark.parametrize(("of_a", "of_b"), [*itertools.product("CF", "CF")])
def test_nothing_behind_a_matrix_is_read_or_written(of_a, of_b):
    for n, m, columns in SHAPES:
        a, b = before_a_wall((n, m), of_a), before_a_wall((m, columns), of_b)
        out = before_a_wall((n, columns), "C")
        compute(a, b, out)
        assert (out == m).all()


def before_a_wall(shape, order):
    """Return a matrix of ones whose last number is followed by memory that may not be touched."""
    size = int(np.prod(shape))
    pages = -(-4 * size // mmap.PAGESIZE)
    memory = np.frombuffer(mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE), np.float32)
    end = pages * mmap.PAGESIZE // 4
    wall = ctypes.c_void_p(memory.ctypes.data + 4 * end)
    assert ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    matrix = memory[end - size : end].reshape(shape, order=order)
    matrix[:] = 1
    return matrix


WITH_THIS_CPU = """
import hashlib, json, sys
import numba, numpy as np
from rank0rl.nets.kernels.products import _BYTES, product

compute = numba.njit(lambda a, b, out: product(a, b, out))
rng, digest = np.random.default_rng(0), hashlib.sha256()
for n, m, columns in json.loads(sys.argv[1]):
    for dtype in ("f4", "f8"):
        a, b = rng.random((n, m)).astype(dtype), rng.random((m, columns)).astype(dtype)
        for other in (b, np.asfortranarray(b)):
            compute(a, other, out := np.empty((n, columns), dtype))
            digest.update(out.tobytes())
print(_BYTES, all("zmm" in code for code in compute.inspect_asm().values()), digest.hexdigest())
"""


@pytest.mark.slow
def test_avx512_is_used_where_there_is_one_and_gives_the_same_bits():
    shapes, wide = json.dumps([shape for shape in SHAPES if shape[2] > 1]), ""
    for hide in ("1", "0"):
        env = {**os.environ, "NUMBA_ENABLE_AVX": hide}
        command = [sys.executable, "-c", WITH_THIS_CPU, shapes]
        size, uses, bits = subprocess.check_output(command, env=env, text=True).split()
        assert (size == "64") == (uses == "True")
        wide = wide or bits
    assert (size, bits) == ("32", wide)


def test_what_is_not_contiguous_is_refused():
    x = np.ones((6, 8), np.float32)
    with pytest.raises(KeyError):
        compute(x, np.ones((8, 6), np.float32)[:, ::2], x)
    with pytest.raises(TypingError):
        inner_product(x[:, 0], x[:, 1])
