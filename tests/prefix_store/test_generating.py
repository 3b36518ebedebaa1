"""`generate` with a store gives the tokens of `prefill` and `generate`, and those of transformers' own cache."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_hybrid_cache import DynamicHybridCache, HybridCache, PrefixStore, PrefixStoreError
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument

from .prompts import FORMS, prompts
from common.modes import ListStreamer
from model_identity.models import new_llama
from models.image_models import model_of_images, prompt_with_picture
from models.tiny_models import FAMILIES, random_prompt, tiny_model

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "processors": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "early end": {"eos_token_id": [*range(3, 128, 5)], "num_return_sequences": 3, "do_sample": True},
}
FAMILIES_KEPT = sorted(set(FAMILIES) - {"mistral_sliding"})


def answered(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and logits of an answer, greedy by default."""
    torch.manual_seed(0)
    common = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, **common | options)
    return output.sequences, torch.stack(output.logits)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES_KEPT)
def test_answers_are_those_of_prefill_and_generate_and_of_stock(family: str, mode: str, tmp_path: Path):
    model, options = tiny_model(family), MODES[mode]
    first, second = prompts(common=300, first=20, second=40)
    store, cache = PrefixStore(tmp_path / "store"), DynamicHybridCache(model.config)
    answered(model, first, custom_generate=store, document_tokens=300, progress=False)
    found: list[int] = []
    ours = answered(model, second, custom_generate=store, document_tokens=300, progress=found.append, **options)
    PrefixStore(tmp_path / "cold").prefill(model, second, cache, document_tokens=300, progress=False)
    if family == "qwen3_next":
        cache.batch_repeat_interleave(max(options.get("num_beams", 1), options.get("num_return_sequences", 1)))
    expected = answered(model, second, **cache_argument(cache), **options)
    assert found == [300, 39]
    assert all(map(torch.equal, ours, expected))
    assert torch.equal(ours[0], answered(model, second, **options)[0])


@pytest.mark.parametrize("form", FORMS)
def test_cache_that_is_passed_is_filled_and_kept_in_its_form(form: str, tmp_path: Path):
    model, (first, second) = tiny_model("llama"), prompts(common=1200, first=30, second=150)
    for prompt in (first, second):
        cache, found = FORMS[form](model.config), []
        options = {"custom_generate": PrefixStore(tmp_path), "progress": found.append, "document_tokens": 1200}
        with pytest.warns(UserWarning, match="context is 512"):
            ours = answered(model, prompt, **options, **cache_argument(cache))
        assert cache.get_seq_length() == prompt.shape[1] + 7
    twin = FORMS[form](model.config)
    with pytest.warns(UserWarning, match="context is 512"):
        PrefixStore(tmp_path / "cold").prefill(model, second, twin, document_tokens=1200, progress=False)
    assert found[0] == 1200
    assert all(map(torch.equal, ours, answered(model, second, **cache_argument(twin))))


def test_prompt_when_no_cache_is_passed_then_is_streamed_and_listed(tmp_path: Path):
    model, ids, store = tiny_model("llama"), random_prompt(1, 200), PrefixStore(tmp_path)
    heard, expected = ListStreamer(), ListStreamer()
    common = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(ids, **common, custom_generate=store, title="mine", progress=False, streamer=heard)
    model.generate(ids, **common, streamer=expected)
    assert type(output[CACHE_ARGUMENT]) is DynamicHybridCache
    assert [stored.title for stored in store.prompts()] == ["mine"]
    assert heard.tokens == expected.tokens


def test_criteria_of_the_caller_end_an_answer(tmp_path: Path):
    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 203)

    model, ids = tiny_model("llama"), random_prompt(1, 200)
    options = {"custom_generate": PrefixStore(tmp_path), "progress": False, "stopping_criteria": [AfterThree()]}
    assert answered(model, ids, **options)[0].shape == (1, 203)


def test_equal_sequences_in_chunks_are_answered_each(tmp_path: Path):
    model, ids = tiny_model("qwen3_next"), random_prompt(1, 200).expand(2, -1)
    options = {"attention_mask": torch.ones_like(ids), "num_return_sequences": 2, "do_sample": True}
    of_store = {"custom_generate": PrefixStore(tmp_path), "progress": False, "prefill_chunk_size": 16}
    assert torch.equal(answered(model, ids, **of_store, **options)[0], answered(model, ids, **options)[0])


@pytest.mark.parametrize("mode", ["greedy", "several answers", "beams"])
def test_tokens_are_known_afterwards(mode: str, tmp_path: Path):
    model, ids, cache = tiny_model("llama"), random_prompt(1, 200), DynamicHybridCache(tiny_model("llama").config)
    options = {"custom_generate": PrefixStore(tmp_path), "progress": False, **cache_argument(cache), **MODES[mode]}
    output, _ = answered(model, ids, **options)
    assert cache.keep_common_prefix(output) == (200 if mode == "beams" else 207)
    other = torch.cat([ids[:, :9], ids[:, 10:]], dim=1)
    assert cache.keep_common_prefix(other) == 9


def test_text_for_a_model_of_images_is_kept(tmp_path: Path):
    model, ids, found = model_of_images(), random_prompt(1, 200) % 100 + 5, []
    inputs = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids, dtype=torch.int)}
    options = {**inputs, "custom_generate": PrefixStore(tmp_path), "progress": found.append}
    answers = [answered(model, ids, **options)[0] for _ in range(2)]
    assert found == [0, 199, 199]
    assert all(torch.equal(answer, answered(model, ids, **inputs)[0]) for answer in answers)


def adapted(**changes: Any) -> Any:
    """Return a small model with an adapter of PEFT that is active."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(new_llama(), peft.LoraConfig(**OF_ADAPTERS | changes)).eval()


OF_ADAPTERS: dict[str, Any] = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
of_peft = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@of_peft
def test_model_with_an_adapter_answers_as_without_a_store(tmp_path: Path):
    model, ids, found = adapted(), random_prompt(1, 200), []
    options = {"input_ids": ids, "max_new_tokens": 8, "do_sample": False}
    for _ in range(2):
        ours = model.generate(**options, custom_generate=PrefixStore(tmp_path), progress=found.append)
        assert torch.equal(ours, model.generate(**options))
    assert found == [0, 199, 199]


# What is refused


@of_peft
@pytest.mark.parametrize(
    ("adapter", "options", "name"),
    [({}, {"adapter_names": ["__base__"]}, "adapter_names"), ({"alora_invocation_tokens": [9]}, {}, "alora_offsets")],
)
def test_adapters_that_are_chosen_for_a_call_are_refused(
    adapter: dict[str, Any], options: dict[str, Any], name: str, tmp_path: Path
):
    ids = random_prompt(1, 200)
    with pytest.raises(PrefixStoreError, match=f"cannot with {name}"):
        adapted(**adapter).generate(input_ids=ids, custom_generate=PrefixStore(tmp_path), **options)


@of_peft
def test_states_are_not_kept_while_a_call_chooses_adapters(tmp_path: Path):
    wrapper, ids, store = adapted(), random_prompt(1, 200), PrefixStore(tmp_path)
    model = wrapper.get_base_model()
    cache = DynamicHybridCache(model.config)
    of_call = partial(wrapper._enable_peft_forward_hooks, adapter_names=["__base__"])
    refused = partial(pytest.raises, PrefixStoreError, match="cannot with adapter_names")
    with of_call(), refused():
        store.prefill(model, ids, cache, progress=False)
    assert store.prefill(model, ids, cache, progress=False).num_tokens == 0
    with of_call(), refused():
        store.keep(model, ids, cache, document_tokens=100)
    assert len(store.keep(model, ids, cache, document_tokens=100)) == 32


# What is told, the options, and the prompt if it is another one.
REFUSED: list[tuple[str, Callable[[PreTrainedModel], dict[str, Any]]]] = [
    ("without padding.* hides 3 of their", lambda _: {"attention_mask": (torch.arange(20) > 2).long()[None]}),
    ("Leave out position_ids", lambda _: {"position_ids": torch.arange(1, 21)[None]}),
    ("cannot with assistant_model or prompt_lookup_num", lambda model: {"assistant_model": model}),
    ("cannot with assistant_model or prompt_lookup_num", lambda _: {"prompt_lookup_num_tokens": 3}),
    ("cannot with use_cache=False", lambda _: {"use_cache": False}),
    ("cannot with synced_gpus", lambda _: {"synced_gpus": True}),
    ("of this package .* got DynamicCache", lambda model: cache_argument(DynamicCache(config=model.config))),
    ("not 'static'. Leave out cache_implementation", lambda _: {"cache_implementation": "static"}),
    ("All 20 tokens are those of the document", lambda _: {"document_tokens": 20}),
    (r"one prompt in a call, without padding\. There are 2", lambda _: {"input_ids": random_prompt(2, 20)}),
    (
        "cannot with inputs_embeds",
        lambda model: {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(random_prompt(1, 20))},
    ),
    ("not part of transformers any more", lambda _: {"dola_layers": "high"}),
    ("`streamer` cannot be used with beam", lambda _: {"num_beams": 2, "streamer": ListStreamer()}),
]


@pytest.mark.parametrize(("reason", "options_of"), REFUSED)
def test_generate_when_a_store_cannot_serve_it_then_is_refused(
    reason: str, options_of: Callable[[PreTrainedModel], dict[str, Any]], tmp_path: Path
):
    model, common = tiny_model("llama"), {"input_ids": random_prompt(1, 20), "max_new_tokens": 2, "do_sample": False}
    with pytest.raises((PrefixStoreError, ValueError), match=reason):
        model.generate(**common | options_of(model), custom_generate=PrefixStore(tmp_path))


def test_images_are_refused(tmp_path: Path):
    with pytest.raises(PrefixStoreError, match=r"images, sound or video \(image_token_id 120\)"):
        model_of_images().generate(**prompt_with_picture(), custom_generate=PrefixStore(tmp_path), max_new_tokens=2)


def test_encoder_decoder_is_refused(tmp_path: Path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(PrefixStoreError, match=r"reads its prompt in the encoder.*Leave out custom_generate"):
        model.generate(random_prompt(1, 9) % 32, custom_generate=PrefixStore(tmp_path), max_new_tokens=2)


def test_cache_when_its_call_was_refused_then_can_be_used(tmp_path: Path):
    model, ids = tiny_model("llama"), random_prompt(1, 20)
    cache: HybridCache = DynamicHybridCache(model.config)
    with pytest.raises(PrefixStoreError):
        answered(model, ids, custom_generate=PrefixStore(tmp_path), document_tokens=21, **cache_argument(cache))
    ours = answered(model, ids, custom_generate=PrefixStore(tmp_path), progress=False, **cache_argument(cache))
    assert torch.equal(ours[0], answered(model, ids)[0])
