"""
Models whose weights another library has quantized: the same tokens with our caches, and the errors of `DecodeOnCPU`.

Each is quantized by the library itself, and loaded as its users load it. What is not installed is skipped.
"""

import copy
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
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
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    QuantoConfig,
    TorchAoConfig,
)
from transformers.cache_utils import Cache
from transformers.integrations.bitnet import pack_weights

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, OffloadedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from common.caches import QUANTIZED_OWN_ATTENTION, QUANTIZED_SAME_ATTENTION, SAME_ATTENTION, stock
from models.tiny_models import COMMON, VOCAB_SIZE, random_prompt

IN_FLOAT64 = DecodeOnCPU(dtype=torch.float64)
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


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


# --- how each is quantized


def torchao_direct(config: str, **options: Any) -> Callable[[Path], PreTrainedModel]:
    """Quantize by torchao alone, which leaves no trace on the model: weights are tensors of another class."""

    def make(folder: Path) -> PreTrainedModel:
        import torchao.quantization as torchao

        model = copy.deepcopy(full_precision())
        torchao.quantize_(model, getattr(torchao, config)(**options))
        return model

    return make


def torchao_int4(folder: Path) -> PreTrainedModel:
    from torchao.quantization import PerGroup

    return torchao_direct("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(32))(folder)


def torchao_loaded(folder: Path) -> PreTrainedModel:
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(saved(folder / "full"), quantization_config=config)
    model.save_pretrained(folder / "quantized")
    return AutoModelForCausalLM.from_pretrained(folder / "quantized")


def quanto_direct(folder: Path, activations: bool = False) -> PreTrainedModel:
    from optimum import quanto

    model = copy.deepcopy(full_precision())
    quanto.quantize(model, weights=quanto.qint8, activations=quanto.qint8 if activations else None)
    if activations:
        with quanto.Calibration():
            model(random_prompt(1, 50))
    quanto.freeze(model)
    return model


def quanto_loaded(weights: str) -> Callable[[Path], PreTrainedModel]:
    def make(folder: Path) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(saved(folder), quantization_config=QuantoConfig(weights=weights))

    return make


def bitsandbytes_direct(bits: int) -> Callable[[Path], PreTrainedModel]:
    """Quantize by bitsandbytes alone, which leaves no trace on the model: its parameters hold plain tensors."""

    def make(folder: Path) -> PreTrainedModel:
        import bitsandbytes

        def quantized(linear: nn.Linear) -> nn.Module:
            sizes = (linear.in_features, linear.out_features, False)
            if bits == 8:
                return bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
            return bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")

        model = copy.deepcopy(full_precision())
        for name, linear in linear_layers(model).items():
            module = quantized(linear)
            module.load_state_dict(linear.state_dict())
            model.model.set_submodule(name, module)
        return model.to("cpu")  # which is when it quantizes

    return make


def bitsandbytes_loaded(**options: Any) -> Callable[[Path], PreTrainedModel]:
    def make(folder: Path) -> PreTrainedModel:
        config = BitsAndBytesConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(saved(folder / "full"), quantization_config=config)
        model.save_pretrained(folder / "quantized")
        return AutoModelForCausalLM.from_pretrained(folder / "quantized")

    return make


def hqq_direct(folder: Path) -> PreTrainedModel:
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model = copy.deepcopy(full_precision())
    config = BaseQuantizeConfig(nbits=4, group_size=64)
    AutoHQQHFModel.quantize_model(model, config, compute_dtype=torch.float32, device="cpu")
    return model


def compressed(scheme: str, **weights: Any) -> Callable[[Path], PreTrainedModel]:
    """Compress a model without `from_pretrained`: its weights are then plain parameters of codes."""

    def make(folder: Path) -> PreTrainedModel:
        from compressed_tensors import quantization
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization.utils import calculate_qparams

        model = copy.deepcopy(full_precision())
        arguments = quantization.QuantizationArgs(symmetric=True, **weights)
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

    return make


def compressed_loaded(scheme: str, **weights: Any) -> Callable[[Path], PreTrainedModel]:
    def make(folder: Path) -> PreTrainedModel:
        compressed(scheme, **weights)(folder)
        return AutoModelForCausalLM.from_pretrained(folder)

    return make


def gptqmodel_saved(folder: Path, **options: Any) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GPTQMODEL_CPU_WORKERS", "2")  # its default is too few for itself on two cores
        from gptqmodel import GPTQModel, QuantizeConfig

        tokenizer().save_pretrained(saved(folder / "full"))
        config = QuantizeConfig(bits=4, group_size=32, **options)
        model = GPTQModel.load(str(folder / "full"), config, device="cpu", dtype=torch.float16)
    texts = [random_prompt(1, 128, seed)[0].tolist() for seed in range(8)]
    model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts], batch_size=1)
    model.save(str(folder / "quantized"))
    return folder / "quantized"


def gptq_loaded(folder: Path) -> PreTrainedModel:
    # The only one of the kernels that is not compiled for minutes.
    config = GPTQConfig(bits=4, backend="gptq_torch")
    return AutoModelForCausalLM.from_pretrained(
        gptqmodel_saved(folder), quantization_config=config, device_map="cpu", dtype=torch.float32
    )


def gptq_direct(folder: Path) -> PreTrainedModel:
    """Quantize by GPTQ alone, which leaves no trace on the model: weights are plain buffers of codes."""
    path = gptqmodel_saved(folder)
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(str(path), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16).model


def awq_loaded(folder: Path) -> PreTrainedModel:
    from gptqmodel.quantization import FORMAT, METHOD

    path = gptqmodel_saved(folder, quant_method=METHOD.AWQ, format=FORMAT.GEMM)
    config = AwqConfig(backend="torch_awq")
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, device_map="cpu")


def auto_round_loaded(folder: Path) -> PreTrainedModel:
    from auto_round import AutoRound

    tokenizer().save_pretrained(saved(folder / "full"))
    rounding = AutoRound(
        str(folder / "full"), scheme="W4A16", iters=0, group_size=32, device_map="cpu", disable_opt_rtn=True
    )
    rounding.quantize_and_save(str(folder / "quantized"), format="auto_round")
    (path,) = (path.parent for path in (folder / "quantized").rglob("config.json"))
    return AutoModelForCausalLM.from_pretrained(path, device_map="cpu")


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

    return AutoModelForCausalLM.from_pretrained(rewritten(folder, torch.float32, BitNetQuantConfig(), ternary))


def torch_dynamic(folder: Path) -> PreTrainedModel:
    """The quantization that torch itself had: modules keep their weights beside parameters and buffers."""
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(full_precision()), {nn.Linear}, dtype=torch.qint8)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
# The package that must be installed, the function that makes the model, and the name of its weights in the error.
MODELS: dict[str, tuple[str, Callable[[Path], PreTrainedModel], str]] = {
    "torchao-int8": ("torchao", torchao_direct("Int8WeightOnlyConfig"), "of type Int8Tensor"),
    "torchao-int4": ("torchao", torchao_int4, "of type IntxUnpackedToInt8Tensor"),
    "torchao-float8": ("torchao", torchao_direct("Float8WeightOnlyConfig"), "of type Float8Tensor"),
    "torchao-loaded": ("torchao", torchao_loaded, "(TorchAoConfig)"),
    "quanto-int8": ("optimum.quanto", quanto_direct, "of type WeightQBytesTensor"),
    "quanto-loaded-int4": ("optimum.quanto", quanto_loaded("int4"), "(QuantoConfig)"),
    "quanto-loaded-float8": ("optimum.quanto", quanto_loaded("float8"), "(QuantoConfig)"),
    "bitsandbytes-8": ("bitsandbytes", bitsandbytes_direct(8), "of type Int8Params"),
    "bitsandbytes-4": ("bitsandbytes", bitsandbytes_direct(4), "of type Params4bit"),
    "bitsandbytes-loaded-8": ("bitsandbytes", bitsandbytes_loaded(load_in_8bit=True), "(BitsAndBytesConfig)"),
    "bitsandbytes-loaded-nf4": (
        "bitsandbytes",
        bitsandbytes_loaded(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "(BitsAndBytesConfig)",
    ),
    "hqq-4": ("hqq", hqq_direct, "that hqq.core.quantize.HQQLinear keeps beside parameters and buffers"),
    "compressed-tensors-loaded-int4": (
        "compressed_tensors",
        compressed_loaded("pack-quantized", **INT4),
        "(CompressedTensorsConfig)",
    ),
    "compressed-tensors-loaded-int8": (
        "compressed_tensors",
        compressed_loaded("int-quantized", **INT8),
        "(CompressedTensorsConfig)",
    ),
    "compressed-tensors-loaded-float8": (
        "compressed_tensors",
        compressed_loaded("float-quantized", **FLOAT8),
        "(CompressedTensorsConfig)",
    ),
    "gptq": ("gptqmodel", gptq_direct, "of type torch.int32"),
    "gptq-loaded": ("gptqmodel", gptq_loaded, "(GPTQConfig)"),
    "awq-loaded": ("gptqmodel", awq_loaded, "(AwqConfig)"),
    "auto-round-loaded": ("auto_round", auto_round_loaded, "(AutoRoundConfig)"),
    "bitnet-loaded": ("transformers", bitnet_loaded, "(BitNetQuantConfig)"),
}
# Activations are rounded to 8 bits, too. That makes much of the last bits, in which the kernel differs from torch.
WITH_ACTIVATIONS: dict[str, tuple[str, Callable[[Path], PreTrainedModel], str]] = {
    "torchao-int8-activations": (
        "torchao",
        torchao_direct("Int8DynamicActivationInt8WeightConfig"),
        "of type Int8Tensor",
    ),
    "quanto-int8-activations": (
        "optimum.quanto",
        functools.partial(quanto_direct, activations=True),
        "of type WeightQBytesTensor",
    ),
    "torch-dynamic": ("torch", torch_dynamic, "linear.Linear keeps beside parameters and buffers"),
}
ALL_MODELS = MODELS | WITH_ACTIVATIONS
INSTALL = {
    "optimum.quanto": "optimum-quanto",
    "compressed_tensors": "compressed-tensors",
    "gptqmodel": "gptqmodel optimum",
    "auto_round": "auto-round",
}
MANY_WARNINGS = ("gptqmodel", "auto_round")
QUICK = ("torchao-int8", "torchao-loaded", "quanto-int8", "bitsandbytes-4", "hqq-4", "compressed-tensors-loaded-int4")
QUICK_WITH_ACTIVATIONS = (*QUICK, "bitnet-loaded", "torch-dynamic")


def needs(package: str) -> None:
    pytest.importorskip(package, reason=f"needs {package}: pip install {INSTALL.get(package, package)}")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreTrainedModel]:
    @functools.cache
    def make(name: str) -> PreTrainedModel:
        needs(ALL_MODELS[name][0])
        return ALL_MODELS[name][1](tmp_path_factory.mktemp(name)).eval()

    return make


def of_models(names: Iterable[str], quick: Collection[str]) -> pytest.MarkDecorator:
    """Tests of one model run in one process, which makes it once."""

    def marks(name: str) -> list[pytest.MarkDecorator]:
        return [
            pytest.mark.xdist_group(f"quantized {name}"),
            *([] if name in quick else [pytest.mark.slow]),
            *([pytest.mark.filterwarnings("ignore")] if ALL_MODELS[name][0] in MANY_WARNINGS else []),
        ]

    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in names])


pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),  # needed to dequantize
]


# --- the same tokens

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "top_k": 20}


def generated(model: PreTrainedModel, cache: Cache, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(random_prompt(2, 150), **cache_argument(cache), max_new_tokens=8, **options)


def assert_same_tokens(
    model: PreTrainedModel,
    makes: list[Callable[[PreTrainedConfig], Cache]],
    reference: Callable[[PreTrainedConfig], Cache] = stock,
) -> None:
    """Greedy and sampled, decoded where the model is and by `DecodeOnCPU`."""
    for options in (GREEDY, SAMPLED):
        expected = generated(model, reference(model.config), **options)
        for make in makes:
            assert torch.equal(generated(model, make(model.config), **options), expected)
            on_cpu = generated(model, make(model.config), custom_generate=DecodeOnCPU(), **options)
            assert torch.equal(on_cpu, expected)


@of_models(ALL_MODELS, QUICK_WITH_ACTIVATIONS)
def test_quantized_model_when_cache_is_ours_then_matches_dynamic_cache(
    name: str, model_of: Callable[[str], PreTrainedModel]
):
    assert_same_tokens(model_of(name), [SAME_ATTENTION["dynamic"], SAME_ATTENTION["offloaded"]])


@of_models(MODELS, QUICK)
def test_quantized_model_when_kernel_attends_then_tokens_are_the_same(
    name: str, model_of: Callable[[str], PreTrainedModel]
):
    assert_same_tokens(model_of(name), [DynamicHybridCache, OffloadedHybridCache])


@of_models(ALL_MODELS, QUICK_WITH_ACTIVATIONS)
def test_quantized_model_when_cache_is_quantized_then_matches_codes(
    name: str, model_of: Callable[[str], PreTrainedModel]
):
    names = ["quantized_on_device", *(["quantized_8"] if name in MODELS else [])]
    for make, reference in ((QUANTIZED_SAME_ATTENTION | QUANTIZED_OWN_ATTENTION)[name] for name in names):
        assert_same_tokens(model_of(name), [make], reference)


# --- what cannot be moved


@of_models(ALL_MODELS, QUICK_WITH_ACTIVATIONS)
def test_decode_on_cpu_when_weights_are_quantized_then_names_way_out(
    name: str, model_of: Callable[[str], PreTrainedModel]
):
    model = model_of(name)
    expected = generated(model, stock(model.config), **GREEDY)
    cache = SAME_ATTENTION["dynamic"](model.config)
    refused = re.escape(f"{ALL_MODELS[name][2]} cannot be moved or converted. Load the model ")
    way_out = r".* or pass custom_generate=DecodeOnCPU\(\) without options to decode with the weights as they are\.$"
    with pytest.raises(ValueError, match=refused + way_out):
        generated(model, cache, custom_generate=IN_FLOAT64, **GREEDY)
    assert cache.get_seq_length() == 0
    assert torch.equal(generated(model, cache, custom_generate=DecodeOnCPU(), **GREEDY), expected)


def test_packed_weights_when_before_first_pass_then_are_not_converted(tmp_path: Path):
    needs("compressed_tensors")
    model = compressed("pack-quantized", **INT4)(tmp_path)
    with pytest.raises(ValueError, match=r"Weights of type torch.int32 cannot be moved"):
        generated(model, DynamicHybridCache(model.config), custom_generate=IN_FLOAT64, **GREEDY)


# --- what was quantized once


def gguf_loaded(folder: Path) -> PreTrainedModel:
    import gguf

    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    model, config = full_precision(), full_precision().config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        if data.ndim == 2:
            data = gguf.quantize(data, gguf.GGMLQuantizationType.Q8_0)
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim == 2 else None
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)


def float8_loaded(folder: Path) -> PreTrainedModel:
    """Load float8 weights without a GPU that computes in 8 bits."""

    def blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tiles = weight.float().unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
        scale = tiles.abs().amax((1, 3), keepdim=True) / 448
        codes = (tiles / scale).to(torch.float8_e4m3fn).reshape(weight.shape)
        return {name: codes, f"{name}_scale_inv": scale.flatten(1)}

    config = FineGrainedFP8Config(weight_block_size=(32, 32))
    path = rewritten(folder, torch.bfloat16, config, blocks)
    return AutoModelForCausalLM.from_pretrained(path).float()


def compressed_dequantized(folder: Path) -> PreTrainedModel:
    compressed("pack-quantized", **INT4)(folder)
    config = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def bitsandbytes_dequantized(folder: Path) -> PreTrainedModel:
    return bitsandbytes_loaded(load_in_4bit=True)(folder).dequantize()


def compressed_unpacked(folder: Path) -> PreTrainedModel:
    model = compressed("pack-quantized", **INT4)(folder)
    model(random_prompt(1, 5))
    return model


DEQUANTIZED: dict[str, tuple[str, Callable[[Path], PreTrainedModel]]] = {
    "gguf": ("gguf", gguf_loaded),
    "float8": ("transformers", float8_loaded),
    "compressed-tensors": ("compressed_tensors", compressed_dequantized),
    "compressed-tensors-unpacked": ("compressed_tensors", compressed_unpacked),
    "bitsandbytes": ("bitsandbytes", bitsandbytes_dequantized),
}


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_a_model_that_was_dequantized_decodes_as_any_other_and_is_moved(name: str, tmp_path: Path):
    package, make = DEQUANTIZED[name]
    needs(package)
    model = make(tmp_path).eval()
    assert_same_tokens(model, [DynamicHybridCache, SAME_ATTENTION["offloaded"]])
    before = copy.deepcopy(model.state_dict())
    converted = generated(model, DynamicHybridCache(model.config), custom_generate=IN_FLOAT64, **GREEDY)
    assert torch.equal(converted, generated(model, stock(model.config), **GREEDY))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
