"""Every byte of every weight counts, wherever it is, at each call."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import AutoModelForCausalLM
from xxhash import xxh3_128_digest

from hf_hybrid_cache import QuantizedWeightsConfig, move_experts_to_host, quantize_weights
from hf_hybrid_cache.model_identity import ModelIdentityError, tensor_digests

from common.programs import run_program
from model_identity.models import differing, identity, new_llama
from models.expert_models import EXPERT_FAMILIES, expert_model


def up(model: Any, layer: int = 0) -> torch.Tensor:
    return model.model.layers[layer].mlp.up_proj.weight


def flip_a_bit(model: Any) -> None:
    up(model).view(torch.int32)[5, 7].bitwise_xor_(1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a bit": flip_a_bit,
    "order of rows": lambda model: up(model).copy_(up(model).flip(0)),
    "two tensors": lambda model: torch.utils.swap_tensors(up(model, 0), up(model, 1)),
    "parameter": lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach() + 1)),
    "data": lambda model: model.lm_head.weight.data.mul_(2),
    "a row of data": lambda model: model.model.embed_tokens.weight.data[-1].mul_(2),
    "a number of data": lambda model: model.lm_head.weight.data[5, 7].add_(1),
    "place of data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.flip(0)),
    "buffer": lambda model: model.model.rotary_emb.inv_freq[1].mul_(1.5),
    "all": lambda model: model.load_state_dict(new_llama(seed=1).state_dict()),
    "all tensors": lambda model: model.load_state_dict(new_llama(seed=1).state_dict(), assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_when_changed_between_calls_then_differ(change: str):
    model = new_llama()
    before = identity(model)
    with torch.no_grad():
        CHANGES[change](model)
    assert differing(identity(model), before) == {"weights"}
    assert identity(copy.deepcopy(model)) == identity(model)


def test_weights_when_made_in_inference_mode_then_changes_count():
    with torch.inference_mode():
        model = new_llama()
    before = identity(model)
    assert before == identity(new_llama())
    with torch.inference_mode():
        flip_a_bit(model)
        assert differing(identity(model), before) == {"weights"}
        flip_a_bit(model)
    assert identity(model) == before


def test_weights_when_tied_then_count_once_and_differ_from_equal_ones():
    tied, equal = new_llama(tie_word_embeddings=True), new_llama()
    with torch.no_grad():
        equal.load_state_dict(tied.state_dict())
    assert "weights" in differing(identity(tied), identity(equal))
    assert identity(tied) == identity(new_llama(tie_word_embeddings=True))


def test_weights_of_zeros_when_of_another_size_then_differ():
    small, large = new_llama(), new_llama(intermediate_size=128)
    with torch.no_grad():
        for weight in (*small.parameters(), *large.parameters()):
            weight.zero_()
    assert "weights" in differing(identity(small), identity(large))


def test_weights_when_in_another_order_in_memory_then_are_the_same():
    model, other = new_llama(), new_llama()
    up(other).data = up(other).data.t().contiguous().t()
    assert not up(other).is_contiguous()
    assert identity(other) == identity(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex128])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3000, 700), (1500, 2, 701), (2, 3, 300_000)], ids=str)
def test_digest_when_of_any_view_then_is_that_of_its_bytes(shape: tuple[int, ...], dtype: torch.dtype):
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(2, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor = data.view(dtype).view(shape)
    views = [tensor, tensor.t() if tensor.dim() < 3 else tensor.transpose(1, 2), tensor[..., ::2] if shape else tensor]
    views.append(tensor.expand(2, *shape))
    copies = [view.contiguous().flatten().view(torch.uint8).numpy() for view in views]
    assert tensor_digests(views) == [xxh3_128_digest(copy) for copy in copies]


def test_digest_of_a_conjugate_is_that_of_its_numbers():
    tensor = torch.complex(torch.ones(3), torch.arange(1.0, 4.0))
    views = [tensor, tensor.conj(), tensor.conj()[::2], tensor.conj().imag]
    digests = tensor_digests(views)
    assert digests == tensor_digests([view.clone().resolve_conj().resolve_neg() for view in views])
    assert digests[0] != digests[1]


def test_model_when_loaded_by_a_process_with_more_threads_then_is_the_same(tmp_path: Path):
    model = new_llama(hidden_size=256, vocab_size=3000)
    model.save_pretrained(tmp_path)
    run_program(
        "import torch; torch.set_num_threads(2); from model_identity.models import *; "
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).eval(); "
        f"assert identity(model).digest.hex() == {identity(model).digest.hex()!r}"
    )


# --- weights of other forms


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_when_loaded_or_made_then_are_the_same(bits: int, tmp_path: Path):
    model = new_llama()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QuantizedWeightsConfig(bits)).eval()
    plain = identity(model)
    quantize_weights(model, bits)
    assert differing(identity(model), plain) == {"weights"}
    assert differing(identity(loaded), identity(model)) == set()


def test_quantized_weights_when_of_other_codes_then_differ():
    models = [new_llama(), new_llama(), new_llama(), new_llama()]
    with torch.no_grad():
        models[1].lm_head.weight[3, 4] *= -1
    for model, bits, group_size in zip(models, (4, 4, 8, 4), (32, 32, 32, 64), strict=True):
        quantize_weights(model, bits, group_size)
    assert len({identity(model).fields["weights"] for model in models}) == 4


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", list(EXPERT_FAMILIES)[:2])
def test_host_experts_are_told_by_their_numbers(family: str, bits: int | None):
    models = [copy.deepcopy(expert_model(family)) for _ in range(3)]
    with torch.no_grad():
        changed = [weight for weight in models[2].parameters() if weight.dim() == 3][-1]
        changed[1, 2, 3] += 1
    for model in models:
        move_experts_to_host(model, bits=bits)
    first, second, third = map(identity, models)
    assert first == second
    assert differing(third, first) == {"weights"}


# --- refused


class Coded(nn.Parameter):
    pass


class Packed(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3)


UNREADABLE: dict[str, Callable[[Any], Any]] = {
    "lm_head.weight is not in memory but on meta": lambda model: model.lm_head.to("meta"),
    "lm_head.weight is a Coded": lambda model: model.lm_head._parameters.update(weight=Coded(up(model).detach())),
    "torch.sparse_coo": lambda model: setattr(model.lm_head, "weight", nn.Parameter(up(model).detach().to_sparse())),
    "lm_head._extra_state is no parameter": lambda model: setattr(model, "lm_head", Packed(64, 128, False).eval()),
    "accelerate": lambda model: cpu_offload(model, torch.device("cpu")),
}


@pytest.mark.parametrize("told", UNREADABLE)
def test_weights_when_they_cannot_be_read_then_are_refused(told: str):
    model = new_llama()
    UNREADABLE[told](model)
    with pytest.raises(ModelIdentityError, match=told):
        identity(model)
