"""The program of a decode step with its memory, as lists of operations of kernels."""

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
_SINKS = AttentionCall._fields.index("sinks")
# The element type of blocks, by the kind of the states that are written to them.
_ELEMENTS: dict[int, np.dtype] = {FLOAT32: np.dtype(np.float32), BFLOAT16: np.dtype(np.uint16)}


class _Run:
    """Operations of kernels without a call of Python between them; the number of parts of each, `None` for the rows."""

    def __init__(self) -> None:
        self.operations: list[tuple[Kernel, int]] = []
        self.parts: list[int | None] = []
        self.whole: Operations | None = None

    def add(self, kernel: Kernel, call: int, parts: int | None = None) -> None:
        self.operations.append((kernel, call))
        self.parts.append(parts)

    def end(self) -> None:
        if self.operations:
            kernels = [kernel for kernel, _ in self.operations]
            beside = [index + 1 for index, kernel in enumerate(kernels) if kernel is attend_codes]
            self.whole = Operations(self.operations, np.array(beside, np.int64))


class _Attention(NamedTuple):
    """Attention to a layer: its call, what is asked, and where the numbers of its parts are noted."""

    call: np.ndarray
    attend: Attend
    query: Array
    out: Array
    sinks: tuple[int, int, int, int]
    element: np.dtype
    run: _Run
    at: int  # the index of its operation on codes


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

    Attributes:
        seen: int64 `[masks, most_rows, 2]`, to be written before each step: the first token that a row sees, and the
            one after the last.

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
        self.seen = np.zeros((1 + max(masks, default=0), most_rows, 2), np.int64)
        # By shapes; those that differ in the number of queries work in the same memory.
        self._workspaces: dict[Shape, Workspace] = {}
        self._memories: dict[Shape, WorkingMemory] = {}
        self._attention: list[_Attention] = []
        self._calls = np.zeros((sum(isinstance(each, Attend) for each in operations), CALL_BYTES // 8), np.int64)
        # By the number of sequences and of tokens of each: the calls, and the parts of each run of operations.
        self._taken: dict[tuple[int, int], tuple[np.ndarray, list[list[int]]]] = {}
        self._taken_from: list[tuple[int, int, int]] = []
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
            run.end()

    def memory_of(self, storage: int) -> Memory:
        """Return where a storage lies, of `scratch` or `given`."""
        return self._memory[storage]

    def take(self, layers: Sequence[StoredBlocks], batch: int, length: int = 1) -> None:
        """
        Let the next steps be of some tokens of each sequence. Row `sequence * length + index` is one of them.

        Args:
            layers: the records of a cache's layers, which count the tokens to come already. The caller keeps them.
                Further tokens of the same blocks are counted there.
            batch: number of sequences.
            length: tokens of each.
        """
        self._starts[1] = batch * length
        # Parts follow from the number of blocks; the number of tokens is read from the records.
        of_layers = [(each.address, each.quantized_blocks, each.blocks_seen) for each in layers]
        if of_layers != self._taken_from:
            self._taken, self._taken_from = {}, of_layers
        if (batch, length) in self._taken:
            calls, parts = self._taken[batch, length]
            self._calls[:] = calls
        else:
            parts = self._ask(layers, batch, length)
            self._taken[batch, length] = self._calls.copy(), parts
        for run, of_run in zip(self._runs, parts, strict=True):
            if run.whole is not None:
                run.whole.set_parts(of_run)

    def _ask(self, layers: Sequence[StoredBlocks], batch: int, length: int) -> list[list[int]]:
        """Write the calls of attention; return the parts of each run of operations."""
        rows, held = batch * length, [memory.num_bytes for memory in self._memories.values()]
        for each in self._attention:
            attend, blocks = each.attend, layers[each.attend.layer]
            assert blocks.element == each.element, (blocks.element, each.element)
            workspace = self._workspace(attend, batch, length)
            parts, in_codes = workspace.ask(
                _strided(each.query, length),
                _strided(each.out, length),
                blocks,
                attend.scale,
                cap=attend.cap,
                seen=self.seen[attend.mask, :rows].reshape(batch, 1, length, 2),
            )
            each.call[: SCRATCH // 8] = workspace.asked[: SCRATCH // 8]
            each.call[_SINKS : _SINKS + len(each.sinks)] = each.sinks
            each.run.parts[each.at : each.at + 3] = in_codes, parts - in_codes, blocks.heads
        for each in self._attention:  # a later call may have needed more memory
            each.call[SCRATCH // 8 :] = self._workspace(each.attend, batch, length).asked[SCRATCH // 8 :]
        if held != [memory.num_bytes for memory in self._memories.values()]:
            self._taken = {}  # calls that were written before work elsewhere
        return [[rows if each is None else each for each in run.parts] for run in self._runs]

    def _workspace(self, attend: Attend, batch: int, length: int) -> Workspace:
        """Attention of so many tokens of some sequences."""
        shape = Shape(batch, attend.num_kv_heads, attend.group, length, attend.key_dim, attend.value_dim)
        if shape not in self._workspaces:
            memory = self._memories.setdefault(shape._replace(batch=0, query_length=0), WorkingMemory())
            self._workspaces[shape] = Workspace(shape, memory)
        return self._workspaces[shape]

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
            self._runs[-1].add(run_rows, self._keep(np.array(Rows(codes, len(self._codes), self._work))))
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
        self._runs[-1].add(multiply, self._keep(np.array(ProductList(first, len(products)))), parts)

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
        call = self._calls[len(self._attention)]
        address, states = int(call.ctypes.data), []
        if attend.keys is not None and attend.values is not None:
            states = [self._array(each, each.strides[::-1], APART) for each in (attend.keys, attend.values)]
        code = Code(TAKE_STATES, len(states), 0, attend.num_kv_heads, 0, 0, 0, address)
        self._codes.append([*code, *(number for array in states for number in array)])
        self._end_rows()
        query, out = (self._array(each, each.strides[::-1], APART) for each in (attend.query, attend.out))
        sinks = (0, 0, 0, 0)
        if attend.sinks is not None:
            of_sinks = self._array(attend.sinks, attend.sinks.strides, APART)
            sinks = of_sinks.address, of_sinks.row_bytes, of_sinks.step, of_sinks.is_bfloat16
        element = _ELEMENTS[(attend.query if attend.keys is None else attend.keys).kind]
        run = self._runs[-1]
        self._attention.append(
            _Attention(
                call, attend, query, out, sinks, element, run, len(run.operations)
            )
        )  # fmt: skip
        for kernel in (attend_codes, ATTEND[element], merge_head):
            run.add(kernel, address)  # `take` says the parts


def _strided(heads: Array, length: int) -> Strided:
    """Heads of rows, `length` of each sequence, as attention takes them."""
    of_row = heads.row_bytes
    return Strided(heads.address, length * of_row, heads.first_step, of_row, bool(heads.is_bfloat16))


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
