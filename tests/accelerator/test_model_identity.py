"""The identity of models on an accelerator: weights are told by their bytes, wherever these are."""

import copy
from collections.abc import Iterator

import pytest
import torch

from hf_hybrid_cache import move_experts_to_host

from accelerator.orders import DEVICE, ORDERS, in_order
from model_identity.models import differing, identity, new_llama
from models.expert_models import EXPERT_FAMILIES, expert_model


@pytest.fixture(autouse=True)
def in_any_order() -> Iterator[None]:
    with in_order(ORDERS[-1]):
        yield


def test_model_when_on_the_device_then_differs_in_device_alone():
    on_cpu = identity(new_llama())
    model = new_llama().to(DEVICE)
    on_device = identity(model)
    assert differing(on_device, on_cpu) == {"device"}
    assert on_device.fields["device"] == torch.device(DEVICE).type
    with torch.no_grad():
        model.lm_head.weight[5, 7] += 1
    assert differing(identity(model), on_device) == {"weights"}


def test_model_when_experts_are_on_the_host_then_computes_on_the_device():
    model = copy.deepcopy(expert_model(next(iter(EXPERT_FAMILIES))))
    move_experts_to_host(model)
    on_cpu = identity(model)
    assert differing(identity(model.to(DEVICE)), on_cpu) == {"device"}
    assert identity(model).fields["device"] == torch.device(DEVICE).type
