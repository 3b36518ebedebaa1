"""Models that `torch.compile` has compiled give the same tokens with our caches as with transformers' own."""

import copy
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache, HybridCache, Placement, graph_breaks, minmax

from .same_tokens import CACHES as SOME_CACHES
from .same_tokens import generated
from common.caches import stock
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


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("how", [compile_layers, lambda model: model.compile(backend="eager"), compile_with_a_compiler])
@pytest.mark.parametrize("name", CACHES)
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


def test_a_function_outside_of_graphs_is_in_none():
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph.code)
        return graph.forward

    @graph_breaks.outside_of_graphs
    def outside(x: torch.Tensor, *, more: float) -> torch.Tensor:
        return x.tan() + more

    def whole(x: torch.Tensor) -> torch.Tensor:
        return outside(x.sin(), more=2.0).cos()

    x = torch.linspace(0, 1, 5)
    expected = (x.sin().tan() + 2).cos()
    assert torch.equal(whole(x), expected)
    assert not graphs
    assert torch.equal(torch.compile(whole, backend=backend)(x), expected)
    assert ["sin" in graphs[0], "cos" in graphs[1]] == [True, True]
    assert not any("tan" in graph for graph in graphs)
