"""Saving a cache to a file, and opening the file of one for a model."""

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..codecs import is_form_of
from ..files import CacheFile, CacheFileError, save_layers
from ..scalars import as_integer
from ..token_ids import TokenIds, as_token_ids, first_difference
from .contents import Contents

# The weights are not among them: two models that were trained from one config cannot be told apart.
_TRAITS = (
    "model_type",
    "num_hidden_layers",
    "layer_types",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "global_head_dim",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "sliding_window",
    "attention_chunk_size",
    "rope_parameters",
    "partial_rotary_factor",
    "per_layer_config",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def save(
    contents: Contents,
    path: str | os.PathLike[str],
    token_ids: TokenIds | None,
    document_tokens: int | None,
) -> None:
    """Write a cache to a file; see `HybridCache.save`."""
    config = contents.stores.config
    assert config is not None
    num_tokens = contents.num_tokens
    kept = None if token_ids is None else as_token_ids("token_ids", token_ids)
    if kept is not None and kept.shape[1] != num_tokens:
        raise ValueError(
            f"token_ids must be integers [batch, {num_tokens}], one for each token that is stored, got "
            f"{list(kept.shape)}. The last token that was generated is not stored."
        )
    document = None if document_tokens is None else as_integer(document_tokens)
    if document_tokens is not None and (kept is None or document is None or not 0 < document <= num_tokens):
        raise ValueError(
            f"document_tokens must be an integer from 1 to the {num_tokens:,} stored tokens, and goes with "
            f"token_ids, got {document_tokens!r}."
        )
    save_layers(path, contents.layers, contents.stores, traits_of(config), kept, document)


def traits_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings that the model has, as JSON stores them."""
    text = config.get_text_config(decoder=True)
    # Not its attributes: some configs refuse to say what differs between layers.
    values, other_names = text.to_dict(), text.attribute_map
    traits = {name: values.get(other_names.get(name, name)) for name in _TRAITS}
    tree: dict[str, Any] = json.loads(json.dumps(traits, default=str))
    return {name: value for name, value in tree.items() if value is not None}


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """List the differences, such as "hidden_size is 64 in the file and 128 in the model"."""
    names = [name for name in dict.fromkeys((*_TRAITS, *saved)) if saved.get(name) != wanted.get(name)]
    # Some versions of transformers repeat this factor beside the parameters of the rotation.
    rotations = [each.get("rope_parameters") for each in (saved, wanted)]
    if any(isinstance(each, Mapping) and "partial_rotary_factor" in each for each in rotations):
        names = [name for name in names if name != "partial_rotary_factor"]
    return [f"{name} is {saved.get(name)} in the file and {wanted.get(name)} in the model" for name in names]


def require_fit(file: CacheFile, config: PreTrainedConfig, token_ids: TokenIds | None) -> None:
    """Raise `CacheFileError` unless it is of a cache for such a model, whose tokens these begin with."""
    if different := differences(file.description.model, traits_of(config)):
        raise CacheFileError(file.path, f"is of another model: {'; '.join(different)}.")
    # Attention gets one mask for all layers, but for those that attend to images.
    of_images = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
    layers = [(index, each.states) for index, each in enumerate(file.description.layers) if index not in of_images]
    held = {index: (each.num_tokens, each.batch) for index, each in layers if each is not None}
    num_ids = 0 if file.token_ids is None else file.token_ids.shape[1]
    if len({*held.values()}) > 1 or (num_ids and not {num_ids} >= {tokens for tokens, _ in held.values()}):
        told = [f"{tokens:,} tokens of {batch:,} in layer {index}" for index, (tokens, batch) in held.items()]
        raise CacheFileError(
            file.path, f"does not describe a cache (of sequences there are {', '.join(told)}, and {num_ids:,} ids)."
        )
    if token_ids is None:
        return
    given, saved = as_token_ids("token_ids", token_ids).to("cpu", torch.long), file.token_ids
    if saved is None:
        raise CacheFileError(file.path, "has no token ids to compare with: save it with token_ids.")
    if given.shape[0] != saved.shape[0] or given.shape[1] < saved.shape[1]:
        raise CacheFileError(
            file.path, f"holds {list(saved.shape)} tokens, with which token_ids {list(given.shape)} cannot begin."
        )
    at = first_difference(saved, given[:, : saved.shape[1]])
    if at is not None:
        sequence, position = at
        raise CacheFileError(
            file.path,
            f"is of another text: token {position:,} of sequence {sequence} is {int(saved[at])} in the file and "
            f"{int(given[at])} in token_ids (counted from 0).",
        )


def take(
    cache: Any, file: CacheFile, device: torch.device | str | None, mmap: bool = False, verify: bool = True
) -> None:
    """Put what a file holds into an empty cache, which has its codecs; see `HybridCache.load` for the errors."""
    file.fill(cache.layers, device, mmap, verify)
    cache._stores.take_seen_queries(file.seen_queries)
    cache._prompts.token_ids = file.token_ids


def fill_from_file(
    cache: Any,
    path: str | os.PathLike[str],
    config: PreTrainedConfig,
    device: torch.device,
    token_ids: TokenIds,
) -> None:
    """
    Fill an empty cache with what one of the same form has saved; it stays as it was made, and empty after an error.

    Args:
        cache: whose placement, group and other options hold, whatever those of the saved one were.
        path: of the file.
        config: of the model.
        device: of the model.
        token_ids: see `HybridCache.load`.

    Raises:
        CacheFileError: see `HybridCache.load`; or it is quantized in another way.
        HostMemoryError: host memory would not suffice.
    """
    stores = cache._stores
    with CacheFile(path) as file:
        require_fit(file, config, token_ids)
        for index in sorted({*file.codecs, *stores.asked_codecs}):
            there, here = file.codecs.get(index), stores.asked_codecs.get(index)
            if there is None or here is None or not is_form_of(there, here):
                forms = ("in full precision" if each is None else str(each) for each in (there, here))
                raise CacheFileError(
                    path,
                    f"is of a cache that is quantized in another way: layer {index} is {' there and '.join(forms)} "
                    "here. Pass a cache of its form.",
                )
        before = stores.codecs
        try:
            stores.take_codecs(file.codecs)
            take(cache, file, device)
        except BaseException:
            cache.reset()
            stores.take_codecs(before)
            raise
