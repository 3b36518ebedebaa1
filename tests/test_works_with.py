"""What else of the Hugging Face libraries a cache works with, and what it refuses."""

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

from tiny_models import VOCAB_SIZE, random_prompt, tiny_model

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
