"""The store of prompts that `--keep` names."""

from itertools import chain, repeat
from typing import cast

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ...cache import HybridCache
from ...prefill_chunks import PREFILL_CHUNK_SIZE
from ...prefix_store import PrefixStore
from ..console import UsageError, note
from ..distributed.ranks import num_processes
from .prefill_bar import PrefillBar

_LONGEST_TITLE = 100


class PromptStore:
    """
    Fills caches from a folder of prompts, and keeps there what is read.

    Args:
        prompts: in their folder.
        tokenizer: of the model, for remarks.
        notes: receives remarks.
    """

    def __init__(self, prompts: PrefixStore, tokenizer: PreTrainedTokenizerBase, notes: Console):
        self.prompts = prompts
        self._tokenizer, self._notes = tokenizer, notes

    def fill(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        cache: Cache,
        document_tokens: int,
        title: str,
        bar: PrefillBar,
    ) -> None:
        """
        Fill an empty cache with all but the last token of a prompt, or with a whole document; remark what was stored.

        Args:
            model: of the prompt.
            input_ids: `[1, tokens]`
            cache: one of this package.
            document_tokens: how many of the first tokens are those of a document that other prompts begin with, too.
            title: of the prompt, for lists.
            bar: shows what is read.

        Raises:
            PrefixStoreError: the prompt, or one of this model, cannot be kept.
            PrefixFolderError: the folder cannot be read.
        """
        shown = chain([bar.take_over], repeat(bar.advance))
        reuse = self.prompts.prefill(
            model,
            input_ids,
            cast(HybridCache, cache),
            document_tokens=document_tokens,
            title=title,
            progress=lambda num_tokens: next(shown)(num_tokens),
        )
        note(self._notes, reuse.text(self._token_text))

    def _token_text(self, token: int) -> str:
        return repr(str(self._tokenizer.decode([token])))


def title_of(document: str, question: str | None = None) -> str:
    """Return the title of a prompt, for lists: the name of its document, and a question."""
    title = " ".join((document if question is None else f"{document}: {question}").split())
    return title if len(title) <= _LONGEST_TITLE else f"{title[:_LONGEST_TITLE]}[...]"


def check_keep(prefill_chunk_size: int) -> None:
    """
    Check that other options go with `--keep`.

    Args:
        prefill_chunk_size: the value of `--prefill-chunk-size`.

    Raises:
        UsageError: they do not.
    """
    if num_processes() > 1:
        raise UsageError("--keep is for one process: start it without torchrun, or use --save-cache instead.")
    if prefill_chunk_size != PREFILL_CHUNK_SIZE:
        raise UsageError(
            f"Forward passes of a prompt that is kept have {PREFILL_CHUNK_SIZE:,} tokens, so that every prompt gives "
            "the same states: drop --prefill-chunk-size, or --keep."
        )
