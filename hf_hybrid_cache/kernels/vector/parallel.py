"""
Running a kernel on the threads of the OpenMP runtime that torch uses.

If the kernels had their own pool, its threads and torch's would keep each other from the processors: an OpenMP thread
spins for milliseconds while it waits for work. If the process has no GNU interface to OpenMP, or was forked, threads
are started for each call.

Beside busy programs a thread may get no processor for milliseconds, and the others wait for it at the end of a call.
Where the threads of a call have lost more time so than one thread alone would have needed, this thread works alone for
as long, and then tries again; for twice as long each time that it is in vain.
"""

import contextlib
import ctypes
import os
import threading
import time
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
from .intrinsics import pointer
from .threads import num_threads_beside, threads_of_torch
from .vector_ir import INT8, INT32, INT64

# The signatures of `body(data)` and of `parallel(body, data, threads, flags)`.
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
# And that of `clock_gettime(clock, time)`, which writes seconds and nanoseconds.
_CLOCK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
_MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 0)
# Nanoseconds: a thread that sleeps wakes up within less where a processor is free.
_LEAST_LOST = 300_000
# So many times that which was lost a thread works alone at most, before it tries again what it may cost.
_MOST_TIMES_ALONE = 32
# Nanoseconds after which a thread that comes late is not late again, but for the first time.
_FORGOTTEN = 100_000_000
_imported_by = os.getpid()


class Team(NamedTuple):
    """
    The threads that share the work of a kernel.

    Attributes:
        address: of the memory that `team_memory` makes.
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
    memory = team_memory(pool, 1 if pool is None else max(threads, pool.team()), threads, clock())
    return Team(memory.ctypes.data, threads), memory


def team_memory(pool: "Threads | None", woken: int, threads: int, clock: int) -> np.ndarray:
    """
    The memory of a team, int64.

    Args:
        pool: that has the threads; `None` for one thread.
        woken: number of threads to wake.
        threads: number of those that take part.
        clock: address of `clock_gettime`, or of a function that does the same.
    """
    return np.array([0 if pool is None else pool.parallel, woken, threads, clock, 0, 1], np.int64)


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
        places = [builder.add(team, INT64(8 * index)) for index in range(6)]
        parallel, woken, threads, clock, alone_until, times = (vec.load(builder, place, INT64) for place in places)
        # Number of threads that have begun, of parts that were taken; when the first began, and when one found no part.
        shared_type = ir.LiteralStructType([INT64] * 7 + [call.type])
        shared = cgutils.alloca_once(builder, shared_type)

        def member(builder: ir.IRBuilder, shared: ir.Value, index: int) -> ir.Value:
            return builder.gep(shared, [INT32(0), INT32(index)], inbounds=True)

        zero = INT64(0)
        for index, value in enumerate((zero, zero, zero, zero, threads, parts, clock, call)):
            builder.store(value, member(builder, shared, index))

        name = builder.module.get_unique_name("share_of_one_thread")
        body = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [pointer]), name)
        body.linkage = "internal"
        blocks = ("entry", "begin", "take", "do", "end", "leave")
        entry, begin, take, do, end, leave = (body.append_basic_block(block) for block in blocks)
        inner = ir.IRBuilder(entry)
        seen = inner.bitcast(body.args[0], shared_type.as_pointer())
        worker = inner.atomic_rmw("add", member(inner, seen, 0), INT64(1), "monotonic")
        inner.cbranch(inner.icmp_signed("<", worker, inner.load(member(inner, seen, 4))), begin, leave)
        inner.position_at_end(begin)
        its_clock = inner.load(member(inner, seen, 6))
        _note_first(inner, member(inner, seen, 2), its_clock)
        inner.branch(take)
        inner.position_at_end(take)
        part = inner.atomic_rmw("add", member(inner, seen, 1), INT64(1), "monotonic")
        inner.cbranch(inner.icmp_signed("<", part, inner.load(member(inner, seen, 5))), do, end)
        inner.position_at_end(do)
        compiled = work.dispatcher.get_compile_result(taken)
        context.active_code_library.add_linking_library(compiled.library)
        function = context.declare_function(builder.module, compiled.fndesc)
        given = [part, *[worker] * tells_thread, inner.load(member(inner, seen, 7))]
        context.call_conv.call_function(inner, function, taken.return_type, taken.args, given)
        inner.branch(take)
        inner.position_at_end(end)
        _note_first(inner, member(inner, seen, 3), its_clock)
        inner.branch(leave)
        inner.position_at_end(leave)
        inner.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [body.type, pointer, INT32, INT32])
        run = builder.inttoptr(parallel, kind.as_pointer())
        data = builder.bitcast(shared, pointer)
        before = _now(builder, clock)
        is_alone = builder.or_(*(builder.icmp_signed("<=", number, INT64(1)) for number in (parts, threads)))
        is_alone = builder.or_(is_alone, builder.icmp_signed("<", before, alone_until))
        with builder.if_else(is_alone) as (then, otherwise):
            with then:
                builder.call(body, [data])
            with otherwise:
                builder.call(run, [body, data, builder.trunc(woken, INT32), INT32(0)])
                after = _now(builder, clock)
                began, idle = (builder.load(member(builder, shared, index)) for index in (2, 3))
                worked = builder.sub(idle, began)
                lost = builder.sub(builder.sub(after, before), worked)
                # Alone this thread would have worked at most so much longer.
                longer = builder.mul(worked, builder.sub(threads, INT64(1)))
                is_lost = builder.icmp_signed(">", lost, INT64(_LEAST_LOST))
                with builder.if_then(builder.and_(is_lost, builder.icmp_signed(">", lost, longer))):
                    since = builder.sub(before, alone_until)
                    times = builder.select(builder.icmp_signed(">", since, INT64(_FORGOTTEN)), INT64(1), times)
                    vec.store(builder, builder.add(after, builder.mul(lost, times)), places[4])
                    is_most = builder.icmp_signed(">=", times, INT64(_MOST_TIMES_ALONE))
                    vec.store(builder, builder.select(is_most, times, builder.shl(times, INT64(1))), places[5])
        return context.get_dummy_value()

    return types.void(types.int64, types.intp, work, call), generate


def _now(builder: ir.IRBuilder, clock: ir.Value) -> ir.Value:
    """The time in nanoseconds."""
    with builder.goto_entry_block():
        written = builder.alloca(INT64, 2)
    kind = ir.FunctionType(INT32, [INT32, INT64.as_pointer()])
    builder.call(builder.inttoptr(clock, kind.as_pointer()), [INT32(_MONOTONIC), written])
    seconds, nanoseconds = (builder.load(builder.gep(written, [INT32(index)])) for index in range(2))
    return builder.add(builder.mul(seconds, INT64(10**9)), nanoseconds)


def _note_first(builder: ir.IRBuilder, place: ir.Value, clock: ir.Value) -> None:
    """Write the time to a place, unless another thread has done so."""
    builder.cmpxchg(place, INT64(0), _now(builder, clock), "monotonic", "monotonic")


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
def clock() -> int:
    """The address of `clock_gettime`, or of what does the same where there is none."""
    try:
        found: Any = ctypes.CDLL(None).clock_gettime
    except (AttributeError, TypeError, OSError):  # Windows
        found = _write_time
    address = ctypes.cast(found, ctypes.c_void_p).value
    assert address is not None
    return address


@_CLOCK
def _write_time(_: int, written: Any) -> int:
    written[0], written[1] = divmod(time.monotonic_ns(), 10**9)
    return 0


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
