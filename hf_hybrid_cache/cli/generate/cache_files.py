"""The files that `generate` keeps a cache in, or takes one from."""

from dataclasses import dataclass
from pathlib import Path

from ...saving import require_place
from ..console import UsageError
from ..replaced_file import replaced_file


@dataclass(frozen=True)
class CacheFiles:
    """
    The files that the cache of a document is saved to or loaded from, or the folder that keeps prompts.

    Attributes:
        save: the file that the cache is written to; `None` writes none.
        load: the file that the cache is read from; `None` for a new cache.
        keep: the folder that the prompt is looked for in, and kept in; `None` for no such folder.
        is_forced: whether `save` may replace a file that is not a cache.

    Raises:
        UsageError: two options exclude each other.
    """

    save: Path | None = None
    load: Path | None = None
    keep: Path | None = None
    is_forced: bool = False

    def __post_init__(self) -> None:
        if self.save and self.load:
            raise UsageError("--save-cache and --load-cache do not go together: copy the file.")
        if self.keep and (self.save or self.load):
            raise UsageError("--keep keeps the document by itself: drop --save-cache and --load-cache, or --keep.")
        if self.is_forced and not self.save:
            raise UsageError("--force is for --save-cache: drop it.")

    @property
    def option(self) -> str | None:
        """The option that was given; `None` without one."""
        given = {"--save-cache": self.save, "--load-cache": self.load, "--keep": self.keep}
        return next((option for option, path in given.items() if path is not None), None)

    def checked_place(self) -> str | None:
        """
        Check that a cache can be written, and return the kind of file that it replaces, if any.

        Raises:
            CacheFileError: no file can be written there.
            UsageError: the file there is not a cache, and `is_forced` is false.
        """
        if self.save is None:
            return None
        require_place(self.save)
        return replaced_file(self.save, self.is_forced, "--force")
