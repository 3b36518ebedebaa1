"""Conversations about documents: the engine of the commands `generate`, `chat` and `batch`."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .chat import MOST_TOGETHER, Chat, Turn
    from .choosing import not_followed
    from .generating import Answer, FinishReason, Generator
    from .prompts import ChatTemplate, DocumentPart, DocumentPrompt, PromptError, context_length
    from .settings import DEFAULT_BITS, AnswerSettings, SettingError
    from .states import CACHES, can_answer_together, is_out_of_memory

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
    "Generator",
    "PromptError",
    "SettingError",
    "Turn",
    "can_answer_together",
    "context_length",
    "is_out_of_memory",
    "not_followed",
]

__getattr__ = lazy_names(
    __name__,
    {
        "chat": ("MOST_TOGETHER", "Chat", "Turn"),
        "choosing": ("not_followed",),
        "generating": ("Answer", "FinishReason", "Generator"),
        "prompts": ("ChatTemplate", "DocumentPart", "DocumentPrompt", "PromptError", "context_length"),
        "settings": ("DEFAULT_BITS", "AnswerSettings", "SettingError"),
        "states": ("CACHES", "can_answer_together", "is_out_of_memory"),
    },
)
