"""
The program of a decode step, as who records it writes it: for any number of rows, and without addresses.

A row is one new token of a sequence. All numbers that a step computes of it lie in storages, of which each row
has its own; weights and other constants are storages that all rows share.
"""

from typing import NamedTuple

from ..weights.products import Products

# Kinds of numbers in memory. Arithmetic is float32; what is written as bfloat16 is rounded to it once.
FLOAT32, BFLOAT16 = range(2)
ITEM_BYTES = {FLOAT32: 4, BFLOAT16: 2}


class Memory(NamedTuple):
    """
    A storage that the caller holds.

    Attributes:
        address: of its start, in row 0.
        row_bytes: from a row's to that of the next row; 0 for one that all rows share.
    """

    address: int
    row_bytes: int


class Place(NamedTuple):
    """
    An array of each row.

    Attributes:
        storage: key of a storage, of `scratch` or of `given` of `StepProgram`.
        kind: of its numbers, `FLOAT32` or `BFLOAT16`.
        offset: numbers from the start of the storage to the first one.
        strides: numbers from one to the next, of each dimension; 0 repeats.
    """

    storage: int
    kind: int
    offset: int
    strides: tuple[int, ...]


class Instruction(NamedTuple):
    """
    Numbers of a row, element by element or reduced.

    Attributes:
        name: a key of `NUM_OPERANDS`.
        shape: of the operands: any dimensions that, once those are joined that lie as one in all places, are at most
            four. A reduction is over the last one.
        out: written. Of a reduction it has no last dimension. It may be the same as an operand; it may not overlap one
            otherwise.
        operands: arrays of this shape, or numbers, which are rounded to float32.
    """

    name: str
    shape: tuple[int, ...]
    out: Place
    operands: tuple[Place | float, ...]


class ProductOf(NamedTuple):
    """
    A product of each row's numbers with a weight, `tokens @ weight.T + bias`.

    Attributes:
        products: with the weight, kept alive by the caller.
        which: index of the weight.
        tokens: `[columns]`, contiguous.
        out: written, `[rows of the weight]`, contiguous.
        bias: `[rows of the weight]`, contiguous, of a storage that all rows share; `None` for none.
    """

    products: Products
    which: int
    tokens: Place
    out: Place
    bias: Place | None = None


class Multiply(NamedTuple):
    """Products that are made together. None takes what another one gives."""

    products: tuple[ProductOf, ...]


class Attend(NamedTuple):
    """
    Attention of each row's token to tokens of a layer of the cache, see `StepProgram.see`.

    Attributes:
        layer: index of the blocks in what `StepProgram.take` is given.
        query: `[query heads, key_dim]`; its last dimension is contiguous.
        keys: `[KV heads, key_dim]`, in any strides, of the kind of the blocks; written to them first. `None` where the
            blocks have the token already, as in layers that share those of another one.
        values: `[KV heads, value_dim]`, likewise.
        out: written, `[query heads, value_dim]`; its last dimension is contiguous.
        num_kv_heads: of a row.
        group: query heads that share a KV head; those of one follow each other.
        key_dim: width of a key.
        value_dim: width of a value.
        scale: of the scores.
        cap: scores are `cap * tanh(scale * product / cap)`; `None` for the products themselves.
        sinks: `[query heads]`, the score of one more token of each head whose value is zero; `None` for none.
        mask: its number in `Seen`, which says what rows see.
    """

    layer: int
    query: Place
    keys: Place | None
    values: Place | None
    out: Place
    num_kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    scale: float
    cap: float | None = None
    sinks: Place | None = None
    mask: int = 0


class Call(NamedTuple):
    """
    A function that the caller calls between two runs of the kernels, see `StepProgram.run`.

    Attributes:
        storages: keys of those of `scratch` that it reads or writes.
    """

    storages: tuple[int, ...]


Operation = Instruction | Multiply | Attend | Call
