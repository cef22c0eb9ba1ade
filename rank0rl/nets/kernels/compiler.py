"""Compile kernels with numba, keep the compiled code in a private folder, and run it in several threads.

Numba pickles what it compiles, so the folder belongs to this user alone. Its name holds a hash of
all kernels: numba by itself misses changes in the functions that a function calls.

A gradient step is too short for a thread pool: the threads enter a kernel once an epoch, and meet
several times in every step, in less than a microsecond if each has a core. A thread that waits
longer gives its core to whoever wants it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.caching import NullCache
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, overload

from rank0rl.agent import NEVER

F = TypeVar("F", bound=Callable[..., Any])

# Without fastmath, a kernel has one result, however LLVM optimizes it. `fma` and `dot` say what is fast.
_ALWAYS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_INNER = {"no_cpython_wrapper": True}  # code that takes longer to compile than most functions

_SPINS = 2000  # before a thread gives its core away: about 20 us
_ALONE = 8  # calls of a team after which it tries all of its threads again; twice as many each time
_SHORT_S = 0.01  # of another program, which may be a single one
_yield_core = types.ExternalFunction("sched_yield", types.int32())


def kernel(function: F) -> F:
    """Compile a function when it is first called. It runs without Python's global lock."""
    folder = cache_folder()
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or "")
    try:
        compiled: Any = _compiled(function, cache=bool(folder))
    finally:
        numba.config.CACHE_DIR = before
    if folder:
        in_folder = Path(compiled._cache.cache_path).is_relative_to(folder)
        compiled._cache = _Cache(compiled._cache) if in_folder else NullCache()
    return compiled


@functools.lru_cache(maxsize=8)
def scalar(function: Callable[..., float], dtype: Any) -> Any:
    """Compile a function (x, y, coefficient) -> number, x and y of this dtype. Kernels `call` its address.

    It uses numbers and functions of NumPy, and may come from a file of a user.
    """
    number = numba.from_dtype(np.dtype(dtype))
    signature, folder = number(number, number, types.float64), cache_folder()
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or "")
    try:
        return numba.cfunc(signature, cache=bool(folder), error_model="numpy")(function)
    except Exception:
        return numba.cfunc(signature, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


def inner(function: F) -> F:
    """Compile a function that only kernels call. A call from Python would crash: code for it is left out."""
    return _compiled(function, **_INNER)


def part(function: F) -> F:
    """Compile a short function anew within each function that calls it. Otherwise as `inner`."""
    return _compiled(function, **_INNER, inline="always")


def by_type(functions: Mapping[Any, Callable[..., Any]]) -> Any:
    """Return a function, for kernels, that is the one for the type of its first argument.

    Args:
        functions: by numba's type of a number, or by the class of a NamedTuple.
    """

    def function(*args: Any) -> Any:
        raise NotImplementedError("only kernels call it")

    @overload(function, jit_options={**_ALWAYS, **_INNER}, strict=False)  # type: ignore[untyped-decorator]
    def choose(*args: Any) -> Any:
        return functions[getattr(args[0], "instance_class", args[0])]

    return function


def _compiled(function: Any, **options: Any) -> Any:
    if numba.config.DISABLE_JIT:
        raise RuntimeError("updates are computed in compiled code: unset NUMBA_DISABLE_JIT")
    return numba.njit(function, **_ALWAYS, **options)


class _Cache:
    """Numba's cache of one function. A damaged file or a full disk costs a compilation, not the run."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the compiled code for these types, or None if it must be compiled."""
        try:
            return self._cache.load_overload(signature, context)
        except Exception:
            with suppress(Exception):
                self._cache.flush()  # forget what is damaged
            return None

    def save_overload(self, signature: Any, code: Any) -> None:
        """Keep compiled code, if that is possible."""
        with suppress(Exception):
            self._cache.save_overload(signature, code)


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder of compiled code, made if need be; None if there is no private one.

    It is private if only this user can look into it, and nobody else can put another in its place.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = (Path(named) if os.path.isabs(named) else Path.home() / ".cache").resolve()
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = base / "rank0rl" / f"kernels-{_sources()}"
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
        private = _is_safe(folder, 0o077) and all(_is_safe(each, 0o022) for each in folder.parents)
    except (OSError, RuntimeError, AttributeError):  # not writable, no home, or not POSIX
        return None
    return folder if private and os.access(folder, os.W_OK) else None


def _is_safe(path: Path, closed: int) -> bool:
    """Return True if a folder is this user's or root's, and closed to others by these permissions."""
    status = path.lstat()
    sticky = (
        closed == 0o022 and status.st_mode & stat.S_ISVTX
    )  # as /tmp: nobody renames others' files
    ours = status.st_uid in (0, os.getuid())
    return stat.S_ISDIR(status.st_mode) and ours and bool(sticky or not status.st_mode & closed)


def _sources() -> str:
    """Return a hash of all that kernels are made of: the modules in this folder, a constant, and what this CPU can do."""
    digest = hashlib.sha256(repr((NEVER, get_host_cpu_features())).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Team:
    """A number of threads. The first is the one that calls; the others start with their first task.

    Where other programs take these cores, threads wait for each other at every `meet`, and one alone is
    faster, by 4 times on 2 cores with a load of 13. So the first one is left alone for some calls after one in
    which it had its core for less than half of the time.

    Args:
        threads: number of threads, at least 1.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._calls_alone, self._next_alone = 0, _ALONE
        self._others = ThreadPoolExecutor(max(1, threads - 1), "rank0rl-learner")

    def run(self, function: Callable[..., Any], tasks: int, *args: Any) -> Any:
        """Call a kernel as function(thread, threads, barrier, *args) in each thread, of `tasks` at most.

        Returns:
            What the first thread's call returned, when all have.

        Raises:
            Exception: what any of the calls raises, when all have ended.
        """
        threads = 1 if self._calls_alone else max(1, min(self.threads, tasks))
        self._calls_alone = max(0, self._calls_alone - 1)
        barrier = np.zeros(3, np.int64)
        began, had = time.perf_counter(), time.thread_time()

        def call(thread: int) -> Any:
            try:
                return function(thread, threads, barrier, *args)
            except BaseException:
                barrier[2] = 1  # nobody waits for this thread
                raise

        others: list[Future[Any]] = []
        try:
            for thread in range(1, threads):
                others.append(self._others.submit(call, thread))
            return call(0)
        except BaseException:
            barrier[2] = 1
            raise
        finally:
            if others:  # to wait for none takes 20 us
                wait(others)
                took, had = time.perf_counter() - began, time.thread_time() - had
                is_alone_better = took > 2 * had + _SHORT_S
                self._calls_alone = self._next_alone if is_alone_better else 0
                self._next_alone = min(2 * self._next_alone, 512) if is_alone_better else _ALONE


@intrinsic  # type: ignore[untyped-decorator]
def call(typingctx: Any, address: Any, x: Any, y: Any, coefficient: Any) -> Any:
    """Call what `scalar` has compiled, by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(args[1].type, [each.type for each in args[1:]])
        pointer = builder.inttoptr(args[0], function.as_pointer())
        return builder.call(pointer, args[1:])

    return x(address, x, x, types.float64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def ask(typingctx: Any, address: Any, number: Any) -> Any:
    """Call a function of Python, (int64) -> int64, by the address that ctypes gives it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        pointer = builder.inttoptr(args[0], ir.FunctionType(word, [word]).as_pointer())
        return builder.call(pointer, [args[1]])

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x y + z, rounded once, for three floats of one type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return x(x, x, x), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to an element of an array of int64; return what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature, args)
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    """Return an element of an array of int64, as the other threads have left it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature, args)
        return builder.load_atomic(pointer, "seq_cst", 8, typ=ir.IntType(64))

    return types.int64(array, types.intp), codegen


def _element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.get_item_pointer(
        context, builder, signature.args[0], array, [args[1]], wraparound=False
    )


@inner
def meet(threads: int, barrier: npt.NDArray[np.int64]) -> None:
    """Wait until all threads have come here. Inside a kernel only.

    Args:
        threads: number of threads.
        barrier: (3,): how many have come, how often all have, and 1 if one of them will not come.

    Raises:
        RuntimeError: if one of them will not come, because of an error.
    """
    if threads == 1:
        return
    round_ = _atomic_load(barrier, 1)
    if _atomic_add(barrier, 0, 1) == threads - 1:
        barrier[0] = 0
        _atomic_add(barrier, 1, 1)
        return
    spins = 0
    while _atomic_load(barrier, 1) == round_:
        if _atomic_load(barrier, 2):
            raise RuntimeError("another thread of this update has failed")
        spins += 1
        if spins > _SPINS:
            _yield_core()
