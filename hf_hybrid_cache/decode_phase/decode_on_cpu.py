"""Prefill on the model's device, decode on the CPU: `generate(..., custom_generate=DecodeOnCPU())`."""

import copy
import inspect
import weakref
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..cache import HybridCache
from ..cache_argument import CACHE_ARGUMENT, arguments_kept_back, loop_of, passed_cache, require_use_cache
from ..decode_step import fuse_where_known, is_fused
from ..drafts import PromptLookup
from ..scalars import checked_bool
from ..weights import Width, use_chosen_experts_if_any
from .moving import HOST, HostCopies, MovableWeights, PhaseSwitch, copy_to_host, digest_of_weights, on_device

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Of weights, and of the indices and masks that ordinary models keep beside them.
_PLAIN_DTYPES = (*DTYPES, torch.int64, torch.bool)
OTHERWISE = "or leave out custom_generate to decode where the model is."
AS_THEY_ARE = "or pass custom_generate=DecodeOnCPU() without options to decode with the weights as they are."


@dataclass(frozen=True)
class DecodeOnCPU:
    """
    Compute the prefill where the model is, and decode on the CPU: a callable for `custom_generate` of `generate`.

    The model's own decoding loop runs, so every option of `generate` works: sampling, beams, prompt lookup, an
    assistant, processors, criteria, streamers, chunked prefill. Once the prompt is in the cache, weights, keys and
    values are in host memory only, and the memory of the device is freed. Processors and criteria still see tokens and
    logits on the device of the inputs. The CPU's generator draws samples. An assistant stays where it is. Nothing is
    moved if the model is on the CPU already. transformers passes no tokenizer to a `custom_generate`: instead of
    `stop_strings` pass `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.

    At the end, also after an exception or Ctrl-C, model and cache are back where they were. If the device has no room
    for them any more, they stay on the CPU, with a warning. Outputs are on the device of the inputs. After an exception
    the cache holds the tokens computed so far, as after an exception in `generate`.

    Args:
        dtype: of weights, keys and values on the CPU; `None` for the model's. The weights come back exactly as they
            were. Keys and values are converted there and back.
        keep_weights: keep the host's copies of the weights for the next call of this object, as long as the model
            lives and its weights do not change.
        weights: bits of a weight on the CPU, 8 or 4, for the weights that `quantize_weights` quantizes; `None` for the
            weights as they are. A token then takes a half to a quarter of the time. The prefill, and so the first
            token, uses the weights as they are.
        drafts: tokens of a draft at most, or the `PromptLookup` that is to draft and count them; `None` for none.

    Raises:
        TypeError: an argument has the wrong type, or `cache` is not one of this package's caches.
        ValueError: `weights` or `drafts` is another number; the model cannot be decoded on the CPU (an encoder-decoder,
            weights that are quantized, sharded or managed by accelerate, flash attention, `use_cache=False`); or none
            of its weights can be quantized.
        HostMemoryError: host memory would not suffice; nothing has been moved then.

    Example:
        >>> cache = DynamicHybridCache(model.config)
        >>> model.generate(**inputs, cache=cache, custom_generate=DecodeOnCPU())
        >>> in_float32 = DecodeOnCPU(dtype=torch.float32, keep_weights=True)
        >>> for inputs in questions:
        ...     cache = DynamicHybridCache(model.config)
        ...     model.generate(**inputs, cache=cache, custom_generate=in_float32)
    """

    dtype: torch.dtype | None = None
    _: KW_ONLY
    keep_weights: bool = False
    weights: int | None = None
    drafts: PromptLookup | int | None = None
    # By model: what its weights were, and their copies.
    _kept: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, HostCopies]] = field(
        default_factory=weakref.WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise TypeError(
                f"dtype must be None or one of {', '.join(map(str, DTYPES))}, got {self.dtype!r}. None decodes in the "
                "dtype of the model."
            )
        if self.weights is not None:
            object.__setattr__(self, "weights", Width.checked(self.weights, name="weights").bits)
        checked_bool("keep_weights", self.keep_weights)
        object.__setattr__(self, "drafts", PromptLookup.of(self.drafts))

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: torch.Tensor | None = None,
        assistant_model: PreTrainedModel | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the decoding loop; `generate` calls this with the arguments that it has prepared."""
        kept_back = arguments_kept_back()
        synced_gpus = synced_gpus or bool(kept_back.get("synced_gpus"))
        streamer = kept_back.get("streamer") if streamer is None else streamer
        assistant_model = kept_back.get("assistant_model") if assistant_model is None else assistant_model
        cache = _checked_cache(model, model_kwargs, synced_gpus)
        pair = assistant_model or model, model
        drafted, verified = (each.config.get_text_config().vocab_size for each in pair)
        if drafted != verified:
            raise ValueError(
                f"The assistant's vocabulary has {drafted:,} tokens and the model's {verified:,}, but transformers "
                f"hands no tokenizers to a custom_generate. Use an assistant with the model's vocabulary, {OTHERWISE}"
            )
        loop = loop_of(model, generation_config, streamer, assistant_model)

        caller = input_ids.device
        prompt_length = _prompt_length(input_ids, generation_config, model_kwargs)
        is_whole = prompt_length == input_ids.shape[1] and model_kwargs.get("inputs_embeds") is None
        offered = {"streamer": streamer, "inputs_tensor": inputs_tensor, "assistant_model": assistant_model}
        taken = {name: value for name, value in offered.items() if name in inspect.signature(loop).parameters}
        inputs = on_device({"input_ids": input_ids} | taken | model_kwargs, HOST)
        config = copy.copy(generation_config)  # with the special tokens' tensors, which `generate` has made
        vars(config).update({name: each.to(HOST) for name, each in vars(config).items() if torch.is_tensor(each)})
        inputs |= {
            "logits_processor": _ProcessorsOn(caller, logits_processor),
            "stopping_criteria": _CriteriaOn(caller, stopping_criteria),
            "generation_config": config,
        }

        dtype = None if self.dtype == model.dtype else self.dtype
        if isinstance(self.drafts, PromptLookup):  # of a number, too
            loop = partial(self.drafts.run, loop)
        run = partial(loop, model, **inputs)
        if model.device.type != "cpu" or dtype is not None or self.weights is not None:
            _require_movable(model)
            weights = MovableWeights(model, self._copies(model, dtype))
            run = partial(PhaseSwitch(model, cache, weights, dtype, prompt_length).run, loop, inputs)
        with ExitStack() as undo:
            use_chosen_experts_if_any(model, undo)
            if not is_fused(model):
                undo.enter_context(fuse_where_known(model))
            output = run()
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        # Beams are not stored in the order in which they are returned: what is known of them is the prompt.
        known = sequences if generation_config.num_beams == 1 else input_ids
        cache.note_tokens(known if is_whole else None)
        return on_device(output, caller)

    def _copies(self, model: PreTrainedModel, dtype: torch.dtype | None) -> HostCopies:
        """Copy the weights to host memory, or return what an earlier call has kept of weights that did not change."""
        width = None if self.weights is None else Width.checked(self.weights)
        if not self.keep_weights:
            return copy_to_host(model, dtype, width)
        digest = digest_of_weights(model)
        kept_digest, copies = self._kept.pop(model, (None, None))
        if copies is None or digest != kept_digest:
            del copies  # before there are others
            copies = copy_to_host(model, dtype, width)
        self._kept[model] = digest, copies
        return copies


class _ProcessorsOn(LogitsProcessorList):
    """Logits processors that compute on `device`, where they may hold tensors, for a loop that runs on the CPU."""

    def __init__(self, device: torch.device, processors: LogitsProcessorList):
        super().__init__(processors)
        self.device = device

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if not self:
            return scores
        return super().__call__(input_ids.to(self.device), scores.to(self.device), **kwargs).to(HOST)


class _CriteriaOn(StoppingCriteriaList):
    """Stopping criteria that get tokens on `device`. Scores of all steps, if recorded, stay in host memory."""

    def __init__(self, device: torch.device, criteria: StoppingCriteriaList):
        super().__init__(criteria)
        self.device = device

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return super().__call__(input_ids.to(self.device), scores, **kwargs).to(HOST)


def _prompt_length(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """The number of tokens in the cache after the prefill; `input_ids` may be only the new ones."""
    mask = model_kwargs.get("attention_mask")
    # transformers notes the length where it drops a mask of ones.
    return getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]


def _checked_cache(model: PreTrainedModel, model_kwargs: dict[str, Any], synced_gpus: bool) -> HybridCache:
    """Return the cache that was passed to `generate`, if the model can be decoded with it."""
    cache = passed_cache(model_kwargs)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"DecodeOnCPU is for decoder-only models, and {type(model).__name__} is an encoder-decoder. Leave out "
            "custom_generate."
        )
    if not isinstance(cache, HybridCache):
        raise TypeError(
            f"DecodeOnCPU moves caches of hf_hybrid_cache only, got {CACHE_ARGUMENT} of type "
            f"{type(cache).__name__}. Pass {CACHE_ARGUMENT}=DynamicHybridCache(model.config) to generate."
        )
    require_use_cache(model_kwargs)
    if synced_gpus:
        raise ValueError(f"synced_gpus=True, but weights shared out to processes cannot be moved. Use one, {OTHERWISE}")
    return cache


def _require_movable(model: Any) -> None:
    """Raise a `ValueError` if the weights cannot be moved, or the model cannot be computed on the CPU."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            "accelerate manages where this model's weights are (several devices, or offloading). Load it onto one "
            f"device, such as device_map='cuda:0', {OTHERWISE}"
        )
    if weights := _weights_not_plain(model):
        otherwise = AS_THEY_ARE if model.device.type == "cpu" else OTHERWISE
        raise ValueError(f"{weights} cannot be moved or converted. Load the model unquantized, {otherwise}")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ValueError(f"Weights are on {' and '.join(devices)}. Move the model to one device, {OTHERWISE}")
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention is not None and "flash" in attention:
        raise ValueError(f"{attention} runs only on GPUs. Use model.set_attn_implementation('sdpa'), {OTHERWISE}")


def _weights_not_plain(model: Any) -> str:
    """
    Describe weights that are not plain tensors of numbers; an empty string if all are.

    Where another library has quantized weights, their scales do not move along, and some modules pack them again for
    the device that they compute on. Such a model need not have a mark of the library.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    config = getattr(quantizer, "quantization_config", None)
    # The quantizer of a GGUF file stays with the weights that it has dequantized.
    if quantizer is not None and getattr(config, "quant_method", None) != "gguf":
        return f"Quantized weights ({type(config).__name__})"
    tensors = (*model.parameters(), *model.buffers())
    # bitsandbytes has parameters of its own over plain data.
    kinds = {kind for tensor in tensors for kind in (type(tensor), type(tensor.data))} - {torch.Tensor, nn.Parameter}
    if kinds:
        return f"Weights of type {', '.join(sorted(kind.__name__ for kind in kinds))}"
    # Last, because packed modules unpack their weights for a state dict, or refuse.
    in_checkpoint = model.state_dict(keep_vars=True)
    known = {id(tensor) for tensor in tensors}
    for name, value in in_checkpoint.items():
        if id(value) not in known:
            return f"Weights that a module keeps beside parameters and buffers ({name})"
    codes = {str(tensor.dtype) for tensor in in_checkpoint.values() if tensor.dtype not in _PLAIN_DTYPES}
    return f"Weights of type {', '.join(sorted(codes))}" if codes else ""
