"""
A prompt, or a conversation, that is looked for in a store and kept there, with the keys it is found by; and the checks
of what users pass. What cannot be kept, or served, raises `PrefixStoreError`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode

from ..cache import Contents, DynamicHybridCache, HybridCache, contents_of
from ..cache_argument import CACHE_ARGUMENT, passed_cache, require_use_cache
from ..model_identity import Identity, ModelIdentityError, identity_of, longest_text
from ..prompt_reading import layer_that_begins_anew
from ..token_ids import TokenIds, as_token_ids
from .errors import PrefixStoreError
from .keys import Passes, num_read_tokens, random_keys
from .stored_prompts import Description

# As in image_token_id, video_token_index and vision_start_token_id.
_MEDIA_TOKEN = re.compile(r"(image|video|audio|vision|speech)\w*_token_(id|index)$")
# Arguments on which states do not depend, or which are checked here.
_TAKEN = {CACHE_ARGUMENT, "attention_mask", "logits_to_keep", "position_ids", "use_cache"}
_TAKEN |= {"assistant_model", "logits_processor", "stopping_criteria", "streamer"}
# Caches that `generate` makes by itself where a config asks for nothing else.
_USUAL_CACHES = (None, "dynamic", "hybrid")


@dataclass(frozen=True)
class Prompt:
    """
    A prompt, and all that its states depend on; or a conversation whose first tokens are in the cache.

    Attributes:
        token_ids: `[1, tokens]`, all of them.
        passes: in which a prompt is read.
        identity: of the model and the form of the cache.
        keys: of the tokens that are read, or that the cache holds, `[tokens]`; those of a conversation that the store
            has not read are random.
        description: for lists, see `Description`.
    """

    model: PreTrainedModel
    token_ids: torch.Tensor
    cache: HybridCache
    passes: Passes
    identity: Identity
    keys: np.ndarray
    description: str

    @classmethod
    def to_read(
        cls,
        model: PreTrainedModel,
        input_ids: TokenIds,
        cache: HybridCache,
        name: str | None,
        document_tokens: int = 0,
        title: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> "Prompt":
        """Check all arguments of `PrefixStore.prefill`; the name is that of the model's identity."""
        identity = identity_for(model, cache, name)
        require_new(cache)
        token_ids = as_token_ids("input_ids", input_ids).cpu()
        batch, tokens = token_ids.shape
        if batch != 1:
            raise PrefixStoreError(
                f"A prompt is one sequence, got {batch}. Pass one at a time; for several continuations of one prompt "
                "pass one sequence, and num_return_sequences to generate."
            )
        _require_short_enough(model, tokens)
        if tokens < 2:
            raise PrefixStoreError(f"A prompt has at least two tokens, of which generate computes one; got {tokens}.")
        require_text(model, token_ids)
        if not 0 <= document_tokens <= tokens:
            raise PrefixStoreError(f"document_tokens must be 0 to {tokens:,}, got {document_tokens:,}.")
        read_tokens = tokens if document_tokens == tokens else tokens - 1
        passes = Passes(read_tokens, min(document_tokens, read_tokens))
        text = Description(identity, _name_of(model), title, details or {}).to_json()
        return cls(model, token_ids, cache, passes, identity, passes.keys(token_ids[0].numpy()), text)

    @classmethod
    def conversation(
        cls,
        model: PreTrainedModel,
        token_ids: TokenIds,
        cache: HybridCache,
        name: str | None,
        document_tokens: int | None,
        title: str,
        details: Mapping[str, Any] | None,
        seed: int,
    ) -> "Prompt":
        """Check all arguments of `PrefixStore.keep`; the seed is that of the random keys."""
        identity = identity_for(model, cache, name)
        contents = contents_of(cache)
        contents.require_whole()
        cache.require_prefix(all_ids := as_token_ids("token_ids", token_ids).cpu())
        require_text(model, all_ids)
        held = cache.get_seq_length()
        _require_short_enough(model, held)
        known = contents.keys(identity.digest)
        document = num_read_tokens(known) if document_tokens is None else document_tokens
        if len(all_ids) != 1 or not 0 <= document <= held <= all_ids.shape[1] or not held:
            raise PrefixStoreError(
                f"The cache holds {held:,} tokens of a conversation of {list(all_ids.shape)}, whose document has "
                f"{document:,}: the document comes first, and the cache holds some of the conversation, and no more."
            )
        # The last one is random in any case: where the cache was cropped, it does not end as that of a prompt.
        known = known[: held - 1]
        keys = np.concatenate([known, random_keys(held - len(known), seed)])
        rest = tuple(all_ids[0, num_read_tokens(keys) :].tolist())
        description = Description(identity, _name_of(model), title, details or {}, document, rest)
        return cls(model, all_ids, cache, Passes(held, document), identity, keys, description.to_json())

    @property
    def contents(self) -> Contents:
        """The layers of the cache."""
        return contents_of(self.cache)


def identity_for(model: PreTrainedModel, cache: HybridCache, name: str | None) -> Identity:
    """Return the identity under which a model's states are kept, of a name of the user's, if they can be kept."""
    if not isinstance(cache, HybridCache):
        raise PrefixStoreError(
            f"Only caches of this package can be kept, such as DynamicHybridCache(model.config), got "
            f"{type(cache).__name__}."
        )
    require_decoder(model)
    if not contents_of(cache).of_text:
        raise PrefixStoreError(
            f"No layer of {type(model).__name__} attends, so a cache does not tell how many tokens it holds. Within a "
            "process use copy.deepcopy(cache)."
        )
    if any(vars(module).get("is_decoder") is False for module in model.modules()):
        raise PrefixStoreError(
            f"{type(model).__name__} reads a text in both directions, so states depend on what comes after their "
            "tokens. Load it with is_decoder=True, which it must have been trained for."
        )
    if model.config.get_text_config(decoder=True).model_type == "doge":
        raise PrefixStoreError(
            f"{type(model).__name__} chooses the tokens that it attends to by products over all of them at once, whose "
            "last bits depend on how many there are, so states would not be those of a cold read. Pass the prompt to "
            "generate without a store."
        )
    if layer := layer_that_begins_anew(model):
        raise PrefixStoreError(
            f"{layer} of transformers forgets what came before each forward pass of several tokens, so a prompt cannot "
            "go on from states that are kept. Pass it to generate without a store."
        )
    try:
        return identity_of(model, cache, name)
    except ModelIdentityError as error:
        raise PrefixStoreError(str(error)) from error


def require_decoder(model: PreTrainedModel) -> None:
    """Check that a model reads its prompt in the decoder."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise PrefixStoreError(
            f"{type(model).__name__} reads its prompt in the encoder, at once, where no prompt begins like another "
            "one. A store keeps prompts of decoders. Leave out custom_generate, or the store."
        )


def _require_short_enough(model: PreTrainedModel, num_tokens: int) -> None:
    """Check that a text is not so long that states depend on what comes after their tokens."""
    limit = longest_text(model)
    if limit is not None and num_tokens > limit:
        raise PrefixStoreError(
            f"{type(model).__name__} turns keys otherwise, all of them, when a text has more than {limit:,} tokens "
            f"(rope_type longrope), and this one has {num_tokens:,}. Only texts up to {limit:,} can be kept."
        )


def require_text(model: PreTrainedModel, token_ids: torch.Tensor) -> None:
    """Check that no tokens are those of images, sound or video, by the config or one inside it."""
    present = set(token_ids.flatten().tolist())
    for name, token in _media_tokens(model.config):
        if token in present:
            raise PrefixStoreError(
                f"The text has tokens that stand for images, sound or video ({name} {token}): its states depend on "
                "more than its tokens, so it cannot be kept. Pass it to generate without a store."
            )


def _media_tokens(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _media_tokens(value)
        elif isinstance(value, int) and _MEDIA_TOKEN.search(name):
            yield name, value


def require_new(cache: HybridCache) -> None:
    """Check that a cache holds nothing and has chosen nothing."""
    if held := cache.get_seq_length():
        raise PrefixStoreError(f"The cache holds {held:,} tokens already: pass a new one.")
    if any(codec.is_fitted != cache.asked_codecs[index].is_fitted for index, codec in cache.codecs.items()):
        raise PrefixStoreError("The cache has chosen its codecs by another prompt, and keeps them: pass a new one.")


def _name_of(model: PreTrainedModel) -> str:
    return str(model.config.name_or_path or type(model).__name__)


def require_tokens_alone(model: PreTrainedModel, config: GenerationConfig, given: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if states depend on more than tokens, or the loop reads the whole prompt itself."""
    require_decoder(model)
    require_use_cache(given)
    is_assisted = config.get_generation_mode(given.get("assistant_model")) is GenerationMode.ASSISTED_GENERATION
    others = ["assistant_model or prompt_lookup_num_tokens (but with drafts=15 it can)"] if is_assisted else []
    for name, value in given.items():
        if name in _TAKEN or name.startswith("output_") or value is None or value is False:
            continue
        # Models of images are told the type of each token, where 0 is text, and get no encoded images then.
        is_of_text = not value.any() if name == "mm_token_type_ids" else name == "mm_encoder_outputs" and not value
        if not is_of_text:
            others.append(name)
    if others:
        raise PrefixStoreError(
            f"A store fills a cache with the states of a prompt's tokens, and cannot with {', '.join(others)}. Leave "
            "that out, or custom_generate."
        )


def require_one_prompt(input_ids: torch.Tensor, given: Mapping[str, Any], document_tokens: int) -> None:
    """Raise a `PrefixStoreError` unless all sequences are one prompt, without padding, that ends after its document."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    sequences, tokens = input_ids.shape
    hidden = 0 if mask is None else int((mask == 0).sum())
    if hidden or bool((input_ids != input_ids[:1]).any()):
        raise PrefixStoreError(
            f"A store reads one prompt in a call, without padding. There are {sequences}, and attention_mask hides "
            f"{hidden:,} of their tokens. Call generate for each; for several answers pass num_return_sequences."
        )
    if positions is not None:
        counted = torch.arange(tokens, device=positions.device)
        if bool((positions[..., :tokens] != counted).any()):
            raise PrefixStoreError("A store counts positions from 0. Leave out position_ids, or custom_generate.")
    if document_tokens == tokens:
        raise PrefixStoreError(
            f"All {tokens:,} tokens are those of the document (document_tokens), and generate needs one after it. Read "
            "a document alone with store.prefill."
        )


def cache_of(model: PreTrainedModel, config: GenerationConfig, given: Mapping[str, Any]) -> HybridCache:
    """Return the cache that the user has passed, whatever it is, or a new one."""
    cache = passed_cache(given)
    # transformers marks the caches of users.
    if isinstance(cache, HybridCache) or getattr(cache, "_is_user_defined", False):
        return cache
    if config.cache_implementation not in _USUAL_CACHES:
        raise PrefixStoreError(
            f"A store fills caches of this package, and not {config.cache_implementation!r}. Leave out "
            f"cache_implementation, and pass {CACHE_ARGUMENT}=OffloadedHybridCache(model.config), or another one."
        )
    return DynamicHybridCache(model.config)
