"""Models with quantized weights: their codes, the numbers that these stand for, and how they are loaded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_hybrid_cache import QuantizedWeightsConfig, quantize_weights
from hf_hybrid_cache.weights.quantized_weight import QuantizedWeight

from models.tiny_models import random_prompt

IN_4_BITS = QuantizedWeightsConfig(bits=4)


def with_dense_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose weights are the numbers that the codes stand for."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, QuantizedWeight):
                module._parameters[name] = nn.Parameter(weight.dense())
    return model


def quantized_weights(model: PreTrainedModel) -> list[QuantizedWeight]:
    return [weight for weight in model.parameters() if isinstance(weight, QuantizedWeight)]


def logits(model: PreTrainedModel, num_tokens: int = 9) -> torch.Tensor:
    ids = random_prompt(2, num_tokens).clamp(max=model.config.get_text_config().vocab_size - 1)
    with torch.no_grad():
        return model(input_ids=ids).logits


def note_operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations that ask for the numbers of a weight, from now on."""
    asked: list[str] = []
    dispatch = QuantizedWeight.__torch_dispatch__.__func__

    def noted(cls: Any, func: Any, *others: Any) -> Any:
        asked.append(str(func))
        return dispatch(cls, func, *others)

    monkeypatch.setattr(QuantizedWeight, "__torch_dispatch__", classmethod(noted))
    return asked


def loaded(folder: Path, config: QuantizedWeightsConfig | None = IN_4_BITS, **settings: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "auto", **settings}, quantization_config=config)


def assert_same_weights(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    """Check that both models have the same codes under the same names, and the same plain weights."""
    own, others = (dict(model.named_parameters(remove_duplicate=False)) for model in (ours, theirs))
    assert list(own) == list(others)
    for name, weight in own.items():
        other = others[name]
        assert type(weight) is type(other), name
        assert weight.dtype == other.dtype, name
        if isinstance(weight, QuantizedWeight):
            assert weight.is_transposed == other.is_transposed, name
            assert weight.matrices.layout == other.matrices.layout, name
            assert weight.matrices.factors == other.matrices.factors, name
            assert torch.equal(weight.matrices.panels, other.matrices.panels), name
        else:
            torch.testing.assert_close(weight, other, rtol=0, atol=0, equal_nan=True, msg=name)


def assert_as_quantized_afterwards(folder: Path, config: QuantizedWeightsConfig = IN_4_BITS, **settings: Any) -> None:
    ours, theirs = loaded(folder, config, **settings), loaded(folder, None, **settings)
    report = quantize_weights(theirs, config.bits, config.group_size, config.head_bits)
    assert_same_weights(ours, theirs)
    assert ours.hf_quantizer.report == report
