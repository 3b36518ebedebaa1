"""The calls of `generate` with a store that can be served, and the caches that it then fills."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from ..cache import DynamicHybridCache, HybridCache
from ..cache_argument import CACHE_ARGUMENT, passed_cache, require_use_cache
from .errors import PrefixStoreError
from .prompt import require_decoder

# Arguments on which states do not depend, or which are checked here.
_TAKEN = {CACHE_ARGUMENT, "attention_mask", "logits_to_keep", "position_ids", "use_cache"}
_TAKEN |= {"assistant_model", "logits_processor", "stopping_criteria", "streamer"}
# Caches that `generate` makes by itself where a config asks for nothing else.
_USUAL_CACHES = (None, "dynamic", "hybrid")


def require_tokens_alone(model: PreTrainedModel, config: GenerationConfig, given: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if states depend on more than tokens, or the loop reads the whole prompt itself."""
    require_decoder(model)
    require_use_cache(given)
    is_assisted = config.get_generation_mode(given.get("assistant_model")) is GenerationMode.ASSISTED_GENERATION
    others = ["assistant_model or prompt_lookup_num_tokens"] if is_assisted else []
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
