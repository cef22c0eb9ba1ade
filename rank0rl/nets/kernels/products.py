"""Products of small matrices in kernels. Each number is one chain of fused multiply-adds, in order of k.

So its bits depend neither on the shape of the rest, nor on how the work is cut, nor on a BLAS. The
outputs are computed in tiles of two vectors and as many rows as fill the registers: 6 with AVX2, and 12 with AVX-512,
whose vectors are twice as long. All other code keeps to the instructions that --cpu allows.
Where b has one column and rows of a are contiguous, each number is a `dot` instead: eight chains.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, overload

from rank0rl.nets.kernels.compiler import fma, inner, kernel, part

Array = npt.NDArray[Any]

_AVX512 = "+avx512f"
_BYTES = 64 if _AVX512 in get_host_cpu_features().split(",") else 32  # of a vector
# A tile has 12 sums, 2 vectors of b and one number of a in 15 of 16 registers. There are 32 of those of 64 bytes.
_ROWS = 6 if _BYTES == 32 else 12
_DEPTH = 8192 // _BYTES  # numbers of a chain at a time: 2 vectors of each are 16 KB


@inner
def product(a: Array, b: Array, out: Array) -> None:
    """Compute out = a b, all of one dtype: a (n, m) of any strides, b (m, columns), C- or F-contiguous, C-contiguous out."""
    n, columns, m = len(out), out.shape[1], len(b)
    vector = _BYTES // out.itemsize
    panel = carray(_stack(out), (_DEPTH, 2 * vector))
    if columns == 1:
        _column(a, b.reshape(m), out.reshape(n))
        return
    for j in range(0, columns, 2 * vector):
        width = min(2 * vector, columns - j)
        for k in range(0, max(m, 1), _DEPTH):
            depth = min(_DEPTH, m - k)
            near = _rows_of(b, k, depth, j, width, panel)
            for i in range(0, n, _ROWS):
                if width == 2 * vector:
                    _two(a, i, k, near, depth, out, j, width)
                elif width > vector:
                    _two_cut(a, i, k, near, depth, out, j, width)
                else:
                    _one_cut(a, i, k, near, depth, out, j, width)


def matmul(a: Array, b: Array) -> Array:
    """Return a b, (n, columns), for a (n, m) and b (m, columns) of one dtype. A call from Python."""
    out = np.empty((a.shape[0], b.shape[1]), a.dtype)
    _matmul(a, np.ascontiguousarray(b), out)
    return out


@kernel
def _matmul(a: Array, b: Array, out: Array) -> None:
    product(a, b, out)


def _column(a: Array, x: Array, out: Array) -> None:
    """Compute out (n,) = a x, for a matrix a and a vector x (m,)."""
    raise NotImplementedError("only kernels call it")


@overload(_column, strict=False)  # type: ignore[untyped-decorator]
def _column_by_layout(a: Any, *_: Any) -> Any:
    def by_rows(a: Array, x: Array, out: Array) -> None:
        for i in range(len(out)):
            out[i] = dot(a[i], x)

    def by_columns(a: Array, x: Array, out: Array) -> None:
        out[:] = 0
        for k in range(len(x)):
            column, factor = a[:, k], x[k]
            for i in range(len(out)):
                out[i] = fma(column[i], factor, out[i])

    return by_rows if a.layout == "C" else by_columns


def _rows_of(b: Array, k: int, depth: int, j: int, width: int, panel: Array) -> Array:
    """Return rows k to k + depth of the columns j to j + width of b. Numbers of a row lie side by side."""
    raise NotImplementedError("only kernels call it")


@overload(_rows_of, strict=False)  # type: ignore[untyped-decorator]
def _by_layout(b: Any, *_: Any) -> Any:
    def as_it_is(b: Array, k: int, depth: int, j: int, width: int, panel: Array) -> Array:
        return b[k : k + depth, j:]

    def transposed(b: Array, k: int, depth: int, j: int, width: int, panel: Array) -> Array:
        vector = panel.shape[1] // 2
        deep, wide = depth // vector * vector, width // vector * vector
        for c in range(0, wide, vector):
            for d in range(0, deep, vector):
                _transpose(b, k + d, j + c, panel, d, c)
        for c in range(width):
            for d in range(deep if c < wide else 0, depth):
                panel[d, c] = b[k + d, j + c]
        return panel

    return {"C": as_it_is, "F": transposed}[b.layout]


class _Vectors:
    """Instructions on vectors of so many numbers, or as long as a register, in code that is being generated."""

    def __init__(self, context: Any, builder: Any, dtype: Any, lanes: int = 0) -> None:
        if _BYTES == 64 and not lanes:
            # llvmlite knows no such attribute, but writes all that are in this set.
            set.add(builder.function.attributes, f'"target-features"="{_AVX512}"')
        self._builder, self.number = builder, context.get_data_type(dtype)
        self._size = context.get_abi_sizeof(self.number)
        self.lanes = lanes or _BYTES // self._size
        self.kind = ir.VectorType(self.number, self.lanes)
        self.zero = ir.Constant(self.kind, [0.0] * self.lanes)

    def everywhere(self, x: Any) -> Any:
        """Return a vector of one number, or index, again and again."""
        kind = ir.VectorType(x.type, self.lanes)
        first = self._builder.insert_element(ir.Constant(kind, ir.Undefined), x, _word(0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self._builder.shuffle_vector(first, first, mask)

    def among(self, width: Any, begin: int) -> Any:
        """Return a mask of the lanes, numbered from `begin`, that are below a width."""
        lanes = range(begin, begin + self.lanes)
        numbers = ir.Constant(ir.VectorType(width.type, self.lanes), [*lanes])
        return self._builder.icmp_signed("<", numbers, self.everywhere(width))

    def load(self, pointer: Any, mask: Any = None) -> Any:
        """Return the numbers from here on; where there is a mask, 0 for those outside of it."""
        if mask is None:
            return self._builder.load(pointer, align=self._size)
        given = [pointer, _word(self._size), mask, self.zero]
        return self._call("masked.load", ".p0", self.kind, *given)

    def store(self, value: Any, pointer: Any, mask: Any) -> None:
        """Write the numbers that a mask, if there is one, does not leave out."""
        if mask is None:
            self._builder.store(value, pointer, align=self._size)
        else:
            given = [value, pointer, _word(self._size), mask]
            self._call("masked.store", ".p0", ir.VoidType(), *given)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """Return x y + z, each rounded once."""
        return self._call("fma", "", self.kind, x, y, z)

    def _call(self, name: str, suffix: str, kind: Any, *args: Any) -> Any:
        whole = f"llvm.{name}.v{self.lanes}f{8 * self._size}{suffix}"
        function = ir.FunctionType(kind, [each.type for each in args])
        return self._builder.call(
            cgutils.get_or_insert_function(self._builder.module, function, whole), args
        )


class _Matrix:
    """An array of two axes in code that is being generated."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        self._builder, self._data = builder, array.data
        self.rows = cgutils.unpack_tuple(builder, array.shape, 2)[0]
        self._strides = cgutils.unpack_tuple(builder, array.strides, 2)

    def at(self, row: Any, column: Any, kind: Any) -> Any:
        """Return the pointer to what is of this type at an element."""
        there = self._builder.bitcast(self._data, ir.IntType(8).as_pointer())
        for index, stride in zip((row, column), self._strides, strict=True):
            there = self._builder.gep(there, [self._builder.mul(index, stride)])
        return self._builder.bitcast(there, kind.as_pointer())


def _word(x: int) -> Any:
    return ir.Constant(ir.IntType(32), x)


def _index(x: int) -> Any:
    return ir.Constant(ir.IntType(64), x)


def _tile(vectors: int, is_cut: bool) -> Any:
    """Return a function that computes the tile at row i, of so many vectors of `out`, or adds to them if k > 0.

    A cut tile has `width` columns, fewer than fill the vectors: what lies beyond them is neither read nor written.
    """

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, out = (_Matrix(context, builder, signature.args[at], args[at]) for at in (0, 3, 5))
        _, i, k, _, depth, _, j, width = args
        of = _Vectors(context, builder, signature.args[0].dtype)
        masks = [of.among(width, c * of.lanes) if is_cut else None for c in range(vectors)]
        last, rows = builder.sub(out.rows, _index(1)), []
        for r in range(_ROWS):
            row = builder.add(i, _index(r))  # the last row again, where there are no more
            rows.append(builder.select(builder.icmp_signed("<", row, last), row, last))
        columns = [_index(c * of.lanes) for c in range(vectors)]
        places = [
            (out.at(row, builder.add(j, column), of.kind), mask)
            for row in rows
            for column, mask in zip(columns, masks, strict=True)
        ]
        adds = builder.icmp_signed(">", k, _index(0))
        sums = [
            cgutils.alloca_once_value(builder, builder.select(adds, of.load(*place), of.zero))
            for place in places
        ]
        with cgutils.for_range(builder, depth) as loop:
            there = [b.at(loop.index, column, of.kind) for column in columns]
            y = [of.load(pointer, mask) for pointer, mask in zip(there, masks, strict=True)]
            for r, row in enumerate(rows):
                x = of.everywhere(builder.load(a.at(row, builder.add(k, loop.index), of.number)))
                for c, total in enumerate(sums[r * vectors : (r + 1) * vectors]):
                    builder.store(of.fma(x, y[c], builder.load(total)), total)
        for total, place in zip(sums, places, strict=True):
            of.store(builder.load(total), *place)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typingctx: Any, a: Any, i: Any, k: Any, b: Any, depth: Any, out: Any, j: Any, width: Any
    ) -> Any:
        return types.void(
            a, types.int64, types.int64, b, types.int64, out, types.int64, types.int64
        ), write

    return tile


_two, _two_cut, _one_cut = _tile(2, False), _tile(2, True), _tile(1, True)


@intrinsic  # type: ignore[untyped-decorator]
def _stack(typingctx: Any, like: Any) -> Any:
    """Return memory of this call for a panel of numbers like those of an array."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            pointer = builder.alloca(ir.ArrayType(ir.IntType(8), 2 * _BYTES * _DEPTH))
        pointer.align = 2 * _BYTES
        return builder.bitcast(pointer, context.get_data_type(like.dtype).as_pointer())

    return types.CPointer(like.dtype)(like), write


@intrinsic  # type: ignore[untyped-decorator]
def _transpose(typingctx: Any, b: Any, k: Any, j: Any, panel: Any, d: Any, c: Any) -> Any:
    """Copy a square of b, F-contiguous, at row k and column j, to row d and column c of a panel, as long as a vector."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, panel = (_Matrix(context, builder, signature.args[at], args[at]) for at in (0, 3))
        _, k, j, _, d, c = args
        of = _Vectors(context, builder, signature.args[0].dtype)
        lanes = range(of.lanes)
        rows = [of.load(b.at(k, builder.add(j, _index(lane)), of.kind)) for lane in lanes]
        half = 1
        while half < of.lanes:  # exchange the off-diagonal quarters of squares of 2, 4 and 8
            for low in (row for row in lanes if not row & half):
                pair = rows[low], rows[low + half]
                first = [x if not x & half else of.lanes + x - half for x in lanes]
                second = [x + half if not x & half else of.lanes + x for x in lanes]
                for row, order in ((low, first), (low + half, second)):
                    chosen = ir.Constant(ir.VectorType(ir.IntType(32), of.lanes), order)
                    rows[row] = builder.shuffle_vector(*pair, chosen)
            half *= 2
        for lane, row in enumerate(rows):
            of.store(row, panel.at(builder.add(d, _index(lane)), c, of.kind), None)
        return context.get_dummy_value()

    return types.void(b, types.int64, types.int64, panel, types.int64, types.int64), write


@intrinsic  # type: ignore[untyped-decorator]
def _eight_sums(typingctx: Any, x: Any, y: Any, n: Any) -> Any:
    """Return the sums of x[i] y[i], or of x[i] if y is None, over the i < n of each remainder modulo 8."""
    if "A" in (x.layout, getattr(y, "layout", "C")):
        return None  # numba refuses the call

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of = _Vectors(context, builder, x.dtype, 8)
        sums = cgutils.alloca_once_value(builder, of.zero)
        begins = [
            context.make_array(kind)(context, builder, value).data
            for kind, value in zip((x, y), args, strict=False)
            if kind != types.none
        ]
        start, step = _index(0), _index(8)
        with cgutils.for_range_slice(builder, start, args[2], step) as (i, _):
            there = (builder.gep(begin, [i]) for begin in begins)
            more = [of.load(builder.bitcast(each, of.kind.as_pointer())) for each in there]
            before = builder.load(sums)
            after = (
                of.fma(more[0], more[1], before)
                if len(more) == 2
                else builder.fadd(before, more[0])
            )
            builder.store(after, sums)
        found = builder.load(sums)
        each = [builder.extract_element(found, _word(lane)) for lane in range(8)]
        return context.make_tuple(builder, signature.return_type, each)

    return types.UniTuple(x.dtype, 8)(x, y, types.int64), write


@part
def dot(x: Array, y: Array) -> Any:
    """Return the sum of products of two vectors, C-contiguous. The order of the additions is fixed."""
    n = len(x) // 8 * 8
    a, b, c, d, e, f, g, h = _eight_sums(x, y, n)
    for i in range(n, len(x)):
        a = fma(x[i], y[i], a)
    return ((a + e) + (c + g)) + ((b + f) + (d + h))


@part
def total(x: Array) -> Any:
    """Return the sum of a vector, C-contiguous, added as `dot` does."""
    n = len(x) // 8 * 8
    a, b, c, d, e, f, g, h = _eight_sums(x, None, n)
    for i in range(n, len(x)):
        a += x[i]
    return ((a + e) + (c + g)) + ((b + f) + (d + h))
