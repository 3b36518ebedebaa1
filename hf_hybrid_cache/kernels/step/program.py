"""The program of a decode step with its memory, as lists of operations of kernels."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..attention.attention import ATTEND, merge_head
from ..attention.attention_call import CALL_BYTES, SCRATCH, AttentionCall
from ..attention.codes import attend_codes
from ..attention.stored_blocks import StoredBlocks
from ..attention.workspace import Shape, Strided, WorkingMemory, Workspace, aligned_zeros
from ..vector.compiled import Kernel
from ..vector.operations import Operations
from ..vector.parallel import team_of_kernels
from ..vector.vector_ir import CACHE_LINE, LANES
from ..weights.products import PANELS, Product, Weights
from .arithmetic import CODES, NUM_OPERANDS, REDUCTIONS
from .instructions import (
    BFLOAT16,
    FLOAT32,
    ITEM_BYTES,
    Attend,
    Call,
    Instruction,
    Memory,
    Multiply,
    Operation,
    Place,
    ProductOf,
)
from .rows import (
    APART,
    CHUNK,
    ONE,
    TAKE_STATES,
    TAKE_TOKENS,
    VECTORS,
    WORK_BYTES,
    Array,
    Code,
    ProductList,
    Rows,
    multiply,
    run_rows,
)

# Parts of a weight for each thread, unless they are smaller than the least or larger than the largest, in bytes: the
# first cache lines of a part come late.
_PARTS_OF_THREAD, _LEAST_PART, _LARGEST_PART = 2, 2**15, 2**19
_MOST_LINES = 3  # dimensions of lines
_SINKS, _FIRST_ROW, _PREFIX, _LENGTH, _VISIBLE = (
    AttentionCall._fields.index(name) for name in ("sinks", "first_row", "prefix", "query_length", "visible")
)
# The element type of blocks, by the kind of the states that are written to them.
_ELEMENTS: dict[int, np.dtype] = {FLOAT32: np.dtype(np.float32), BFLOAT16: np.dtype(np.uint16)}


class Sequences(NamedTuple):
    """
    Rows of a pass: tokens of the sequences of one cache.

    Attributes:
        layers: the records of the cache's layers, which count the tokens to come already. The caller keeps them.
            Further tokens of the same blocks are counted there.
        batch: number of sequences.
        length: tokens of each. Row `sequence * length + index` is one of them, counted from the first row of these.
        prefixes: records of whole blocks that come before those of a layer, by its index; several sequences that
            follow each other share one of its sequences.
        num_alike: how many first tokens have the same keys and values as in the cache before this one.
    """

    layers: Sequence[StoredBlocks]
    batch: int
    length: int = 1
    prefixes: Mapping[int, StoredBlocks] = {}
    num_alike: int = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.batch * self.length


class Seen(NamedTuple):
    """
    The tokens of some layers that the rows of a cache see.

    Attributes:
        masks: which attention it is for, see `Attend.mask`.
        first: the first of the rows.
        ranges: int64 `[rows, 2]`, the first token that a row sees, and the one after the last.
        visible: uint8 `[rows, tokens]`, 0 for a token in its range that a row does not see; `None` for none.
        after_prefix: whether these are tokens after the prefixes of the layers, counted from their ends on.
    """

    masks: Sequence[int]
    first: int
    ranges: np.ndarray
    visible: np.ndarray | None = None
    after_prefix: bool = False


class _Asked(NamedTuple):
    """
    One call of attention to a layer: rows from `first` on are so many tokens of sequences of `blocks`.

    Attributes:
        prefix: which call of the layer is for tokens before these; `None` for none.
        shared_parts: parts that the sequence shares with others, which are those of the call or come before them.
    """

    blocks: StoredBlocks
    first: int
    batch: int
    length: int
    is_prefix: bool = False
    prefix: int | None = None
    shared_parts: int = 0

    @property
    def follows_prefix(self) -> bool:
        """Whether masks have the tokens before these apart, see `Seen`; not those that are shared."""
        return self.prefix is not None and not self.shared_parts


class _Attention(NamedTuple):
    """Attention to a layer: its calls, with their addresses, what is asked, and the numbers of their parts."""

    calls: np.ndarray
    addresses: list[int]
    attend: Attend
    query: Array
    out: Array
    sinks: tuple[int, int, int, int]
    element: np.dtype
    parts: list[int]


class _Run:
    """Operations of kernels without a call of Python between them."""

    def __init__(self) -> None:
        # Kernel, call and number of parts, `None` for the rows; or attention.
        self.steps: list[tuple[Kernel, int, int | None] | _Attention] = []
        self.whole: Operations | None = None

    def end(self, most_calls: int) -> None:
        """Write the operations, with so many calls of attention to a layer, which run side by side."""
        operations: list[tuple[Kernel, int]] = []
        beside: list[int] = []
        for each in self.steps:
            if isinstance(each, _Attention):
                calls, start = each.addresses[:most_calls], len(operations)
                operations += [(kernel, call) for call in calls for kernel in (attend_codes, ATTEND[each.element])]
                operations += [(merge_head, call) for call in calls]
                beside += [at for at in range(start + 1, len(operations)) if at != start + 2 * most_calls]
            else:
                operations.append(each[:2])
        self.whole = Operations(operations, beside) if operations else None

    def parts(self, rows: int) -> list[int]:
        """The number of parts of each operation."""
        parts: list[int] = []
        for each in self.steps:
            parts += each.parts if isinstance(each, _Attention) else [rows if each[2] is None else each[2]]
        return parts


class StepProgram:
    """
    A step of any number of rows up to a most one.

    Args:
        operations: in their order. Instructions that follow each other are one operation of the kernels.
        most_rows: for which there is memory.
        scratch: bytes of a row's storages that live within a step only, by their keys. Storages may lie in the same
            memory where one is used last before the other is used first, so a step finds nothing there of the step
            before.
        given: the storages that the caller holds, by their keys.

    Raises:
        ValueError: an instruction is not known, or has more than four dimensions that do not lie as one.
    """

    def __init__(
        self, operations: Sequence[Operation], most_rows: int, scratch: Mapping[int, int], given: Mapping[int, Memory]
    ):
        self._most_rows = most_rows
        self._kept: list[object] = []  # what kernels read by its address
        offsets, row_bytes = _placed(operations, scratch)
        start = self._keep(aligned_zeros(most_rows * row_bytes))
        self._memory = {**given, **{key: Memory(start + offset, row_bytes) for key, offset in offsets.items()}}
        self._work = self._keep(aligned_zeros(most_rows * WORK_BYTES))
        lists = [each.products for each in operations if isinstance(each, Multiply)]
        self._operands = self._keep(aligned_zeros(max((_operands(each, most_rows)[1] for each in lists), default=0)))
        # All rows are multiplied with one weight; the second number is theirs in the step at hand.
        self._pairs, self._starts = np.arange(most_rows), np.zeros(2, np.int64)
        masks = [each.mask for each in operations if isinstance(each, Attend)]
        # The second half is for tokens after a prefix.
        self._ranges = np.zeros((2, 1 + max(masks, default=0), most_rows, 2), np.int64)
        # By the place of a call among those of a layer, and shapes; those that differ in the number of queries work in
        # the same memory.
        self._workspaces: dict[tuple[int, Shape], Workspace] = {}
        self._memories: dict[tuple[int, Shape], WorkingMemory] = {}
        self._attention: list[_Attention] = []
        # Each row has a call, and its prefix one. Of those that no pass needs the system gives no memory.
        num_layers, self._most_calls = sum(isinstance(each, Attend) for each in operations), 1
        self._calls = np.zeros((2 * most_rows, num_layers, CALL_BYTES // 8), np.int64)
        # By the numbers of sequences and of tokens of each: the calls, and the parts of each run of operations.
        self._taken: dict[tuple[tuple[int, int], ...], tuple[np.ndarray, list[list[int]]]] = {}
        self._taken_from: list[tuple[int, int, int]] = []
        self._seen: Sequence[Seen] = ()
        self._codes: list[list[int]] = []  # of the operation on rows that is being written
        self._runs = [_Run()]
        for operation in operations:
            if isinstance(operation, Instruction):
                self._codes += self._instruction(operation)
            elif isinstance(operation, Multiply):
                self._multiply(operation.products)
            elif isinstance(operation, Attend):
                self._attend(operation)
            else:
                self._end_rows()
                self._runs.append(_Run())
        self._end_rows()
        for run in self._runs:
            run.end(self._most_calls)

    def memory_of(self, storage: int) -> Memory:
        """Return where a storage lies, of `scratch` or `given`."""
        return self._memory[storage]

    def take(self, taken: Sequence[Sequences]) -> None:
        """Let the next steps be of the tokens of some caches, whose rows follow each other."""
        self._starts[1] = sum(each.rows for each in taken)
        # Parts follow from the number of blocks; the number of tokens is read from the records.
        records = [record for each in taken for record in (*each.layers, *each.prefixes.values())]
        of_layers = [(each.address, each.quantized_blocks, each.blocks_seen) for each in records]
        of_layers += [(each.num_alike, 0, 0) for each in taken]
        if of_layers != self._taken_from:
            self._taken, self._taken_from = {}, of_layers
        sizes = tuple((each.batch, each.length) for each in taken)
        if sizes not in self._taken:
            parts = self._ask(taken)
            self._taken[sizes] = self._calls[: self._most_calls].copy(), parts
        calls, parts = self._taken[sizes]
        self._calls[: len(calls)] = calls
        for run, of_run in zip(self._runs, parts, strict=True):
            if run.whole is not None:
                run.whole.set_parts(of_run)

    def _ask(self, taken: Sequence[Sequences]) -> list[list[int]]:
        """Write the calls of attention; return the parts of each run of operations."""
        held = [memory.num_bytes for memory in self._memories.values()]
        asked = [_asked(each.attend, taken) for each in self._attention]
        most_calls = max(map(len, asked), default=1)
        if most_calls > self._most_calls:
            self._most_calls, self._taken = most_calls, {}
            for run in self._runs:
                run.end(most_calls)
        for attention, calls in zip(self._attention, asked, strict=True):
            attention.parts[:] = [0] * (3 * self._most_calls)
            for which, call in enumerate(calls):
                following = attention.addresses[which + 1] if which + 1 < len(calls) else 0
                self._ask_one(attention, which, call, following)
        for attention, calls in zip(self._attention, asked, strict=True):  # a later call may have needed more memory
            for which, call in enumerate(calls):
                workspace = self._workspace(attention.attend, which, call)
                attention.calls[which, SCRATCH // 8 :] = workspace.asked[SCRATCH // 8 :]
        if held != [memory.num_bytes for memory in self._memories.values()]:
            self._taken = {}  # calls that were written before work elsewhere
        return [run.parts(int(self._starts[1])) for run in self._runs]

    def _ask_one(self, attention: _Attention, which: int, call: _Asked, following: int) -> None:
        """Write one of the calls of a layer, and the numbers of its parts."""
        attend, (blocks, first, batch, length, is_prefix, of_prefix, shared) = attention.attend, call
        assert blocks.element == attention.element, (blocks.element, attention.element)
        workspace = self._workspace(attend, which, call)
        ranges = self._ranges[int(call.follows_prefix), attend.mask, first : first + batch * length]
        parts, in_codes = workspace.ask(
            _strided(attention.query, first, length),
            _strided(attention.out, first, length),
            blocks,
            attend.scale,
            cap=attend.cap,
            seen=ranges.reshape(batch, 1, length, 2),
            shared_parts=shared,
            are_shared=is_prefix and shared > 0,
        )
        written, prefix = attention.calls[which], 0 if of_prefix is None else attention.addresses[of_prefix]
        written[: SCRATCH // 8] = workspace.asked[: SCRATCH // 8]
        written[_SINKS : _SINKS + len(attention.sinks)] = attention.sinks
        written[_FIRST_ROW : _FIRST_ROW + 4] = first, is_prefix, prefix, following
        attention.parts[2 * which : 2 * which + 2] = in_codes, parts - in_codes
        attention.parts[2 * self._most_calls + which] = 0 if is_prefix else blocks.heads

    def see(self, seen: Sequence[Seen]) -> None:
        """Say what all rows see, before each step."""
        if any(each.visible is not None for each in self._seen):
            self._calls[: self._most_calls, :, _VISIBLE] = 0
        self._seen = seen
        for masks, first, ranges, visible, after_prefix in seen:
            self._ranges[int(after_prefix), masks, first : first + len(ranges)] = ranges
            if visible is None:
                continue
            of_row = visible.strides[0]
            for attention in self._attention:
                for call in attention.calls[: self._most_calls]:
                    is_it = call[_FIRST_ROW] == first and bool(call[_PREFIX]) == after_prefix
                    if is_it and attention.attend.mask in masks:
                        strides = call[_LENGTH] * of_row, 0, of_row
                        call[_VISIBLE : _VISIBLE + 4] = visible.ctypes.data, *strides

    def _workspace(self, attend: Attend, which: int, call: _Asked) -> Workspace:
        """Attention by one of the calls of a layer."""
        shape = Shape(call.batch, attend.num_kv_heads, attend.group, call.length, attend.key_dim, attend.value_dim)
        if (which, shape) not in self._workspaces:
            key = which, shape._replace(batch=0, query_length=0)
            self._workspaces[which, shape] = Workspace(shape, self._memories.setdefault(key, WorkingMemory()))
        return self._workspaces[which, shape]

    def run(self, calls: Sequence[Callable[[], None]] = ()) -> None:
        """
        Run the step that was taken with what is in `given`, and with the last tokens of each record.

        Args:
            calls: what to do at each `Call`, in their order.

        Raises:
            MemoryError: the host had no memory for what a part works in; what the step writes is not whole.
        """
        for index, run in enumerate(self._runs):
            if index:
                calls[index - 1]()
            if run.whole is not None:
                run.whole.run()

    def _keep(self, array: np.ndarray) -> int:
        """The address of an array that kernels read as long as the program is there."""
        self._kept.append(array)
        address: int = array.ctypes.data
        return address

    def _end_rows(self) -> None:
        """End the operation on rows that is being written."""
        if self._codes:
            codes = self._keep(np.array([number for code in self._codes for number in code]))
            rows = self._keep(np.array(Rows(codes, len(self._codes), self._work)))
            self._runs[-1].steps.append((run_rows, rows, None))
            self._codes = []

    def _array(self, place: Place | float, steps: Sequence[int], form: int) -> Array:
        """An array as kernels read it; its steps, of columns and then of lines, are in numbers."""
        if not isinstance(place, Place):
            return Array(self._keep(np.array([place], np.float32)), 0, False, ONE, 0, 0, 0, 0)
        item, memory = ITEM_BYTES[place.kind], self._memory[place.storage]
        of_columns, *of_lines = (step * item for step in steps)
        of_lines += [0] * (_MOST_LINES - len(of_lines))
        address = memory.address + place.offset * item
        return Array(address, memory.row_bytes, place.kind == BFLOAT16, form, of_columns, *of_lines)

    def _instruction(self, instruction: Instruction) -> list[list[int]]:
        """The code of an instruction, none if it has no numbers."""
        name, shape, out, operands = instruction
        if NUM_OPERANDS.get(name) != len(operands):
            raise ValueError(f"There is no instruction {name} of {len(operands)} operands.")
        if 0 in shape:
            return []
        is_reduction = name in REDUCTIONS
        places = [out, *operands]
        strides = [
            each.strides + (0,) * (is_reduction and not index) if isinstance(each, Place) else (0,) * len(shape)
            for index, each in enumerate(places)
        ]
        columns, sizes, steps = _as_lines(shape, strides, is_reduction)
        if len(sizes) > _MOST_LINES:
            raise ValueError(f"{name} of shape {shape} has more than four dimensions that do not lie as one.")
        sizes = [1] * (_MOST_LINES - len(sizes)) + sizes
        arrays = []
        for index, (place, of_place) in enumerate(zip(places, steps, strict=True)):
            of_lines = [0] * (_MOST_LINES + 1 - len(of_place)) + of_place[1:]
            form = APART
            if not any(of_place) and index and not is_reduction:
                form = ONE
            elif isinstance(place, Place) and place.kind == FLOAT32 and columns % LANES == 0:
                whole = [columns * sizes[1] * sizes[2], columns * sizes[2], columns]
                are_joined = all(size == 1 or step == at for size, step, at in zip(sizes, of_lines, whole, strict=True))
                form = VECTORS if of_place[0] == 1 and are_joined else APART
            arrays.append(self._array(place, [of_place[0], *of_lines], form))
        at_once = max(1, CHUNK // (-(-columns // LANES) * LANES))
        code = Code(CODES[name], len(arrays), columns, int(np.prod(sizes)), sizes[1], sizes[2], at_once, 0)
        return [[*code, *(number for array in arrays for number in array)]]

    def _multiply(self, products: Sequence[ProductOf]) -> None:
        """Add products, and before them what makes their operands of the tokens."""
        threads = team_of_kernels().threads
        offsets, _ = _operands(products, self._most_rows)
        calls = np.array([self._product(each, offsets, threads) for each in products])
        first = self._keep(calls)
        for index, each in enumerate(products):
            if _operand_of(each) in offsets:
                del offsets[_operand_of(each)]  # one of those that share it
                call = first + index * calls.strides[0]
                self._codes.append([*Code(TAKE_TOKENS, 0, 0, 0, 0, 0, 0, call)])
        self._end_rows()
        parts = int(calls[:, Product._fields.index("parts")].sum())
        self._runs[-1].steps.append((multiply, self._keep(np.array(ProductList(first, len(products)))), parts))

    def _product(self, each: ProductOf, offsets: Mapping[tuple, Sequence[int]], threads: int) -> Product:
        operand, steps, sums = (self._operands + offset for offset in offsets[_operand_of(each)])
        tokens, out = (self._array(place, [1], APART) for place in (each.tokens, each.out))
        bias = None if each.bias is None else self._array(each.bias, [1], APART)
        return Product(
            weights=each.products.address,
            places=self._most_rows,
            pairs=self._pairs.ctypes.data,
            matrices=self._keep(np.array([each.which])),
            starts=self._starts.ctypes.data,
            tokens=tokens.address,
            tokens_are_bfloat16=tokens.is_bfloat16,
            token_step=tokens.row_bytes // tokens.step,
            pairs_of_token=1,
            is_gated=0,
            operand=operand,
            steps=steps,
            sums=sums,
            operand_parts=self._most_rows,
            bias=0 if bias is None else bias.address,
            bias_is_bfloat16=0 if bias is None else bias.is_bfloat16,
            bias_step=0,
            out=out.address,
            out_is_bfloat16=out.is_bfloat16,
            out_step=out.row_bytes // out.step,
            parts=_parts(each.products.weights, threads),
        )

    def _attend(self, attend: Attend) -> None:
        """Add attention, and before it what writes keys and values and takes the queries."""
        assert attend.query.strides[-1] == attend.out.strides[-1] == 1
        calls = self._calls[:, len(self._attention)]
        start, states = int(calls.ctypes.data), []
        addresses = [start + which * calls.strides[0] for which in range(len(calls))]
        if attend.keys is not None and attend.values is not None:
            states = [self._array(each, each.strides[::-1], APART) for each in (attend.keys, attend.values)]
        code = Code(TAKE_STATES, len(states), 0, attend.num_kv_heads, 0, 0, 0, start)
        self._codes.append([*code, *(number for array in states for number in array)])
        self._end_rows()
        query, out = (self._array(each, each.strides[::-1], APART) for each in (attend.query, attend.out))
        sinks = (0, 0, 0, 0)
        if attend.sinks is not None:
            of_sinks = self._array(attend.sinks, attend.sinks.strides, APART)
            sinks = of_sinks.address, of_sinks.row_bytes, of_sinks.step, of_sinks.is_bfloat16
        element = _ELEMENTS[(attend.query if attend.keys is None else attend.keys).kind]
        self._attention.append(_Attention(calls, addresses, attend, query, out, sinks, element, []))
        self._runs[-1].steps.append(self._attention[-1])


def _asked(attend: Attend, taken: Sequence[Sequences]) -> list[_Asked]:
    """
    The calls of attention to a layer: one for the sequences of each cache, and before it one for their prefixes.

    Before those of several caches with equal first tokens there is one for these.
    """
    first, calls, left = 0, list[_Asked](), list(taken)
    while left:
        together, shared = _sharing(attend, left)
        rows = sum(each.rows for each in left[:together])
        of_prefix = len(calls) if shared else None
        if shared:
            calls.append(_Asked(left[0].layers[attend.layer], first, 1, rows, is_prefix=True, shared_parts=shared))
        for each in left[:together]:
            own = _Asked(each.layers[attend.layer], first, each.batch, each.length, False, of_prefix, shared)
            prefix = each.prefixes.get(attend.layer)
            if prefix is not None:
                groups = prefix.heads // attend.num_kv_heads
                own = own._replace(prefix=len(calls))
                calls.append(_Asked(prefix, first, groups, each.rows // groups, is_prefix=True))
            calls.append(own)
            first += each.rows
        del left[:together]
    return calls


def _sharing(attend: Attend, taken: Sequence[Sequences]) -> tuple[int, int]:
    """Return how many of the first caches share parts of a layer, and how many parts, so that most are shared."""
    together, shared, num_alike = 1, 0, sys.maxsize
    before = taken[0].layers[attend.layer]
    for count, each in enumerate(taken[1:], 2):
        num_alike = min(num_alike, each.num_alike)
        parts = before.shared_parts(each.layers[attend.layer], num_alike) if num_alike else 0
        parts = min(parts, shared) if together > 1 else parts
        if parts * (count - 1) <= shared * (count - 2):
            break
        together, shared = count, parts
    return together, shared


def _strided(heads: Array, first: int, length: int) -> Strided:
    """Heads of rows from `first` on, `length` of each sequence, as attention takes them."""
    of_row = heads.row_bytes
    start = heads.address + first * of_row
    return Strided(start, length * of_row, heads.first_step, of_row, bool(heads.is_bfloat16))


def _as_lines(
    shape: Sequence[int], strides: Sequence[Sequence[int]], is_reduction: bool
) -> tuple[int, list[int], list[list[int]]]:
    """Join dimensions that lie as one; return the columns, sizes of lines, and steps of each array, columns first."""
    dimensions = list(zip(shape, zip(*strides, strict=True), strict=True))
    last = [dimensions.pop()] if is_reduction else []
    joined: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in dimensions:
        if joined and all(before == size * step for before, step in zip(joined[-1][1], steps, strict=True)):
            joined[-1] = joined[-1][0] * size, steps
        elif size > 1:
            joined.append((size, steps))
    if not is_reduction and joined and joined[-1][0] < LANES:
        joined.sort(key=lambda dimension: dimension[0])  # the order of numbers is of no account
    joined += last
    columns, of_columns = joined.pop() if joined else (1, (0,) * len(strides))
    steps_of = [[of_columns[index], *(steps[index] for _, steps in joined)] for index in range(len(strides))]
    return columns, [size for size, _ in joined], steps_of


def _operand_of(product: ProductOf) -> tuple:
    """The parts that products with one operand have in common: the tokens, and the form for the weights."""
    weights = product.products.weights
    return product.tokens, weights.kind == PANELS, weights.bits, weights.group, weights.operand_columns


def _operands(products: Sequence[ProductOf], rows: int) -> tuple[dict[tuple, list[int]], int]:
    """Offsets of the integers, steps and sums of each operand of some products, and the bytes of all."""
    offsets: dict[tuple, list[int]] = {}
    end = 0
    for each in products:
        weights, key = each.products.weights, _operand_of(each)
        if key not in offsets:
            offsets[key] = []
            for size in (weights.operand_columns, weights.groups, weights.groups):
                offsets[key].append(end)
                end += _in_lines(4 * rows * size)
    return offsets, end


def _in_lines(num_bytes: int) -> int:
    """Bytes of whole cache lines."""
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE


def _storages(operation: Operation) -> set[int]:
    """The storages that an operation uses."""
    if isinstance(operation, Call):
        return {*operation.storages}
    if isinstance(operation, Instruction):
        places: list[object] = [operation.out, *operation.operands]
    elif isinstance(operation, Multiply):
        places = [place for each in operation.products for place in (each.tokens, each.out)]
    else:
        places = [*operation]
    return {place.storage for place in places if isinstance(place, Place)}


def _placed(operations: Sequence[Operation], sizes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Offsets of storages in the memory of a row, each where there is room while it is used, and the bytes of a row."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, operation in enumerate(operations):
        for storage in _storages(operation) & sizes.keys():
            first.setdefault(storage, index)
            last[storage] = index
    offsets: dict[int, int] = {}
    used: list[tuple[int, int, int]] = []  # the start, the end and the last use of those that are in use
    row_bytes = 0
    for storage, index in first.items():
        used = sorted(each for each in used if each[2] >= index)
        num_bytes, start = _in_lines(sizes[storage]), 0
        for begin, end, _ in used:
            if start + num_bytes <= begin:
                break
            start = max(start, end)
        offsets[storage] = start
        used.append((start, start + num_bytes, last[storage]))
        row_bytes = max(row_bytes, start + num_bytes)
    return offsets, row_bytes


def _parts(weights: Weights, threads: int) -> int:
    """Number of parts of a weight."""
    units = -(-weights.rows // LANES) if weights.kind == PANELS else weights.rows
    several = min(_PARTS_OF_THREAD * threads, weights.matrix_bytes // _LEAST_PART)
    return min(units, max(1, several, weights.matrix_bytes // _LARGEST_PART))
