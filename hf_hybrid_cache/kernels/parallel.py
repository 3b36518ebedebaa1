"""
Running a kernel on several threads: those of the OpenMP runtime that torch uses.

With a pool of their own, the kernels' threads and torch's would keep each other from the processors: a thread that has
finished waits for more by spinning, for milliseconds. Where no GNU interface to OpenMP is found, and in a process that
was forked, threads are started for each call.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .threads import get_num_threads
from .vector_ir import INT8, INT32, INT64

# What both the kernel and OpenMP call: `body(data)`, and `parallel(body, data, threads, flags)`.
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_imported_by = os.getpid()


def team_of_kernels() -> tuple[int, int, int]:
    """What `share_out` is to be told, by this thread, now: `parallel`, `team` and `threads`."""
    threads = get_num_threads()
    if threads == 1:
        return 0, 1, 1
    pool = openmp() or started_threads()
    return pool.parallel, max(threads, pool.team()), threads


@intrinsic
def share_out(typing_context: Any, parallel: Any, team: Any, threads: Any, parts: Any, work: Any, call: Any) -> Any:
    """
    Call `work(part, call)` for each part below `parts`; whoever is done takes the next.

    One part is this thread's, and so are all parts if it is the only one.

    parallel: of `Threads`, not called for one part or one thread; team: threads that are woken; threads: how many of
    them take part; work: jitted, returns nothing and raises nothing; call: a tuple.
    """
    return _shared_out(typing_context, work, call, tells_thread=False)


@intrinsic
def share_out_to(typing_context: Any, parallel: Any, team: Any, threads: Any, parts: Any, work: Any, call: Any) -> Any:
    """The same with `work(part, thread, call)`, where `thread` counts those that take part."""
    return _shared_out(typing_context, work, call, tells_thread=True)


def _shared_out(typing_context: Any, work: Any, call: Any, tells_thread: bool) -> Any:
    numbers = (types.intp,) * (1 + tells_thread)
    taken = typing_context.resolve_function_type(work, (*numbers, call), {})
    pointer = INT8.as_pointer()

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        parallel, team, threads, parts, _, call = arguments
        shared_type = ir.LiteralStructType([INT64] * 4 + [call.type])
        shared = cgutils.alloca_once(builder, shared_type)

        def member(builder: ir.IRBuilder, shared: ir.Value, index: int) -> ir.Value:
            return builder.gep(shared, [INT32(0), INT32(index)], inbounds=True)

        for index, value in enumerate((INT64(0), threads, INT64(0), parts, call)):
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
                builder.call(run, [body, data, builder.trunc(team, INT32), INT32(0)])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, work, call), generate


class Threads(NamedTuple):
    """
    Threads to share work out to.

    Attributes:
        parallel: address of `GOMP_parallel`, or of a function that does what it does.
        team: how many threads the next parallel region of this thread would have. A pool keeps those and ends others,
            so a region with fewer would make the next one start them anew.
    """

    parallel: int
    team: Callable[[], int]


def use_threads_here(number: int) -> None:
    """Have torch and the kernels use so many threads in calls of this thread; elsewhere all stays as it is."""
    with contextlib.suppress(AttributeError, TypeError, OSError):  # no OpenMP
        ctypes.CDLL(None).omp_set_num_threads(number)


def openmp() -> Threads | None:
    """
    Those of the OpenMP runtime that is in the process; `None` if there is none.

    And `None` in a forked process: the pool's threads have stayed behind, and the runtime would wait for them for ever.
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
    """Threads that are started for each call, and end with it."""
    address = ctypes.cast(_run_on_started_threads, ctypes.c_void_p).value
    assert address is not None
    return Threads(address, lambda: 1)


@_PARALLEL
def _run_on_started_threads(body: int, data: int, num_threads: int, flags: int) -> None:
    run = _BODY(body)
    others = []
    # Where there are no more threads to be had, this one does their parts.
    with contextlib.suppress(RuntimeError):
        for _ in range(num_threads - 1):
            thread = threading.Thread(target=run, args=(data,))
            thread.start()
            others.append(thread)
    run(data)
    for thread in others:
        thread.join()
