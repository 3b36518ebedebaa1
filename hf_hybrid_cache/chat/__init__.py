"""Conversations about documents: the engine of the commands `generate`, `chat` and `batch`."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .chat import CACHES, DEFAULT_BITS, MOST_TOGETHER, Chat, Turn, is_out_of_memory
    from .generating import Answer, FinishReason
    from .prompts import ChatTemplate, DocumentPart, DocumentPrompt, PromptError, context_length
    from .settings import AnswerSettings, SettingError

__all__ = [
    "CACHES",
    "DEFAULT_BITS",
    "MOST_TOGETHER",
    "Answer",
    "AnswerSettings",
    "Chat",
    "ChatTemplate",
    "DocumentPart",
    "DocumentPrompt",
    "FinishReason",
    "PromptError",
    "SettingError",
    "Turn",
    "context_length",
    "is_out_of_memory",
]

__getattr__ = lazy_names(
    __name__,
    {
        "chat": ("CACHES", "DEFAULT_BITS", "MOST_TOGETHER", "Chat", "Turn", "is_out_of_memory"),
        "generating": ("Answer", "FinishReason"),
        "prompts": ("ChatTemplate", "DocumentPart", "DocumentPrompt", "PromptError", "context_length"),
        "settings": ("AnswerSettings", "SettingError"),
    },
)
