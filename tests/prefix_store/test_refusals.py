"""Prompts that cannot be kept are refused; where files cannot be read or written, a warning says so."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import DynamicHybridCache, HybridCache, PrefixStore, PrefixStoreError, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from .prompts import FORMS, alter_states, are_equal, hits, prompts, read
from common.caches import group_of_one
from model_identity.models import new_llama
from models.image_models import model_of_images, prompt_with_picture
from models.tiny_models import random_prompt, tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")


Call = Callable[[PrefixStore], object]


def prefill(
    make: Callable[[Any], Any] = DynamicHybridCache, shape: tuple[int, int] = (1, 9), family: str = "", **options: Any
) -> Call:
    def call(store: PrefixStore) -> None:
        model = MODELS[family]()
        store.prefill(model, random_prompt(*shape) % 32, make(model.config), **options)

    return call


def generate(family: str = "", options_of: Callable[[Any], dict[str, Any]] = lambda _: {}, **options: Any) -> Call:
    def call(store: PrefixStore) -> None:
        model = MODELS[family]()
        given = {"input_ids": random_prompt(1, 20) % 32, "max_new_tokens": 2, "do_sample": False} | options
        model.generate(**given | options_of(model), custom_generate=store)

    return call


def with_encoder() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "": partial(tiny_model, "llama"),
    "encoder": with_encoder,
    "images": model_of_images,
}


@torch.no_grad()
def that_has_read(num_tokens: int, make: Callable[[Any], HybridCache], config: Any, model: Any = None) -> HybridCache:
    cache = make(config)
    (model or tiny_model("llama"))(random_prompt(1, num_tokens), **cache_argument(cache))
    return cache


def that_was_reset(config: Any) -> HybridCache:
    cache = that_has_read(640, QuantizedHybridCache, config)
    cache.reset()
    return cache


def embedded(model: Any) -> dict[str, Any]:
    return {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(random_prompt(1, 20))}


REFUSED: list[tuple[str, Call]] = [
    ("DynamicCache", prefill(lambda config: DynamicCache(config=config))),
    ("holds 8 tokens already", prefill(partial(that_has_read, 8, DynamicHybridCache))),
    ("chosen its codecs", prefill(that_was_reset, (1, 400))),
    ("one sequence, got 2", prefill(shape=(2, 9))),
    ("at least two tokens", prefill(shape=(1, 1))),
    ("document_tokens must be 0 to 9", prefill(document_tokens=10)),
    ("encoder", prefill(family="encoder")),
    ("reads its prompt in the encoder.*Leave out custom_generate", generate("encoder")),
    (r"images, sound or video \(image_token_id 120\)", generate("images", **prompt_with_picture())),
    ("without padding.* hides 3 of their", generate(attention_mask=(torch.arange(20) > 2).long()[None])),
    ("Leave out position_ids", generate(position_ids=torch.arange(1, 21)[None])),
    ("cannot with assistant_model or prompt_lookup", generate("", lambda model: {"assistant_model": model})),
    ("use_cache=False forbids it", generate(use_cache=False)),
    (
        "of this package .* got DynamicCache",
        generate("", lambda model: cache_argument(DynamicCache(config=model.config))),
    ),
    ("not 'static'. Leave out cache_implementation", generate(cache_implementation="static")),
    ("All 20 tokens are those of the document", generate(document_tokens=20)),
    (r"one prompt in a call, without padding\. There are 2", generate(input_ids=random_prompt(2, 20))),
    ("cannot with inputs_embeds", generate("", embedded)),
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("reason", "call"), REFUSED)
def test_call_that_a_store_cannot_serve_is_refused_and_keeps_nothing(reason: str, call: Call, tmp_path: Path):
    store = PrefixStore(tmp_path)
    with pytest.raises((PrefixStoreError, ValueError), match=reason):
        call(store)
    assert store.prompts() == []


def test_prefill_when_length_turns_keys_then_keeps_short_texts_alone(tmp_path: Path):
    rotation = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 400}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model, store = new_llama(rope_parameters={**rotation, **factors}), PrefixStore(tmp_path)
    both = prompts(200, 30, 100)
    assert hits(tmp_path, model, DynamicHybridCache, *both, document=200) == [0, 200]
    with pytest.raises(PrefixStoreError, match=r"more than 400 tokens .* has 401"):
        store.prefill(model, random_prompt(1, 401), DynamicHybridCache(model.config), progress=False)
    cache = that_has_read(450, DynamicHybridCache, model.config, model)
    with pytest.raises(PrefixStoreError, match=r"more than 400 tokens .* has 450"):
        store.keep(model, random_prompt(1, 450), cache, document_tokens=100)
    assert hits(tmp_path, model, DynamicHybridCache, *both, document=200) == [200, 200]


def test_states_when_of_another_number_of_processes_then_not_used(tmp_path: Path):
    model, prompt, group, store = tiny_model("llama"), random_prompt(1, 400), group_of_one(), PrefixStore(tmp_path)
    if group is None:
        pytest.skip("this torch has no groups of processes")
    found = [
        store.prefill(model, prompt, DynamicHybridCache(model.config, group=each), progress=False).num_tokens
        for each in (None, group, None, group)
    ]
    assert found == [0, 0, 399, 399]


@pytest.mark.parametrize("is_of_a_part", [False, True])
def test_tokens_when_they_stand_for_media_then_refused(is_of_a_part: bool, tmp_path: Path):
    model, prompt, store = new_llama(), random_prompt(1, 9), PrefixStore(tmp_path)
    config, token = model.config, int(prompt[0, 4])
    cache = that_has_read(9, DynamicHybridCache, config, model)
    if is_of_a_part:
        config.thinker_config = type(config)(audio_config=type(config)(audio_token_index=token))
    else:
        config.image_token_id = token
    with pytest.raises(PrefixStoreError, match="images, sound or video"):
        store.keep(model, prompt, cache, document_tokens=8)
    with pytest.raises(PrefixStoreError, match="images, sound or video"):
        store.prefill(model, prompt, DynamicHybridCache(config))
    assert store.prompts() == []


def test_prefill_when_there_is_no_room_then_reads_and_warns(tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 2400)
    cache, store = DynamicHybridCache(model.config), PrefixStore(tmp_path / "store", max_bytes="100KiB")
    with pytest.warns(UserWarning, match="is read, and not kept: "):
        store.prefill(model, prompt, cache, progress=False)
    assert hits(tmp_path, model, DynamicHybridCache, prompt) == [0]
    assert repr(store) == f"PrefixStore({str(tmp_path / 'store')!r})"


def test_prefill_when_a_file_was_altered_then_reads_and_warns(tmp_path: Path):
    model, (first, second) = tiny_model("llama"), prompts(common=2200, first=200, second=300)
    _, cold = read(tmp_path / "cold", model, second, QuantizedHybridCache(model.config))
    read(tmp_path / "store", model, first, QuantizedHybridCache(model.config))
    alter_states(tmp_path / "store")
    with pytest.warns(UserWarning, match="was altered"):
        reused, states = read(tmp_path / "store", model, second, QuantizedHybridCache(model.config))
    assert reused == 0
    assert are_equal(states, cold)
    assert hits(tmp_path, model, QuantizedHybridCache, second) == [second.shape[1] - 1]


def test_states_when_of_another_form_or_model_then_not_used_and_why(tmp_path: Path):
    model, prompt, store = tiny_model("llama"), random_prompt(1, 400), PrefixStore(tmp_path)
    store.prefill(model, prompt, DynamicHybridCache(model.config), progress=False)
    told = store.why(model, prompt, QuantizedHybridCache(model.config, bits=4))
    assert "0 of 400 tokens" in told
    assert "399 tokens are stored and not used" in told
    assert "codec" in told
    twin = tiny_model("llama", seed=1)
    assert "weights" in store.why(twin, prompt, DynamicHybridCache(twin.config))
    assert store.prefill(twin, prompt, DynamicHybridCache(twin.config), progress=False).num_tokens == 0
    assert store.prefill(model, prompt, DynamicHybridCache(model.config), progress=False).num_tokens == 399


@pytest.mark.parametrize("form", FORMS)
def test_memory_when_states_come_from_a_store_then_as_much_as_read(form: str, tmp_path: Path):
    model = tiny_model("llama")
    of_read, of_stored = (FORMS[form](model.config) for _ in range(2))
    for cache in (of_read, of_stored):
        PrefixStore(tmp_path).prefill(model, random_prompt(1, 3000), cache, progress=False)
    assert of_stored.memory().host_bytes <= of_read.memory().host_bytes + 2**20
