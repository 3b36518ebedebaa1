"""Whatever is changed in a model, its cache or the functions that it uses, a step gives what its own forward gives."""

import copy
import functools
import inspect
import random
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import masking_utils
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from decode_step.twins import Twins, made_at_random
from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cache_argument import cache_argument, passed_cache
from hf_hybrid_cache.decode_step import FusedDecode, UnknownStepError, fuse_decode

from common.soak import budget, count
from models.tiny_models import random_prompt


@pytest.fixture
def twins() -> Twins:
    """Twins with gates of different widths, that have read a prompt and run a step."""
    model = made_at_random(attention_bias=False, mlp_bias=False)
    widen(model.model.layers[1].mlp, 160)
    twins = Twins(model)
    twins.forward(random_prompt(1, 40))
    assert twins.steps(1) == 1
    return twins


def widen(mlp: Any, width: int) -> None:
    """Give the gate of a layer another width, in place."""
    for name, shape in {"gate_proj": (width, 64), "up_proj": (width, 64), "down_proj": (64, width)}.items():
        module = getattr(mlp, name)
        module.weight = nn.Parameter(0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(width)))
        module.out_features, module.in_features = shape


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, value)
        yield


def scaled(function: Any) -> Any:
    """A function whose result is scaled, by another for each number in it."""

    def of(result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(of, result))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.dim():
            return result * torch.linspace(0.5, 1.5, result.shape[-1]).to(result.dtype)
        return result

    return functools.wraps(function)(lambda *args, **options: of(function(*args, **options)))


def window(q_length: int, kv_length: int, **options: Any) -> torch.Tensor:
    """A mask that hides all but the last tokens, as that of sdpa is called."""
    return torch.ones(q_length, kv_length).bool().tril(kv_length - q_length).triu(kv_length - q_length - 8)[None, None]


def window_of_model(*args: Any, **options: Any) -> torch.Tensor:
    """The same, as a model calls it."""
    cache, length = passed_cache(options), options["inputs_embeds"].shape[1]
    return window(length, cache.get_seq_length() + length)


def hook(module: Any, *args: Any) -> Any:
    """A hook that scales what comes last: inputs before, outputs after."""
    return tuple(1.5 * each for each in args[-1]) if isinstance(args[-1], tuple) else 1.5 * args[-1]


def accelerated(module: nn.Module) -> None:
    inner = ModelHook()
    inner.post_forward = lambda module, output: 1.5 * output
    add_hook_to_module(module, inner)


def transposed(weight: Any) -> None:
    weight.data = weight.data.t()


def biased(name: str) -> Callable[[Any], object]:
    def change(layer: Any) -> None:
        module = layer.get_submodule(name)
        module.bias = nn.Parameter(torch.linspace(-1, 1, module.out_features))

    return change


# What is done to a layer of each of the twins -> how. Attributes are changed at random below.
CHANGES: dict[str, Callable[[Any], object]] = {
    **{f"bias of {name}": biased(name) for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")},
    "a square weight is transposed": lambda layer: transposed(layer.self_attn.q_proj.weight),
    "numbers of a weight": lambda layer: layer.self_attn.q_proj.weight.data.mul_(-1),
    "memory of a weight": lambda layer: setattr(layer.mlp.up_proj.weight, "data", 2 * layer.mlp.up_proj.weight.data),
    "numbers of a norm": lambda layer: layer.input_layernorm.weight.data.mul_(-1),
    "a wider gate": lambda layer: widen(layer.mlp, 4096),
    "a narrower gate": lambda layer: widen(layer.mlp, 16),
    "hook": lambda layer: layer.mlp.register_forward_hook(hook),
    "hook before": lambda layer: layer.mlp.register_forward_pre_hook(hook),
    "hook of accelerate": lambda layer: accelerated(layer.mlp),
    "forward": lambda layer: setattr(layer.mlp, "forward", scaled(layer.mlp.forward)),
    "class": lambda layer: setattr(layer.mlp.act_fn, "__class__", nn.Tanh),
    "children change places": lambda layer: layer.mlp._modules.update(
        gate_proj=layer.mlp.up_proj, up_proj=layer.mlp.gate_proj
    ),
}
BY_OWN_FORWARD = {"hook", "hook before", "hook of accelerate", "forward"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_when_a_layer_was_changed_gives_what_the_own_forward_gives(twins: Twins, change: str):
    for model in (twins.model, twins.own_model):
        CHANGES[change](model.model.layers[1])
    assert twins.steps(2) == (0 if change in BY_OWN_FORWARD else 2)
    assert twins.hold_the_same()


# What is replaced for all models -> the owner of it, its name, and what is put there.
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "mask": (modeling_llama, "create_causal_mask", window_of_model),
    "mask of sdpa": (ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", window),
    "attention": (ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", scaled(sdpa_attention.sdpa_attention_forward)),
    "forward of Linear": (nn.Linear, "forward", scaled(nn.Linear.forward)),
    "forward of a layer": (modeling_llama.LlamaMLP, "forward", scaled(modeling_llama.LlamaMLP.forward)),
    "call of any module": (nn.Module, "__call__", scaled(nn.Module.__call__)),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_step_when_a_function_was_replaced_gives_what_forward_gives(twins: Twins, patch: str):
    with patched(*PATCHES[patch]):
        assert not twins.steps(2)
    assert twins.steps(2) == 2
    with patched(*PATCHES[patch]), pytest.raises(UnknownStepError):
        fuse_decode(made_at_random())


def test_step_when_a_hook_comes_to_replaced_slots_gives_what_forward_gives(twins: Twins):
    for model in (twins.model, twins.own_model):
        model.model.layers[1].mlp._forward_hooks = OrderedDict()
    assert twins.steps(1) == 1
    for model in (twins.model, twins.own_model):
        model.model.layers[1].mlp.register_forward_hook(hook)
    assert not twins.steps(2)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_step_when_all_modules_have_a_hook_gives_what_forward_gives(twins: Twins, register: Any):
    with register(lambda module, *args: hook(module, *args) if isinstance(module, nn.SiLU) else None):
        assert not twins.steps(2)
    assert twins.steps(2) == 2


def test_a_step_when_only_what_it_calls_has_hooks_is_fused(twins: Twins):
    for model in (twins.model, twins.own_model):
        for module in (model, model.model, model.model.embed_tokens, model.lm_head):
            module.register_forward_hook(lambda module, args, result: None)
        model.model.rotary_emb.register_forward_hook(scaled(lambda module, args, angles: angles))
    assert twins.steps(2) == 2


def test_a_step_after_hidden_states_were_asked_for_is_fused_again(twins: Twins):
    twins.forward(torch.tensor([[7]]), output_hidden_states=True)
    assert twins.model.model.layers[1]._forward_hooks
    assert twins.steps(2) == 2


def test_a_step_when_a_window_is_set_gives_what_the_own_forward_gives():
    twins = Twins(made_at_random("Mistral", sliding_window=None))
    twins.forward(random_prompt(1, 40))
    for model in (twins.model, twins.own_model):
        model.config.sliding_window = 4
    assert twins.steps(2) == 2
    for model in (twins.model, twins.own_model):
        model.config.sliding_window = None
    assert twins.steps(2) == 2


class Halving(DynamicHybridCache):
    """Takes keys and values otherwise."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
        return DynamicHybridCache.update(self, keys, values / 2, *args, **options)


def test_step_when_a_cache_takes_states_otherwise_gives_what_forward_gives():
    twins = Twins(made_at_random(), Halving)
    twins.forward(random_prompt(1, 40))
    assert not twins.steps(2)
    assert twins.fused.other_passes["the cache is not of this package"] == 3


def test_step_when_update_was_replaced_gives_what_forward_gives(twins: Twins):
    for cache in (twins.ours, twins.own):
        cache.update = types.MethodType(Halving.update, cache)  # type: ignore[method-assign]
    assert not twins.steps(2)


@torch.no_grad()
def test_weights_of_a_functional_call_count_only_while_it_runs(twins: Twins):
    weights = {"model.norm.weight": torch.full((64,), 2.0)}
    ours, own = (
        torch.func.functional_call(model, weights, (torch.tensor([[7]]),), cache_argument(cache)).logits
        for model, cache in ((twins.model, twins.ours), (twins.own_model, twins.own))
    )
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)
    assert twins.steps(2) == 2
    assert twins.hold_the_same()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_when_squares_of_states_overflow_gives_what_forward_gives(dtype: torch.dtype):
    twins = Twins(made_at_random(dtype=dtype))
    twins.forward(random_prompt(1, 40))
    for scale in (1e18, 1e19, 1e20, 1e38):
        states = (scale * torch.linspace(-1, 1, 64, dtype=dtype))[None, None]
        with torch.no_grad():
            ours = twins.model.model(inputs_embeds=states, **cache_argument(twins.ours))[0]
            own = twins.own_model.model(inputs_embeds=states, **cache_argument(twins.own))[0]
        torch.testing.assert_close(ours, own)
        assert own.isfinite().all()
    assert twins.fused.fused_steps == 4


@pytest.mark.parametrize("states", [torch.ones(1, 1, 64).double(), torch.ones(1, 1, 1), torch.ones(1, 1, 128)])
def test_a_step_with_states_of_another_kind_ends_as_the_own_forward_ends(twins: Twins, states: torch.Tensor):
    pairs = (twins.model, twins.ours), (twins.own_model, twins.own)
    ours, own = (end_of_step(model, cache, inputs_embeds=states) for model, cache in pairs)
    assert twins.fused.fused_steps == 1
    assert ours is own if isinstance(own, type) else torch.allclose(ours, own, atol=1e-4)


def places(model: Any) -> Iterator[tuple[Any, str]]:
    """Everything that one could set in a model: attributes, slots of tensors, children, and entries of the config."""
    for module in (model.model, *model.model.layers.modules(), model.model.norm):
        for holder in (vars(module), module._parameters, module._buffers, module._modules):
            is_leaf = {name: not isinstance(value, (dict, set, FusedDecode)) for name, value in holder.items()}
            yield from ((holder, name) for name in holder if is_leaf[name])
        yield from ((hooks, "new") for hooks in (module._forward_hooks, module._forward_pre_hooks))
    yield from ((vars(model.config), name) for name in vars(model.config))


def functions() -> Iterator[tuple[dict[str, Any], str]]:
    """Every function of the files that have layers, masks and attention; and those of torch that these name."""
    for file in (modeling_llama, masking_utils, sdpa_attention, functional):
        yield from ((vars(file), name) for name, value in vars(file).items() if inspect.isroutine(value))


def other(value: Any) -> Any:
    """Something else than a value, of the same kind where there is one."""
    if isinstance(value, torch.Tensor):
        return nn.Parameter(value.detach() * torch.linspace(0.5, 1.5, value.shape[-1]))
    if isinstance(value, (bool, int, float, str)):
        return {bool: lambda: not value, str: lambda: value + "?"}.get(type(value), lambda: 2 * value + 1)()
    return scaled(value) if inspect.isroutine(value) else hook if value is None else nn.Identity()


def end_of_step(model: Any, cache: Any, **options: Any) -> Any:
    """Logits of a step, or the kind of error that it ends with."""
    try:
        with torch.no_grad():
            return model(**(options or {"input_ids": torch.tensor([[7]])}), **cache_argument(cache)).logits
    except Exception as error:
        return type(error)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_anything_that_is_changed_gives_what_the_own_forward_gives(twins: Twins):
    pairs = [[ours, own] for ours, own in zip(places(twins.model), places(twins.own_model), strict=True)]
    chosen = random.Random(0)
    chosen.shuffle(pairs)
    of_each_name = {pair[0][1]: pair for pair in pairs}.values()
    more = [*pairs, *([place] for place in functions())]
    leaves = [*of_each_name, *chosen.sample(more, min(budget(40), len(more)))]
    for leaf in leaves:
        before = [holder.get(name) for holder, name in leaf]
        for (holder, name), value in zip(leaf, before, strict=True):
            holder[name] = other(value)
        try:
            ours, own = (
                end_of_step(model, copy.deepcopy(cache))
                for model, cache in ((twins.model, twins.ours), (twins.own_model, twins.own))
            )
        finally:
            for (holder, name), value in zip(leaf, before, strict=True):
                holder[name] = value
                if name == "new":
                    del holder[name]
        if isinstance(own, type):
            assert ours is own, leaf[0][1]
        else:
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4 * float(own.abs().max()), msg=leaf[0][1])
    assert twins.steps(2) == 2
    count("changes of a model", len(leaves))
