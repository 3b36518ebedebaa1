"""A conversation, which is kept as a cache holds it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from transformers import PreTrainedModel

from ...cache import HybridCache, contents_of
from ...model_identity import Identity
from ...token_ids import TokenIds, as_token_ids
from ..errors import PrefixStoreError
from ..nodes.description import Label, NodeDescription
from ..nodes.keys import keys_as_they_came
from .checks import require_short_enough, require_text
from .passes import Passes
from .prompt import Prompt


@dataclass(frozen=True)
class Conversation(Prompt):
    """
    A conversation whose first tokens are in a cache, as questions and answers came; the passes are its document's.

    Attributes:
        held: how many tokens the cache holds.
    """

    held: int

    @classmethod
    def checked(
        cls,
        model: PreTrainedModel,
        token_ids: TokenIds,
        cache: HybridCache,
        document_tokens: int,
        label: Label,
        identity: Identity,
    ) -> "Conversation":
        """
        Check all arguments of `PrefixStore.keep`, but for the model's identity.

        Raises:
            PrefixStoreError: a conversation of this model or cache cannot be kept.
        """
        cache.require_prefix(tokens := as_token_ids("token_ids", token_ids).cpu())
        require_text(model, tokens)
        held = cache.get_seq_length()
        require_short_enough(model, held)
        if len(tokens) != 1 or not 0 < document_tokens <= held <= tokens.shape[1]:
            raise PrefixStoreError(
                f"The cache holds {held:,} tokens of a conversation of {list(tokens.shape)}, whose document has "
                f"{document_tokens:,}: the document comes first, and the cache holds no more than the conversation."
            )
        passes = Passes.of(document_tokens, document_tokens, model, contents_of(cache))
        return cls(model, tokens, cache, passes, identity, label, held)

    @cached_property
    def keys(self) -> np.ndarray:
        """The tokens that the cache holds, `[tokens]`, as the conversation is found by them."""
        are_read = self.passes.first_tokens > 0 and self.contents.stores.attention.has_given_states
        tokens, shared = self.token_ids[0], 0 if are_read else self.passes.shared_tokens
        return np.concatenate([self.passes.keys(tokens)[:shared], keys_as_they_came(tokens[shared : self.held])])

    @property
    def description(self) -> NodeDescription:
        """The description of its nodes, with the tokens that the cache lacks, and without their states."""
        rest = tuple(self.token_ids[0, self.held :].tolist())
        return NodeDescription.of(self.model, self.identity, self.label, self.passes.num_tokens, rest)
