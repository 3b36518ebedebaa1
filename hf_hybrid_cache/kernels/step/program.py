"""The program of a decode step with its memory, as lists of operations of kernels."""

from collections.abc import Callable, Mapping, Sequence

from ..attention.stored_blocks import StoredBlocks
from .instructions import Memory, Operation


class StepProgram:
    """
    A step for a number of rows.

    Args:
        operations: in their order. Instructions that follow each other are one operation of the kernels.
        rows: their number.
        scratch: bytes of a row's storages that live within a step only, by their keys. Storages may lie in the same
            memory where one is used last before the other is used first, so a step finds nothing there of the step
            before.
        given: the storages that the caller holds, by their keys.

    Raises:
        ValueError: an instruction is none of `KINDS`, or has more than four dimensions that do not lie as one.
    """

    def __init__(
        self, operations: Sequence[Operation], rows: int, scratch: Mapping[int, int], given: Mapping[int, Memory]
    ):
        raise NotImplementedError

    def memory_of(self, storage: int) -> Memory:
        """Where a storage lies, of `scratch` or `given`."""
        raise NotImplementedError

    def take(self, layers: Sequence[StoredBlocks]) -> None:
        """
        Take the records of a cache's layers, which count the token to come already.

        Further tokens of the same blocks are counted there.
        """
        raise NotImplementedError

    def run(self, calls: Sequence[Callable[[], None]] = ()) -> None:
        """
        Run the step with what is in `given`, and with the last token of each record.

        Args:
            calls: what to do at each `Call`, in their order.

        Raises:
            MemoryError: the host had no memory for what a part works in; what the step writes is not whole.
        """
        raise NotImplementedError
