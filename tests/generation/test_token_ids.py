"""Token ids are taken in every form that tokenizers give them in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hf_hybrid_cache
from hf_hybrid_cache import DynamicHybridCache, HybridCache, prefill, saved_token_ids
from hf_hybrid_cache.token_ids import as_token_ids

from models.tiny_models import random_prompt, tiny_model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": [[1]]}, r"pass inputs\['input_ids'\]"),
        ("text", "got text: pass tokenizer"),
        ([[1, 2], [3]], "cannot be a tensor"),
        ([0.5], r"must be integers \[batch, tokens\], got \[1, 1\] of torch.float32"),
        ([True], "of torch.bool"),
        (torch.ones(1, 2, 3, dtype=torch.long), r"got \[1, 2, 3\]"),
        (None, "cannot be a tensor"),
    ],
    ids=str,
)
def test_anything_else_is_refused_with_what_is_wanted(given: Any, message: str):
    with pytest.raises(ValueError, match=f"^input_ids .*{message}"):
        as_token_ids("input_ids", given)


def test_token_ids_of_one_sequence_are_a_batch_of_one_whatever_holds_them():
    for make in (list, tuple, np.array, torch.tensor):
        assert as_token_ids("input_ids", make([3, 1, 2])).tolist() == [[3, 1, 2]]
        assert as_token_ids("input_ids", make([[3, 1, 2]])).tolist() == [[3, 1, 2]]


def test_a_cache_is_read_saved_and_loaded_with_a_list_of_token_ids(tmp_path: Path):
    model, ids = tiny_model("llama"), random_prompt(1, 20)[0].tolist()
    cache = prefill(model, ids, DynamicHybridCache(model.config), progress=False)
    assert isinstance(cache, HybridCache)
    cache.save(tmp_path / "a.kv", ids)
    cache.save(tmp_path / "known.kv")
    for name in ("a.kv", "known.kv"):
        saved = saved_token_ids(tmp_path / name)
        assert saved is not None
        assert saved.tolist() == [ids]
    again = HybridCache.load(tmp_path / "a.kv", model.config, token_ids=[*ids, 1])
    assert again.get_seq_length() == 20
    with pytest.raises(ValueError, match="one for each token that is stored"):
        cache.save(tmp_path / "b.kv", ids[1:])
    cache.batch_repeat_interleave(2)
    cache.save(tmp_path / "known.kv")
    assert torch.equal(saved_token_ids(tmp_path / "known.kv"), torch.tensor([ids, ids]))
    model.generate(torch.tensor([[*ids, 1], [*ids, 2]]), cache=cache, max_new_tokens=2)
    cache.save(tmp_path / "known.kv")  # of the answers it does not know the tokens
    assert saved_token_ids(tmp_path / "known.kv") is None


def test_only_public_names_are_in_dir():
    assert sorted(dir(hf_hybrid_cache)) == sorted(hf_hybrid_cache.__all__)
