"""Generation on a device with observations at each token."""

import torch
from transformers.generation.streamers import BaseStreamer

from hf_hybrid_cache.cache_argument import cache_argument


def decode(model, ids: torch.Tensor, cache, **options):
    ids = ids.to(model.device)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False} | options
    return model.generate(ids, **cache_argument(cache), **options)


class Watcher(BaseStreamer):
    """Calls `observe` after the prompt and after every token, and `finish` at the end."""

    def __init__(self, observe, finish=lambda: None):
        self.observe, self.finish = observe, finish
        self.notes = []

    def put(self, value: torch.Tensor) -> None:
        self.notes.append(self.observe())

    def end(self) -> None:
        self.finish()
