"""
Running a kernel on the threads of the OpenMP runtime that torch uses.

If the kernels had their own pool, its threads and torch's would keep each other from the processors: an OpenMP thread
spins for milliseconds while it waits for work. If the process has no GNU interface to OpenMP, or was forked, threads
are started for each call.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import vector_ir as vec
from .compiled import jit_inlined
from .threads import num_threads_beside, threads_of_torch
from .tiles import pointer
from .vector_ir import INT8, INT32, INT64

# The signatures of `body(data)` and of `parallel(body, data, threads, flags)`.
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_imported_by = os.getpid()


class Team(NamedTuple):
    """
    The threads that share the work of a kernel.

    Attributes:
        address: of int64: `parallel` of `Threads`, number of threads to wake, and of those that take part.
        threads: number of those that take part.
    """

    address: int
    threads: int


def team_of_kernels() -> Team:
    """The team for a call of this thread now."""
    of_torch = threads_of_torch()
    return _team_of(num_threads_beside(of_torch), of_torch, os.getpid())[0]


@cache
def _team_of(threads: int, of_torch: int, process: int) -> tuple[Team, np.ndarray]:
    """
    The same in this process, with the memory of the team.

    While torch has `of_torch` threads, these are the threads of the OpenMP runtime.
    """
    pool = None if threads == 1 else openmp() or started_threads()
    memory = np.array([0, 1, 1] if pool is None else [pool.parallel, max(threads, pool.team()), threads], np.int64)
    return Team(memory.ctypes.data, threads), memory


@jit_inlined
def threads_of(team):
    """The number of threads that take part."""
    return numba.carray(pointer(team, numba.int64(0)), 3)[2]


@intrinsic
def split_work(typing_context: Any, team: Any, parts: Any, work: Any, call: Any) -> Any:
    """
    Call `work(part, call)` for each part below `parts`; a thread that is done takes the next part.

    A single part, or a single thread, runs on this thread.

    team: address of a `Team`; work: a jitted function that returns nothing and raises nothing; call: a tuple, or the
    address of one, see `call_at`.
    """
    return _work_split(typing_context, work, call, tells_thread=False)


@intrinsic
def split_work_to(typing_context: Any, team: Any, parts: Any, work: Any, call: Any) -> Any:
    """Do as `split_work`, with `work(part, thread, call)`; `thread` is the index of the thread."""
    return _work_split(typing_context, work, call, tells_thread=True)


def _work_split(typing_context: Any, work: Any, call: Any, tells_thread: bool) -> Any:
    numbers = (types.intp,) * (1 + tells_thread)
    taken = typing_context.resolve_function_type(work, (*numbers, call), {})
    pointer = INT8.as_pointer()

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        team, parts, _, call = arguments
        parallel, woken, threads = (vec.load(builder, builder.add(team, INT64(8 * index)), INT64) for index in range(3))
        shared_type = ir.LiteralStructType([INT64] * 4 + [call.type])
        shared = cgutils.alloca_once(builder, shared_type)

        def member(builder: ir.IRBuilder, shared: ir.Value, index: int) -> ir.Value:
            return builder.gep(shared, [INT32(0), INT32(index)], inbounds=True)

        given = _uncounted(context, builder, signature.args[-1], call)
        for index, value in enumerate((INT64(0), threads, INT64(0), parts, given)):
            builder.store(value, member(builder, shared, index))

        name = builder.module.get_unique_name("share_of_one_thread")
        body = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [pointer]), name)
        body.linkage = "internal"
        entry, take, do, leave = (body.append_basic_block(block) for block in ("entry", "take", "do", "leave"))
        inner = ir.IRBuilder(entry)
        seen = inner.bitcast(body.args[0], shared_type.as_pointer())
        worker = inner.atomic_rmw("add", member(inner, seen, 0), INT64(1), "monotonic")
        inner.cbranch(inner.icmp_signed("<", worker, inner.load(member(inner, seen, 1))), take, leave)
        inner.position_at_end(take)
        part = inner.atomic_rmw("add", member(inner, seen, 2), INT64(1), "monotonic")
        inner.cbranch(inner.icmp_signed("<", part, inner.load(member(inner, seen, 3))), do, leave)
        inner.position_at_end(do)
        compiled = work.dispatcher.get_compile_result(taken)
        context.active_code_library.add_linking_library(compiled.library)
        function = context.declare_function(builder.module, compiled.fndesc)
        given = [part, *[worker] * tells_thread, inner.load(member(inner, seen, 4))]
        context.call_conv.call_function(inner, function, taken.return_type, taken.args, given)
        inner.branch(take)
        inner.position_at_end(leave)
        inner.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [body.type, pointer, INT32, INT32])
        run = builder.inttoptr(parallel, kind.as_pointer())
        data = builder.bitcast(shared, pointer)
        is_alone = builder.or_(*(builder.icmp_signed("<=", number, INT64(1)) for number in (parts, threads)))
        with builder.if_else(is_alone) as (then, otherwise):
            with then:
                builder.call(body, [data])
            with otherwise:
                builder.call(run, [body, data, builder.trunc(woken, INT32), INT32(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.intp, work, call), generate


def _uncounted(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> ir.Value:
    """
    The value without owners of its arrays, which the caller keeps alive.

    An owner is counted, by atomic instructions, whenever its array is taken out of a tuple, and threads would wait for
    each other's counts.
    """
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo, array.parent = (cgutils.get_null_value(owner.type) for owner in (array.meminfo, array.parent))
        return array._getvalue()
    if not isinstance(kind, types.BaseTuple):
        return value
    parts: Any = enumerate(kind)  # type: ignore[arg-type]
    values = [_uncounted(context, builder, part, builder.extract_value(value, index)) for index, part in parts]
    return context.make_tuple(builder, kind, values)


class Threads(NamedTuple):
    """
    Threads that share work.

    Attributes:
        parallel: address of `GOMP_parallel`, or of a function that does the same.
        team: returns the number of threads that the next parallel region of this thread would have. A region with
            fewer makes the pool end the others, and the next region start them again.
    """

    parallel: int
    team: Callable[[], int]


def use_threads_here(number: int) -> None:
    """Let torch and the kernels use `number` threads in calls of this thread; other threads keep their numbers."""
    with contextlib.suppress(AttributeError, TypeError, OSError):  # no OpenMP
        ctypes.CDLL(None).omp_set_num_threads(number)


def openmp() -> Threads | None:
    """
    The threads of the OpenMP runtime in this process; `None` if there is none.

    In a forked process it is `None` too: the pool's threads stayed in the parent, and the runtime would wait for them
    for ever.
    """
    return _openmp() if os.getpid() == _imported_by else None


@cache
def _openmp() -> Threads | None:
    try:
        library = ctypes.CDLL(None)
        parallel = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        team = library.omp_get_max_threads
    except (AttributeError, TypeError, OSError):  # not loaded, or Windows
        return None
    assert parallel is not None
    return Threads(parallel, team)


@cache
def started_threads() -> Threads:
    """Threads that start with each call and end with it."""
    address = ctypes.cast(_run_on_started_threads, ctypes.c_void_p).value
    assert address is not None
    return Threads(address, lambda: 1)


@_PARALLEL
def _run_on_started_threads(body: int, data: int, num_threads: int, flags: int) -> None:
    run = _BODY(body)
    others = []
    # If the system gives no more threads, this one does their parts.
    with contextlib.suppress(RuntimeError):
        for _ in range(num_threads - 1):
            thread = threading.Thread(target=run, args=(data,))
            thread.start()
            others.append(thread)
    run(data)
    for thread in others:
        thread.join()
