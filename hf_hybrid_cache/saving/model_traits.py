"""The settings of a model's config that keys and values depend on, which tell whether a file is for this model."""

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

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
    saved, wanted = _told_once(saved), _told_once(wanted)
    names = [name for name in (*_TRAITS, *saved) if saved.get(name) != wanted.get(name)]
    return [
        f"{name} is {saved.get(name)} in the file and {wanted.get(name)} in the model" for name in dict.fromkeys(names)
    ]


def _told_once(traits: Mapping[str, Any]) -> dict[str, Any]:
    """Drop a factor that some versions of transformers repeat beside the parameters of the rotation."""
    rotation = traits.get("rope_parameters")
    is_told = isinstance(rotation, Mapping) and "partial_rotary_factor" in rotation
    return {name: value for name, value in traits.items() if name != "partial_rotary_factor" or not is_told}
