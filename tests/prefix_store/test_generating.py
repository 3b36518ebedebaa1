"""`generate` with a store gives the tokens of `prefill` and `generate`, and those of transformers' own cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_hybrid_cache import DynamicHybridCache, PrefixStore
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument

from .prompts import FORMS, prompts
from common.modes import ListStreamer
from models.image_models import model_of_images
from models.tiny_models import random_prompt, tiny_model


class AtLength345(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 345)


ENDS = {"stopping_criteria": [AtLength345()], "eos_token_id": [*range(3, 128, 5)]}
# A family that generates with some options, and the form of the cache that is passed.
MODES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "greedy": ("deepseek_v3", "full", {}),
    "sampling": ("gemma3", "quantized", {"do_sample": True, "top_k": 20}),
    "several answers": ("qwen3_next", "full", {"do_sample": True, "num_return_sequences": 3}),
    "beams": ("gemma4_shared", "full", {"num_beams": 3, "num_return_sequences": 2}),
    "sampled beams": ("qwen3_next", "offloaded", {"num_beams": 3, "do_sample": True}),
    "processors": ("llama", "offloaded", {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),
    "early end": ("llama", "full", {"num_return_sequences": 3, "do_sample": True} | ENDS),
}


def answered(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and logits of an answer, greedy by default."""
    torch.manual_seed(0)
    common = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, **common | options)
    return output.sequences, torch.stack(output.logits)


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_prefill_and_generate_and_of_stock(mode: str, tmp_path: Path):
    family, form, options = MODES[mode]
    model = tiny_model(family)
    first, second = prompts(common=300, first=20, second=40)
    store, passed, cache = PrefixStore(tmp_path / "store"), *(FORMS[form](model.config) for _ in range(2))
    of_store = {"custom_generate": store, "document_tokens": 300}
    answered(model, first, **of_store, **cache_argument(FORMS[form](model.config)), progress=False)
    found: list[int] = []
    ours = answered(model, second, **of_store, **cache_argument(passed), progress=found.append, **options)
    PrefixStore(tmp_path / "cold").prefill(model, second, cache, document_tokens=300, progress=False)
    if family == "qwen3_next":
        cache.batch_repeat_interleave(max(options.get("num_beams", 1), options.get("num_return_sequences", 1)))
    expected = answered(model, second, **cache_argument(cache), **options)
    assert found == [300, 39]
    assert all(map(torch.equal, ours, expected))
    assert form == "quantized" or torch.equal(ours[0], answered(model, second, **options)[0])
    assert passed.get_seq_length() == ours[0].shape[1] - 1


def test_prompt_when_no_cache_is_passed_then_is_streamed_and_listed(tmp_path: Path):
    model, ids, store = tiny_model("llama"), random_prompt(1, 200), PrefixStore(tmp_path)
    heard, expected = ListStreamer(), ListStreamer()
    common: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(ids, **common, custom_generate=store, title="mine", progress=False, streamer=heard)
    model.generate(ids, **common, streamer=expected)
    assert type(output[CACHE_ARGUMENT]) is DynamicHybridCache
    assert [stored.title for stored in store.prompts()] == ["mine"]
    assert heard.tokens == expected.tokens


def test_equal_sequences_in_chunks_are_answered_each(tmp_path: Path):
    model, ids = tiny_model("qwen3_next"), random_prompt(1, 200).expand(2, -1)
    options = {"attention_mask": torch.ones_like(ids), "num_return_sequences": 2, "do_sample": True}
    of_store = {"custom_generate": PrefixStore(tmp_path), "progress": False, "prefill_chunk_size": 16}
    assert torch.equal(answered(model, ids, **of_store, **options)[0], answered(model, ids, **options)[0])


@pytest.mark.parametrize("beams", [1, 3])
def test_tokens_are_known_afterwards(beams: int, tmp_path: Path):
    model, ids, cache = tiny_model("llama"), random_prompt(1, 200), DynamicHybridCache(tiny_model("llama").config)
    options = {"custom_generate": PrefixStore(tmp_path), "progress": False, **cache_argument(cache)}
    output, _ = answered(model, ids, **options, num_beams=beams)
    assert cache.keep_common_prefix(output) == (200 if beams > 1 else 207)
    assert cache.keep_common_prefix(torch.cat([ids[:, :9], ids[:, 10:]], dim=1)) == 9


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_text_for_a_model_of_images_is_kept(tmp_path: Path):
    model, ids, found = model_of_images(), random_prompt(1, 200) % 100 + 5, []
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    inputs["mm_token_type_ids"] = torch.zeros_like(ids, dtype=torch.int)
    for _ in range(2):
        ours = model.generate(**inputs, custom_generate=PrefixStore(tmp_path), progress=found.append)
        assert torch.equal(ours, model.generate(**inputs))
    assert found == [0, 199, 199]
