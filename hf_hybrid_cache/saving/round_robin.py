"""Writing the parts of a file by several processes, which continue and fail together."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..processes import OutOfStepError, Peers
from .errors import CacheFileError
from .sections import CODEC_SECTIONS, Section


class RoundRobin:
    """
    Lets all processes agree before each piece that they continue, so that they fail together.

    Attributes:
        is_taking_one: whether the others are waited for; what is raised meanwhile they cannot be told.
    """

    def __init__(self, peers: Peers, path: Path):
        self._peers, self._path = peers, path
        self.is_taking_one = False

    def take(self, is_good: bool = True) -> None:
        """
        Tell the others whether this process goes on.

        Raises:
            CacheFileError: another one does not.
        """
        self.is_taking_one = True
        go_on = self._peers.numbers(int(is_good))
        self.is_taking_one = False
        if is_good and not all(go_on):
            writer = self._peers.rank_of_all(0)
            raise CacheFileError(self._path, f"was not written: rank {writer} could not, and says why.")

    def before_each(self, pieces_of: Callable[[], Iterable[Iterable[torch.Tensor]]]) -> Callable[[], Any]:
        """Return the same pieces, with a turn before each of them."""

        def in_turns(tensor: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
            made = iter(tensor)
            while True:
                self.take()
                self.is_taking_one = True  # others may be needed to make it
                piece = next(made, None)
                self.is_taking_one = False
                if piece is None:
                    return
                yield piece

        return lambda: (in_turns(tensor) for tensor in pieces_of())

    def require_same(self, sections: Sequence[Section]) -> None:
        """
        Check that all processes hold as much, quantized in the same way.

        Raises:
            OutOfStepError: they do not.
        """
        forms = repr([(section.name, list(section.forms.items())) for section in sections])
        checksum = zlib.crc32(forms.encode())
        for section in sections:
            if section.name.startswith(CODEC_SECTIONS):
                for tensor in section.pieces():
                    for part in tensor:
                        checksum = zlib.crc32(part.numpy().tobytes(), checksum)
        told = self._peers.numbers(checksum)
        different = [self._peers.rank_of_all(rank) for rank, each in enumerate(told) if each != told[0]]
        if different:
            raise OutOfStepError(
                f"The caches of ranks {self._peers.rank_of_all(0)} and {', '.join(map(str, different))} hold different "
                f"tokens, or codes of another form: {self._path} was not written. Call the model in all processes with "
                "the same inputs and options."
            )
