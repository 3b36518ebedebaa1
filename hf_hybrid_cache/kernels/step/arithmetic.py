"""
The arithmetic of rows: what each instruction does to vectors of sixteen floats, and loops over vectors in memory.

Functions are as accurate as torch's: to a few units of the last place, with its results for infinity, NaN and numbers
that are not normal. Polynomials without another source are those of Cephes (https://www.netlib.org/cephes, `single`).
"""

import math
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.vector_ir import CACHE_LINE, FLOAT, FLOATS, INT32, INT64, INTS, LOG2_E, floats, ints

# ln 2 as the difference of two floats, of which a small integer times the first is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, 2.12194440e-4
# Of (e^x - 1 - x) / x^2, x in [-ln 2 / 2, ln 2 / 2].
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Beyond these e^x is infinite, 0, and -1 when 1 is subtracted.
_LARGEST_EXP, _LEAST_EXP, _LEAST_EXPM1 = 89.0, -105.0, -30.0
# Of (ln(1 + x) - x + x^2 / 2) / x^3, 1 + x in [sqrt(1/2), sqrt(2)].
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
# Of (tanh(x) - x) / x^3 in x^2, x below `_TANH_END`.
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TANH_END = 0.625
# Of erf(x) / x - 1 in x^2, x below `_ERF_END`; and of ln(1 - erf(x)) + x above. The second begins with two in x, which
# are joined by x^2. From N. Juffa's `my_erff`, https://stackoverflow.com/questions/35148198.
_ERF = (
    -5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1,
)  # fmt: skip
_ERF_END = 0.927734375
_ERF_HIGH, _ERF_LOW = (-1.72853470e-5, 3.83197126e-4), (-3.88396438e-3, 2.42546219e-2)
_ERF_TAIL = (-1.06777877e-1, -6.34846687e-1, -1.28717512e-1)


def _polynomial(
    b: ir.IRBuilder, x: ir.Value, coefficients: Sequence[float], highest: ir.Value | None = None
) -> ir.Value:
    """A polynomial of the coefficients, the highest first; they follow `highest` if it is given."""
    value, left = (floats(coefficients[0]), coefficients[1:]) if highest is None else (highest, coefficients)
    for coefficient in left:
        value = vec.multiply_add(b, value, x, floats(coefficient))
    return value


def _is(b: ir.IRBuilder, comparison: str, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.fcmp_ordered(comparison, x, y)


def _is_nan(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.fcmp_unordered("uno", x, x)


def _between(b: ir.IRBuilder, x: ir.Value, least: float, largest: float) -> ir.Value:
    """The nearest number between two; NaN stays NaN."""
    x = b.select(_is(b, ">", x, floats(largest)), floats(largest), x)
    return b.select(_is(b, "<", x, floats(least)), floats(least), x)


def _with_sign_of(b: ir.IRBuilder, x: ir.Value, signed: ir.Value) -> ir.Value:
    """A number that is not negative, with the sign of another."""
    sign = b.and_(b.bitcast(signed, INTS), ints(0x80000000))
    return b.bitcast(b.or_(b.bitcast(x, INTS), sign), FLOATS)


def _power_of_two(b: ir.IRBuilder, exponent: ir.Value) -> ir.Value:
    """2 to the power of integers from -126 to 127."""
    return b.bitcast(b.shl(b.add(exponent, ints(127)), ints(23)), FLOATS)


def _reduced_exp(b: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """An integer n, and e^y - 1 for y = x - n ln 2."""
    exponent = vec.nearest_integers(b, x, floats(LOG2_E))
    whole = b.sitofp(exponent, FLOATS)
    rest = vec.multiply_add(b, whole, floats(-_LN2_HIGH), x)
    rest = vec.multiply_add(b, whole, floats(_LN2_LOW), rest)
    power = vec.multiply_add(b, _polynomial(b, rest, _EXP), b.fmul(rest, rest), rest)
    return exponent, power


def _exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    exponent, power = _reduced_exp(b, _between(b, x, _LEAST_EXP, _LARGEST_EXP))
    # In two steps, as the result may be below the normal numbers.
    half = b.ashr(exponent, ints(1))
    scaled = b.fmul(b.fadd(power, floats(1.0)), _power_of_two(b, half))
    return b.fmul(scaled, _power_of_two(b, b.sub(exponent, half)))


def _expm1(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    exponent, power = _reduced_exp(b, _between(b, x, _LEAST_EXPM1, _LARGEST_EXP))
    half = _power_of_two(b, b.sub(exponent, ints(1)))
    result = b.fmul(vec.multiply_add(b, power, half, b.fsub(half, floats(0.5))), floats(2.0))
    return b.select(_is(b, "==", x, floats(0.0)), x, result)


def _log(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    is_small = _is(b, "<", x, floats(2.0**-126))
    bits = b.bitcast(b.select(is_small, b.fmul(x, floats(2.0**25)), x), INTS)
    exponent = b.sub(b.ashr(bits, ints(23)), b.select(is_small, ints(126 + 25), ints(126)))
    fraction = b.bitcast(b.or_(b.and_(bits, ints(0x7FFFFF)), ints(0x3F000000)), FLOATS)
    is_low = _is(b, "<", fraction, floats(math.sqrt(0.5)))
    exponent = b.select(is_low, b.sub(exponent, ints(1)), exponent)
    f = b.fsub(b.select(is_low, b.fadd(fraction, fraction), fraction), floats(1.0))
    whole, square = b.sitofp(exponent, FLOATS), b.fmul(f, f)
    low = b.fmul(b.fmul(_polynomial(b, f, _LOG), f), square)
    low = vec.multiply_add(b, whole, floats(-_LN2_LOW), low)
    low = vec.multiply_add(b, square, floats(-0.5), low)
    result = vec.multiply_add(b, whole, floats(_LN2_HIGH), b.fadd(f, low))
    result = b.select(_is(b, "==", x, floats(math.inf)), x, result)
    result = b.select(_is(b, "==", x, floats(0.0)), floats(-math.inf), result)
    return b.select(b.fcmp_unordered(">=", x, floats(0.0)), b.select(_is_nan(b, x), x, result), floats(math.nan))


def _log1p(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    near = b.fadd(x, floats(1.0))
    # What the sum has lost counts for as much as it is of the sum.
    lost = b.fsub(x, b.fsub(near, floats(1.0)))
    correction = b.select(_is(b, "!=", lost, floats(0.0)), b.fdiv(lost, near), floats(0.0))
    result = b.fadd(_log(b, near), correction)
    return b.select(_is(b, "==", x, floats(0.0)), x, result)


def _tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    size, square = vec.absolute(b, x), b.fmul(x, x)
    small = vec.multiply_add(b, b.fmul(_polynomial(b, square, _TANH), square), x, x)
    power = _exp(b, b.fadd(size, size))
    large = b.fsub(floats(1.0), b.fdiv(floats(2.0), b.fadd(power, floats(1.0))))
    return b.select(_is(b, "<", size, floats(_TANH_END)), small, _with_sign_of(b, large, x))


def _sigmoid(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.fdiv(floats(1.0), b.fadd(floats(1.0), _exp(b, b.fneg(x))))


def _erf(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    size, square = vec.absolute(b, x), b.fmul(x, x)
    small = vec.multiply_add(b, _polynomial(b, square, _ERF), x, x)
    high, low = (_polynomial(b, size, each) for each in (_ERF_HIGH, _ERF_LOW))
    tail = _polynomial(b, size, _ERF_TAIL, vec.multiply_add(b, high, square, low))
    large = b.fsub(floats(1.0), _exp(b, vec.multiply_add(b, tail, size, b.fneg(size))))
    is_small = _is(b, "<", size, floats(_ERF_END))
    return b.select(is_small, small, b.select(_is_nan(b, x), x, _with_sign_of(b, large, x)))


def _sqrt(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return vec.call(b, "llvm.sqrt.v16f32", FLOATS, x)


def _maximum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.or_(_is(b, ">", x, y), _is_nan(b, x)), x, y)


def _minimum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.or_(_is(b, "<", x, y), _is_nan(b, x)), x, y)


def _truth(b: ir.IRBuilder, condition: ir.Value) -> ir.Value:
    return b.select(condition, floats(1.0), floats(0.0))


# Where it has a function of its own, see the errors in `tests/kernels/test_rows.py`. Truth is a number too: comparisons
# give 1 or 0, and `where` gives its second operand where the first is not 0.
_ELEMENTWISE: dict[str, Callable[..., ir.Value]] = {
    "copy": lambda b, x: x,
    "neg": lambda b, x: b.fneg(x),
    "abs": vec.absolute,
    "exp": _exp,
    "expm1": _expm1,
    "log": _log,
    "log1p": _log1p,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "sqrt": _sqrt,
    "rsqrt": lambda b, x: b.fdiv(floats(1.0), _sqrt(b, x)),
    "reciprocal": lambda b, x: b.fdiv(floats(1.0), x),
    "add": lambda b, x, y: b.fadd(x, y),
    "sub": lambda b, x, y: b.fsub(x, y),
    "mul": lambda b, x, y: b.fmul(x, y),
    "div": lambda b, x, y: b.fdiv(x, y),
    "maximum": _maximum,
    "minimum": _minimum,
    "eq": lambda b, x, y: _truth(b, _is(b, "==", x, y)),
    "ne": lambda b, x, y: _truth(b, b.fcmp_unordered("!=", x, y)),
    "lt": lambda b, x, y: _truth(b, _is(b, "<", x, y)),
    "le": lambda b, x, y: _truth(b, _is(b, "<=", x, y)),
    "gt": lambda b, x, y: _truth(b, _is(b, ">", x, y)),
    "ge": lambda b, x, y: _truth(b, _is(b, ">=", x, y)),
    "addcmul": lambda b, x, y, z: vec.multiply_add(b, y, z, x),
    "where": lambda b, x, y, z: b.select(b.fcmp_unordered("!=", x, floats(0.0)), y, z),
}
# What a reduction begins with, and how it goes on.
_REDUCTIONS: dict[str, tuple[float, Callable[..., ir.Value]]] = {
    "sum": (0.0, vec.add),
    "mean": (0.0, vec.add),
    "amax": (-math.inf, _maximum),
    "amin": (math.inf, _minimum),
}
NUM_OPERANDS = {name: len(signature(make).parameters) - 1 for name, make in _ELEMENTWISE.items()}
NUM_OPERANDS |= dict.fromkeys(_REDUCTIONS, 1)
REDUCTIONS = frozenset(_REDUCTIONS)
CODES = {name: code for code, name in enumerate(NUM_OPERANDS)}


def _switch(builder: ir.IRBuilder, code: ir.Value, cases: dict[int, Callable[[], None]]) -> None:
    """Generate code of which one case runs."""
    end = builder.append_basic_block("end")
    switch = builder.switch(code, end)
    for number, generate in cases.items():
        block = builder.append_basic_block("case")
        switch.add_case(INT64(number), block)
        builder.position_at_end(block)
        generate()
        builder.branch(end)
    builder.position_at_end(end)


@intrinsic
def compute(typing_context: Any, code: Any, operands: Any, out: Any, vectors: Any) -> Any:
    """
    Compute vectors of an instruction.

    code: one of `CODES`, of an instruction element by element; operands: address of the address and of the bytes from a
    vector to the next one, int64, of each of three operands; out: address; vectors: their number, at least one.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        code, operands, out, vectors = arguments
        numbers = [vec.load(builder, builder.add(operands, INT64(8 * index)), INT64) for index in range(6)]

        def loop(name: str) -> None:
            def step(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                places = [
                    builder.add(numbers[2 * which], builder.mul(index, numbers[2 * which + 1]))
                    for which in range(NUM_OPERANDS[name])
                ]
                result = _ELEMENTWISE[name](builder, *(vec.load(builder, place, FLOATS) for place in places))
                vec.store(builder, result, builder.add(out, builder.mul(index, INT64(CACHE_LINE))))
                return carried

            vec.loop(builder, vectors, [], step)

        _switch(builder, code, {CODES[name]: lambda name=name: loop(name) for name in _ELEMENTWISE})  # type: ignore[misc]
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def begin_reduction(typing_context: Any, code: Any, sums: Any) -> Any:
    """Write what a reduction begins with to sixteen floats, and return it."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        code, sums = arguments
        first = FLOAT(0.0)
        for name, (number, _) in _REDUCTIONS.items():
            is_it = builder.icmp_signed("==", code, INT64(CODES[name]))
            first = builder.select(is_it, FLOAT(number), first)
        vec.store(builder, vec.splat(builder, first), sums)
        return first

    return types.float32(types.int64, types.int64), generate


@intrinsic
def reduce(typing_context: Any, code: Any, source: Any, vectors: Any, sums: Any) -> Any:
    """
    Go on with a reduction, and return its result so far.

    code: one of `CODES`; source: address of vectors; vectors: their number, at least one; sums: address of the sixteen
    floats that `begin_reduction` has written.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        code, source, vectors, sums = arguments
        with builder.goto_entry_block():
            result = builder.alloca(FLOAT)

        def loop(name: str) -> None:
            join = _REDUCTIONS[name][1]

            def step(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                place = builder.add(source, builder.mul(index, INT64(CACHE_LINE)))
                return [join(builder, vec.load(builder, place, FLOATS), carried[0])]

            [joined] = vec.loop(builder, vectors, [vec.load(builder, sums, FLOATS)], step)
            vec.store(builder, joined, sums)
            for distance in (8, 4, 2, 1):
                lanes = [lane ^ distance for lane in range(vec.LANES)]
                joined = join(builder, joined, vec.shuffle(builder, joined, joined, lanes))
            builder.store(builder.extract_element(joined, INT32(0)), result)

        _switch(builder, code, {CODES[name]: lambda name=name: loop(name) for name in _REDUCTIONS})  # type: ignore[misc]
        return builder.load(result)

    return types.float32(*[types.int64] * 4), generate
