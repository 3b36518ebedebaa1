"""Caches are passed by the name that the installed transformers wants, and found by any name that it takes."""

import logging

import pytest
import torch
from transformers.utils import logging as transformers_logging

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument, passed_cache

from models.tiny_models import random_prompt, tiny_model


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_a_cache_is_found_by_any_name(name: str):
    cache = object()
    assert passed_cache({"use_cache": True, name: cache}) is cache
    assert passed_cache({name: None}) is None


def test_a_model_gives_the_cache_back_by_the_name_it_takes():
    model = tiny_model("llama")
    cache = DynamicHybridCache(model.config)
    with torch.no_grad():
        output = model(random_prompt(1, 20), **cache_argument(cache))
    assert output[CACHE_ARGUMENT] is cache
    assert cache.get_seq_length() == 20


# transformers says that the older name is deprecated, to whoever uses it.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted({CACHE_ARGUMENT, "past_key_values"}))
def test_decode_on_cpu_takes_the_cache_by_each_name_of_generate(name: str):
    model, ids = tiny_model("llama"), random_prompt(1, 20)
    options = {"max_new_tokens": 5, "do_sample": False}
    cache = DynamicHybridCache(model.config)
    in_float64 = DecodeOnCPU(dtype=torch.float64)
    tokens = model.generate(ids, **{name: cache}, custom_generate=in_float64, **options)
    assert torch.equal(tokens, model.generate(ids, **options))
    assert cache.get_seq_length() == tokens.shape[1] - 1


def test_transformers_has_nothing_to_say_of_names(caplog: pytest.LogCaptureFixture):
    model, ids = tiny_model("llama"), random_prompt(1, 20)
    transformers_logging._get_library_root_logger().addHandler(caplog.handler)
    # The warning is given once, and may have been given.
    transformers_logging.warning_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for custom in (None, DecodeOnCPU(), DecodeOnCPU(dtype=torch.float64)):
                given = cache_argument(DynamicHybridCache(model.config))
                model.generate(ids, **given, custom_generate=custom, max_new_tokens=3, return_dict_in_generate=True)
    finally:
        transformers_logging._get_library_root_logger().removeHandler(caplog.handler)
    assert not [record.message for record in caplog.records if "deprecated" in record.message]
