"""Prompts of one batch have the states that each has alone, and their answers are those of transformers' cache."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicIndexedLayer

from hf_hybrid_cache import DynamicHybridCache, HybridCache, Placement, QuantizedHybridCache, minmax
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.layers import side_by_side
from hf_hybrid_cache.prefix_store import PrefixStore, PrefixStoreError

from .prompts import are_equal, held
from models.tiny_models import FAMILIES, random_prompt, tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")

MakeCache = Callable[[PreTrainedConfig], HybridCache]
PLACEMENTS = {
    "host": Placement(),
    "device": Placement(cpu_decode=False),
    "streamed": Placement(offload=True, cpu_decode=False),
    "divided": Placement(offload=True, cpu_decode=True, device_tokens=128),
}


def in_place(name: str) -> MakeCache:
    return lambda config: HybridCache(config, PLACEMENTS[name])


def padded(*paddings: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and their mask, `[batch, tokens]`, with so much padding on the left of each row."""
    token_ids = random_prompt(len(paddings), tokens)
    mask = (torch.arange(tokens) >= torch.tensor(paddings)[:, None]).long()
    return token_ids * mask, mask


def answers(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, ...]:
    """Return generated tokens, `[batch, tokens]`, and the logits of each step."""
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    output = model.generate(ids, attention_mask=mask, max_new_tokens=12, **options, **cache_argument(cache))
    return output.sequences, torch.stack(output.logits)


@pytest.mark.parametrize(
    ("family", "place"), [*((family, "host") for family in FAMILIES), *(("llama", place) for place in PLACEMENTS)]
)
@pytest.mark.filterwarnings("ignore:No layer of this model")
def test_batch_when_padded_then_answers_as_transformers(family: str, place: str, tmp_path: Path):
    model, cache = tiny_model(family), in_place(place)(tiny_model(family).config)
    ids, mask = padded(13, 290, 5, tokens=300)  # a row of fewer tokens than a window, and none without padding
    PrefixStore(tmp_path).prefill_batch(model, ids, cache, mask, progress=False)
    assert cache.get_seq_length() == 299
    tokens, logits = answers(model, ids, mask, cache)
    expected, expected_logits = answers(model, ids, mask, DynamicCache(config=model.config))
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logits, expected_logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize("place", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_when_in_a_batch_then_have_the_bits_of_prompts_alone(dtype: torch.dtype, place: str, tmp_path: Path):
    model, cache = tiny_model("llama", dtype), in_place(place)(tiny_model("llama").config)
    ids, mask = padded(64, 0, 297, tokens=300)
    PrefixStore(tmp_path / "batch").prefill_batch(model, ids, cache, mask, progress=False)
    for row, padding in enumerate((64, 0, 297)):
        alone = in_place(place)(model.config)
        PrefixStore(tmp_path / str(row)).prefill(model, ids[row, padding:], alone, progress=False)
        assert are_equal([each[row : row + 1, :, padding:] for each in held(cache)], held(alone))
        assert not any(each[row, :, :padding].any() for each in held(cache))


@pytest.mark.parametrize("codec", [minmax(4, rotate=True), minmax(8, rotate=False)], ids=str)
def test_rows_when_codecs_are_chosen_before_then_are_quantized(codec: Any, tmp_path: Path):
    model, (ids, _) = tiny_model("llama"), padded(0, 0, tokens=1500)
    cache = HybridCache(model.config, codec=codec)
    PrefixStore(tmp_path).prefill_batch(model, ids, cache, progress=False)
    for row in range(2):
        alone = HybridCache(model.config, codec=codec)
        PrefixStore(tmp_path).prefill(model, ids[row], alone, progress=False)
        assert are_equal([each[row : row + 1] for each in held(cache)], held(alone))
    assert cache.memory().host_bytes < 2.1 * alone.memory().host_bytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_batch_when_rows_were_read_before_then_has_equal_bits(family: str, tmp_path: Path):
    model, (ids, mask) = tiny_model(family), padded(0, 130, 0, 2000, tokens=2400)
    ids[2] = ids[0]
    caches = [DynamicHybridCache(model.config) for _ in range(2)]
    for name, cache in zip(("cold", "warm"), caches, strict=True):
        store = PrefixStore(tmp_path / name)
        if name == "warm":
            before = torch.cat([ids[1:2, 130 : 130 + 2048], random_prompt(1, 200, 1)], dim=1)
            store.prefill(model, before, DynamicHybridCache(model.config), progress=False)
        found = store.prefill_batch(model, ids, cache, mask, progress=False)
        assert [reuse.num_tokens for reuse in found] == [0, 2048 if name == "warm" else 0, 2399, 0]
    assert are_equal(*map(held, caches))
    assert are_equal(*(list(answers(model, ids, mask, cache)) for cache in caches))


def test_batch_when_read_then_rows_are_in_memory_one_by_one(tmp_path: Path):
    model, (ids, mask) = tiny_model("llama"), padded(0, 100, 3, 7, tokens=300)
    counts: list[int] = []

    def count(num_tokens: int) -> None:
        counts.append(sum(issubclass(type(each), HybridCache) for each in gc.get_objects()))

    cache, filled = DynamicHybridCache(model.config), DynamicHybridCache(model.config)
    PrefixStore(tmp_path).prefill_batch(model, ids, cache, mask, progress=count)
    assert len(set(counts)) == 1
    model.generate(ids, attention_mask=mask, max_new_tokens=1, **cache_argument(filled))
    assert cache.memory().host_bytes <= filled.memory().host_bytes


def test_batch_when_document_tokens_are_given_then_passes_end_there(tmp_path: Path):
    model, store, (ids, mask) = tiny_model("gemma3"), PrefixStore(tmp_path), padded(0, 10, tokens=300)
    ids[1, 10:210] = ids[0, :200]
    cache = DynamicHybridCache(model.config)
    found = store.prefill_batch(model, ids, cache, mask, document_tokens=200, progress=False)
    assert [reuse.num_tokens for reuse in found] == [0, 200]


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([[1] * 9, [1] * 7 + [0] * 2], "The 7 tokens of row 1 are not the last ones of its 9 positions.*padding_side"),
        ([[1] * 9, [1] * 4 + [0] + [1] * 4], "The 8 tokens of row 1 are not the last"),
        ([[1] * 9, [0] * 9], r"at least two tokens.*the rows have \[9, 0\]"),
        ([[1] * 9, [0] * 8 + [1]], r"at least two tokens.*the rows have \[9, 1\]"),
        ([[1] * 9], r"\[2, 9\], got \[1, 9\]"),
        ([[1] * 8] * 2, r"\[2, 9\], got \[2, 8\]"),
        ([[1] * 9, [0, 2, *[1] * 7]], "must be 0 or 1"),
        ([[0.0] * 9, [-1e9] + [0.0] * 8], "must be 0 or 1"),
    ],
)
def test_batch_when_the_mask_is_no_left_padding_then_refused(mask: list[list[float]], reason: str, tmp_path: Path):
    model, cache = tiny_model("llama"), DynamicHybridCache(tiny_model("llama").config)
    with pytest.raises(PrefixStoreError, match=reason):
        PrefixStore(tmp_path).prefill_batch(model, random_prompt(2, 9), cache, torch.tensor(mask))
    assert cache.get_seq_length() == 0


def test_batch_when_document_is_longer_than_a_row_then_refused(tmp_path: Path):
    model, (ids, mask) = tiny_model("llama"), padded(0, 3, tokens=9)
    with pytest.raises(PrefixStoreError, match="document_tokens must be 0 to 5"):
        PrefixStore(tmp_path).prefill_batch(model, ids, DynamicHybridCache(model.config), mask, document_tokens=6)


def test_batch_when_rows_would_choose_codecs_then_refused(tmp_path: Path):
    model, (ids, mask) = tiny_model("llama"), padded(0, 3, tokens=9)
    with pytest.raises(PrefixStoreError, match="codecs of a quantized cache by its own states"):
        PrefixStore(tmp_path).prefill_batch(model, ids, QuantizedHybridCache(model.config))
    cache = HybridCache(model.config, codec=minmax(4, rotate=True))
    with pytest.raises(PrefixStoreError, match=r"the rows have \[0, 3\] tokens of padding"):
        PrefixStore(tmp_path).prefill_batch(model, ids, cache, mask)


def test_batch_when_a_row_is_refused_then_the_cache_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, store, (ids, mask) = tiny_model("llama"), PrefixStore(tmp_path), padded(0, 50, tokens=300)
    cache = DynamicHybridCache(model.config)
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "image_token_id", 127, raising=False)
        ids[0, 3:], ids[1, 60] = ids[0, 3:].clamp(max=120), 127
        with pytest.raises(PrefixStoreError, match="images"):
            store.prefill_batch(model, ids, cache, mask, progress=False)
    assert cache.get_seq_length() == 0
    store.prefill_batch(model, ids, cache, mask, progress=False)
    assert cache.get_seq_length() == 299


def test_layers_when_their_states_are_not_by_sequence_then_refused():
    layers = [DynamicIndexedLayer() for _ in range(2)]
    for layer in layers:
        layer.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
        layer.update_indexer(torch.zeros(1, 5, 4))
    with pytest.raises(ValueError, match="indexer_keys cannot be side by side"):
        side_by_side(layers, 5)
