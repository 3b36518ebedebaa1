"""The stored beginning of a prompt."""

from collections.abc import Sequence
from typing import BinaryIO, Self

from .search import Part


class Match:
    """
    The stored beginning of a prompt, in use until it is closed. A context manager.

    While it is in use the store does not remove its nodes. Where there are no locks it may; readers on POSIX then keep
    what they have open or mapped, and opening the others fails with `NodeFileError`. A process that is forked meanwhile
    uses them, too, until it ends.

    Args:
        parts: in order, without holes.
        pin: the last node's file, whose lock is shared; it protects those before it, which it continues.

    Attributes:
        parts: as given.
        num_tokens: of the prompt that are stored.
    """

    def __init__(self, parts: Sequence[Part] = (), pin: BinaryIO | None = None):
        self.parts, self._pin = tuple(parts), pin
        self.num_tokens = self.parts[-1].end if self.parts else 0

    def part_before(self, position: int) -> Part | None:
        """Return the part with the token before a position; `None` at the start and beyond the end."""
        return next((part for part in self.parts if part.file.head.start < position <= part.end), None)

    def close(self) -> None:
        if self._pin is not None:
            self._pin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
