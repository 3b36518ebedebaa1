"""Whole decode steps: llama.cpp gets the same model and as many tokens, and groups are compared by a shared row."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.cache_utils import DynamicCache

from experiments.common.told_process import EndedError
from experiments.experts.random_experts import random_model
from experiments.peers import llama_cpp
from experiments.peers.gguf_files import write_model
from experiments.peers.llama_cpp import FORMS
from experiments.peers.llama_process import LlamaProcess, Settings
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models.loading import random_llama

PROMPT = np.random.default_rng(0).integers(96, size=60).tolist()

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs llama.cpp: pip install hf_hybrid_cache[peers]"
)


@pytest.fixture(scope="module", autouse=True)
def no_files_left_open() -> Iterator[None]:
    yield
    if utilities := sys.modules.get("llama_cpp._utils"):  # it opens these when it is imported
        utilities.outnull_file.close()
        utilities.errnull_file.close()


@pytest.fixture(scope="module", params=["llama", "experts"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Make a model with scaled rotary frequencies, and keys and values that llama.cpp can quantize."""
    shape: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "pad_token_id": None,
    }  # fmt: skip
    if request.param == "experts":
        experts = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
        return random_model(Qwen3MoeConfig(**shape, **experts, tie_word_embeddings=False), torch.float32)
    rotary = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    return random_llama(LlamaConfig(**shape, tie_word_embeddings=True, rope_parameters=rotary), torch.float32)


@pytest.fixture(scope="module")
def file(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_model(model, path)
    return path


@torch.no_grad()
def logits_after(model: PreTrainedModel, copies: int, tokens: int, next_token: int) -> torch.Tensor:
    """Return the logits of a step at position `tokens`, after the prompt's keys and values, repeated to `tokens`."""
    prefilled, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(torch.tensor([PROMPT]), **cache_argument(prefilled))
    for index, layer in enumerate(prefilled.layers):
        keys, values = (torch.cat([states] * copies, dim=2)[:, :, :tokens] for states in (layer.keys, layer.values))
        cache.update(keys, values, index)
    position = torch.tensor([[tokens]])
    return model(torch.tensor([[next_token]]), **cache_argument(cache), position_ids=position).logits[0, -1]


@needs_llama_cpp
@pytest.mark.default("values")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("context", "copies"), [(None, 1), (61, 2), (180, 3)])
def test_llama_cpp_says_what_the_model_says(
    model: PreTrainedModel, file: Path, form: str, context: int | None, copies: int
):
    engine = llama_cpp.Engine(llama_cpp.Model(file), FORMS[form], PROMPT, num_steps=1, threads=1, context=context)
    tokens = context or len(PROMPT)
    assert engine.num_tokens == tokens
    logits = torch.from_numpy(engine.step(7).copy())
    expected, of_one_copy = (logits_after(model, number, tokens, 7) for number in (copies, 1))
    error = 1 - float(torch.cosine_similarity(logits, expected, dim=0))
    bound = 1e-3 if FORMS[form].bits == 4 else 2e-5
    if isinstance(model.config, Qwen3MoeConfig):  # scores that are close give tokens to other experts
        bound *= 10
    assert error < bound
    if copies > 1:  # the copies are attended to
        assert error < 1 - float(torch.cosine_similarity(logits, of_one_copy, dim=0))


@needs_llama_cpp
def test_a_process_times_steps_or_tells_why_not(file: Path):
    settings = Settings("llama.cpp", str(file), False, FORMS["llama.cpp-f16"], context=300, steps=2, threads=1)
    process = LlamaProcess(sys.executable, settings)
    assert process.step(3) > 0
    assert process.holds["kv_bytes"] > 300 * 2 * 2 * 2 * 2 * 32
    assert process.library["package"].startswith("llama-cpp-python")
    process.close()
    with pytest.raises(EndedError, match=r"llama.cpp cannot load .*missing"):
        LlamaProcess(sys.executable, replace(settings, file=f"{file}-missing"))
