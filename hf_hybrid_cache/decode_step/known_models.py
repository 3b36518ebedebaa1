"""
Models whose decode step can run in one call, recognised by the source of their modules.

A model is known if the syntax trees of its forward methods and rotary functions are those of a listed form; names of
families and versions of transformers do not matter.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ..errors import HybridCacheError
from ..kernels import LANES
from ..weights.quantized_weight import HostWeight, QuantizedWeight
from .snapshot import REGISTRIES

# What has a forward, or which function -> digest of its source, see `form_digest` -> whose it is; of two, the second is
# that of transformers 5.24, of one, that of 5.17 too.
KNOWN_FORMS = {
    "model": {
        "8a994a9f989a": "Llama, one mask",
        "ef97ea080fcd": "Mistral, one mask, perhaps of a window",
        "53413b9942b6": "Qwen2, Qwen3 and SmolLM3, a mask for each type of layer",
    },
    "decoder layer": {"f352d9a4778f": "Llama"},
    "attention": {
        **dict.fromkeys(("17c7b674af42", "83aa319339f3"), "Llama"),
        **dict.fromkeys(("b37be4e97077", "18b541e2d3ba"), "Mistral, with the window of the config"),
        **dict.fromkeys(("df7597c2079f", "377922fa4dbf"), "Qwen2, with a window of the layer"),
        **dict.fromkeys(("728b7485f729", "6dff11165a4a"), "Qwen3, with norms of heads"),
        **dict.fromkeys(("e06e80b136d0", "0e1cfc106f37"), "SmolLM3, with layers that are not rotated"),
        **dict.fromkeys(("6140fc7910dd", "a1d31bd72e7c"), "Seed-OSS, with dropout in training"),
    },
    "MLP": {"03bf3791a3ed": "Llama", "03f6cff9772e": "Seed-OSS, with dropout in training"},
    "norm": {"cc4ad1cc5bca": "Llama, multiplied by the weight after rounding"},
    "apply_rotary_pos_emb": {"b5d71507154c": "Llama"},
    "rotate_half": {"84c78d313494": "Llama"},
}
# Parts of a syntax tree that change nothing of what is computed, or that differ between versions of Python.
_LEFT_OUT = {"annotation", "ctx", "decorator_list", "kind", "returns", "type_comment", "type_params"}
# Those of the backward pass do nothing where no gradients are recorded.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Sizes of hidden states, of all heads, of all KV heads and of gates, by projection: its rows and columns.
_SIZES = {
    "q": ("heads", "hidden"),
    "k": ("kv_heads", "hidden"),
    "v": ("kv_heads", "hidden"),
    "o": ("hidden", "heads"),
    "gate": ("gates", "hidden"),
    "up": ("gates", "hidden"),
    "down": ("hidden", "gates"),
}


class UnknownStepError(HybridCacheError, ValueError):
    """
    A model's decode step is not of a form that can run in one call.

    Attributes:
        why: the reason alone.
    """

    why = ""


@dataclass(frozen=True)
class KnownLayer:
    """
    One decoder layer of a known model: its modules, whose weights may be replaced.

    Attributes:
        q_norm: norm of each query head, or `None`.
        k_norm: norm of each key head, or `None`.
        is_rotated: whether queries and keys get the rotary embedding.
        index: of the layer in the cache.
    """

    input_norm: nn.Module
    post_norm: nn.Module
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    is_rotated: bool
    index: int

    @property
    def norms(self) -> list[nn.Module]:
        """All norms of the layer."""
        return [norm for norm in (self.input_norm, self.post_norm, self.q_norm, self.k_norm) if norm is not None]

    @property
    def projections(self) -> dict[str, nn.Linear]:
        """All projections of the layer by name."""
        return {name: getattr(self, name) for name in ("q", "k", "v", "o", "gate", "up", "down")}


@dataclass(frozen=True)
class KnownModel:
    """
    A model of a known form.

    Attributes:
        name: of the class of the decoder, without the output head.
        epsilon: of all norms.
        scale: by which scores are multiplied.
    """

    name: str
    layers: tuple[KnownLayer, ...]
    norm: nn.Module
    epsilon: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


def known_model(decoder: Any) -> KnownModel:
    """
    Recognise a decoder, a model without its output head.

    Projections have to be plain or quantized matrices in host memory; queries, keys and values quantized alike, and so
    gate and up. Norms and biases are plain. All are of one dtype, float32 or bfloat16. Nobody else's code may run.

    Raises:
        UnknownStepError: it is of no known form, or has weights that a step cannot use.
    """
    name = type(decoder).__name__
    try:
        _raise_first(_unknown_parts(decoder), name)
        modules = _layers(decoder)
        layers, attention = tuple(map(_known_layer, modules)), modules[0].self_attn
        known = KnownModel(
            name=name,
            layers=layers,
            norm=decoder.norm,
            epsilon=decoder.norm.variance_epsilon,
            num_heads=layers[0].q.out_features // attention.head_dim,
            num_kv_heads=layers[0].k.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            scale=attention.scaling,
        )
        _raise_first(_unknown_settings(decoder, modules, known), name)
        _raise_first(_unfit_weights(known), name)
    except AttributeError as error:
        raise unknown_step(name, str(error)) from error
    return known


def form_digest(function: Any) -> str:
    """Digest of the source of a function, without decorators of transformers, docstring and annotations."""
    try:
        # Of the code: the source of a function is that of the one which it wraps.
        source = inspect.getsource(undecorated(function).__code__)
        tree = ast.parse(textwrap.dedent(source)).body[0]
    except (AttributeError, OSError, SyntaxError):
        return "without source"
    return hashlib.blake2b(_form(tree).encode(), digest_size=6).hexdigest()


def is_own_forward(forward: Any, attributes: Mapping[str, Any]) -> bool:
    """Whether a forward that stands among the attributes of a module is that of its class, as accelerate leaves it."""
    owner: Any = getattr(forward, "__self__", None)
    kind: Any = type(owner)
    return getattr(owner, "__dict__", None) is attributes and forward.__func__ is kind.forward


def unknown_step(name: str, why: str) -> UnknownStepError:
    """Return the error that a decoder's step cannot run in one call."""
    error = UnknownStepError(f"A decode step of {name} cannot run in one call: {why}. Its own forward goes on.")
    error.why = why
    return error


def _raise_first(reasons: Iterator[str], name: str) -> None:
    for reason in reasons:
        raise unknown_step(name, reason)


def _layers(decoder: Any) -> list[Any]:
    """The layers that the forward of a decoder calls."""
    return list(decoder.layers)[: decoder.config.num_hidden_layers]


def _known_layer(layer: Any) -> KnownLayer:
    attention, mlp = layer.self_attn, layer.mlp
    names = undecorated(type(attention).forward).__code__.co_names
    has_head_norms = "q_norm" in names
    return KnownLayer(
        input_norm=layer.input_layernorm,
        post_norm=layer.post_attention_layernorm,
        **{name: getattr(attention, f"{name}_proj") for name in ("q", "k", "v", "o")},
        **{name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")},
        q_norm=attention.q_norm if has_head_norms else None,
        k_norm=attention.k_norm if has_head_norms else None,
        is_rotated="use_rope" not in names or bool(attention.use_rope),
        index=attention.layer_idx,
    )


def _unknown_parts(decoder: Any) -> Iterator[str]:
    """Parts of a model that have no known form; each is looked for in those before it."""
    types = set(getattr(getattr(decoder, "config", None), "layer_types", None) or ()) - {"full_attention"}
    if types:
        yield f"it has layers of {' and '.join(sorted(types))}"
    yield from _unknown_forms("model", [decoder])
    layers = _layers(decoder)
    yield from _unknown_forms("decoder layer", layers)
    yield from _unknown_forms("attention", [layer.self_attn for layer in layers])
    yield from _unknown_forms("MLP", [layer.mlp for layer in layers])
    norms = [norm for layer in layers for norm in _known_layer(layer).norms]
    yield from _unknown_forms("norm", [decoder.norm, *norms])
    for space, name in _functions(layers[0]):
        if name in KNOWN_FORMS and form_digest(space[name]) not in KNOWN_FORMS[name]:
            yield f"{name} has an unknown form, {form_digest(space[name])}"
        if name not in KNOWN_FORMS and space[name] is not ALL_ATTENTION_FUNCTIONS:
            yield "it has attention functions of its own"
    yield from _code_of_others([decoder.norm, *(module for layer in layers for module in layer.modules())])


def _unknown_forms(part: str, modules: Iterable[nn.Module]) -> Iterator[str]:
    kinds: dict[Any, None] = dict.fromkeys(map(type, modules))
    for kind in kinds:
        if form_digest(kind.forward) not in KNOWN_FORMS[part]:
            yield f"the {part} {kind.__name__} has an unknown form, {form_digest(kind.forward)}"
    if len(kinds) != 1:
        yield f"it has {len(kinds)} kinds of {part}"


def _code_of_others(modules: list[nn.Module]) -> Iterator[str]:
    """Yield all that runs in modules beside their forward, or changes it."""
    hooks = [getattr(module, name) for module in modules for name in _HOOKS]
    hooks += [getattr(torch_modules, f"_global{name}") for name in _HOOKS]
    # Once outputs were asked for, transformers' hooks stay, and do nothing while none are collected.
    if any(getattr(hook, "__module__", None) != output_capturing.__name__ for each in hooks for hook in each.values()):
        yield "a module has hooks"
    for attributes in map(vars, modules):
        if "forward" in attributes and not is_own_forward(attributes["forward"], attributes):
            yield "the forward of a module was replaced"
        if attributes["training"]:
            yield "a module is in training mode"


def _unknown_settings(decoder: PreTrainedModel, modules: list[Any], known: KnownModel) -> Iterator[str]:
    """Settings and kinds of modules that are not supported."""
    name = decoder.config._attn_implementation
    if name != "sdpa":
        yield f"its attention is {name!r}, not 'sdpa'"
    if [registry[name] for registry in REGISTRIES] != [sdpa_attention_forward, sdpa_mask]:
        yield "a function of 'sdpa' was replaced"
    if [layer.index for layer in known.layers] != [*range(len(modules))]:
        yield f"its layers have the numbers {', '.join(str(layer.index) for layer in known.layers)}"
    for module, layer in zip(modules, known.layers, strict=True):
        attention, activation = module.self_attn, module.mlp.act_fn
        window = getattr(attention if hasattr(attention, "sliding_window") else decoder.config, "sliding_window", None)
        if window is not None:
            yield f"it has a window of {window:,} tokens"
        if not (attention.is_causal and getattr(decoder.config, "is_causal", True)):
            yield "its attention is not causal"
        if attention.config is not decoder.config:
            yield "its layers have configs of their own"
        if type(activation) not in (nn.SiLU, SiLUActivation):
            yield f"its activation is {type(activation).__name__}, not SiLU"
        for name, projection in layer.projections.items():
            if hasattr(projection, "base_layer"):
                yield f"{name} of layer {layer.index} has an adapter; merge it first, with model.merge_and_unload()"
            if type(projection) is not nn.Linear:
                yield f"{name} of layer {layer.index} is {type(projection).__name__}, not Linear"
        if (attention.head_dim, attention.scaling) != (known.head_dim, known.scale):
            yield "its layers differ in the size of heads, or in the scale of their scores"
        if any(norm.variance_epsilon != known.epsilon for norm in layer.norms):
            yield "its norms have several epsilons"


def _functions(layer: Any) -> list[tuple[dict[str, Any], str]]:
    """Global names that the attention of a layer uses, each with its namespace."""
    space = undecorated(type(layer.self_attn).forward).__globals__
    inner = getattr(undecorated(space["apply_rotary_pos_emb"]), "__globals__", space)
    return [(space, "ALL_ATTENTION_FUNCTIONS"), (space, "apply_rotary_pos_emb"), (inner, "rotate_half")]


def undecorated(function: Any) -> Any:
    """A function without the decorators of transformers."""
    while hasattr(function, "__wrapped__") and function.__globals__["__name__"].startswith("transformers."):
        function = function.__wrapped__
    return function


def _form(part: Any) -> str:
    """A part of a syntax tree as a text that is the same in all versions of Python."""
    if isinstance(part, list):
        return f"[{','.join(map(_form, part))}]"
    if not isinstance(part, ast.AST):
        return repr("cache" if part == "past_key_values" else part)  # the name of an argument before 5.24
    if isinstance(part, ast.AnnAssign) and part.value is not None:
        part = ast.Assign([part.target], part.value)
    fields = {name: value for name, value in ast.iter_fields(part) if name not in _LEFT_OUT and value not in (None, [])}
    if isinstance(part, ast.FunctionDef) and ast.get_docstring(part) is not None:
        fields["body"] = part.body[1:]
    return f"{type(part).__name__}({','.join(f'{name}={_form(value)}' for name, value in fields.items())})"


def _unfit_weights(known: KnownModel) -> Iterator[str]:
    first: Any = known.norm.weight
    device, dtype, dim = first.device, first.dtype, known.head_dim
    if dtype not in (torch.float32, torch.bfloat16):
        yield f"it is in {dtype}, not in torch.float32 or torch.bfloat16"
    if device.type != "cpu":
        yield f"its weights are on {device}, not in host memory"
    sizes = {"hidden": first.numel(), "heads": known.num_heads * dim, "kv_heads": known.num_kv_heads * dim}
    if not _is_plain(first, (sizes["hidden"],), dtype) or known.num_heads % known.num_kv_heads:
        yield "its heads or its last norm have another size"
    for layer in known.layers:
        where, projections = f"of layer {layer.index}", layer.projections
        sizes["gates"] = layer.gate.out_features
        for name, size in {"hidden states": sizes["hidden"], "heads": dim, "gates": sizes["gates"]}.items():
            if size % LANES:
                yield f"the size of its {name} is no multiple of {LANES}"
        head_norms = [(norm.weight, (dim,)) for norm in (layer.q_norm, layer.k_norm) if norm is not None]
        norms = [(norm.weight, (sizes["hidden"],)) for norm in (layer.input_norm, layer.post_norm)]
        biases = [(each.bias, (sizes[_SIZES[name][0]],)) for name, each in projections.items() if each.bias is not None]
        if not all(_is_plain(weight, shape, dtype) for weight, shape in (*norms, *head_norms, *biases)):
            yield f"a norm or a bias {where} is no plain tensor of {dtype} in host memory, or has another size"
        widths: dict[str, tuple[int, int] | None] = {}
        for name, projection in projections.items():
            weight, shape = projection.weight, tuple(sizes[size] for size in _SIZES[name])
            if isinstance(weight, QuantizedWeight):
                widths[name] = (weight.matrices.layout.bits, weight.matrices.layout.group)
                is_fit = weight.dtype == dtype and not weight.is_stacked and not weight.is_transposed
            else:
                widths[name], is_fit = None, _is_plain(weight, shape, dtype)
            if not is_fit or weight.shape != shape:
                yield f"{name} {where} is neither a plain nor a quantized matrix of {dtype} and {shape} in host memory"
        for names in (("q", "k", "v"), ("gate", "up")):
            if len({widths[name] for name in names}) > 1:
                yield f"{', '.join(names)} {where} are not quantized alike"


def _is_plain(weight: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    is_tensor = type(weight) in (nn.Parameter, HostWeight) and (weight.dtype, weight.shape) == (dtype, shape)
    return is_tensor and weight.device.type == "cpu" and weight.is_contiguous()
