"""Families with layers, masks or positions of other kinds: kept to the bit, or refused with the reason."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.prefix_store import PrefixStore, PrefixStoreError

from .prompts import FORMS, hits
from models.architectures import CONFIGS, small_model

# The models have short contexts, and kernels of other packages are not installed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The prompt has .* context is", "ignore:The model has not used the cache"
)

KEPT = {
    "AriaTextConfig": "experts, told by the modules alone",
    "BambaConfig": "state spaces and attention, positions that begin at 0 in each pass unless they are given",
    "Cohere2Config": "windows and full attention without positions",
    "FalconH1Config": "state spaces beside attention in each layer",
    "GptOssConfig": "attention sinks, windows, experts",
    "GraniteMoeHybridConfig": "state spaces and attention, experts",
    "Lfm2Config": "convolutions and attention",
    "Lfm2MoeConfig": "convolutions and attention, experts",
    "Llama4TextConfig": "attention in chunks, experts",
    "NemotronHConfig": "layers that hold nothing",
    "Olmo3Config": "windows and full attention, normed queries and keys",
    "Phi3Config": "one matrix for queries, keys and values",
    "Qwen3_5TextConfig": "linear and full attention",
    "SmolLM3Config": "layers without positions",
}
KEPT = {name: why for name, why in KEPT.items() if name in CONFIGS}
REFUSED = {
    "DogeConfig": "by products over all of them at once",
    "BertConfig": "both directions",
    "FalconMambaConfig": "No layer .* attends",
    "JambaConfig": "JambaMambaMixer .* forgets",
    "MambaConfig": "No layer .* attends",
    "RecurrentGemmaConfig": "not all states",
    "RwkvConfig": "holds those of 0",
}


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    return small_model(name)


def tokens(count: int, seed: int) -> torch.Tensor:
    """Token ids, `[1, count]`, whose first one tells the seed."""
    ids = torch.randint(5, 85, (1, count), generator=torch.Generator().manual_seed(seed))
    ids[0, 0] = 5 + seed
    return ids


def answer(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    return model.generate(ids, **cache_argument(cache), max_new_tokens=6, do_sample=False, eos_token_id=None)


@pytest.mark.default("values")
@pytest.mark.parametrize("form", ["full", "quantized"])
@pytest.mark.parametrize("name", KEPT)
def test_family_when_prompts_share_a_document_then_equal_a_cold_read(form: str, name: str, tmp_path: Path):
    """The first block is due in the second pass, whose queries choose the codec, in a hit too."""
    model, make, document = model_of(name), FORMS[form], tokens(150, 0)
    first, second = (torch.cat([document, tokens(count, seed)], dim=1) for seed, count in ((1, 20), (2, 45)))
    assert hits(tmp_path, model, make, first, second, document=150) == [0, 150]
    if form == "full":
        ours, stock = make(model.config), DynamicCache(config=model.config)
        PrefixStore(tmp_path / "cold").prefill(model, second, ours, document_tokens=150, progress=False)
        assert torch.equal(*(answer(model, second, cache) for cache in (ours, stock)))


@pytest.mark.parametrize("name", ["DiffLlamaConfig", "MiniCPM3Config"])
def test_codes_when_attention_reads_states_then_equal_a_cold_read(name: str, tmp_path: Path):
    first = tokens(700, 0)
    second = torch.cat([first[:, :-1], tokens(200, 1)], dim=1)
    assert hits(tmp_path, model_of(name), FORMS["quantized"], first, second) == [0, 512]


@pytest.mark.parametrize("name", REFUSED)
def test_family_when_states_are_not_those_of_tokens_then_refused(name: str, tmp_path: Path):
    model, store = model_of(name), PrefixStore(tmp_path)
    with pytest.raises(PrefixStoreError, match=REFUSED[name]):
        store.prefill(model, tokens(200, 0), DynamicHybridCache(model.config), progress=False)
    assert store.prompts() == []
