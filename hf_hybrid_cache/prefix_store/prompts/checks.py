"""Checks of models, texts and caches whose states are to be kept."""

import re
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...cache import HybridCache, contents_of
from ...model_identity import Identity, ModelIdentityError, identity_of, longest_text
from ...prompt_reading import layer_that_begins_anew
from ..errors import PrefixStoreError

# As in image_token_id, video_token_index and vision_start_token_id.
_MEDIA_TOKEN = re.compile(r"(image|video|audio|vision|speech)\w*_token_(id|index)$")


def identity_for(model: PreTrainedModel, cache: HybridCache, name: str | None) -> Identity:
    """
    Return the identity under which the states of a model in a cache are kept; the name is the user's, of the model.

    Raises:
        PrefixStoreError: they cannot be kept.
    """
    if not isinstance(cache, HybridCache):
        raise PrefixStoreError(
            f"Only caches of this package can be kept, such as DynamicHybridCache(model.config), got "
            f"{type(cache).__name__}."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise PrefixStoreError(
            "An encoder-decoder model reads its prompt in the encoder, at once, and no prompt begins like another one "
            "there. Only prompts of decoders can be kept."
        )
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


def require_short_enough(model: PreTrainedModel, num_tokens: int) -> None:
    """
    Check that states do not depend on what comes after their tokens.

    Raises:
        PrefixStoreError: the text is so long that they do.
    """
    limit = longest_text(model)
    if limit is not None and num_tokens > limit:
        raise PrefixStoreError(
            f"{type(model).__name__} turns keys otherwise, all of them, when a text has more than {limit:,} tokens "
            f"(rope_type longrope), and this one has {num_tokens:,}. Only texts up to {limit:,} can be kept."
        )


def require_text(model: PreTrainedModel, token_ids: torch.Tensor) -> None:
    """
    Check that tokens stand for text alone.

    Raises:
        PrefixStoreError: some are those of images, sound or video, by the config or one inside it.
    """
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
    """
    Check that a cache holds nothing and has chosen nothing.

    Raises:
        PrefixStoreError: it does, or has.
    """
    if held := cache.get_seq_length():
        raise PrefixStoreError(f"The cache holds {held:,} tokens already: pass a new one.")
    if any(codec.is_fitted != cache.asked_codecs[index].is_fitted for index, codec in cache.codecs.items()):
        raise PrefixStoreError("The cache has chosen its codecs by another prompt, and keeps them: pass a new one.")
