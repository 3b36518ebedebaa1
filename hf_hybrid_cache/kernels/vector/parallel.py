"""
Running a kernel on the threads of the OpenMP runtime that torch uses.

If the kernels had their own pool, its threads and torch's would keep each other from the processors: an OpenMP thread
spins for milliseconds while it waits for work. If the process has no GNU interface to OpenMP, or was forked, the code
of a kernel starts threads for each call, and joins them. No Python runs in between: a signal is handled after the call.

Beside busy programs a thread may get no processor for milliseconds, and the others wait for it at the end of a call.
Where the threads of a call have lost more time so than one thread alone would have needed, this thread works alone for
as long, and then tries again; for twice as long each time that it is in vain.
"""

import contextlib
import ctypes
import os
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

_MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 0)
# Nanoseconds: a thread that sleeps wakes up within less where a processor is free.
_LEAST_LOST = 300_000
# So many times that which was lost a thread works alone at most, before it tries again what it may cost.
_MOST_TIMES_ALONE = 32
# Nanoseconds after which a thread that comes late is not late again, but for the first time.
_FORGOTTEN = 100_000_000
_NO_MEMORY = "The host had no memory for what a kernel works in. What the kernel was to write is not whole."
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
    if pool is None:
        threads = 1
    memory = team_memory(pool, 1 if pool is None else max(threads, pool.team()), threads)
    return Team(memory.ctypes.data, threads), memory


def team_memory(pool: "Threads | None", woken: int, threads: int, clock: int | None = None) -> np.ndarray:
    """
    The memory of a team, int64.

    Args:
        pool: that has the threads; `None` for one thread.
        woken: number of threads to wake.
        threads: number of those that take part.
        clock: address of a function that does the same as `clock_gettime`.
    """
    of_pool = (0, 0, 0) if pool is None else (pool.parallel, pool.create, pool.join)
    clock = address_in_process("clock_gettime") if clock is None else clock
    return np.array([woken, threads, clock, 0, 1, *of_pool], np.int64)


@jit_inlined
def threads_of(team):
    """The number of threads that take part."""
    return numba.carray(pointer(team, numba.int64(0)), 2)[1]


@intrinsic
def split_work(typing_context: Any, team: Any, parts: Any, work: Any, call: Any) -> Any:
    """
    Call `work(part, call)` for each part below `parts`; a thread that is done takes the next part.

    A single part, or a single thread, runs on this thread. If a part raises an error, it is one of memory, and
    `MemoryError` is raised after the others.

    team: address of a `Team`; work: a jitted function that returns nothing; call: a tuple, or the address of one, see
    `call_at`.
    """
    return _work_split(typing_context, work, call, tells_thread=False)


@intrinsic
def split_work_to(typing_context: Any, team: Any, parts: Any, work: Any, call: Any) -> Any:
    """Do as `split_work`, with `work(part, thread, call)`; `thread` is the index of the thread."""
    return _work_split(typing_context, work, call, tells_thread=True)


def _work_split(typing_context: Any, work: Any, call: Any, tells_thread: bool) -> Any:
    numbers = (types.intp,) * (1 + tells_thread)
    taken = typing_context.resolve_function_type(work, (*numbers, call), {})

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        team, parts, _, call = arguments
        memory = _Memory(builder, team)
        members = *[INT64(0)] * 5, memory.threads, parts, memory.clock, call
        shared = cgutils.alloca_once(builder, ir.LiteralStructType([value.type for value in members]))
        for index, value in enumerate(members):
            builder.store(value, _member(builder, shared, index))
        compiled = work.dispatcher.get_compile_result(taken)
        context.active_code_library.add_linking_library(compiled.library)

        def do_part(builder: ir.IRBuilder, part: ir.Value, thread: ir.Value, call: ir.Value) -> ir.Value:
            function = context.declare_function(builder.module, compiled.fndesc)
            given = [part, *[thread] * tells_thread, call]
            status, _ = context.call_conv.call_function(builder, function, taken.return_type, taken.args, given)
            return status.is_error

        body = _share_of_one_thread(builder.module, shared.type, do_part)
        data = builder.bitcast(shared, _ANYTHING)
        is_alone = builder.or_(*(builder.icmp_signed("<=", number, INT64(1)) for number in (parts, memory.threads)))
        with builder.if_else(is_alone) as (then, otherwise):
            with then:
                builder.store(INT64(0), _member(builder, shared, _CLOCK_OF_CALL))
                builder.call(body, [data])
            with otherwise:
                before = _now(builder, memory.clock)
                with builder.if_else(builder.icmp_signed("<", before, memory.alone_until)) as (then, otherwise):
                    with then:
                        builder.call(body, [data])
                    with otherwise:
                        memory.run(body, data)
                        began, idle = (builder.load(_member(builder, shared, index)) for index in (_BEGAN, _IDLE))
                        _note_lost(builder, memory, before, builder.sub(idle, began))
        failed = builder.load(_member(builder, shared, _FAILED))
        with builder.if_then(builder.icmp_signed("!=", failed, INT64(0)), likely=False):
            context.call_conv.return_user_exc(builder, MemoryError, (_NO_MEMORY,))
        return context.get_dummy_value()

    return types.void(types.int64, types.intp, work, call), generate


class _Memory:
    """The memory of a team, as `team_memory` makes it."""

    def __init__(self, builder: ir.IRBuilder, team: ir.Value):
        self._builder = builder
        self.places = [builder.add(team, INT64(8 * index)) for index in range(8)]
        numbers = [vec.load(builder, place, INT64) for place in self.places]
        self.woken, self.threads, self.clock, self.alone_until, self.times, *self._of_pool = numbers

    def run(self, body: ir.Function, data: ir.Value) -> None:
        """Let all threads call `body(data)`."""
        builder, (parallel, create, join) = self._builder, self._of_pool
        with builder.if_else(builder.icmp_signed("!=", parallel, INT64(0))) as (then, otherwise):
            with then:
                kind = ir.FunctionType(ir.VoidType(), [body.type, _ANYTHING, INT32, INT32])
                run = builder.inttoptr(parallel, kind.as_pointer())
                builder.call(run, [body, data, builder.trunc(self.woken, INT32), INT32(0)])
            with otherwise:
                run = _on_started_threads(builder.module, body.type)
                builder.call(run, [body, data, self.woken, create, join])


# What the threads of a call share: how many have begun, and how many parts are taken; when the first thread began, and
# when the first found no part; whether a part failed; how many threads take part, and how many parts there are; the
# clock, 0 for none; the call.
_BEGUN, _TAKEN, _BEGAN, _IDLE, _FAILED, _THREADS, _PARTS, _CLOCK_OF_CALL, _CALL = range(9)
_ANYTHING = INT8.as_pointer()


def _member(builder: ir.IRBuilder, shared: ir.Value, index: int) -> ir.Value:
    return builder.gep(shared, [INT32(0), INT32(index)], inbounds=True)


def _on_started_threads(module: ir.Module, body: ir.Type) -> ir.Function:
    """The function that lets this thread, and others that it starts and waits for, call `body(data)`."""
    name = "on_started_threads"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [body, _ANYTHING, *[INT64] * 3]), name)
    function.linkage = "internal"
    function.attributes.add("noinline")  # the memory for ids of threads is given back at its end
    body, data, threads, create, join = function.args
    builder, nothing = ir.IRBuilder(function.append_basic_block()), _ANYTHING(None)
    ids = builder.alloca(INT64, threads)
    taken = [ids.type, _ANYTHING, body.type, _ANYTHING]
    create, join = (
        builder.inttoptr(address, ir.FunctionType(INT32, given).as_pointer())
        for address, given in ((create, taken), (join, [INT64, _ANYTHING]))
    )

    def start(_: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        [started] = carried
        refused = builder.call(create, [builder.gep(ids, [started]), nothing, body, data])
        # If the system gives no more threads, those that there are do the parts.
        return [builder.add(started, builder.zext(builder.icmp_signed("==", refused, INT32(0)), INT64))]

    def wait(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        builder.call(join, [builder.load(builder.gep(ids, [index])), nothing])
        return []

    [started] = vec.loop(builder, builder.sub(threads, INT64(1)), [INT64(0)], start)
    builder.call(body, [data])
    with builder.if_then(builder.icmp_signed(">", started, INT64(0))):
        vec.loop(builder, started, [], wait)
    builder.ret_void()
    return function


def _share_of_one_thread(module: ir.Module, shared_type: ir.Type, do_part: Callable[..., ir.Value]) -> ir.Function:
    """The function that each thread calls: it does parts until none is left."""
    name = module.get_unique_name("share_of_one_thread")
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [_ANYTHING]), name)
    body.linkage = "internal"
    entry, begin, take, do, end, leave = map(body.append_basic_block, ("entry", "begin", "take", "do", "end", "leave"))
    builder = ir.IRBuilder(entry)
    shared = builder.bitcast(body.args[0], shared_type)

    def counted(index: int) -> ir.Value:
        return builder.atomic_rmw("add", _member(builder, shared, index), INT64(1), "monotonic")

    def loaded(index: int) -> ir.Value:
        return builder.load(_member(builder, shared, index))

    thread = counted(_BEGUN)
    builder.cbranch(builder.icmp_signed("<", thread, loaded(_THREADS)), begin, leave)
    builder.position_at_end(begin)
    clock = loaded(_CLOCK_OF_CALL)
    _note_first(builder, _member(builder, shared, _BEGAN), clock)
    builder.branch(take)
    builder.position_at_end(take)
    part = counted(_TAKEN)
    builder.cbranch(builder.icmp_signed("<", part, loaded(_PARTS)), do, end)
    builder.position_at_end(do)
    with builder.if_then(do_part(builder, part, thread, loaded(_CALL)), likely=False):
        builder.store(INT64(1), _member(builder, shared, _FAILED))
    builder.branch(take)
    builder.position_at_end(end)
    _note_first(builder, _member(builder, shared, _IDLE), clock)
    builder.branch(leave)
    builder.position_at_end(leave)
    builder.ret_void()
    return body


def _note_lost(builder: ir.IRBuilder, memory: _Memory, before: ir.Value, worked: ir.Value) -> None:
    """Let one thread work alone for a while if a call has lost more than one thread alone would have needed."""
    after = _now(builder, memory.clock)
    lost = builder.sub(builder.sub(after, before), worked)
    # Alone this thread would have worked at most so much longer.
    longer = builder.mul(worked, builder.sub(memory.threads, INT64(1)))
    is_lost = builder.icmp_signed(">", lost, INT64(_LEAST_LOST))
    with builder.if_then(builder.and_(is_lost, builder.icmp_signed(">", lost, longer))):
        since = builder.sub(before, memory.alone_until)
        times = builder.select(builder.icmp_signed(">", since, INT64(_FORGOTTEN)), INT64(1), memory.times)
        vec.store(builder, builder.add(after, builder.mul(lost, times)), memory.places[3])
        is_most = builder.icmp_signed(">=", times, INT64(_MOST_TIMES_ALONE))
        vec.store(builder, builder.select(is_most, times, builder.shl(times, INT64(1))), memory.places[4])


def _now(builder: ir.IRBuilder, clock: ir.Value) -> ir.Value:
    """The time in nanoseconds."""
    with builder.goto_entry_block():
        written = builder.alloca(INT64, 2)
    kind = ir.FunctionType(INT32, [INT32, INT64.as_pointer()])
    builder.call(builder.inttoptr(clock, kind.as_pointer()), [INT32(_MONOTONIC), written])
    seconds, nanoseconds = (builder.load(builder.gep(written, [INT32(index)])) for index in range(2))
    return builder.add(builder.mul(seconds, INT64(10**9)), nanoseconds)


def _note_first(builder: ir.IRBuilder, place: ir.Value, clock: ir.Value) -> None:
    """Write the time to a place, unless another thread has done so, or there is no clock."""
    with builder.if_then(builder.icmp_signed("!=", clock, INT64(0))):
        builder.cmpxchg(place, INT64(0), _now(builder, clock), "monotonic", "monotonic")


class Threads(NamedTuple):
    """
    Threads that share work: those of a pool, or threads that start with each call and end with it.

    Attributes:
        team: returns the number of threads that the next parallel region of this thread would have. A region with
            fewer makes the pool end the others, and the next region start them again.
        parallel: address of `GOMP_parallel`, or of a function that does the same; 0 to start threads.
        create: address of `pthread_create`.
        join: address of `pthread_join`.
    """

    team: Callable[[], int]
    parallel: int = 0
    create: int = 0
    join: int = 0


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
    parallel = address_in_process("GOMP_parallel") if os.getpid() == _imported_by else 0
    return Threads(ctypes.CDLL(None).omp_get_max_threads, parallel) if parallel else None


def started_threads() -> Threads | None:
    """Threads that start with each call and end with it; `None` where there are none of POSIX, as on Windows."""
    create, join = address_in_process("pthread_create"), address_in_process("pthread_join")
    return Threads(lambda: 1, create=create, join=join) if create else None


@cache
def address_in_process(name: str) -> int:
    """The address of a function of a library that the process has loaded, as C's; 0 if there is none."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, TypeError, OSError):  # not loaded, or Windows
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
