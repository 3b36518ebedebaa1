"""The offset of positions that images leave behind, which models keep outside of the cache."""

import os
import weakref

import torch

from ...files import CacheFileError
from .callers import counter_from_images


class ImagePositions:
    """
    Notes the offset from which a model such as Qwen2-VL counts positions after images, and refuses files without it.

    The model sets it between its question for the length of the cache and its first states.

    Attributes:
        has_asked: the model, from its question to its first states.
    """

    def __init__(self) -> None:
        self.has_asked: weakref.ref[torch.nn.Module] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the offset."""
        self._rope_deltas: torch.Tensor | None = None

    def note_question(self) -> None:
        """Note the model, if it asks for the length of the cache to count positions."""
        counter = counter_from_images()
        if counter is not None:
            self.has_asked = weakref.ref(counter)

    def note_stored(self) -> None:
        """Note the offset of the model that has asked, now that states of its are stored."""
        if self.has_asked is not None:
            self._rope_deltas = getattr(self.has_asked(), "rope_deltas", None)
            self.has_asked = None

    def refuse_file(self, path: str | os.PathLike[str]) -> None:
        """Raise `CacheFileError` if positions go on from images: in another process they would go on elsewhere."""
        if self._rope_deltas is not None and bool(self._rope_deltas.any()):
            raise CacheFileError(
                path,
                "was not written: positions go on from images, by an offset that the model keeps itself (rope_deltas), "
                "so an answer from the file would be another one. Here use copy.deepcopy(cache); for another process "
                "keep text and images, and read them again.",
            )
