"""Weights quantized while they are loaded: the model is that of `quantize_weights`, and never whole in memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import MergeModulelist
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from hf_hybrid_cache import HostMemoryError, QuantizedWeightsConfig, quantize_weights
from hf_hybrid_cache.weights import NothingToQuantizeError
from hf_hybrid_cache.weights.expert_layers import expert_modules
from hf_hybrid_cache.weights.quantized_weight import QuantizedWeight

from common.interruptions import Interruption
from models.architectures import small_config, small_model
from models.tiny_models import random_prompt
from weights.quantized_models import IN_4_BITS, assert_as_quantized_afterwards, assert_same_weights, loaded


def mixtral(**changes: Any) -> PreTrainedModel:
    """Wide enough that all its matrices are quantized."""
    config = small_config("MixtralConfig")
    config.update({"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2, **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# --- the same model; tests/models/test_every_architecture.py compares all architectures


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ((8,), {}),
        ((4, 64), {"dtype": torch.float32}),
        ((4, 32, 4), {"dtype": torch.float16}),
        pytest.param(
            (4,),
            {"device_map": "auto"},
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine that has only the CPU"),
        ),
    ],
)
def test_widths_and_type_are_those_that_were_asked_for(options: tuple, settings: dict, tmp_path: Path):
    mixtral().bfloat16().save_pretrained(tmp_path)
    config = QuantizedWeightsConfig(*options)
    assert_as_quantized_afterwards(tmp_path, config, **settings)
    computed = loaded(tmp_path, config, **settings)(random_prompt(1, 5).clamp(max=90)).logits
    assert computed.dtype == settings.get("dtype", torch.bfloat16)


def test_a_layer_s_experts_are_never_stacked_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mixtral().save_pretrained(tmp_path)
    stacked = []
    merge = MergeModulelist.convert

    def noted(self: Any, input_dict: Any, *others: Any, **more: Any) -> Any:
        stacked.extend(len(tensors) for tensors in input_dict.values())
        return merge(self, input_dict, *others, **more)

    monkeypatch.setattr(MergeModulelist, "convert", noted)
    loaded(tmp_path)
    assert set(stacked) == {1}
    loaded(tmp_path, None)
    assert set(stacked) == {1, 4}


def test_only_experts_are_coded_where_that_is_asked_for(tmp_path: Path):
    own = mixtral()
    own.save_pretrained(tmp_path)
    ours, theirs = loaded(tmp_path, QuantizedWeightsConfig(4, only_experts=True)), loaded(tmp_path, None)
    quantize_weights(theirs, 4)
    for name, weight in ours.named_parameters():
        if weight.dim() == 3:
            assert torch.equal(weight.matrices.panels, theirs.get_parameter(name).matrices.panels)
        else:
            assert torch.equal(weight, own.get_parameter(name))
    report = ours.hf_quantizer.report
    experts = sum(weight.nbytes for weight in own.parameters() if weight.dim() == 3)
    assert (report.quantized_weights, report.original_bytes, report.left) == (4, experts, {})
    assert report.original_bytes + report.other_bytes == sum(weight.nbytes for weight in own.parameters())
    assert "output head" not in str(report)
    assert expert_modules(ours)


def test_weights_of_a_type_of_their_own_are_coded_in_it(tmp_path: Path):
    class Mixed(type(mixtral())):  # some models have weights of another dtype, whatever they are loaded in
        def __init__(self, config: Any):
            super().__init__(config)
            self.model.layers[0].self_attn.q_proj.to(torch.float32)

    mixtral().save_pretrained(tmp_path)
    ours, theirs = (
        Mixed.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
        for config in (IN_4_BITS, None)
    )
    quantize_weights(theirs, 4)
    assert ours.model.layers[0].self_attn.q_proj.weight.dtype == torch.float32
    assert_same_weights(ours, theirs)


# --- files of other kinds


@pytest.mark.parametrize(("name", "factor"), [("MixtralConfig", 1), ("GPT2Config", 1), ("GPT2Config", 2)])
def test_files_of_torch_that_name_tied_weights_twice_are_loaded_too(name: str, factor: int, tmp_path: Path):
    model = small_model(name)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights["lm_head.weight"] *= factor
    model.config.save_pretrained(tmp_path)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    ours = loaded(tmp_path)
    is_tied = ours.lm_head.weight is ours.get_input_embeddings().weight
    assert is_tied == (name == "GPT2Config" and factor == 1)
    assert_as_quantized_afterwards(tmp_path)


def test_a_weight_that_files_do_not_have_is_coded_as_it_was_initialized(tmp_path: Path):
    model = mixtral()
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    ours = loaded(tmp_path)
    assert isinstance(ours.lm_head.weight, QuantizedWeight)
    assert ours.hf_quantizer.report == quantize_weights(model, 4)


def test_a_loaded_config_beside_plain_files_loads_either_way(tmp_path: Path):
    mixtral().save_pretrained(tmp_path)
    loaded(tmp_path).config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["bits"] == 4
    assert_as_quantized_afterwards(tmp_path)


# --- what stays as it is, and what is refused


def test_what_cannot_be_coded_stays_and_is_named_with_the_reason(tmp_path: Path):
    model = mixtral()
    model.model.layers[0].mlp.experts.down_proj.data[3, 5, 7] = torch.inf
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    assert_as_quantized_afterwards(tmp_path)
    left = loaded(tmp_path).hf_quantizer.report.left
    reason = "has numbers that are infinite or not a number"
    assert left["model.layers.0.mlp.experts.down_proj"] == left["model.layers.1.self_attn.q_proj.weight"] == reason


@pytest.mark.parametrize(
    ("config", "settings", "error", "message"),
    [
        ({"vocab_size": 50}, {}, (RuntimeError, ValueError), r"ignore_mismatched_sizes|is \[96, 64\] in the files"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            {},
            ValueError,
            "quantized with GPTQConfig but you are passing a QuantizedWeightsConfig",
        ),
        # Noticed before anything is read.
        (
            {"hidden_size": 2**14, "vocab_size": 2**32},
            {},
            HostMemoryError,
            r"Weights in 4 bits need \d+\.\d+ GiB more host memory",
        ),
        *(
            ({}, {"device_map": device_map}, ValueError, "need the CPU, and device_map names .*: use device_map=.cpu")
            for device_map in ("meta", {"": "cuda:0"}, {"model": "cpu", "lm_head": "disk"})
        ),
    ],
)
def test_what_cannot_be_loaded_in_codes_is_refused(
    config: dict, settings: dict, error: type[Exception], message: str, tmp_path: Path
):
    mixtral().save_pretrained(tmp_path)
    change_config(tmp_path, **config)
    with pytest.raises(error, match=message):
        loaded(tmp_path, **settings)


def test_a_model_without_experts_or_without_matrices_to_code_is_refused(tmp_path: Path):
    small_model("LlamaConfig").save_pretrained(tmp_path)
    with pytest.raises(NothingToQuantizeError, match="LlamaForCausalLM has no stacked experts: leave only_experts out"):
        loaded(tmp_path, QuantizedWeightsConfig(4, only_experts=True))
    with pytest.raises(TypeError, match="only_experts must be True or False"):
        QuantizedWeightsConfig(4, only_experts=None)
    config = small_config("GPT2Config")
    config.n_embd, config.n_head, config.vocab_size = 8, 1, 8
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "narrow")
    with pytest.raises(NothingToQuantizeError, match=r"No weight of GPT2LMHeadModel can be quantized: .* has only"):
        loaded(tmp_path / "narrow")


def test_saving_is_refused_before_anything_is_written(tmp_path: Path):
    mixtral().save_pretrained(tmp_path / "there")
    with pytest.raises(TypeError, match=r"cannot be saved: .* Keep the files that it was loaded from"):
        loaded(tmp_path / "there").save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


# --- what is left behind


def test_ended_at_any_line_the_next_model_loads_as_if_nothing_had_been(tmp_path: Path):
    mixtral(num_hidden_layers=1).save_pretrained(tmp_path)
    loaded(tmp_path)  # once, for what is done once
    whole = Interruption(folder="weights")
    whole.run(lambda: loaded(tmp_path))
    quantizers, own = dict(AUTO_QUANTIZER_MAPPING), loaded(tmp_path, None)
    ended = 0
    for at_line in range(0, whole.lines, max(1, whole.lines // 12)):
        fault = Interruption(KeyboardInterrupt, at_line, folder="weights")
        # Lines that another thread runs are not counted, and how many those are differs.
        if fault.run(lambda: loaded(tmp_path)):
            ended += 1
        else:
            assert fault.place is None
        assert_same_weights(loaded(tmp_path, None), own)
    assert ended >= 4
    assert_as_quantized_afterwards(tmp_path)
    assert quantizers == AUTO_QUANTIZER_MAPPING


@pytest.mark.slow
def test_transformers_is_told_with_the_first_config_and_not_by_an_import():
    program = """
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
before = dict(AUTO_QUANTIZER_MAPPING)
from hf_hybrid_cache import *
assert AUTO_QUANTIZER_MAPPING == before
QuantizedWeightsConfig(4), QuantizedWeightsConfig(8)
assert set(AUTO_QUANTIZER_MAPPING) - set(before) == {"hf_hybrid_cache"}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
