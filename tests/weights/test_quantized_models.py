"""
Models whose weights another library has quantized: the same tokens with our caches, and the errors of `DecodeOnCPU`.

Each is quantized by the library itself, and loaded as its users load it. What is not installed is skipped.
"""

import copy
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitNetQuantConfig,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    LlamaConfig,
    PreTrainedModel,
    TorchAoConfig,
)
from transformers.cache_utils import Cache
from transformers.integrations.bitnet import pack_weights

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, OffloadedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from common.caches import QUANTIZED_OWN_ATTENTION, QUANTIZED_SAME_ATTENTION, SAME_ATTENTION, stock
from models.gguf_files import write_gguf
from models.tiny_models import COMMON, random_prompt

# Rows and columns are multiples of 64, as some libraries want them.
SIZES = COMMON | {"intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}


@functools.cache
def full_precision(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=dtype).eval()


def saved(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    copy.deepcopy(full_precision(dtype)).save_pretrained(folder)
    return folder


class Format(NamedTuple):
    """
    A way to quantize a model.

    Attributes:
        make: make the model in a folder.
        package: that must be installed.
        told: the name of its weights in the error; empty where the model has plain weights again.
        is_quick: whether its tests are not slow.
        rounds: whether activations are rounded, too, which makes much of the last bits, in which kernels differ.
    """

    make: Callable[[Path], PreTrainedModel]
    package: str
    told: str = ""
    is_quick: bool = False
    rounds: bool = False


FORMATS: dict[str, Format] = {}


def form(name: str, package: str, told: str = "", is_quick: bool = False, rounds: bool = False, **options: Any) -> Any:
    """Add a format that the decorated function makes with `options`."""

    def added(make: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
        FORMATS[name] = Format(functools.partial(make, **options), package, told, is_quick, rounds)
        return make

    return added


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """List the linear layers, without the output head."""
    return {name: module for name, module in model.model.named_modules() if type(module) is nn.Linear}


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def saved_and_loaded(folder: Path, config: Any) -> PreTrainedModel:
    """Quantize a model while it is loaded, save it, and load what was saved."""
    loaded(saved(folder / "full"), quantization_config=config).save_pretrained(folder / "quantized")
    return loaded(folder / "quantized")


# --- how each is quantized

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


@form("torchao-int8", "torchao", "of type Int8Tensor", is_quick=True)
def torchao_direct(folder: Path) -> PreTrainedModel:
    """Quantize by torchao alone, which leaves no trace on the model: weights are tensors of another class."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = copy.deepcopy(full_precision())
    quantize_(model, Int8WeightOnlyConfig())
    return model


@form("torchao-loaded", "torchao", "(TorchAoConfig)", is_quick=True)
def torchao_loaded(folder: Path) -> PreTrainedModel:
    from torchao.quantization import Int8WeightOnlyConfig

    return saved_and_loaded(folder, TorchAoConfig(Int8WeightOnlyConfig()))


@form("quanto-int8", "optimum.quanto", "of type WeightQBytesTensor", is_quick=True)
def quanto_direct(folder: Path) -> PreTrainedModel:
    from optimum import quanto

    model = copy.deepcopy(full_precision())
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


@form("bitsandbytes-4", "bitsandbytes", "of type Params4bit", is_quick=True)
def bitsandbytes_direct(folder: Path) -> PreTrainedModel:
    """Quantize by bitsandbytes alone, which leaves no trace on the model: its parameters hold plain tensors."""
    import bitsandbytes

    model = copy.deepcopy(full_precision())
    for name, linear in linear_layers(model).items():
        sizes = linear.in_features, linear.out_features, False
        module = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        module.load_state_dict(linear.state_dict())
        model.model.set_submodule(name, module)
    return model.to("cpu")  # which is when it quantizes


@form("bitsandbytes-loaded-8", "bitsandbytes", "(BitsAndBytesConfig)", load_in_8bit=True)
def bitsandbytes_loaded(folder: Path, **options: Any) -> PreTrainedModel:
    return saved_and_loaded(folder, BitsAndBytesConfig(**options))


@form("bitsandbytes-dequantized", "bitsandbytes", is_quick=True)
def bitsandbytes_dequantized(folder: Path) -> PreTrainedModel:
    return bitsandbytes_loaded(folder, load_in_4bit=True).dequantize()


@form("hqq-4", "hqq", "that a module keeps beside parameters and buffers", is_quick=True)
def hqq_direct(folder: Path) -> PreTrainedModel:
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model = copy.deepcopy(full_precision())
    config = BaseQuantizeConfig(nbits=4, group_size=64)
    AutoHQQHFModel.quantize_model(model, config, compute_dtype=torch.float32, device="cpu")
    return model


@form("compressed-tensors-packed", "compressed_tensors", "of type torch.int32")
def compressed(folder: Path) -> PreTrainedModel:
    """Compress a model without `from_pretrained`: its weights are then plain parameters of codes."""
    from compressed_tensors import quantization
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model = copy.deepcopy(full_precision())
    arguments = quantization.QuantizationArgs(symmetric=True, **INT4)
    config = quantization.QuantizationConfig(
        config_groups={"all": quantization.QuantizationScheme(targets=["Linear"], weights=arguments)},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="compressed",
    )
    quantization.apply_quantization_config(model, config)
    for linear in linear_layers(model).values():
        groups = linear.weight.detach().unflatten(1, (-1, 32))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
        linear.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return model


@form("compressed-tensors-loaded-int4", "compressed_tensors", "(CompressedTensorsConfig)", is_quick=True)
def compressed_loaded(folder: Path) -> PreTrainedModel:
    compressed(folder)
    return loaded(folder)


def rewritten(folder: Path, dtype: torch.dtype, config: Any, weights: Callable[[str, torch.Tensor], Any]) -> Path:
    """A checkpoint in which each weight of a linear layer is replaced by what `weights` makes of it."""
    saved(folder, dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= weights(name, tensor) if "_proj" in name else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config.to_dict()}))
    return folder


@form("bitnet-loaded", "transformers", "(BitNetQuantConfig)")
def bitnet_loaded(folder: Path) -> PreTrainedModel:
    def ternary(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        factor = 1 / weight.abs().mean()
        codes = (weight * factor).round().clamp(-1, 1)
        return {name: pack_weights(codes), f"{name}_scale": factor.reshape(1)}

    return loaded(rewritten(folder, torch.float32, BitNetQuantConfig(), ternary))


@form("torch-dynamic", "torch", "that a module keeps beside parameters and buffers", is_quick=True, rounds=True)
def torch_dynamic(folder: Path) -> PreTrainedModel:
    """The quantization that torch itself had: modules keep their weights beside parameters and buffers."""
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(full_precision()), {nn.Linear}, dtype=torch.qint8)


@form("gguf", "gguf", is_quick=True)
def gguf_loaded(folder: Path) -> PreTrainedModel:
    write_gguf(folder / "tiny.gguf", full_precision(), is_quantized=True)
    return loaded(folder, gguf_file="tiny.gguf", dtype=torch.float32)


@form("float8-dequantized", "transformers", is_quick=True)
def float8_loaded(folder: Path) -> PreTrainedModel:
    """Load float8 weights without a GPU that computes in 8 bits."""

    def blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tiles = weight.float().unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
        scale = tiles.abs().amax((1, 3), keepdim=True) / 448
        codes = (tiles / scale).to(torch.float8_e4m3fn).reshape(weight.shape)
        return {name: codes, f"{name}_scale_inv": scale.flatten(1)}

    return loaded(rewritten(folder, torch.bfloat16, FineGrainedFP8Config(weight_block_size=(32, 32)), blocks)).float()


@form("compressed-tensors-unpacked", "compressed_tensors", is_quick=True)
def compressed_unpacked(folder: Path) -> PreTrainedModel:
    model = compressed(folder)
    model(random_prompt(1, 5))
    return model


pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),  # needed to dequantize
]


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Tests of one model run in one process, which makes it once."""
    return [
        pytest.mark.xdist_group(f"quantized {name}"),
        *([] if FORMATS[name].is_quick else [pytest.mark.slow]),
    ]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in FORMATS])
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Format, PreTrainedModel]:
    """A format and a model in it."""
    asked = FORMATS[request.param]
    pytest.importorskip(asked.package, reason=f"needs {asked.package}")
    return asked, asked.make(tmp_path_factory.mktemp(request.param)).eval()


GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "top_k": 20}


def generated(model: PreTrainedModel, cache: Cache, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(random_prompt(2, 150), **cache_argument(cache), max_new_tokens=6, **options)


def test_decode_on_cpu_converts_plain_weights_or_names_the_way_out(quantized: tuple[Format, PreTrainedModel]):
    asked, model = quantized
    in_float64 = {"custom_generate": DecodeOnCPU(dtype=torch.float64), **GREEDY}
    cache = SAME_ATTENTION["dynamic"](model.config)
    if asked.told:
        refused = rf"{re.escape(asked.told)}( \(.*\))? cannot be moved or converted\. Load the model .* or pass "
        way_out = r"custom_generate=DecodeOnCPU\(\) without options to decode with the weights as they are\.$"
        with pytest.raises(ValueError, match=refused + way_out):
            generated(model, cache, **in_float64)
        assert cache.get_seq_length() == 0
    else:
        before = copy.deepcopy(model.state_dict())
        assert torch.equal(generated(model, cache, **in_float64), generated(model, stock(model.config), **GREEDY))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_it_gives_the_tokens_that_it_gives_with_stock(quantized: tuple[Format, PreTrainedModel]):
    """Decoded where the model is and by `DecodeOnCPU`; with quantized caches the same codes in a plain cache."""
    asked, model = quantized
    caches = [(SAME_ATTENTION[name], stock) for name in ("dynamic", "offloaded")]
    caches.append(QUANTIZED_SAME_ATTENTION["quantized_on_device"])
    if not asked.rounds:
        caches += [(DynamicHybridCache, stock), (OffloadedHybridCache, stock), QUANTIZED_OWN_ATTENTION["quantized_8"]]
    for make, reference in caches:
        for custom, options in ((None, GREEDY), (DecodeOnCPU(), SAMPLED)):
            expected = generated(model, reference(model.config), **options)
            assert torch.equal(generated(model, make(model.config), custom_generate=custom, **options), expected)
