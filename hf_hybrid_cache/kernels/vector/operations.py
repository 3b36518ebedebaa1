"""
Operations one after the other on threads that share their parts, inside one parallel region.

All threads run through the same list and take parts from one counter. An operation ends when its parts are done, not
when all threads have come: a thread without a processor holds up nothing but the part that it is in, and threads that
come late find nothing left to do.

The list is in memory, and functions are called by their addresses. So each is compiled once, and by itself.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.callconv import RETCODE_NONE, RETCODE_OK
from numba.extending import intrinsic

from . import vector_ir as vec
from .compiled import Kernel, jit, jit_function, taking_numbers
from .intrinsics import call_at
from .numbers_at import integers_at
from .parallel import address_in_process, split_work, team_of_kernels, threads_of
from .processor import has_feature
from .vector_ir import CACHE_LINE, INT32, INT64

# The counters of a list, each in a line of its own, and the address of a function that gives way to other threads.
_NEXT, _DONE, _GIVE_WAY = (line * CACHE_LINE // 8 for line in range(3))
# Looks, of some ten nanoseconds each, before a thread that waits gives way.
_LOOKS = 2000


class Operation(NamedTuple):
    """
    A call of `function(part, call)` for each of its parts.

    Attributes:
        function: address, see `address_of_kernel`.
        call: address of what describes the operation.
        parts: their number.
        needs: number of parts, of the operations before it, that are done first.
    """

    function: int
    call: int
    parts: int
    needs: int


class Operations:
    """
    A list of operations.

    Args:
        operations: kernel and address of the call of each, in their order; none has any parts yet.
        beside: indices of those that may run beside the one before, and beside what that may run beside.
    """

    def __init__(self, operations: Sequence[tuple[Kernel, int]], beside: Sequence[int] = ()):
        self._list = np.array([Operation(address_of_kernel(kernel), call, 0, 0) for kernel, call in operations])
        # For each operation the first of those that it may run beside.
        alone = ~np.isin(np.arange(len(operations)), beside)
        self._first = np.maximum.accumulate(np.arange(len(operations)) * alone)
        self._parts: Sequence[int] = []
        self._counters = np.zeros(3 * CACHE_LINE // 8, np.int64)
        self._counters[_GIVE_WAY] = address_in_process("sched_yield")
        self._program = np.array([self._counters.ctypes.data, len(operations), self._list.ctypes.data])
        self._address: int = self._program.ctypes.data

    def set_parts(self, parts: Sequence[int]) -> None:
        """Set the number of parts of each operation."""
        if parts != self._parts:
            self._parts = []
            numbers, needs = (self._list[:, Operation._fields.index(name)] for name in ("parts", "needs"))
            numbers[:] = parts
            needs[1:] = np.cumsum(numbers[:-1])
            needs[:] = needs[self._first]
            self._parts = parts

    def run(self) -> None:
        """
        Run all operations, on the threads that any kernel would have now.

        Raises:
            MemoryError: the host had no memory for what a part works in; what the operations write is not whole.
        """
        run_operations(team_of_kernels().address, self._address)


class _Program(NamedTuple):
    counters: int
    count: int
    operations: int


@jit
def run_operations(team, program):
    counters = integers_at(call_at(program, _Program).counters, _GIVE_WAY)
    counters[_NEXT] = 0
    counters[_DONE] = 0
    split_work(team, threads_of(team), _take_parts, program)


@jit_function
def _take_parts(thread, program):
    """Do the parts of all operations that no other thread takes. One that fails counts as done: others wait for it."""
    given, first, has_failed = call_at(program, _Program), 0, False
    taken = _count(given.counters + _NEXT * 8)
    for index in range(given.count):
        operation = call_at(given.operations + index * _OPERATION_BYTES, Operation)
        end = first + operation.parts
        if taken < end:
            _wait(given.counters, operation.needs)
        while taken < end:
            if _call(operation.function, taken - first, operation.call):
                has_failed = True
            _count(given.counters + _DONE * 8)
            taken = _count(given.counters + _NEXT * 8)
        first = end
    if has_failed:
        raise MemoryError


_OPERATION_BYTES = 8 * len(Operation._fields)


@cache
def address_of_kernel(kernel: Kernel) -> int:
    """The address of a kernel that takes two integers, compiled now if it is not."""
    given = taking_numbers(kernel)
    kernel.compile(given)
    compiled = kernel.overloads[given]
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


@intrinsic
def _call(typing_context: Any, function: Any, part: Any, call: Any) -> Any:
    """Call a kernel by its address; return whether it raised an error."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        function, part, call = arguments
        kind = context.call_conv.get_function_type(types.none, (types.int64, types.int64))
        with builder.goto_entry_block():
            result, error = (builder.alloca(each.pointee) for each in kind.args[:2])
        code = builder.call(builder.inttoptr(function, kind.as_pointer()), [result, error, part, call])
        return builder.and_(*(builder.icmp_signed("!=", code, fine) for fine in (RETCODE_OK, RETCODE_NONE)))

    return types.boolean(*[types.int64] * 3), generate


@intrinsic
def _count(typing_context: Any, address: Any) -> Any:
    """Add one to a number that threads share; return what it was. What was written before is seen by who sees this."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        place = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", place, INT64(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def _wait(typing_context: Any, counters: Any, least: Any) -> Any:
    """Wait until at least so many parts are done."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        counters, least = arguments
        done, give_way = (
            builder.inttoptr(builder.add(counters, INT64(index * 8)), INT64.as_pointer())
            for index in (_DONE, _GIVE_WAY)
        )
        give_way = builder.load(give_way)
        before = builder.block
        look, again, yielding, end = map(builder.append_basic_block, ("look", "again", "yielding", "end"))
        builder.branch(look)
        builder.position_at_end(look)
        looks = builder.phi(INT64)
        count = builder.load_atomic(done, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", count, least), end, again)
        builder.position_at_end(again)
        if has_feature(context, "sse2"):
            vec.call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        following = builder.add(looks, INT64(1))
        is_long = builder.icmp_signed(">=", following, INT64(_LOOKS))
        gives_way = builder.and_(is_long, builder.icmp_signed("!=", give_way, INT64(0)))
        builder.cbranch(gives_way, yielding, look)
        builder.position_at_end(yielding)
        builder.call(builder.inttoptr(give_way, ir.FunctionType(INT32, []).as_pointer()), [])
        builder.branch(look)
        for value, block in ((INT64(0), before), (following, again), (following, yielding)):
            looks.add_incoming(value, block)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
