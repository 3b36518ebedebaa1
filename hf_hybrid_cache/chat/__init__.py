"""Conversations about documents: the engine of the commands `generate`, `chat` and `batch`."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .chat import MOST_TOGETHER, Chat, OpenAnswerError, Turn
    from .choosing import not_followed
    from .generating import Answer, FinishReason, Generation, Generator
    from .prompts import Asked, ChatTemplate, DocumentPart, DocumentPrompt, PromptError, context_length
    from .settings import DEFAULT_BITS, AnswerSettings, SettingError
    from .tracked_cache import CACHES, TrackedCache, cache_maker, can_answer_together, is_out_of_memory

__all__ = [
    "CACHES",
    "DEFAULT_BITS",
    "MOST_TOGETHER",
    "Answer",
    "AnswerSettings",
    "Asked",
    "Chat",
    "ChatTemplate",
    "DocumentPart",
    "DocumentPrompt",
    "FinishReason",
    "Generation",
    "Generator",
    "OpenAnswerError",
    "PromptError",
    "SettingError",
    "TrackedCache",
    "Turn",
    "cache_maker",
    "can_answer_together",
    "context_length",
    "is_out_of_memory",
    "not_followed",
]

__getattr__ = lazy_names(
    __name__,
    {
        "chat": ("MOST_TOGETHER", "Chat", "OpenAnswerError", "Turn"),
        "choosing": ("not_followed",),
        "generating": ("Answer", "FinishReason", "Generation", "Generator"),
        "prompts": ("Asked", "ChatTemplate", "DocumentPart", "DocumentPrompt", "PromptError", "context_length"),
        "settings": ("DEFAULT_BITS", "AnswerSettings", "SettingError"),
        "tracked_cache": ("CACHES", "TrackedCache", "cache_maker", "can_answer_together", "is_out_of_memory"),
    },
)
