"""The folder `hub`, which can be uploaded: `generate` loads it by name and makes the cache that fits."""

import importlib.abc
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache, HybridCache, minmax
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument
from hf_hybrid_cache.planning import Machine, PlanError, model_cost
from hf_hybrid_cache.planning.candidates import Candidate, Strategy
from hf_hybrid_cache.planning.plans import make_plan

from common.modes import ListStreamer
from models.tiny_models import COMMON, random_model, random_prompt, tiny_model

HUB = Path(__file__).parents[2] / "hub"
BY_NAME = {"custom_generate": str(HUB), "trust_remote_code": True}


@pytest.fixture(autouse=True, scope="module")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the modules that transformers copies in a folder of this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(LlamaConfig(**COMMON | {"max_position_embeddings": 2048}, num_hidden_layers=2))


def padded() -> dict[str, torch.Tensor]:
    """A batch of which the first prompt is shorter."""
    ids, mask = random_prompt(2, 100), torch.ones(2, 100, dtype=torch.long)
    ids[0, :30], mask[0, :30] = COMMON["pad_token_id"], 0
    return {"input_ids": ids, "attention_mask": mask}


MODES: dict[str, dict[str, Any]] = {
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "an assistant": {"assistant_model": tiny_model("llama", seed=1)},
    "a length in all": {"max_new_tokens": None, "max_length": 210},
    "a generation config": {
        "max_new_tokens": None,
        "do_sample": None,
        "generation_config": GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0),
    },
    "embeddings": {"input_ids": None, "inputs_embeds": torch.ones(1, 20, 64) / 10},
    "no prompt": {"input_ids": None},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_plain_generate(model: PreTrainedModel, mode: str):
    options = {"input_ids": random_prompt(1, 200), "max_new_tokens": 12, "do_sample": False, **MODES[mode]}
    options = {name: value for name, value in options.items() if value is not None}
    torch.manual_seed(0)
    plain = model.generate(**options)
    torch.manual_seed(0)
    assert torch.equal(model.generate(**options, **BY_NAME), plain)


@pytest.mark.parametrize(("options", "expected"), [({}, [600, 1, 1]), ({"prefill_chunk_size": 512}, [512, 88, 1, 1])])
def test_the_prompt_is_computed_in_chunks(model: PreTrainedModel, options: dict, expected: list[int]):
    lengths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    with model.register_forward_pre_hook(note, with_kwargs=True):
        model.generate(random_prompt(1, 600), max_new_tokens=3, **options, **BY_NAME)
    assert lengths == expected


@pytest.mark.usefixtures("short_prompts_choose")
def test_the_cache_is_the_one_that_fits(model: PreTrainedModel):
    ids = random_prompt(1, 600)
    cost = model_cost(model.config, chunk=600)
    for name, codecs in (("dynamic", set()), ("quantized-4", {minmax(4)})):
        memory = make_plan(cost, Candidate(name, Strategy.CPU), 610, Machine(0, 2**40)).host_bytes
        result = model.generate(
            ids, max_new_tokens=10, host_memory=memory, return_dict_in_generate=True, output_scores=True, **BY_NAME
        )
        assert isinstance(result[CACHE_ARGUMENT], HybridCache)
        assert {minmax(codec.keys.bits) for codec in result[CACHE_ARGUMENT].codecs.values()} == codecs
        assert len(result.scores) == 10
    least = make_plan(cost, Candidate("quantized-2", Strategy.CPU), 610, Machine(0, 2**40)).host_bytes
    with pytest.raises(PlanError, match=r"610 tokens of LlamaConfig do not fit: .* Use a shorter context"):
        model.generate(ids, max_new_tokens=10, host_memory=least - 1, **BY_NAME)


# Options, and the context, batch and chunk that have to fit.
ASKED: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({}, (120, 1, 100)),
    ({"max_new_tokens": 40, "prefill_chunk_size": 64}, (140, 1, 64)),
    ({"max_length": 300, "num_beams": 3}, (300, 3, 100)),
    ({"generation_config": GenerationConfig(max_new_tokens=40, num_beams=2)}, (140, 2, 100)),
    ({"max_new_tokens": 5, "do_sample": True, "num_return_sequences": 4, **padded()}, (105, 8, 100)),
    ({"max_new_tokens": 100_000}, (2048, 1, 100)),
]


def test_what_has_to_fit_is_what_generate_is_asked_for(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    def ask(config: Any, context: int, gpu_memory: Any, host_memory: Any, **sizes: int) -> HybridCache:
        assert (config, gpu_memory, host_memory) == (model.config, 0, "9GiB")  # the model is on the CPU
        raise PlanError((context, *sizes.values()))

    monkeypatch.setattr("hf_hybrid_cache.cache_for_budget", ask)
    for options, expected in ASKED:
        given = {"input_ids": random_prompt(1, 100), "gpu_memory": "8GiB", "host_memory": "9GiB"} | options
        with pytest.raises(PlanError) as raised:
            model.generate(**given, **BY_NAME)
        assert raised.value.args == (expected,)


def test_an_option_that_asks_for_another_cache_is_refused(model: PreTrainedModel):
    for option in (
        cache_argument(DynamicHybridCache(model.config)),
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"generation_config": GenerationConfig(use_cache=False)},
    ):
        way_out = f"{CACHE_ARGUMENT}, or call generate" if CACHE_ARGUMENT in option else "use_cache and cache_implem"
        with pytest.raises(ValueError, match=f"This generation method makes the cache itself. Leave out {way_out}"):
            model.generate(random_prompt(1, 20), max_new_tokens=2, **option, **BY_NAME)


def test_a_model_on_several_devices_has_to_say_what_there_is(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    weights = [torch.empty(1, device="meta"), torch.empty(1)]
    weights += [SimpleNamespace(device=torch.device("cuda", index)) for index in range(2)]
    monkeypatch.setattr(model, "parameters", lambda: weights)
    with pytest.raises(ValueError, match=r"the model is on cuda:0, cuda:1\. Pass gpu_memory"):
        model.generate(random_prompt(1, 20), max_new_tokens=2, **BY_NAME)


def test_a_folder_with_weights_generates_so_by_itself_if_trusted(model: PreTrainedModel, tmp_path: Path):
    model.save_pretrained(tmp_path)
    shutil.copytree(HUB / "custom_generate", tmp_path / "custom_generate")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    ids, streamer = random_prompt(1, 40), ListStreamer()
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    result = loaded.generate(input_ids=ids, streamer=streamer, **options)
    assert isinstance(result[CACHE_ARGUMENT], HybridCache)
    assert torch.equal(result.sequences, model.generate(ids, **options).sequences)
    assert streamer.tokens == [*result.sequences[0].tolist(), -1]
    with pytest.raises(ValueError, match="contains custom generation code"):
        model.generate(random_prompt(1, 20), custom_generate=str(HUB), trust_remote_code=False)


def test_a_package_that_is_missing_or_too_old_is_named(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copied = shutil.copytree(HUB, tmp_path / "hub")
    (copied / "custom_generate" / "requirements.txt").write_text("hf_hybrid_cache>=999.0\n")
    with pytest.raises(ImportError, match=r"Missing requirements .*\nhf_hybrid_cache>=999\.0 \(installed: "):
        model.generate(random_prompt(1, 20), custom_generate=str(copied), trust_remote_code=True)

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "hf_hybrid_cache":
                raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "hf_hybrid_cache")
    with pytest.raises(ImportError, match="pip install hf_hybrid_cache"):
        model.generate(random_prompt(1, 20), **BY_NAME)


def test_the_page_says_what_the_hub_asks_for():
    page = (HUB / "README.md").read_text()
    _, head, text = page.split("---\n", 2)
    assert "  - custom_generate\n" in head
    for heading in ("Description", "Base model", "Model compatibility", "Additional Arguments", "Output Type changes"):
        assert f"\n## {heading}\n" in text
    assert {path.name for path in (HUB / "custom_generate").iterdir() if path.suffix} >= {
        "generate.py",
        "requirements.txt",
    }
