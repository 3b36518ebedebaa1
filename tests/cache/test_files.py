"""Token ids in files of caches, and whether a file is for a model."""

from pathlib import Path

import pytest
import torch
from files.test_saving import filled

from hf_hybrid_cache import CacheFileError, DynamicHybridCache, HybridCache, QuantizedHybridCache, saved_token_ids
from hf_hybrid_cache.cache.files import differences
from hf_hybrid_cache.token_ids import first_difference

from models.tiny_models import random_prompt, tiny_model


def test_token_ids_are_kept_and_compared(tmp_path: Path):
    model, path = tiny_model("llama"), tmp_path / "cache.kv"
    ids = random_prompt(2, 70)
    cache = filled(model, QuantizedHybridCache, 70, batch=2)
    cache.save(path, ids)
    assert torch.equal(saved_token_ids(path), ids)
    HybridCache.load(path, model.config, token_ids=torch.cat([ids, ids], dim=1))
    other = ids.clone()
    other[1, 33] += 1
    with pytest.raises(CacheFileError, match=rf"token 33 of sequence 1 is {ids[1, 33]} in the file and {other[1, 33]}"):
        HybridCache.load(path, model.config, token_ids=other)
    for unlike in (ids[:, :69], ids[:1], ids[0]):
        with pytest.raises(CacheFileError, match=r"holds \[2, 70\] tokens"):
            HybridCache.load(path, model.config, token_ids=unlike)
    cache.save(path)
    assert saved_token_ids(path) is None
    with pytest.raises(CacheFileError, match="no token ids to compare with"):
        HybridCache.load(path, model.config, token_ids=ids)


@pytest.mark.parametrize("ids", [random_prompt(1, 9), random_prompt(1, 11), random_prompt(1, 9)[0], torch.ones(1, 10)])
def test_token_ids_that_are_not_those_of_the_tokens_are_refused(ids: torch.Tensor, tmp_path: Path):
    cache = filled(tiny_model("llama"), DynamicHybridCache, 10)
    with pytest.raises(ValueError, match=r"must be integers \[batch, "):
        cache.save(tmp_path / "cache.kv", ids)


@pytest.mark.parametrize("document_tokens", [0, 11, 5.0, True])
def test_save_when_a_document_cannot_have_so_many_tokens_then_is_refused(document_tokens: object, tmp_path: Path):
    cache = filled(tiny_model("llama"), DynamicHybridCache, 10)
    with pytest.raises(ValueError, match="document_tokens must be an integer from 1 to the 10 stored tokens"):
        cache.save(tmp_path / "cache.kv", random_prompt(1, 10), document_tokens)
    with pytest.raises(ValueError, match="goes with token_ids"):
        cache.save(tmp_path / "cache.kv", document_tokens=5)


def test_token_ids_when_several_differ_then_earliest_position_is_told():
    known = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    assert first_difference(known, torch.tensor([[1, 2, 3, 9], [1, 9, 3, 4]])) == (1, 1)
    assert first_difference(known, known.clone()) is None


def test_rope_factor_when_repeated_in_config_then_is_no_difference():
    rotation = {"rope_type": "default", "partial_rotary_factor": 0.25}
    twice, once = {"rope_parameters": rotation, "partial_rotary_factor": 0.25}, {"rope_parameters": rotation}
    assert not differences(twice, once)
    assert not differences(once, twice)
    assert differences(twice, {"rope_parameters": rotation | {"partial_rotary_factor": 0.5}})
    assert differences({"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.5})
