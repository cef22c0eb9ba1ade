"""Products in kernels: right for every shape and layout, with bits that depend on their own row and column alone."""

import ctypes
import mmap

import numpy as np
import pytest

from rank0rl.nets.kernels.compiler import kernel
from rank0rl.nets.kernels.products import product

SHAPES = [
    (1, 1, 1),
    (5, 3, 1),
    (6, 8, 8),
    (7, 9, 2),
    (13, 16, 7),
    (12, 300, 16),
    (64, 17, 33),
    (20, 513, 40),
    (3, 0, 4),
]
TYPES = [np.float32, np.float64]


@kernel
def compute(a, b, out):
    product(a, b, out)


def numbers(rng, shape, dtype, transposed):
    x = rng.standard_normal(shape[::-1] if transposed else shape).astype(dtype)
    return x.T if transposed else x


def result(a, b):
    """Return a b from a buffer whose numbers beside the result must stay."""
    n, columns = len(a), b.shape[1]
    buffer = np.full(n * columns + 64, 7, a.dtype)
    out = buffer[32 : 32 + n * columns].reshape(n, columns)
    compute(a, b, out)
    assert (np.delete(buffer, slice(32, -32)) == 7).all()
    return out


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["A B", "A' B", "A B'"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_product(shape, layout, dtype):
    n, m, columns = shape
    rng = np.random.default_rng(0)
    a = numbers(rng, (n, m), dtype, layout == "A' B")
    b = numbers(rng, (m, columns), dtype, layout == "A B'")
    wanted = a.astype(np.longdouble) @ b.astype(np.longdouble)
    bound = abs(a.astype(float)) @ abs(b.astype(float)) * np.finfo(dtype).eps * max(m, 1)
    assert (abs(result(a, b) - wanted) <= bound).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_bits_depend_on_one_row_and_column_alone(dtype, transposed):
    rng = np.random.default_rng(1)
    a = numbers(rng, (25, 300), dtype, False)
    b = numbers(rng, (300, 37), dtype, transposed)
    whole = result(a, b)
    for rows, columns in ((slice(3, 9), slice(0, 37)), (slice(24, 25), slice(16, 18))):
        few = b.T[columns].copy().T if transposed else b[:, columns].copy()
        assert result(a[rows], few).tobytes() == whole[rows, columns].tobytes()
    by_columns = np.ascontiguousarray(a.T).T
    assert result(by_columns, b).tobytes() == whole.tobytes()


def test_a_number_is_one_chain_in_order_of_k():
    a = np.float32([[1e8, 1, -1e8]])
    assert (result(a, np.ones((3, 2), np.float32)) == 0).all()
    assert (result(a[:, [0, 2, 1]].copy(), np.ones((3, 2), np.float32)) == 1).all()


def test_products_within_a_chain_are_not_rounded():
    x = np.float32(1) + np.float32(2**-20)
    a, b = np.float32([[-(x * x), x]]), np.array([[1, 1], [x, x]], np.float32)
    assert (result(a, b) == 2**-40).all()


def test_nothing_behind_a_matrix_is_read():
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    numbers = np.frombuffer(memory, np.float32)
    libc, none = ctypes.CDLL(None), 0
    end = mmap.PAGESIZE // 4
    assert libc.mprotect(ctypes.c_void_p(numbers[end:].ctypes.data), mmap.PAGESIZE, none) == 0
    b = numbers[end - 4 * 11 : end].reshape(4, 11)
    b[:] = 1
    assert (result(np.ones((2, 4), np.float32), b) == 4).all()
    assert (result(b[:2], np.ones((11, 3), np.float32)) == 11).all()
