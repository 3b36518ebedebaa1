"""Positions that go on from a picture, by an offset that the model keeps itself: no file is written without it."""

import copy
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import CacheFileError, DynamicHybridCache, HybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from models.image_models import model_of_images, prompt_with_picture

TEXT = torch.arange(40, 60)[None]
OPTIONS = {"max_new_tokens": 6, "do_sample": False}


@pytest.mark.parametrize("way", ["generate", "forward pass"])
def test_save_when_positions_go_on_from_a_picture_then_is_refused(way: str, tmp_path: Path):
    model, prompt = model_of_images(), prompt_with_picture()
    ours, stock = DynamicHybridCache(model.config), DynamicCache(config=model.config)
    stored = prompt["input_ids"]
    for cache in (stock, ours):
        with torch.inference_mode():
            if way == "generate":
                stored = model.generate(**prompt, **cache_argument(cache), **OPTIONS)
            else:
                model(**prompt, **cache_argument(cache))
    assert int(model.model.rope_deltas) < 0
    twin = copy.deepcopy(ours)
    for each in (ours, twin):
        with pytest.raises(CacheFileError, match=r"rope_deltas.*copy\.deepcopy"):
            each.save(tmp_path / "picture.kv")
    assert not list(tmp_path.iterdir())
    longer = torch.cat([stored, TEXT], dim=1)
    assert torch.equal(
        model.generate(longer, **cache_argument(twin), **OPTIONS),
        model.generate(longer, **cache_argument(stock), **OPTIONS),
    )


def test_save_when_there_is_no_picture_then_a_new_model_goes_on(tmp_path: Path):
    model, cache = model_of_images(), DynamicHybridCache(model_of_images().config)
    model.generate(**prompt_with_picture(), **cache_argument(cache), **OPTIONS)
    cache.reset()
    longer = torch.cat([model.generate(TEXT, **cache_argument(cache), **OPTIONS), TEXT], dim=1)
    cache.save(tmp_path / "text.kv")
    again = HybridCache.load(tmp_path / "text.kv", model.config)
    expected = model.generate(longer, **cache_argument(cache), **OPTIONS)
    assert torch.equal(model_of_images().generate(longer, **cache_argument(again), **OPTIONS), expected)
