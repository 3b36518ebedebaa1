"""
Instructions on rows against torch and float64, and programs of them against torch in the same types.

The tensors of torch describe the arrays of rows: `[rows, ...]`, whose storage offset and strides are those in a row.
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hybrid_cache.kernels import (
    BFLOAT16,
    FLOAT32,
    NUM_OPERANDS,
    REDUCTIONS,
    Attend,
    Call,
    Instruction,
    Memory,
    Multiply,
    Operation,
    PanelLayout,
    Place,
    ProductOf,
    Products,
    Seen,
    Sequences,
    StepProgram,
    StoredBlocks,
    dequantize_panels,
    factor_of,
    quantize_panels,
    value_width,
)
from kernels.calls import recorded
from kernels.reference import to_blocks

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
# By the names of instructions; the others have the same name in torch.
OF_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "copy": torch.clone,
    "addcmul": lambda a, b, c: (a.double() + b.double() * c.double()).float(),
    "where": lambda a, b, c: torch.where(a != 0, b, c),
    "sqrt": lambda a: a.double().sqrt(),  # torch's own is not the nearest number
    "sum": lambda a: a.double().sum(-1),
    "mean": lambda a: a.double().mean(-1),
    "amax": lambda a: a.amax(-1),
    "amin": lambda a: a.amin(-1),
}
# Whose results are not exact, with their largest error in units of the last place.
ROUNDED = {"exp": 1.5, "expm1": 2.5, "log": 1.5, "log1p": 2.5, "tanh": 2.5, "sigmoid": 2.5, "erf": 2.5, "addcmul": 1.5}
SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1.0,
    -1.0,
    1e-40,
    -1e-40,
    3e38,
    -3e38,
    0.5,
    88.8,
    -88.8,
    -103.5,
    -95.0,
]


def of_torch(name: str, *operands: Any) -> torch.Tensor:
    """Return what torch gives, of float32."""
    result: torch.Tensor = OF_TORCH.get(name, getattr(torch, name, None))(*operands)  # type: ignore[misc]
    return result.float()


class Numbers(NamedTuple):
    """Numbers of each row: what torch has made of them, `[rows, ...]`, and the key of their storage."""

    tensor: torch.Tensor
    storage: int

    @property
    def place(self) -> Place:
        tensor = self.tensor
        return Place(self.storage, KINDS[tensor.dtype], tensor.storage_offset(), tensor.stride()[1:])

    def as_is(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Numbers":
        """Another view of the same numbers."""
        return Numbers(change(self.tensor), self.storage)


class Recorded:
    """A program as it is written, which torch runs at once."""

    def __init__(self, rows: int):
        self.rows = rows
        self.operations: list[Operation] = []
        self.scratch: dict[int, int] = {}
        self.given: dict[int, torch.Tensor] = {}
        self.shared: set[int] = set()

    def holds(self, tensor: torch.Tensor, is_shared: bool = False) -> Numbers:
        """Numbers that the caller of a program holds, `[rows, ...]`, or of all rows."""
        key = len(self.scratch) + len(self.given)
        self.given[key] = tensor
        if is_shared:
            self.shared.add(key)
            return Numbers(tensor.expand(self.rows, *tensor.shape), key)
        return Numbers(tensor.clone(), key)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Numbers:
        key = len(self.scratch) + len(self.given)
        tensor = torch.full((self.rows, *shape), math.nan, dtype=dtype)
        self.scratch[key] = tensor[0].nbytes
        return Numbers(tensor, key)

    def write(self, out: Numbers, name: str, *operands: Numbers | float) -> None:
        """Write an instruction, and what torch makes of it."""
        numbers = [each for each in operands if isinstance(each, Numbers)]
        shape = torch.broadcast_shapes(*(each.tensor.shape[1:] for each in numbers))
        shape = shape or tuple(out.tensor.shape[1:])
        wide = [
            each.as_is(lambda tensor: tensor.expand(self.rows, *shape)) if isinstance(each, Numbers) else each
            for each in operands
        ]
        places = tuple(each.place if isinstance(each, Numbers) else each for each in wide)
        self.operations.append(Instruction(name, tuple(shape), out.place, places))
        taken = [each.tensor.float() if isinstance(each, Numbers) else torch.tensor(each) for each in wide]
        out.tensor.copy_(of_torch(name, *taken))

    def make(self, name: str, *operands: Numbers | float, dtype: torch.dtype = torch.float32) -> Numbers:
        shapes = [each.tensor.shape[1:] for each in operands if isinstance(each, Numbers)]
        shape = torch.broadcast_shapes(*shapes)
        out = self.empty(*(shape[:-1] if name in REDUCTIONS else shape), dtype=dtype)
        self.write(out, name, *operands)
        return out

    def program(self, rows: list[int]) -> tuple[StepProgram, dict[int, torch.Tensor]]:
        """The program of some rows, and what it is given: copies of what is held."""
        given = {key: tensor if key in self.shared else tensor[rows] for key, tensor in self.given.items()}
        memory = {
            key: Memory(tensor.data_ptr(), 0 if key in self.shared else tensor.stride(0) * tensor.element_size())
            for key, tensor in given.items()
        }
        return StepProgram(self.operations, len(rows) + 2, self.scratch, memory), given

    def run(self, outs: list[Numbers], rows: list[int] | None = None) -> list[torch.Tensor]:
        """Run it for some rows, or all; return what it writes to some of what is held."""
        rows = list(range(self.rows)) if rows is None else rows
        program, given = self.program(rows)
        program.take([Sequences((), len(rows))])
        program.run()
        return [given[out.storage] for out in outs]


@pytest.mark.parametrize("name", sorted(set(NUM_OPERANDS) - REDUCTIONS))
def test_instruction_when_of_special_and_random_numbers_then_as_torch(name: str) -> None:
    torch.manual_seed(0)
    count = NUM_OPERANDS[name]
    special = torch.tensor(SPECIAL)
    grid = torch.stack([each.flatten() for each in torch.meshgrid(*[special] * count, indexing="ij")])
    numbers = torch.randn(count, 20_000) * 10 ** (torch.rand(count, 20_000) * 12 - 8)
    if name in ("log", "log1p", "sqrt", "rsqrt"):
        numbers = numbers.abs()
    operands = [each[None] for each in torch.cat([grid, numbers], 1)]
    recorded = Recorded(rows=1)
    result = recorded.holds(torch.zeros_like(operands[0]))
    recorded.write(result, name, *map(recorded.holds, operands))
    [out], expected = recorded.run([result]), result.tensor
    if name not in ROUNDED:
        assert torch.equal(out.nan_to_num(nan=5.0), expected.nan_to_num(nan=5.0))
        is_zero = expected == 0
        assert torch.equal(out.signbit()[is_zero], expected.signbit()[is_zero]) or name in ("maximum", "minimum")
        return
    assert torch.equal(out.isnan(), expected.isnan())
    exact = OF_TORCH.get(name, getattr(torch, name, None))(*(each.double() for each in operands)).double()  # type: ignore[misc]
    is_finite = expected.isfinite() & (expected != 0)
    assert torch.equal(out[~is_finite & ~out.isnan()], expected[~is_finite & ~out.isnan()])
    unit = torch.from_numpy(np.spacing(exact[is_finite].abs().float().numpy())).double()
    errors = (out[is_finite].double() - exact[is_finite]).abs() / unit
    worst = errors.argmax()
    assert errors.max() <= ROUNDED[name], (errors.max(), operands[0][is_finite][worst], out[is_finite][worst])


def some_view(draw: Any, numbers: Numbers) -> Numbers:
    """Another view of numbers: dimensions in another order, a part of them, each second one, or repeated."""
    tensor = numbers.tensor
    for dim in range(1, tensor.dim()):
        size = tensor.shape[dim]
        first = draw(st.integers(0, size - 1))
        step = draw(st.sampled_from([1, 1, 1, 2]))
        tensor = tensor[(slice(None),) * dim + (slice(first, None, step),)] if draw(st.booleans()) else tensor
        if tensor.shape[dim] == 1 and draw(st.booleans()):
            tensor = tensor.expand(*tensor.shape[:dim], draw(st.sampled_from([1, 2, 17])), *tensor.shape[dim + 1 :])
    order = draw(st.permutations(range(1, tensor.dim())))
    return Numbers(tensor.permute(0, *order), numbers.storage)


# Straddle a vector and a chunk; with one that is longer than all buffers.
LENGTHS = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 576, 1024, 1025, 5000])
EXACT = ["copy", "neg", "abs", "sqrt", "add", "sub", "mul", "div", "maximum", "minimum", "ge", "where"]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([*EXACT, *sorted(REDUCTIONS)]))
def test_instruction_when_arrays_lie_anyhow_then_as_torch(data: st.DataObject, name: str) -> None:
    draw, rows = data.draw, data.draw(st.integers(1, 3))
    torch.manual_seed(draw(st.integers(0, 99)))
    recorded = Recorded(rows)
    sizes = [draw(LENGTHS), *draw(st.lists(st.sampled_from([1, 2, 3, 9]), max_size=3))]
    dtypes = st.sampled_from([torch.float32, torch.bfloat16])

    def held(*shape: int) -> Numbers:
        return some_view(draw, recorded.holds(torch.randn(rows, *shape).to(draw(dtypes))))

    first = held(*draw(st.permutations(sizes)))
    shape = first.tensor.shape[1:]
    operands: list[Numbers | float] = [first]
    while len(operands) < NUM_OPERANDS[name]:
        if draw(st.booleans()):
            operands.append(draw(st.sampled_from([0.0, -1.5, math.inf])))
        else:
            is_repeated = [draw(st.booleans()) for _ in shape]
            each = recorded.holds(
                torch.randn(rows, *(1 if is_one else size for is_one, size in zip(is_repeated, shape, strict=True))).to(
                    draw(dtypes)
                )
            )
            operands.append(each.as_is(lambda tensor: tensor.expand(rows, *shape)))
    of_out = list(shape[:-1] if name in REDUCTIONS else shape)
    gaps = [draw(st.sampled_from([1, 1, 2])) for _ in of_out]
    base = torch.randn(rows, *(size * gap for size, gap in zip(of_out, gaps, strict=True))).to(draw(dtypes))
    whole = recorded.holds(base)
    out = whole.as_is(lambda tensor: tensor[(slice(None), *(slice(None, None, gap) for gap in gaps))])
    recorded.write(out, name, *operands)
    [written] = recorded.run([whole])
    if name in ("sum", "mean"):
        largest = first.tensor.double().abs().sum(-1).max().item() / (1 if name == "sum" else shape[-1])
        bound = largest * 1e-6 + (2**-8 if base.dtype == torch.bfloat16 else 1e-7) * whole.tensor.float().abs()
        assert ((written.float() - whole.tensor.float()).abs() <= bound).all()
    else:
        assert torch.equal(written.nan_to_num(nan=7.0), whole.tensor.nan_to_num(nan=7.0))


def random_program(seed: int, rows: int) -> tuple[Recorded, list[Numbers]]:
    """Instructions on numbers of 96, of which many are dead soon, and some are written over; and what they give."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    recorded = Recorded(rows)
    dtypes = [torch.float32, torch.bfloat16]
    values = [recorded.holds(torch.randn(rows, 96).to(dtype)) for dtype in dtypes]
    values.append(recorded.holds(torch.randn(96), is_shared=True))
    for _ in range(60):
        name = EXACT[random.integers(len(EXACT))]
        operands: list[Any] = [values[index] for index in random.integers(max(0, len(values) - 9), len(values), 3)]
        operands = operands[: NUM_OPERANDS[name]]
        if random.random() < 0.2 and values[-1].storage in recorded.scratch:
            recorded.write(values[-1], name, *operands)  # in place
        else:
            values.append(recorded.make(name, *operands, dtype=dtypes[random.integers(2)]))
    outs = []
    for value in values[-5:]:
        outs.append(recorded.holds(torch.zeros(rows, 96)))
        recorded.write(outs[-1], "copy", value)
    return recorded, outs


@pytest.mark.parametrize("seed", range(4))
def test_program_when_random_then_as_torch_in_the_same_types(seed: int) -> None:
    recorded, outs = random_program(seed, rows=3)
    for written, out in zip(recorded.run(outs), outs, strict=True):
        assert torch.equal(written.nan_to_num(nan=7.0), out.tensor.nan_to_num(nan=7.0))


class Layer:
    """
    A decoder layer as a model computes it, written to a program; its sizes are not those of vectors.

    Args:
        rows: sequences, with other numbers each.
        dtype: of the model.
        is_quantized: whether weights are, all but the first.
        cap: of the scores.
        has_sinks: whether each head has one.
    """

    HEADS, KV_HEADS, DIM, VALUE_DIM, HIDDEN, GATED, TOKENS = 6, 2, 20, 24, 100, 130, 70

    def __init__(self, rows: int, dtype: torch.dtype, is_quantized: bool, cap: float | None, has_sinks: bool):
        torch.manual_seed(0)
        self.recorded, self.dtype, self.is_quantized, self.kept = Recorded(rows), dtype, is_quantized, []  # type: ignore[var-annotated]
        recorded, heads, dim = self.recorded, self.HEADS, self.DIM
        states = recorded.holds(torch.randn(rows, self.HIDDEN).to(dtype))
        normed = self.norm(states)
        query, key, value = self.multiply(
            [
                (normed, heads * dim, False),
                (normed, self.KV_HEADS * dim, False),
                (normed, self.KV_HEADS * self.VALUE_DIM, True),
            ]
        )
        query, key = (self.turned(each.as_is(lambda tensor: tensor.unflatten(1, (-1, dim)))) for each in (query, key))
        value = value.as_is(lambda tensor: tensor.unflatten(1, (-1, self.VALUE_DIM)))
        attended = self.attend(query, key, value, cap, has_sinks)
        [projected] = self.multiply([(attended, self.HIDDEN, True)])
        added = recorded.make("add", states, projected, dtype=dtype)
        # What it is computed of differs, as in layers whose halves are parallel.
        gate, up = self.multiply([(self.norm(added), self.GATED, True), (added, self.GATED, True)])
        gated = recorded.make("mul", gate, recorded.make("sigmoid", gate), dtype=dtype)
        [down] = self.multiply([(recorded.make("mul", gated, up, dtype=dtype), self.HIDDEN, True)])
        self.out = recorded.holds(torch.zeros(rows, self.HIDDEN, dtype=dtype))
        recorded.write(self.out, "add", added, down)

    def norm(self, states: Numbers) -> Numbers:
        make, weight = self.recorded.make, torch.rand(self.HIDDEN).to(self.dtype)
        wide = make("copy", states)
        mean = make("mean", make("mul", wide, wide)).as_is(lambda tensor: tensor.unsqueeze(1))
        scaled = make("mul", wide, make("rsqrt", make("add", mean, 1e-5)), dtype=self.dtype)
        return make("mul", self.recorded.holds(weight, is_shared=True), scaled, dtype=self.dtype)

    def turned(self, heads: Numbers) -> Numbers:
        """Rotary embedding of halves."""
        make, half = self.recorded.make, self.DIM // 2
        cosines, sines = (
            self.recorded.holds(torch.rand(self.recorded.rows, 1, self.DIM).to(self.dtype)) for _ in range(2)
        )
        other = self.recorded.empty(*heads.tensor.shape[1:], dtype=self.dtype)
        self.recorded.write(
            other.as_is(lambda tensor: tensor[..., :half]), "neg", heads.as_is(lambda tensor: tensor[..., half:])
        )
        self.recorded.write(
            other.as_is(lambda tensor: tensor[..., half:]), "copy", heads.as_is(lambda tensor: tensor[..., :half])
        )
        products = make("mul", heads, cosines, dtype=self.dtype), make("mul", other, sines, dtype=self.dtype)
        return make("add", *products, dtype=self.dtype)

    def multiply(self, wanted: list[tuple[Numbers, int, bool]]) -> list[Numbers]:
        products, outs = [], []
        for tokens, rows, may_be_quantized in wanted:
            columns = tokens.tensor[0].numel()
            weight, bias = torch.randn(rows, columns) / columns**0.5, torch.randn(rows).to(self.dtype)
            weight = weight.to(self.dtype)
            if self.is_quantized and may_be_quantized:
                layout, factor = PanelLayout(4, rows, columns, 64), factor_of(4.0)
                panels = np.full(layout.num_bytes, 255, np.uint8)
                quantize_panels(weight.float().numpy(), layout, factor, panels)
                of_weight = Products.of_panels(panels.ctypes.data, layout, [factor])
                numbers = np.empty((rows, columns), np.float32)
                dequantize_panels(panels, layout, factor, numbers)
                self.kept.append(panels)
                weight = torch.from_numpy(numbers)
            else:
                of_weight = Products.of_numbers(weight.data_ptr(), 1, rows, columns, weight.dtype == torch.bfloat16)
                self.kept.append(weight)
            # With room around it.
            out = self.recorded.empty(rows + 32, dtype=self.dtype).as_is(lambda tensor: tensor[:, 16:-16])
            flat = tokens.as_is(lambda tensor: tensor.flatten(1))
            of_bias = self.recorded.holds(bias, is_shared=True)
            products.append(ProductOf(of_weight, 0, flat.place, out.place, of_bias.place._replace(strides=(1,))))
            out.tensor.copy_(flat.tensor.float() @ weight.float().T + bias.float())
            outs.append(out)
        self.recorded.operations.append(Multiply(tuple(products)))
        return outs

    def attend(self, query: Numbers, key: Numbers, value: Numbers, cap: float | None, has_sinks: bool) -> Numbers:
        rows, scale = self.recorded.rows, 0.3
        keys, values = (
            torch.cat([torch.randn(rows, self.KV_HEADS, self.TOKENS, dim).to(self.dtype), new.tensor[:, :, None]], 2)
            for dim, new in ((self.DIM, key), (self.VALUE_DIM, value))
        )
        self.states = keys, values
        sinks = self.recorded.holds(torch.randn(self.HEADS).to(self.dtype), is_shared=True) if has_sinks else None
        # Heads in another order of dimensions than the model's.
        out = self.recorded.empty(self.HEADS, 30, dtype=self.dtype).as_is(lambda tensor: tensor[..., : self.VALUE_DIM])
        self.recorded.operations.append(
            Attend(
                0, query.place, key.place, value.place, out.place, self.KV_HEADS, self.HEADS // self.KV_HEADS,
                self.DIM, self.VALUE_DIM, scale, cap, None if sinks is None else sinks.place,
            )
        )  # fmt: skip
        group = self.HEADS // self.KV_HEADS
        wide_keys, wide_values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("bhd,bhtd->bht", query.tensor.double(), wide_keys) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.tensor.double()[:, :, None]], 2)
        weights = torch.softmax(scores, -1)[..., : self.TOKENS + 1]
        out.tensor.copy_(torch.einsum("bht,bhtd->bhd", weights, wide_values))
        together = self.recorded.empty(self.HEADS, self.VALUE_DIM, dtype=self.dtype)
        self.recorded.write(together, "copy", out)
        return together.as_is(lambda tensor: tensor.flatten(1))

    def blocks(self, rows: list[int]) -> StoredBlocks:
        """Records of the tokens before, with room for the next one."""
        kind, bits = (torch.int16, np.uint16) if self.dtype == torch.bfloat16 else (torch.float32, np.float32)
        dims = self.DIM, value_width(self.VALUE_DIM)
        keys, values = (
            to_blocks(states[rows].view(kind).numpy().view(bits), is_key, dim)
            for states, is_key, dim in zip(self.states, (True, False), dims, strict=True)
        )
        at, group = self.TOKENS // 64, self.TOKENS % 64
        keys[at, :, :, group], values[at, :, group, : self.VALUE_DIM] = 7, 7  # the program writes them
        return recorded(self.TOKENS + 1, keys, values, self.KV_HEADS, self.VALUE_DIM)

    def run(self, rows: list[int]) -> torch.Tensor:
        program, given = self.recorded.program(rows)
        blocks = self.blocks(rows)
        program.take([Sequences([blocks], len(rows))])
        program.see([Seen([0], 0, np.array([[0, blocks.num_tokens]] * len(rows)))])
        program.run()
        return given[self.out.storage]


@pytest.mark.parametrize(
    ("dtype", "is_quantized", "cap", "has_sinks"),
    [
        (torch.float32, False, None, False),
        (torch.float32, True, 5.0, True),
        (torch.bfloat16, False, None, True),
        (torch.bfloat16, True, 5.0, False),
    ],
)
def test_layer_when_of_rows_then_as_torch_and_as_each_row_alone(
    dtype: torch.dtype, is_quantized: bool, cap: float | None, has_sinks: bool
) -> None:
    layer = Layer(5, dtype, is_quantized, cap, has_sinks)
    written, expected = layer.run(list(range(5))), layer.out.tensor
    error = (written.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= (2e-2 if dtype == torch.bfloat16 else 5e-4 if is_quantized else 1e-5), error
    for row in (0, 3):
        assert torch.equal(layer.run([row])[0], written[row])


def test_program_when_python_is_called_between_then_it_works_on_rows() -> None:
    recorded = Recorded(3)
    given, result = recorded.holds(torch.randn(3, 40)), recorded.holds(torch.zeros(3, 40))
    doubled = recorded.make("add", given, given)
    # Scratch that is used between, which must not lie where a call still reads.
    recorded.make("mul", given, 3.0)
    recorded.operations.append(Call((doubled.storage,)))
    recorded.operations.append(Call((doubled.storage,)))
    recorded.write(result, "neg", doubled)
    program, held = recorded.program([0, 1, 2])
    program.take([Sequences((), 3)])
    at = program.memory_of(doubled.storage)

    def square() -> None:
        for row in range(3):
            numbers = np.ctypeslib.as_array((ctypes.c_float * 40).from_address(at.address + row * at.row_bytes))
            numbers *= numbers

    program.run([square, square])
    assert torch.allclose(held[result.storage], -((2 * held[given.storage]) ** 4))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("cosh", (3,), "no instruction cosh"),
        ("add", (3,), "of 1 operands"),
        ("neg", (2, 2, 2, 2, 2), "four dimensions"),
    ],
)
def test_program_when_an_instruction_is_not_known_then_it_says_which(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    strides = tuple(3**dim for dim in range(len(shape)))
    out, operand = Place(0, FLOAT32, 0, strides), Place(0, FLOAT32, 0, strides[::-1])
    with pytest.raises(ValueError, match=message):
        StepProgram([Instruction(name, shape, out, (operand,))], 1, {0: 4 * 3**6}, {})
