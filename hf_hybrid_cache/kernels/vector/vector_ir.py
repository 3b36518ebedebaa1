"""
LLVM instructions for vectors of sixteen floats.

LLVM splits a vector of sixteen into the processor's registers: one with AVX-512, two with AVX2, four with SSE or Neon.
The instructions are written out because LLVM's vectoriser prefers 256 bits and spills the accumulators of a tile, which
is 2.3 times slower (docs/log.md).
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import initialize_native_asmparser
from numba import types
from numba.core import cgutils

from .processor import has_feature

# Dot products are inline assembly. Numba's cache may bring it to a process that generates none, and LLVM aborts if the
# assembly parser is missing.
initialize_native_asmparser()

LANES = 16
# Tokens of a block of keys and values, as the kernels read them, see `forms.blocks`.
BLOCK = 64
CACHE_LINE = 64
LOG2_E = math.log2(math.e)

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
FOUR = ir.VectorType(FLOAT, 4)
INTS = ir.VectorType(INT32, LANES)

# Bytes of a number, by element type: `uint16` is bfloat16, the upper half of a float32; `int16` is half precision.
ITEM_BYTES = {types.float32: 4, types.uint16: 2, types.int16: 2}

# Smaller floats do not matter beside any number of a model, and their reciprocal would overflow.
NEGLIGIBLE = 1e-30


def floats(value: float) -> ir.Constant:
    """A vector with `value` in all lanes."""
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


def ints(value: int, lanes: int = LANES) -> ir.Constant:
    return ir.Constant(ir.VectorType(INT32, lanes), [value] * lanes)


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    """A vector with `scalar` in all lanes."""
    nothing = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    return shuffle(builder, builder.insert_element(nothing, scalar, INT32(0)), nothing, [0] * lanes)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _are_paired(dtype: Any, count: int) -> bool:
    """Whether `load_vectors` gives the even and the odd elements of 32, instead of the first and the last sixteen."""
    return dtype == types.uint16 and count > 1


def in_order(builder: ir.IRBuilder, dtype: Any, vectors: list[ir.Value], count: int) -> list[ir.Value]:
    """Bring vectors from the order of `load_vectors`, of `count` vectors each, to the order of memory."""
    if not _are_paired(dtype, count):
        return vectors
    mixed = [lane // 2 + lane % 2 * LANES for lane in range(2 * LANES)]
    halves = mixed[:LANES], mixed[LANES:]
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [shuffle(builder, even, odd, half) for even, odd in pairs for half in halves]


def as_loaded(builder: ir.IRBuilder, dtype: Any, vectors: list[ir.Value], count: int) -> list[ir.Value]:
    """Bring vectors from the order of memory to the order of `load_vectors`: the inverse of `in_order`."""
    if not _are_paired(dtype, count):
        return vectors
    halves = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [shuffle(builder, first, last, half) for first, last in pairs for half in halves]


def load_vectors(context: Any, builder: ir.IRBuilder, dtype: Any, address: ir.Value, count: int) -> list[ir.Value]:
    """Load `count` consecutive vectors of sixteen elements as floats; see `_are_paired` for the order."""
    step = LANES * ITEM_BYTES[dtype]
    if _are_paired(dtype, count):
        # Each of the two elements in 32 bits becomes a float by one instruction.
        twos = [load(builder, builder.add(address, INT64(index * 2 * step)), INTS) for index in range(count // 2)]
        evens = [builder.shl(each, ints(16)) for each in twos]
        odds = [builder.and_(each, ints(0xFFFF0000)) for each in twos]
        return [builder.bitcast(half, FLOATS) for pair in zip(evens, odds, strict=True) for half in pair]
    addresses = [builder.add(address, INT64(index * step)) for index in range(count)]
    if dtype == types.float32:
        return [load(builder, each, FLOATS) for each in addresses]
    if dtype == types.int16 and has_feature(context, "f16c"):
        halves = ir.VectorType(ir.HalfType(), LANES)
        return [builder.fpext(load(builder, each, halves), FLOATS) for each in addresses]
    bits = [builder.zext(load(builder, each, ir.VectorType(INT16, LANES)), INTS) for each in addresses]
    if dtype == types.uint16:
        return [builder.bitcast(builder.shl(each, ints(16)), FLOATS) for each in bits]
    return [_half_to_float(builder, each) for each in bits]


def _half_to_float(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Convert half precision by integer arithmetic: shift the exponent into place and correct its bias."""
    magnitude = builder.bitcast(builder.shl(builder.and_(bits, ints(0x7FFF)), ints(13)), FLOATS)
    number = builder.bitcast(builder.fmul(magnitude, floats(2.0**112)), INTS)
    exponent = builder.and_(bits, ints(0x7C00))
    not_finite = builder.icmp_unsigned("==", exponent, ints(0x7C00))
    number = builder.select(not_finite, builder.or_(number, ints(0x7F800000)), number)
    sign = builder.shl(builder.and_(bits, ints(0x8000)), ints(16))
    return builder.bitcast(builder.or_(number, sign), FLOATS)


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """A * b + c, in one instruction if the processor has it."""
    return call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, a, b, c)


def shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Iterable[int]) -> ir.Value:
    """Choose lanes of `a`, which count from 0, and of `b`, which count on after those of `a`."""
    chosen = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(chosen)), chosen))


def reduced(builder: ir.IRBuilder, vectors: list[ir.Value], operation: Any) -> ir.Value:
    """Fold vectors into one, lane by lane."""
    return functools.reduce(functools.partial(operation, builder), vectors)


def total(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of sixteen floats."""
    for distance in (8, 4, 2, 1):
        vector = builder.fadd(vector, shuffle(builder, vector, vector, [lane ^ distance for lane in range(LANES)]))
    return builder.extract_element(vector, INT32(0))


def fold(
    builder: ir.IRBuilder,
    vectors: Sequence[ir.Value],
    operation: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value],
) -> ir.Value:
    """Fold each of four vectors into one number; the first four lanes of the result hold the first number."""
    a, b, c, d = vectors

    def join(left: ir.Value, right: ir.Value, run: int) -> ir.Value:
        firsts = [lane for lane in range(2 * LANES) if lane % (2 * run) < run]
        seconds = [lane + run for lane in firsts]
        return operation(builder, shuffle(builder, left, right, firsts), shuffle(builder, left, right, seconds))

    folded = join(join(a, b, 8), join(c, d, 8), 4)
    for distance in (2, 1):
        folded = operation(
            builder, folded, shuffle(builder, folded, folded, [lane ^ distance for lane in range(LANES)])
        )
    return folded


def transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of sixteen vectors. First halves change places, then quarters, then eighths, then sixteenths."""
    for half in (8, 4, 2, 1):
        # `firsts` takes the left vector's lanes whose bit `half` is not set, `seconds` the right one's whose bit is
        # set.
        firsts = [lane if not lane & half else LANES + lane - half for lane in range(LANES)]
        seconds = [lane + half if not lane & half else LANES + lane for lane in range(LANES)]
        joined = list(rows)
        for index in range(LANES):
            if not index & half:
                pair = rows[index], rows[index + half]
                joined[index] = shuffle(builder, *pair, firsts)
                joined[index + half] = shuffle(builder, *pair, seconds)
        rows = joined
    return rows


def load_four(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Load four floats, each into four lanes, as `fold` gives them."""
    four = load(builder, address, FOUR)
    return shuffle(builder, four, four, [lane // 4 for lane in range(LANES)])


def store_four(builder: ir.IRBuilder, vector: ir.Value, address: ir.Value) -> None:
    store(builder, shuffle(builder, vector, vector, range(0, LANES, 4)), address)


def splat_fourth(builder: ir.IRBuilder, vector: ir.Value, index: int) -> ir.Value:
    """A vector with one of the four numbers that `fold` gives in all lanes."""
    return shuffle(builder, vector, vector, [4 * index] * LANES)


def narrowed(
    context: Any, builder: ir.IRBuilder, vectors: Sequence[ir.Value], kind: ir.Type, order: Sequence[int]
) -> ir.Value:
    """Truncate vectors of integers to `kind`, with the lanes of each in `order`, and concatenate them."""
    if kind.width > 8 or len(vectors) == 1 or not has_feature(context, "avx512vbmi"):
        narrow = [builder.trunc(vector, ir.VectorType(kind, LANES)) for vector in vectors]
        return joined(builder, [shuffle(builder, each, each, order) for each in narrow])
    per_lane = INT32.width // kind.width
    parts = [builder.bitcast(vector, ir.VectorType(kind, LANES * per_lane)) for vector in vectors]
    places = [lane * per_lane for lane in order]
    # The processor picks bytes from two vectors in one instruction.
    second = [LANES * per_lane + place for place in places]
    return joined(
        builder, [shuffle(builder, a, b, places + second) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    )


def joined(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """Concatenate vectors of the same length; their number is a power of two."""
    parts = list(vectors)
    while len(parts) > 1:
        lanes = range(2 * parts[0].type.count)
        parts = [shuffle(builder, a, b, lanes) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fadd(a, b)


def maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of the two, and `b` if either is NaN: one instruction of x86-64."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def absolute(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    return call(builder, "llvm.fabs.v16f32", FLOATS, vector)


def prefetch(builder: ir.IRBuilder, address: ir.Value, num_bytes: int) -> None:
    """Prefetch the cache lines from `address` on into the second-level cache; any address is allowed."""
    pointer = INT8.as_pointer()
    function = _intrinsic(builder, "llvm.prefetch.p0i8", ir.VoidType(), [pointer, INT32, INT32, INT32])
    for offset in range(0, num_bytes, CACHE_LINE):
        line = builder.inttoptr(builder.add(address, INT64(offset)), pointer)
        builder.call(function, [line, INT32(0), INT32(2), INT32(1)])


# Adding `_SHIFT` to a float leaves its nearest integer in the last bits.
_SHIFT, _SHIFT_BITS = 12582912.0, 0x4B400000


def nearest_integers(builder: ir.IRBuilder, numbers: ir.Value, factors: ir.Value) -> ir.Value:
    """The nearest integers of numbers * factors, of at most 22 bits."""
    return builder.sub(shifted_integers(builder, numbers, factors), ints(_SHIFT_BITS))


def shifted_integers(builder: ir.IRBuilder, numbers: ir.Value, factors: ir.Value) -> ir.Value:
    """The nearest integers of numbers * factors, each plus `_SHIFT_BITS`; their last 22 bits are right."""
    return builder.bitcast(multiply_add(builder, numbers, factors, floats(_SHIFT)), INTS)


def without_shift(builder: ir.IRBuilder, sums: ir.Value, count: ir.Value) -> ir.Value:
    """The sum of `count` integers, from the sum of as many shifted ones."""
    return builder.sub(sums, splat(builder, builder.mul(builder.trunc(count, INT32), INT32(_SHIFT_BITS))))


def rounded_to_bfloat16(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """Integers whose upper halves are the nearest bfloat16 of sixteen finite floats."""
    bits = builder.bitcast(numbers, INTS)
    is_odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    return builder.add(bits, builder.add(is_odd, ints(0x7FFF)))


def _bits_of_bfloat16(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """Integers whose upper halves are the nearest bfloat16 of sixteen floats; NaN stays NaN."""
    not_a_number = builder.or_(builder.bitcast(numbers, INTS), ints(0x400000))
    is_number = builder.fcmp_ordered("ord", numbers, numbers)
    return builder.select(is_number, rounded_to_bfloat16(builder, numbers), not_a_number)


def rounded_to(builder: ir.IRBuilder, numbers: ir.Value, dtype: Any) -> ir.Value:
    """Sixteen floats, rounded to bfloat16 if `dtype` is uint16."""
    if dtype != types.uint16:
        return numbers
    return builder.bitcast(builder.and_(_bits_of_bfloat16(builder, numbers), ints(0xFFFF0000)), FLOATS)


def of_either_type(builder: ir.IRBuilder, is_bfloat16: ir.Value, run: Callable[[Any], Any]) -> Any:
    """Generate code by `run(dtype)` for bfloat16 and for float32, of which one runs; what it returns, if anything."""
    with builder.if_else(is_bfloat16) as (then, otherwise):
        with then:
            of_bfloat16, end_of_bfloat16 = run(types.uint16), builder.block
        with otherwise:
            of_float32, end_of_float32 = run(types.float32), builder.block
    if of_bfloat16 is None:
        return None
    result = builder.phi(of_bfloat16.type)
    result.add_incoming(of_bfloat16, end_of_bfloat16)
    result.add_incoming(of_float32, end_of_float32)
    return result


def store_as(builder: ir.IRBuilder, numbers: ir.Value, dtype: Any, address: ir.Value) -> None:
    """Store sixteen floats as float32, or rounded to bfloat16 if `dtype` is uint16."""
    if dtype == types.uint16:
        halves = builder.trunc(builder.lshr(_bits_of_bfloat16(builder, numbers), ints(16)), ir.VectorType(INT16, LANES))
        builder.store(halves, builder.inttoptr(address, halves.type.as_pointer()), align=2)
    else:
        store(builder, numbers, address)


# Coefficients of 1, x, x^2, ..., by degree; relative errors are 1e-7 and 3e-6.
_EXP2_COEFFICIENTS = {
    6: (
        1.0,
        0.6931471880262281,
        0.24022650760567918,
        0.055503571142199365,
        0.009618082557297484,
        0.0013390863364337894,
        0.00015453162940998934,
    ),
    4: (1.0, 0.6931241750717163, 0.24024099111557007, 0.05590642988681793, 0.009582854807376862),
}


def exp2(context: Any, builder: ir.IRBuilder, x: ir.Value, degree: int) -> ir.Value:
    """
    2 to the power of sixteen floats of at most 0.

    The relative error is 1e-7 for degree 6 and 3e-6 for degree 4. Powers of numbers below -126 are 0, NaN stays NaN.
    The nearest integer is split off; a polynomial gives the power of the rest, in [-0.5, 0.5]. Of degree 6 it is
    Chebyshev's interpolation; of degree 4 it has the least relative error of those that are 1 at 0.
    """
    if has_feature(context, "avx512f"):
        whole = call(builder, "llvm.nearbyint.v16f32", FLOATS, x)
        power = _of_fraction(builder, builder.fsub(x, whole), degree)
        is_left = builder.bitcast(builder.fcmp_unordered(">=", x, floats(-126.0)), INT16)
        to_nearest = INT32(4)
        arguments = power, whole, floats(0.0), is_left, to_nearest
        return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, *arguments)
    # The last bits of a shifted float hold the nearest integer.
    shifted = builder.fadd(x, floats(_SHIFT))
    power = _of_fraction(builder, builder.fsub(x, builder.fsub(shifted, floats(_SHIFT))), degree)
    exponent = builder.shl(builder.bitcast(shifted, INTS), ints(23))
    power = builder.bitcast(builder.add(builder.bitcast(power, INTS), exponent), FLOATS)
    # Adding to the exponent could turn NaN into a number.
    otherwise = maximum(builder, floats(0.0), x)
    return builder.select(builder.fcmp_ordered(">=", x, floats(-126.0)), power, otherwise)


def _of_fraction(builder: ir.IRBuilder, fraction: ir.Value, degree: int) -> ir.Value:
    highest, *others = reversed(_EXP2_COEFFICIENTS[degree])
    power = floats(highest)
    for coefficient in others:
        power = multiply_add(builder, power, fraction, floats(coefficient))
    return power


def loop(
    builder: ir.IRBuilder,
    count: ir.Value,
    carried: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """
    Run `body(index, values)` for `count` indices, at least one.

    `values` are the results of `body` for the index before; they are `carried` for the first index. They stay in
    registers.
    """
    before, function = builder.block, builder.function
    head, done = function.append_basic_block("loop"), function.append_basic_block("done")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(INT64)
    index.add_incoming(INT64(0), before)
    values = []
    for initial in carried:
        value = builder.phi(initial.type)
        value.add_incoming(initial, before)
        values.append(value)
    results = body(index, values)
    following = builder.add(index, INT64(1))
    index.add_incoming(following, builder.block)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), head, done)
    builder.position_at_end(done)
    return results


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    return builder.call(_intrinsic(builder, name, result, [argument.type for argument in arguments]), arguments)


def _intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Function:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
