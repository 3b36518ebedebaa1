"""Experts in host memory while the rest of a model is on an accelerator."""

from collections.abc import Iterator

import pytest
import torch
from contracts.decoding import decode

from hf_hybrid_cache import move_experts_to_host
from hf_hybrid_cache.weights.chosen_experts import streamed_experts
from hf_hybrid_cache.weights.expert_layers import ExpertLayer, expert_modules
from hf_hybrid_cache.weights.quantized_weight import QuantizedWeight

import simulated
from accelerator.orders import DEVICE, IS_SIMULATED, ORDERS, in_order
from common.caches import stock
from models.expert_models import EXPERT_FAMILIES, NUM_EXPERTS, expert_model
from models.tiny_models import random_prompt


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_order(request.param):
        yield request.param


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids.to(model.device)).logits.cpu()


# Few tokens, more than an expert takes at once, and so many that all experts are streamed.
@pytest.mark.default("pairs")
@pytest.mark.parametrize("num_tokens", [1, 20, 60, 300])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
@pytest.mark.usefixtures("exact_kernels")
def test_a_model_computes_on_the_device_what_it_computes_on_the_cpu(family, bits, num_tokens, order):
    model = expert_model(family)
    ids = random_prompt(1, num_tokens)
    move_experts_to_host(model, bits)
    theirs = logits(model, ids)
    model.to(DEVICE)
    errors = (logits(model, ids) - theirs).abs().amax(-1) / theirs.abs().max()
    # Choices of experts that come close to each other change with the last bits.
    assert errors.median() < (1e-5 if bits is None else 2e-3)


@pytest.mark.parametrize("bits", [None, 4])
def test_experts_stay_in_host_memory_wherever_the_model_goes(bits):
    model = expert_model("gpt_oss")
    move_experts_to_host(model, bits)
    theirs = logits(model, random_prompt(1, 9))
    experts = {
        name for module in expert_modules(model) for name, _ in model.named_parameters() if name.startswith(module)
    }
    for target in (DEVICE, "cpu", torch.device(DEVICE, 0)):
        model.to(target)
        kind = torch.device(target).type
        for name, weight in model.named_parameters():
            assert weight.device.type == ("cpu" if name in experts else kind)
    model.to("cpu")
    assert torch.equal(logits(model, random_prompt(1, 9)), theirs)


@pytest.mark.parametrize("bits", [None, 8])
def test_experts_on_the_device_decode_there_and_are_moved_to_host_memory(bits):
    model, expected, ids = expert_model("qwen3_moe"), expert_model("qwen3_moe"), random_prompt(1, 40)
    theirs = decode(model, ids, stock(model.config))
    model.to(DEVICE)
    assert torch.equal(decode(model, ids, stock(model.config)).cpu(), theirs)
    move_experts_to_host(expected, bits)
    assert move_experts_to_host(model, bits).expert_layers == 3
    assert all(weight.is_cpu for module in expert_modules(model).values() for weight in module.parameters())
    torch.testing.assert_close(logits(model, ids[:, :9]), logits(expected, ids[:, :9]), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not IS_SIMULATED, reason="memory is limited on the simulated accelerator")
def test_a_prompt_takes_room_for_two_experts_on_the_device():
    model = expert_model("mixtral")
    move_experts_to_host(model)
    layer = ExpertLayer(next(iter(expert_modules(model).values())))
    of_expert = (2 * 96 * 64 + 64 * 96) * 4
    like = torch.empty(1, device=DEVICE)
    everyone = list(range(NUM_EXPERTS))
    with simulated.memory_limit(simulated.memory_allocated() + 5 * of_expert // 2):
        sums = [float(up.sum() + down.sum()) for _, (up, down) in streamed_experts(layer, everyone, like)]
    experts = next(iter(expert_modules(model).values()))
    exact = experts.gate_up_proj.detach().sum((1, 2)) + experts.down_proj.detach().sum((1, 2))
    torch.testing.assert_close(torch.tensor(sums), exact, rtol=1e-4, atol=1e-4)


def test_codes_change_their_type_with_the_model_and_have_no_gradients():
    model, ids = expert_model("qwen3_moe"), random_prompt(1, 5)
    move_experts_to_host(model, 8)
    model.to(DEVICE, torch.bfloat16)
    assert {each.dtype for each in model.parameters() if isinstance(each, QuantizedWeight)} == {torch.bfloat16}
    assert logits(model, ids).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"no gradients .* torch\.no_grad"):
        model(ids.to(DEVICE))
