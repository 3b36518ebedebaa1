"""Caches with other Hugging Face libraries, and the uses that they refuse."""

import pytest
import torch
from transformers import PreTrainedModel, pipeline
from transformers.cache_utils import Cache

from hf_hybrid_cache.cache_argument import cache_argument

from .same_tokens import each_cache, prompt
from common.caches import MakeCache, stock
from common.modes import read
from models.tiny_models import tiny_model
from models.word_tokenizer import word_tokenizer


@each_cache
def test_a_pipeline_gives_the_same_text(make: MakeCache):
    model, tokenizer = tiny_model("llama"), word_tokenizer()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = tokenizer.decode(prompt()[0])
    expected, given = (
        generator(text, **cache_argument(made(model.config)), max_new_tokens=8, do_sample=False)
        for made in (stock, make)
    )
    assert given == expected


def logits(model: PreTrainedModel, cache: Cache, tokens: slice, is_cast: bool = False) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        return read(model, prompt()[:, tokens], cache)


@each_cache
@pytest.mark.parametrize(("prefix", "then"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
@pytest.mark.usefixtures("torch_attends")  # the kernel rounds a prefix in bfloat16 in another way
def test_a_wider_type_continues_a_prefix_and_a_narrower_one_is_refused(
    make: MakeCache, prefix: torch.dtype, then: torch.dtype
):
    narrow, wide = tiny_model("llama", prefix), tiny_model("llama", then)
    ours, plain = make(narrow.config), stock(narrow.config)
    for cache in (ours, plain):
        logits(narrow, cache, slice(0, 20))
    for tokens in (slice(20, 30), slice(30, 31), slice(31, 32)):
        torch.testing.assert_close(logits(wide, ours, tokens), logits(wide, plain, tokens), rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.layers[0].keys, plain.layers[0].keys)
    with pytest.raises(ValueError, match=rf"{then} .* {prefix} .* its type with cache\.to\(dtype\)"):
        logits(narrow, ours, slice(32, 33))
    assert ours.get_seq_length() == 32
    logits(narrow, ours.to(prefix), slice(32, 33))


@each_cache
@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
def test_autocast_in_any_phase_gives_what_it_gives_with_stock(make: MakeCache, first: bool, then: bool):
    model = tiny_model("llama")
    ours, plain = make(model.config), stock(model.config)
    for tokens, is_cast in ((slice(0, 20), first), (slice(20, 21), then), (slice(21, 22), then)):
        expected = logits(model, plain, tokens, is_cast)
        # Our kernel does not round to bfloat16, as autocast lets stock's attention do.
        torch.testing.assert_close(logits(model, ours, tokens, is_cast), expected, rtol=0, atol=0.15)
