"""
Models whose weights another library has quantized: the same tokens with our caches, and the errors of `DecodeOnCPU`.

Each is quantized by the library itself, and loaded as its users load it. What is not installed is skipped.
"""

import copy
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AwqConfig,
    BitNetQuantConfig,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    LlamaConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)
from transformers.cache_utils import Cache
from transformers.integrations.bitnet import pack_weights

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, OffloadedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from common.caches import QUANTIZED_OWN_ATTENTION, QUANTIZED_SAME_ATTENTION, SAME_ATTENTION, stock
from models.gguf_files import write_gguf
from models.tiny_models import COMMON, random_prompt
from models.word_tokenizer import word_tokenizer

# Rows and columns are multiples of 64, as some libraries want them.
SIZES = COMMON | {"intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}


@functools.cache
def full_precision(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=dtype).eval()


def saved(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    copy.deepcopy(full_precision(dtype)).save_pretrained(folder)
    return folder


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """List the linear layers, without the output head."""
    return {name: module for name, module in model.model.named_modules() if type(module) is nn.Linear}


def saved_with_tokenizer(folder: Path) -> str:
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "w1"
    tokenizer.save_pretrained(saved(folder))
    return str(folder)


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def saved_and_loaded(folder: Path, config: Any) -> PreTrainedModel:
    """Quantize a model while it is loaded, save it, and load what was saved."""
    loaded(saved(folder / "full"), quantization_config=config).save_pretrained(folder / "quantized")
    return loaded(folder / "quantized")


# --- how each is quantized


def torchao_direct(folder: Path, config: str, **options: Any) -> PreTrainedModel:
    """Quantize by torchao alone, which leaves no trace on the model: weights are tensors of another class."""
    import torchao.quantization as torchao

    model = copy.deepcopy(full_precision())
    torchao.quantize_(model, getattr(torchao, config)(**options))
    return model


def torchao_int4(folder: Path) -> PreTrainedModel:
    from torchao.quantization import PerGroup

    return torchao_direct(folder, "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(32))


def torchao_loaded(folder: Path) -> PreTrainedModel:
    from torchao.quantization import Int8WeightOnlyConfig

    return saved_and_loaded(folder, TorchAoConfig(Int8WeightOnlyConfig()))


def quanto_direct(folder: Path, activations: bool = False) -> PreTrainedModel:
    from optimum import quanto

    model = copy.deepcopy(full_precision())
    quanto.quantize(model, weights=quanto.qint8, activations=quanto.qint8 if activations else None)
    if activations:
        with quanto.Calibration():
            model(random_prompt(1, 50))
    quanto.freeze(model)
    return model


def quanto_loaded(folder: Path, weights: str) -> PreTrainedModel:
    return loaded(saved(folder), quantization_config=QuantoConfig(weights=weights))


def bitsandbytes_direct(folder: Path, bits: int) -> PreTrainedModel:
    """Quantize by bitsandbytes alone, which leaves no trace on the model: its parameters hold plain tensors."""
    import bitsandbytes

    model = copy.deepcopy(full_precision())
    for name, linear in linear_layers(model).items():
        sizes = linear.in_features, linear.out_features, False
        if bits == 8:
            module = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        else:
            module = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        module.load_state_dict(linear.state_dict())
        model.model.set_submodule(name, module)
    return model.to("cpu")  # which is when it quantizes


def bitsandbytes_loaded(folder: Path, **options: Any) -> PreTrainedModel:
    return saved_and_loaded(folder, BitsAndBytesConfig(**options))


def hqq_direct(folder: Path) -> PreTrainedModel:
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model = copy.deepcopy(full_precision())
    config = BaseQuantizeConfig(nbits=4, group_size=64)
    AutoHQQHFModel.quantize_model(model, config, compute_dtype=torch.float32, device="cpu")
    return model


def compressed(folder: Path, scheme: str = "pack-quantized", **weights: Any) -> PreTrainedModel:
    """Compress a model without `from_pretrained`: its weights are then plain parameters of codes."""
    from compressed_tensors import quantization
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model = copy.deepcopy(full_precision())
    arguments = quantization.QuantizationArgs(symmetric=True, **weights or INT4)
    config = quantization.QuantizationConfig(
        config_groups={"all": quantization.QuantizationScheme(targets=["Linear"], weights=arguments)},
        ignore=["lm_head"],
        format=scheme,
        quantization_status="compressed",
    )
    quantization.apply_quantization_config(model, config)
    for linear in linear_layers(model).values():
        groups = linear.weight.detach().unflatten(1, (-1, arguments.group_size or linear.in_features))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
        linear.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=scheme)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return model


def compressed_loaded(folder: Path, scheme: str = "pack-quantized", **weights: Any) -> PreTrainedModel:
    compressed(folder, scheme, **weights)
    return loaded(folder)


def gptqmodel_saved(folder: Path, **options: Any) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GPTQMODEL_CPU_WORKERS", "2")  # its default is too few for itself on two cores
        from gptqmodel import GPTQModel, QuantizeConfig

        config = QuantizeConfig(bits=4, group_size=32, **options)
        model = GPTQModel.load(saved_with_tokenizer(folder / "full"), config, device="cpu", dtype=torch.float16)
    texts = [random_prompt(1, 128, seed)[0].tolist() for seed in range(8)]
    model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts], batch_size=1)
    model.save(str(folder / "quantized"))
    return folder / "quantized"


def gptq_loaded(folder: Path) -> PreTrainedModel:
    # The only one of the kernels that is not compiled for minutes.
    config = GPTQConfig(bits=4, backend="gptq_torch")
    return loaded(gptqmodel_saved(folder), quantization_config=config, device_map="cpu", dtype=torch.float32)


def gptq_direct(folder: Path) -> PreTrainedModel:
    """Quantize by GPTQ alone, which leaves no trace on the model: weights are plain buffers of codes."""
    path = gptqmodel_saved(folder)
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(str(path), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16).model


def awq_loaded(folder: Path) -> PreTrainedModel:
    from gptqmodel.quantization import FORMAT, METHOD

    path = gptqmodel_saved(folder, quant_method=METHOD.AWQ, format=FORMAT.GEMM)
    return loaded(path, quantization_config=AwqConfig(backend="torch_awq"), device_map="cpu")


def auto_round_loaded(folder: Path) -> PreTrainedModel:
    from auto_round import AutoRound

    path = saved_with_tokenizer(folder / "full")
    rounding = AutoRound(path, scheme="W4A16", iters=0, group_size=32, device_map="cpu", disable_opt_rtn=True)
    rounding.quantize_and_save(str(folder / "quantized"), format="auto_round")
    (path,) = (path.parent for path in (folder / "quantized").rglob("config.json"))
    return loaded(path, device_map="cpu")


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


def bitnet_loaded(folder: Path) -> PreTrainedModel:
    def ternary(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        factor = 1 / weight.abs().mean()
        codes = (weight * factor).round().clamp(-1, 1)
        return {name: pack_weights(codes), f"{name}_scale": factor.reshape(1)}

    return loaded(rewritten(folder, torch.float32, BitNetQuantConfig(), ternary))


def torch_dynamic(folder: Path) -> PreTrainedModel:
    """The quantization that torch itself had: modules keep their weights beside parameters and buffers."""
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(full_precision()), {nn.Linear}, dtype=torch.qint8)


def gguf_loaded(folder: Path) -> PreTrainedModel:
    write_gguf(folder / "tiny.gguf", full_precision(), is_quantized=True)
    return loaded(folder, gguf_file="tiny.gguf", dtype=torch.float32)


def float8_loaded(folder: Path) -> PreTrainedModel:
    """Load float8 weights without a GPU that computes in 8 bits."""

    def blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tiles = weight.float().unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
        scale = tiles.abs().amax((1, 3), keepdim=True) / 448
        codes = (tiles / scale).to(torch.float8_e4m3fn).reshape(weight.shape)
        return {name: codes, f"{name}_scale_inv": scale.flatten(1)}

    return loaded(rewritten(folder, torch.bfloat16, FineGrainedFP8Config(weight_block_size=(32, 32)), blocks)).float()


def compressed_dequantized(folder: Path) -> PreTrainedModel:
    compressed(folder)
    return loaded(folder, quantization_config=CompressedTensorsConfig(dequantize=True))


def compressed_unpacked(folder: Path) -> PreTrainedModel:
    model = compressed(folder)
    model(random_prompt(1, 5))
    return model


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


class Format(NamedTuple):
    """
    A way to quantize a model.

    Attributes:
        package: that must be installed.
        make: make the model in a folder, with `options`.
        told: the name of its weights in the error; empty where the model has plain weights again.
        options: of `make`.
        is_quick: whether its tests are not slow.
        rounds: whether activations are rounded, too, which makes much of the last bits, in which kernels differ.
    """

    package: str
    make: Callable[..., PreTrainedModel]
    told: str = ""
    options: Mapping[str, Any] | None = None
    is_quick: bool = False
    rounds: bool = False


FORMATS = {
    "torchao-int8": Format(
        "torchao", torchao_direct, "of type Int8Tensor", {"config": "Int8WeightOnlyConfig"}, is_quick=True
    ),
    "torchao-int4": Format("torchao", torchao_int4, "of type IntxUnpackedToInt8Tensor"),
    "torchao-loaded": Format("torchao", torchao_loaded, "(TorchAoConfig)", is_quick=True),
    "torchao-int8-activations": Format(
        "torchao",
        torchao_direct,
        "of type Int8Tensor",
        {"config": "Int8DynamicActivationInt8WeightConfig"},
        rounds=True,
    ),
    "quanto-int8": Format("optimum.quanto", quanto_direct, "of type WeightQBytesTensor", is_quick=True),
    "quanto-int8-activations": Format(
        "optimum.quanto", quanto_direct, "of type WeightQBytesTensor", {"activations": True}, rounds=True
    ),
    "quanto-loaded-int4": Format("optimum.quanto", quanto_loaded, "(QuantoConfig)", {"weights": "int4"}),
    "bitsandbytes-8": Format("bitsandbytes", bitsandbytes_direct, "of type Int8Params", {"bits": 8}),
    "bitsandbytes-4": Format("bitsandbytes", bitsandbytes_direct, "of type Params4bit", {"bits": 4}, is_quick=True),
    "bitsandbytes-loaded-8": Format(
        "bitsandbytes", bitsandbytes_loaded, "(BitsAndBytesConfig)", {"load_in_8bit": True}
    ),
    "bitsandbytes-loaded-nf4": Format("bitsandbytes", bitsandbytes_loaded, "(BitsAndBytesConfig)", NF4),
    "hqq-4": Format(
        "hqq", hqq_direct, "that hqq.core.quantize.HQQLinear keeps beside parameters and buffers", is_quick=True
    ),
    "compressed-tensors-packed": Format("compressed_tensors", compressed, "of type torch.int32"),
    "compressed-tensors-loaded-int4": Format(
        "compressed_tensors", compressed_loaded, "(CompressedTensorsConfig)", is_quick=True
    ),
    "compressed-tensors-loaded-int8": Format(
        "compressed_tensors", compressed_loaded, "(CompressedTensorsConfig)", {"scheme": "int-quantized", **INT8}
    ),
    "gptq": Format("gptqmodel", gptq_direct, "of type torch.int32"),
    "gptq-loaded": Format("gptqmodel", gptq_loaded, "(GPTQConfig)"),
    "awq-loaded": Format("gptqmodel", awq_loaded, "(AwqConfig)"),
    "auto-round-loaded": Format("auto_round", auto_round_loaded, "(AutoRoundConfig)"),
    "bitnet-loaded": Format("transformers", bitnet_loaded, "(BitNetQuantConfig)", is_quick=True),
    "torch-dynamic": Format(
        "torch", torch_dynamic, "linear.Linear keeps beside parameters and buffers", is_quick=True, rounds=True
    ),
    "gguf": Format("gguf", gguf_loaded, is_quick=True),
    "float8-dequantized": Format("transformers", float8_loaded, is_quick=True),
    "compressed-tensors-dequantized": Format("compressed_tensors", compressed_dequantized, is_quick=True),
    "compressed-tensors-unpacked": Format("compressed_tensors", compressed_unpacked, is_quick=True),
    "bitsandbytes-dequantized": Format(
        "bitsandbytes", lambda folder: bitsandbytes_loaded(folder, load_in_4bit=True).dequantize(), is_quick=True
    ),
}
MANY_WARNINGS = ("gptqmodel", "auto_round")
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
        *([pytest.mark.filterwarnings("ignore")] if FORMATS[name].package in MANY_WARNINGS else []),
    ]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in FORMATS])
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Format, PreTrainedModel]:
    """A format and a model in it."""
    form = FORMATS[request.param]
    pytest.importorskip(form.package, reason=f"needs {form.package}")
    return form, form.make(tmp_path_factory.mktemp(request.param), **(form.options or {})).eval()


GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "top_k": 20}


def generated(model: PreTrainedModel, cache: Cache, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(random_prompt(2, 150), **cache_argument(cache), max_new_tokens=8, **options)


def test_decode_on_cpu_converts_plain_weights_or_names_the_way_out(quantized: tuple[Format, PreTrainedModel]):
    form, model = quantized
    in_float64 = {"custom_generate": DecodeOnCPU(dtype=torch.float64), **GREEDY}
    cache = SAME_ATTENTION["dynamic"](model.config)
    if form.told:
        refused = re.escape(f"{form.told} cannot be moved or converted. Load the model ")
        way_out = (
            r".* or pass custom_generate=DecodeOnCPU\(\) without options to decode with the weights as they are\.$"
        )
        with pytest.raises(ValueError, match=refused + way_out):
            generated(model, cache, **in_float64)
        assert cache.get_seq_length() == 0
    else:
        before = copy.deepcopy(model.state_dict())
        assert torch.equal(generated(model, cache, **in_float64), generated(model, stock(model.config), **GREEDY))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_it_gives_the_tokens_that_it_gives_with_stock(quantized: tuple[Format, PreTrainedModel], options: dict):
    """Decoded where the model is and by `DecodeOnCPU`; with quantized caches the same codes in a plain cache."""
    form, model = quantized
    caches = [(SAME_ATTENTION[name], stock) for name in ("dynamic", "offloaded")]
    caches.append(QUANTIZED_SAME_ATTENTION["quantized_on_device"])
    if not form.rounds:
        caches += [(DynamicHybridCache, stock), (OffloadedHybridCache, stock), QUANTIZED_OWN_ATTENTION["quantized_8"]]
    for make, reference in caches:
        expected = generated(model, reference(model.config), **options)
        for custom in (None, DecodeOnCPU()):
            ours = generated(model, make(model.config), custom_generate=custom, **options)
            assert torch.equal(ours, expected)
