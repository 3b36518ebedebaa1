"""A conversation that is kept in a store, and its document, which comes from there."""

from collections.abc import Callable

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ...cache import HybridCache
from ...errors import HybridCacheError
from ..console import note
from ..runs.prompt_store import PromptStore, title_of
from ..runs.shown_run import shown_fill


class KeptConversation:
    """
    Keeps a conversation after each turn, in the place of what was taken back.

    Args:
        store: where.
        model: answers.
        new_cache: makes an empty cache for it.
        document: the name of the document.
        title: of the conversation; `None` for the document and the first question.
        kept_id: id of the conversation in the store; `None` for a new one.
        token_ids: that are kept already.
        document_tokens: how many of the first tokens are the document's.
        notes: receives remarks, and shows a bar on a terminal.

    Attributes:
        document_tokens: as given.
    """

    def __init__(
        self,
        store: PromptStore,
        model: PreTrainedModel,
        new_cache: Callable[[], HybridCache],
        document: str,
        title: str | None,
        kept_id: str | None,
        token_ids: list[int],
        document_tokens: int,
        notes: Console,
    ):
        self.document_tokens = document_tokens
        self._store, self._model, self._new_cache = store, model, new_cache
        self._document, self._title, self._notes = document, title, notes
        self._kept_id, self._kept = kept_id, list(token_ids)
        self._has_failed = False

    def filled(self, token_ids: list[int], cache: HybridCache) -> HybridCache:
        """
        Return a cache with the document, from the store or read now; the given one if it has the document.

        Args:
            token_ids: of the conversation.
            cache: empty, or with the first of the tokens.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was read is kept.
            PrefixStoreError: a document of this model cannot be kept.
            PrefixFolderError: the folder cannot be read.
        """
        if cache.get_seq_length() >= self.document_tokens:
            return cache
        # The codecs that a cache has chosen before stay when it is reset: those of a document are its own.
        cache, length = self._new_cache(), self.document_tokens
        document = torch.tensor([token_ids[:length]])
        shown_fill(
            self._notes,
            "document",
            length,
            lambda bar: self._store.fill(self._model, document, cache, length, title_of(self._document), bar),
        )
        return cache

    def keep(self, token_ids: list[int], cache: HybridCache, first_question: str | None) -> None:
        """
        Keep a conversation, unless nothing is new; a failure is a remark, once.

        Args:
            token_ids: of the conversation.
            cache: holds the first of them.
            first_question: for the title.
        """
        if token_ids == self._kept or cache.get_seq_length() < self.document_tokens:
            return
        title = self._title or title_of(self._document, first_question)
        try:
            self._kept_id = self._store.prompts.keep(
                self._model,
                torch.tensor([token_ids]),
                cache,
                document_tokens=self.document_tokens,
                title=title,
                replaces=self._kept_id,
            )
        except HybridCacheError as error:
            if not self._has_failed:
                note(self._notes, f"the conversation is not kept: {error}")
            self._has_failed = True
            return
        self._has_failed, self._kept = False, list(token_ids)
