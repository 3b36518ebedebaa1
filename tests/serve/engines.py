"""An engine in this process, and its answers."""

from collections.abc import Callable
from typing import Any

from hf_hybrid_cache import PrefixStore
from hf_hybrid_cache.chat import AnswerSettings, Call, Conversation, Thought
from hf_hybrid_cache.serve.engine import Answered, Engine
from hf_hybrid_cache.serve.logprobs import Piece


class Asking:
    """
    An engine in this process.

    Args:
        model: that answers.
        tokenizer: of the model.
        store: of prompts.
        options: of the engine.
    """

    def __init__(self, model: Any, tokenizer: Any, store: PrefixStore, **options: Any):
        self.model, self.tokenizer = model, tokenizer
        options = {"memory_bytes": None, "remark": print, "cache": "dynamic"} | options
        self.engine = Engine(model, tokenizer, store, **options)

    def answer(
        self,
        asked: Conversation | str,
        settings: AnswerSettings,
        look: Callable[[], object] = lambda: None,
        number: int = 1,
    ) -> tuple[str, Answered, list[Call]]:
        """Return the text of an answer without its thought, its end, and the calls in it."""
        *pieces, end = self.engine.answer(asked, settings, look, number)
        assert isinstance(end, Answered)
        told = [each for each in pieces if isinstance(each, Piece)]
        text = "".join(each.text for each in told if not isinstance(each.text, Thought))
        return text, end, [each.call for each in told if each.call]
