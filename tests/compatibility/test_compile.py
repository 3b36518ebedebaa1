"""Models that `torch.compile` has compiled give the same tokens with our caches as with transformers' own."""

import copy
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache, HybridCache, Placement, minmax

from .same_tokens import CACHES as SOME_CACHES
from .same_tokens import generated
from common.caches import stock
from common.slow import slow, slow_but
from models.tiny_models import tiny_model

CACHES = SOME_CACHES | {
    "on the device": lambda config: DynamicHybridCache(config, cpu_decode=False),
    "8 bits, on the device": lambda config: HybridCache(config, Placement(cpu_decode=False), codec=minmax(8)),
}


def compile_with_a_compiler(model: PreTrainedModel) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch's default backend needs a C++ compiler")
    model.compile()


def compile_layers(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


def compile_whole(model: PreTrainedModel) -> None:
    model.compile(backend="eager")


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


# A compiler takes long.
@pytest.mark.parametrize("how", [compile_layers, slow(compile_whole), slow(compile_with_a_compiler)])
@pytest.mark.parametrize("name", slow_but(["8 bits"], CACHES))
def test_a_compiled_model_gives_the_same_tokens(how: Callable[[PreTrainedModel], None], name: str):
    model = copy.deepcopy(tiny_model("llama"))
    expected = generated(model, stock(model.config))
    how(model)
    assert torch.equal(generated(model, CACHES[name](model.config)), expected)


def test_a_single_graph_is_refused_with_the_way_out():
    model = copy.deepcopy(tiny_model("llama"))
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="outside of compiled graphs; compile without fullgraph=True"):
        generated(model, DynamicHybridCache(model.config))
