"""A prompt that is looked for in a store and kept there."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from transformers import PreTrainedModel

from ...cache import Contents, HybridCache, contents_of
from ...model_identity import Identity
from ...token_ids import TokenIds, as_token_ids
from ..errors import PrefixStoreError
from ..nodes.description import Label, NodeDescription
from .checks import require_new, require_short_enough, require_text
from .passes import Passes


@dataclass(frozen=True)
class Prompt:
    """
    A prompt, and all that its states depend on.

    Attributes:
        token_ids: `[1, tokens]`, all of them.
        passes: in which it is read.
        identity: of the model and the form of the cache.
        label: for lists.
    """

    model: PreTrainedModel
    token_ids: torch.Tensor
    cache: HybridCache
    passes: Passes
    identity: Identity
    label: Label

    @classmethod
    def checked(
        cls,
        model: PreTrainedModel,
        input_ids: TokenIds,
        cache: HybridCache,
        document_tokens: int,
        label: Label,
        identity: Identity,
    ) -> "Prompt":
        """
        Check all arguments of `PrefixStore.prefill`, but for the model's identity.

        Raises:
            PrefixStoreError: the prompt, or one of this model or cache, cannot be kept.
        """
        require_new(cache)
        token_ids = as_token_ids("input_ids", input_ids).cpu()
        batch, tokens = token_ids.shape
        if batch != 1:
            raise PrefixStoreError(
                f"A prompt is one sequence, got {batch}. Call prefill_batch for several prompts; for several "
                "continuations of one prompt pass one sequence, and num_return_sequences to generate."
            )
        require_short_enough(model, tokens)
        if tokens < 2:
            raise PrefixStoreError(f"A prompt has at least two tokens, of which generate computes one; got {tokens}.")
        require_text(model, token_ids)
        if not 0 <= document_tokens <= tokens:
            raise PrefixStoreError(f"document_tokens must be 0 to {tokens:,}, got {document_tokens:,}.")
        read_tokens = tokens if document_tokens == tokens else tokens - 1
        passes = Passes.of(read_tokens, document_tokens, model, contents_of(cache))
        return cls(model, token_ids, cache, passes, identity, label)

    @property
    def contents(self) -> Contents:
        """The layers of the cache."""
        return contents_of(self.cache)

    @cached_property
    def keys(self) -> np.ndarray:
        """The tokens that are read, `[tokens]`, as the prompt is found by them."""
        return self.passes.keys(self.token_ids[0])

    @property
    def description(self) -> NodeDescription:
        """The description of its nodes, without their states."""
        return NodeDescription.of(self.model, self.identity, self.label)
