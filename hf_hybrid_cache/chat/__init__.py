"""Conversations about documents: the engine of the commands `generate`, `chat` and `batch`."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .chat import Chat as Chat
    from .chat import OpenAnswerError as OpenAnswerError
    from .chat import Turn as Turn
    from .choosing import TokenChoice as TokenChoice
    from .choosing import not_followed as not_followed
    from .choosing import sampling as sampling
    from .generating import Answer as Answer
    from .generating import FinishReason as FinishReason
    from .generating import Generation as Generation
    from .generating import Generator as Generator
    from .prompts import Asked as Asked
    from .prompts import ChatTemplate as ChatTemplate
    from .prompts import DocumentPart as DocumentPart
    from .prompts import DocumentPrompt as DocumentPrompt
    from .prompts import PromptError as PromptError
    from .prompts import context_length as context_length
    from .prompts import room_for_answer as room_for_answer
    from .settings import DEFAULT_BITS as DEFAULT_BITS
    from .settings import AnswerSettings as AnswerSettings
    from .settings import SettingError as SettingError
    from .thinking import Thought as Thought
    from .tools import Call as Call
    from .tools import CallForm as CallForm
    from .tools import Conversation as Conversation
    from .tools import Message as Message
    from .tools import arguments_text as arguments_text
    from .tracked_cache import CACHES as CACHES
    from .tracked_cache import TrackedCache as TrackedCache
    from .tracked_cache import cache_maker as cache_maker
    from .tracked_cache import can_answer_together as can_answer_together
    from .tracked_cache import is_out_of_memory as is_out_of_memory

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "chat": ("Chat", "OpenAnswerError", "Turn"),
        "choosing": ("TokenChoice", "not_followed", "sampling"),
        "generating": ("Answer", "FinishReason", "Generation", "Generator"),
        "prompts": (
            *("Asked", "ChatTemplate", "DocumentPart", "DocumentPrompt", "PromptError"),
            *("context_length", "room_for_answer"),
        ),
        "settings": ("DEFAULT_BITS", "AnswerSettings", "SettingError"),
        "thinking": ("Thought",),
        "tools": ("Call", "CallForm", "Conversation", "Message", "arguments_text"),
        "tracked_cache": ("CACHES", "TrackedCache", "cache_maker", "can_answer_together", "is_out_of_memory"),
    },
)
