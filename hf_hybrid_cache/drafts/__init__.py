"""Prompt lookup decoding: the next tokens are drafted from the text so far, and checked in one pass."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .draft_length import MOST_TOKENS as MOST_TOKENS
    from .draft_length import DraftLength as DraftLength
    from .draft_length import checked_drafts as checked_drafts
    from .index import Index as Index
    from .prompt_lookup import PromptLookup as PromptLookup

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "draft_length": ("MOST_TOKENS", "DraftLength", "checked_drafts"),
        "index": ("Index",),
        "prompt_lookup": ("PromptLookup",),
    },
)
