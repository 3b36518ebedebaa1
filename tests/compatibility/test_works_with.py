"""Caches with other Hugging Face libraries, and the uses that they refuse."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, pipeline
from transformers.cache_utils import Cache, DynamicCache

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from models.tiny_models import VOCAB_SIZE, random_prompt, tiny_model

CACHES: dict[str, Callable[[PreTrainedConfig], Cache]] = {
    "dynamic": DynamicHybridCache,
    "streamed": lambda config: OffloadedHybridCache(config, cpu_decode=False),
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
}
each_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


def generated(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    return model.generate(random_prompt(1, 150), **cache_argument(cache), max_new_tokens=8, do_sample=False)


@each_cache
def test_a_pipeline_gives_the_same_text(make: Callable[[PreTrainedConfig], Cache]):
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    model = tiny_model("llama")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = tokenizer.decode(random_prompt(1, 150)[0])
    texts = [
        generator(text, **cache_argument(cache), max_new_tokens=8, do_sample=False)[0]["generated_text"]
        for cache in (DynamicCache(config=model.config), make(model.config))
    ]
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    copy.deepcopy(tiny_model("llama")).save_pretrained(folder)
    return folder


ON_DISK = {f"model.layers.{index}": "disk" for index in (2, 3)}
IN_MEMORY = dict.fromkeys(
    ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
)


@pytest.mark.parametrize("device_map", ["cpu", IN_MEMORY | ON_DISK], ids=["whole", "half on disk"])
def test_weights_that_accelerate_places_give_the_same_tokens(device_map: object, saved: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(saved, device_map=device_map, offload_folder=tmp_path).eval()
    for make in CACHES.values():
        assert torch.equal(
            generated(model, make(model.config)),
            generated(tiny_model("llama"), DynamicCache(config=tiny_model("llama").config)),
        )


@each_cache
def test_training_is_refused_with_the_way_out(make: Callable[[PreTrainedConfig], Cache]):
    model = tiny_model("llama")
    with pytest.raises(RuntimeError, match=r"under torch\.no_grad\(\) .* train with transformers' DynamicCache"):
        model(random_prompt(1, 20), **cache_argument(make(model.config)))


def logits(model: PreTrainedModel, cache: Cache, tokens: slice, is_cast: bool = False) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        return model(random_prompt(1, 150)[:, tokens], **cache_argument(cache)).logits


@each_cache
@pytest.mark.parametrize(("prefix", "then"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_a_wider_type_continues_a_prefix_as_with_stock(
    make: Callable, prefix: torch.dtype, then: torch.dtype, torch_attends: None
):
    """PyTorch computes both, because the kernel rounds a prefix in bfloat16 in another way."""
    config = tiny_model("llama").config
    ours, stock = make(config), DynamicCache(config=config)
    for cache in (ours, stock):
        logits(tiny_model("llama", prefix), cache, slice(0, 20))
    for tokens in (slice(20, 30), slice(30, 31), slice(31, 32)):
        expected = logits(tiny_model("llama", then), stock, tokens)
        torch.testing.assert_close(logits(tiny_model("llama", then), ours, tokens), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.layers[0].keys, stock.layers[0].keys)


@each_cache
def test_a_narrower_type_is_refused_with_the_way_out(make: Callable[[PreTrainedConfig], Cache]):
    cache = make(tiny_model("llama").config)
    logits(tiny_model("llama"), cache, slice(0, 20))
    with pytest.raises(ValueError, match=r"torch\.float32 .* torch\.bfloat16 .* its type with cache\.to\(dtype\)"):
        logits(tiny_model("llama", torch.bfloat16), cache, slice(20, 21))
    assert cache.get_seq_length() == 20
    logits(tiny_model("llama", torch.bfloat16), cache.to(torch.bfloat16), slice(20, 21))


@each_cache
@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
def test_autocast_in_any_phase_gives_what_it_gives_with_stock(make: Callable, first: bool, then: bool):
    model = tiny_model("llama")
    ours, stock = make(model.config), DynamicCache(config=model.config)
    for tokens, is_cast in ((slice(0, 20), first), (slice(20, 21), then), (slice(21, 22), then)):
        expected = logits(model, stock, tokens, is_cast)
        # Our kernel does not round to bfloat16, as autocast lets stock's attention do.
        torch.testing.assert_close(logits(model, ours, tokens, is_cast), expected, rtol=0, atol=0.15)
