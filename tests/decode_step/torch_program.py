"""The program of a decode step, run by torch: what the kernels are compared with."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_hybrid_cache.kernels import BFLOAT16, REDUCTIONS, Attend, Call, Instruction, Memory, Multiply, Operation, Place

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "copy": lambda x: x,
    "neg": torch.neg,
    "div": torch.div,
    "addcmul": lambda a, b, c: a + b * c,
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
}


def tensor_at(address: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    num_bytes -= num_bytes % dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=dtype)


class TorchProgram:
    """As `StepProgram`; attention is none of its operations."""

    def __init__(
        self, operations: Sequence[Operation], rows: int, scratch: Mapping[int, int], given: Mapping[int, Memory]
    ):
        self.operations, self.rows = operations, rows
        self._scratch = {
            key: torch.full((rows, -(-size // 64) * 64), 255, dtype=torch.uint8) for key, size in scratch.items()
        }
        of_scratch = {key: Memory(each.data_ptr(), each.stride(0)) for key, each in self._scratch.items()}
        self._memory = {**given, **of_scratch}
        assert not any(isinstance(each, Attend) for each in operations)

    def memory_of(self, storage: int) -> Memory:
        return self._memory[storage]

    def take(self, layers: Any) -> None:
        assert not layers

    def run(self, calls: Sequence[Callable[[], None]] = ()) -> None:
        in_turn = iter(calls)
        for operation in self.operations:
            if isinstance(operation, Call):
                next(in_turn)()
            for row in range(self.rows):
                if isinstance(operation, Instruction):
                    self._instruct(operation, row)
                if isinstance(operation, Multiply):
                    self._multiply(operation, row)

    def _place(self, place: Place, shape: tuple[int, ...], row: int) -> torch.Tensor:
        dtype = torch.bfloat16 if place.kind == BFLOAT16 else torch.float32
        memory = self._memory[place.storage]
        last = place.offset + sum((size - 1) * stride for size, stride in zip(shape, place.strides, strict=True))
        numbers = tensor_at(memory.address + row * memory.row_bytes, (last + 1) * dtype.itemsize, dtype)
        return numbers.as_strided(shape, place.strides, place.offset)

    def _instruct(self, given: Instruction, row: int) -> None:
        operands = [
            self._place(each, given.shape, row).float() if isinstance(each, Place) else torch.tensor(each)
            for each in given.operands
        ]
        function = _FUNCTIONS.get(given.name) or getattr(torch, given.name)
        shape = given.shape[:-1] if given.name in REDUCTIONS else given.shape
        self._place(given.out, shape, row).copy_(function(*operands))

    def _multiply(self, given: Multiply, row: int) -> None:
        for each in given.products:
            weights = each.products.weights
            tokens = self._place(each.tokens, (weights.columns,), row)
            out = self._place(each.out, (weights.rows,), row)
            bias = 0 if each.bias is None else each.bias
            is_bfloat16 = each.tokens.kind == BFLOAT16
            at_bias = 0 if each.bias is None else self._place(each.bias, (weights.rows,), 0).data_ptr()
            wrong = each.products.multiply(each.which, tokens.data_ptr(), 1, is_bfloat16, at_bias, out.data_ptr())
            assert not wrong, bias
