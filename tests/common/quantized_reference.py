"""A plain reference for quantized caches: one tensor, in which old blocks are quantized and decoded."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_hybrid_cache import KVCodec

BLOCK = 64


class QuantizedDynamicLayer(DynamicLayer):
    """
    transformers' own layer, which replaces a block by what its codes stand for once 64 tokens came after it.

    With `device_tokens` the sinks and the last tokens do not count: they are elsewhere, in full precision, until there
    are more of them, when blocks leave from the front.
    """

    def __init__(self, codec: KVCodec, device_tokens: int = 0):
        super().__init__()
        self.codec = codec
        self.quantized_tokens = self.tokens_that_left = 0
        self.device_tokens = device_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        only_these = self.get_seq_length() == 0
        super().update(key_states, value_states, *args, **kwargs)
        first, end = self.codec.sink_tokens, self.get_seq_length()
        if self.device_tokens:
            while end - self.tokens_that_left > self.device_tokens:
                self.tokens_that_left += BLOCK
            end = first + self.tokens_that_left
        while end - first - self.quantized_tokens >= 2 * BLOCK:
            start = first + self.quantized_tokens
            block = slice(start, start + BLOCK)
            for codec, name in ((self.codec.keys, "keys"), (self.codec.values, "values")):
                states = getattr(self, name).clone()
                codec.decode(codec.encode(states[:, :, block]), states[:, :, block])
                setattr(self, name, states)
            self.quantized_tokens += BLOCK
        return (key_states, value_states) if only_these else (self.keys, self.values)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        after_sinks = max(0, self.get_seq_length() - self.codec.sink_tokens)
        self.quantized_tokens = min(self.quantized_tokens, after_sinks // BLOCK * BLOCK)
        self.tokens_that_left = min(self.tokens_that_left, after_sinks)

    def reset(self) -> None:
        super().reset()
        self.quantized_tokens = self.tokens_that_left = 0


def quantized_reference(
    config: PreTrainedConfig, codecs: KVCodec | Mapping[int, KVCodec], device_tokens: int = 0
) -> DynamicCache:
    """A `DynamicCache` whose layers of full attention are quantized."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        codec = codecs.get(index) if isinstance(codecs, Mapping) else codecs
        if type(layer) is DynamicLayer and codec is not None:
            cache.layers[index] = QuantizedDynamicLayer(codec, device_tokens)
    return cache
