"""A digest of the settings of a config that say what its model computes."""

from typing import Any

from transformers import PreTrainedConfig

from .digests import canonical, digest_of

# Where a model comes from, how it is loaded, and what it returns beside states. The type and the weights themselves are
# read from the model.
_LEFT_OUT = {
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "id2label",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def config_digest(config: PreTrainedConfig) -> str:
    """Return the digest of a config, those inside it included."""
    return digest_of(canonical(_settings(config.to_dict())))


def _settings(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _settings(each) for name, each in value.items() if name not in _LEFT_OUT}
    if isinstance(value, list | tuple):
        return [_settings(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if isinstance(value, bool | int | float | str | None) else str(value)
