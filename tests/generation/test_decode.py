"""`custom_generate=DecodeOnCPU()`: the same tokens, and model and cache where they should be, whatever happens."""

import copy
import functools
import gc
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import transformers
from accelerate import dispatch_model
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, HostMemoryError, prefill, quantize_weights
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument
from hf_hybrid_cache.weights.quantized_weight import QuantizedWeight

from common.caches import dynamic, offloaded, stock
from common.interruptions import Interruption
from common.modes import MODES, NOT_IN_TRANSFORMERS, similar_model
from common.soak import budget, count
from generation.test_contract import expected
from models.tiny_models import FAMILIES, gemma3, llama, random_prompt, tiny_model

# Another dtype on the CPU makes the CPU a place to move to: weights, keys and values are exchanged as between devices.
IN_FLOAT64 = DecodeOnCPU(dtype=torch.float64)


@pytest.fixture(scope="session")
def second_device() -> torch.device:
    """
    A device that is not the CPU, on any machine: torch's lazy tensors.

    They are computed on the CPU, but refuse operands there as a GPU does.
    """
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"transformers {transformers.__version__} computes only on devices that autocast knows")
    lazy = pytest.importorskip("torch._lazy.ts_backend", reason="torch was built without lazy tensors")
    lazy.init()
    return torch.device("lazy:0")


@pytest.fixture(params=["float64", "second_device"])
def moving(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, DecodeOnCPU]:
    """Make a Llama, and a `DecodeOnCPU` that moves it."""
    if request.param == "float64":
        return copy.deepcopy(tiny_model("llama")), IN_FLOAT64
    return copy.deepcopy(tiny_model("llama")).to(request.getfixturevalue("second_device")), DecodeOnCPU()


def run(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
    """Call `generate` for a prompt moved to the model, greedily by default."""
    ids = ids.to(model.device)
    cache = dynamic(model.config) if cache is None else cache
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False} | options
    return model.generate(ids, **cache_argument(cache), **options)


def plain(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    """Run a copy of the model on the CPU, with transformers' `DynamicCache`."""
    return run(copy.deepcopy(model).to("cpu"), ids, stock(model.config), **options)


def snapshot(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Copy everything that the model computes with."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}


def assert_as_before(model: PreTrainedModel, before: dict[str, torch.Tensor], device: torch.device) -> None:
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device}
    after = snapshot(model)
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def whereabouts(cache: DynamicHybridCache) -> set[tuple[torch.device, torch.dtype]]:
    return {(layer.store.shape.device, layer.store.shape.key_dtype) for layer in cache.layers if layer.store}


class Watcher(BaseStreamer):
    """Notes what `observe` says while tokens are decoded; the first call is the prompt, put there by `generate`."""

    def __init__(self, observe: Callable[[], Any]):
        self.observe = observe
        self.notes: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.notes.append(self.observe())

    def end(self) -> None:
        pass


# --- tokens


@pytest.fixture
def every_call_decodes_on_cpu() -> Iterator[Callable[..., None]]:
    """Lets `model.generate` pass `custom_generate`, on `device` if the model is to be there; undone at the end."""
    changed = []

    def change(model: PreTrainedModel, decode: DecodeOnCPU, device: torch.device | None = None) -> None:
        @functools.wraps(model.generate)
        def generate(*inputs: Any, **options: Any) -> Any:
            if device is not None:
                inputs = tuple(tensor.to(device) for tensor in inputs)
                options = {key: value.to(device) if torch.is_tensor(value) else value for key, value in options.items()}
            output = type(model).generate(model, *inputs, **options, custom_generate=decode)
            if device is not None:
                assert {tensor.device for tensor in (output.sequences, *output.logits)} == {device}
                output.sequences = output.sequences.cpu()
                output.logits = tuple(logits.cpu() for logits in output.logits)
            return output

        if device is None:
            similar_model(model)  # an assistant is a copy of the model, made before it is changed
        model.generate = generate
        changed.append(model)

    yield change
    for model in changed:
        del model.generate


def assert_results_agree(actual: list[Any], reference: list[Any], tolerance: float) -> None:
    for ours, theirs in zip(actual, reference, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        else:
            assert ours == theirs


# Full attention, with sliding windows between, and with recurrent layers between.
IN_EVERY_MODE = ("llama", "gemma3", "qwen3_next")
IN_OTHER_FAMILIES = ("beams", "continued", "chunked_prefill", "left_padding")


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, marks=pytest.mark.xdist_group(family))
        for family in FAMILIES
        for mode in (MODES if family in IN_EVERY_MODE else IN_OTHER_FAMILIES)
        if (family, mode) not in NOT_IN_TRANSFORMERS
    ],
)
def test_tokens_equal_those_of_dynamic_cache_when_weights_and_cache_move(
    family: str, mode: str, every_call_decodes_on_cpu: Any
):
    reference = expected(family, mode, torch.float32)
    model = tiny_model(family)
    every_call_decodes_on_cpu(model, IN_FLOAT64)
    assert_results_agree(MODES[mode](model, dynamic), reference, tolerance=1e-3)
    assert model.dtype == torch.float32


@pytest.mark.xdist_group("llama")
@pytest.mark.parametrize("mode", MODES)
def test_a_model_on_the_cpu_decodes_as_without_custom_generate(mode: str, every_call_decodes_on_cpu: Any):
    reference = expected("llama", mode, torch.float32)
    model = tiny_model("llama")
    every_call_decodes_on_cpu(model, DecodeOnCPU())
    # Attention to a prompt that sequences share is merged with attention to the rest.
    tolerance = 1e-3 if mode == "continuations" else 0
    assert_results_agree(MODES[mode](model, offloaded), reference, tolerance=tolerance)


@pytest.mark.xdist_group("second_device")
@pytest.mark.parametrize(
    ("family", "mode", "make_cache"),
    [
        ("llama", "greedy", DynamicHybridCache),
        ("llama", "beams", dynamic),
        ("llama", "left_padding", dynamic),
        ("llama", "continued", dynamic),
        ("llama", "chunked_prefill", dynamic),
        ("gemma4_shared", "sampling", dynamic),
        ("mistral_sliding", "prompt_lookup", dynamic),
    ],
)
def test_tokens_on_another_device_equal_those_on_the_cpu(
    family: str, mode: str, make_cache: Any, second_device: torch.device, every_call_decodes_on_cpu: Any
):
    reference = expected(family, mode, torch.float32)
    model = copy.deepcopy(tiny_model(family)).to(second_device)
    every_call_decodes_on_cpu(model, DecodeOnCPU(), second_device)
    assert_results_agree(MODES[mode](model, make_cache), reference, tolerance=1e-3)
    assert model.device == second_device


def test_assistant_when_decoding_on_cpu_then_drafts_from_its_own_device(moving):
    model, decode = moving
    assistant = similar_model(tiny_model("llama"))
    drafts = Watcher(lambda: assistant.device.type)
    with assistant.register_forward_hook(lambda *_: drafts.put(torch.empty(0))):
        tokens = run(model, random_prompt(1, 30), custom_generate=decode, assistant_model=assistant)
    assert torch.equal(tokens.cpu(), plain(model, random_prompt(1, 30)))
    assert len(drafts.notes) > 1
    assert set(drafts.notes) == {"cpu"}


@pytest.mark.parametrize("options", [{"assistant_early_exit": 2}, {"prompt_lookup_num_tokens": 3}])
def test_drafts_when_without_an_assistant_then_tokens_are_the_same(moving, options: dict[str, Any]):
    model, decode = moving
    tokens = run(model, random_prompt(1, 20), custom_generate=decode, **options)
    assert torch.equal(tokens.cpu(), plain(model, random_prompt(1, 20)))


def test_new_tokens_alone_continue_a_conversation(moving):
    model, decode = moving
    ids = random_prompt(2, 30)
    cache = dynamic(model.config)
    with torch.no_grad():
        model(ids[:, :18].to(model.device), **cache_argument(cache))
    mask = torch.ones_like(ids).to(model.device)
    tokens = run(model, ids[:, 18:], cache, attention_mask=mask, custom_generate=decode)
    assert torch.equal(tokens[:, 12:].cpu(), plain(model, ids)[:, 30:])


def test_prompt_when_given_as_embeddings_then_tokens_are_the_same(moving):
    model, decode = moving
    ids = random_prompt(2, 20)
    embeddings = model.get_input_embeddings()(ids.to(model.device)).detach()
    cache = dynamic(model.config)
    tokens = model.generate(
        inputs_embeds=embeddings, **cache_argument(cache), max_new_tokens=12, do_sample=False, custom_generate=decode
    )
    assert torch.equal(tokens.cpu(), plain(model, ids)[:, 20:])


def test_images_are_computed_with_the_prompt():
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    }
    torch.manual_seed(0)
    config = Gemma3Config(text_config=gemma3(), vision_config=vision, mm_tokens_per_image=4, image_token_index=127)
    model = Gemma3ForConditionalGeneration(config).eval()
    ids = random_prompt(1, 20).clamp(max=126)
    ids[0, 5:9] = 127
    inputs = {
        "pixel_values": torch.rand(1, 3, 28, 28),
        "token_type_ids": (ids == 127).long(),
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 12,
        "do_sample": False,
    }
    tokens = model.generate(ids, **cache_argument(DynamicHybridCache(config)), custom_generate=IN_FLOAT64, **inputs)
    assert torch.equal(tokens, model.generate(ids, **cache_argument(stock(config)), **inputs))


def test_generate_outputs_when_asked_for_then_are_returned(moving):
    model, decode = moving
    options = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    cache = dynamic(model.config)
    ours = run(model, random_prompt(2, 20), cache, custom_generate=decode, **options)
    theirs = plain(model, random_prompt(2, 20), **options)
    assert ours.keys() == theirs.keys()
    assert ours[CACHE_ARGUMENT] is cache
    assert ours.scores[3].device == model.device
    for step, layers in enumerate(theirs.hidden_states):
        assert [states.shape for states in ours.hidden_states[step]] == [states.shape for states in layers]
        assert {states.device for states in ours.hidden_states[step]} == {model.device}


class Favour(LogitsProcessor):
    """Prefers a token, with a tensor on the device of the inputs."""

    def __init__(self, device: torch.device):
        self.bias = torch.zeros(128, device=device)
        self.bias[9] = 4.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.device == scores.device
        return scores + self.bias


class StopAt(StoppingCriteria):
    """Ends sequences at a token, with a tensor on the device of the inputs."""

    def __init__(self, device: torch.device):
        self.token = torch.tensor(9, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=["", "beams", "drafts"]
)
def test_processors_and_criteria_work_where_the_inputs_are(moving, options: dict[str, Any]):
    model, decode = moving
    options |= {"pad_token_id": 0, "eos_token_id": [7, 11], "repetition_penalty": 1.2, "min_new_tokens": 3}

    def theirs(device: torch.device) -> dict[str, Any]:
        return {"logits_processor": [Favour(device)], "stopping_criteria": [StopAt(device)]}

    ids = random_prompt(1, 20)
    tokens = run(model, ids, custom_generate=decode, **options, **theirs(model.device))
    assert torch.equal(tokens.cpu(), plain(model, ids, **options, **theirs(torch.device("cpu"))))


def test_a_streamer_gets_every_token_and_ends():
    class Words:
        def decode(self, ids: list[int], **kwargs: Any) -> str:
            return "".join(f"{index} " for index in ids)

    streamer = TextIteratorStreamer(Words(), skip_prompt=True, timeout=60)
    options = {"streamer": streamer, "custom_generate": IN_FLOAT64}
    thread = threading.Thread(target=run, args=(tiny_model("llama"), random_prompt(1, 20)), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert [int(word) for word in text.split()] == plain(tiny_model("llama"), random_prompt(1, 20))[0, 20:].tolist()


# --- weights


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "decode_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["lossy", "wider"],
)
def test_weights_come_back_bit_by_bit(family: str, dtype: torch.dtype, decode_dtype: torch.dtype):
    model = tiny_model(family, dtype)
    before, objects = snapshot(model), [id(tensor) for tensor in model.parameters()]
    watcher = Watcher(lambda: (model.dtype, model.get_output_embeddings().weight.dtype))
    cache = dynamic(model.config)
    decode = DecodeOnCPU(decode_dtype)
    run(model, random_prompt(1, 5), cache, max_new_tokens=3, custom_generate=decode, streamer=watcher)
    assert set(watcher.notes[1:]) == {(decode_dtype, decode_dtype)}
    assert_as_before(model, before, torch.device("cpu"))
    assert [id(tensor) for tensor in model.parameters()] == objects
    assert {layer.keys.dtype for layer in cache.layers if getattr(layer, "keys", None) is not None} == {dtype}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("decode_dtype", [torch.bfloat16, None, torch.float64], ids=["lossy", "same", "wider"])
def test_weights_come_back_to_another_device_bit_by_bit(
    family: str, decode_dtype: torch.dtype | None, keep_weights: bool, second_device: torch.device
):
    model = copy.deepcopy(tiny_model(family)).to(second_device)
    before, objects = snapshot(model), [id(tensor) for tensor in model.parameters()]
    decode = DecodeOnCPU(decode_dtype, keep_weights=keep_weights)
    watcher = Watcher(lambda: {tensor.device.type for tensor in (*model.parameters(), *model.buffers())})
    for _ in range(2):
        run(model, random_prompt(1, 5), max_new_tokens=3, custom_generate=decode, streamer=watcher)
        assert_as_before(model, before, second_device)
        assert [id(tensor) for tensor in model.parameters()] == objects
    assert watcher.notes[1] == watcher.notes[-1] == {"cpu"}


def test_model_and_cache_when_moved_after_a_prefill_then_stay_on_the_cpu(second_device: torch.device):
    model = copy.deepcopy(tiny_model("llama")).to(second_device)
    ids, cache = random_prompt(2, 20), dynamic(model.config)
    prefill(model, ids[:, :-1], cache)
    model.to("cpu")
    cache.to("cpu")
    assert torch.equal(run(model, ids, cache), plain(model, ids))
    assert whereabouts(cache) == {(torch.device("cpu"), torch.float32)}


def test_the_dtype_that_the_model_has_moves_nothing():
    model = tiny_model("llama")
    watcher = Watcher(lambda: [parameter.data_ptr() for parameter in model.parameters()])
    decode = DecodeOnCPU(torch.float32)
    run(model, random_prompt(1, 9), custom_generate=decode, streamer=watcher)
    assert watcher.notes[0] == watcher.notes[1] == [parameter.data_ptr() for parameter in model.parameters()]


def test_weights_that_a_model_keeps_in_float32_stay_so():
    model = copy.deepcopy(tiny_model("deepseek_v3"))
    model._keep_in_fp32_modules_strict = {"q_a_layernorm"}
    watcher = Watcher(lambda: {name for name, weight in model.named_parameters() if weight.dtype == torch.float32})
    decode = DecodeOnCPU(torch.bfloat16)
    run(model, random_prompt(1, 9), max_new_tokens=1, custom_generate=decode, streamer=watcher)
    assert watcher.notes[1] == {name for name, _ in model.named_parameters() if "q_a_layernorm" in name}


def test_frequencies_that_a_model_replaces_on_its_way_go_with_it(second_device: torch.device):
    config = llama()
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config.max_position_embeddings = 16
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(second_device)
    reference = plain(model, random_prompt(1, 20), prefill_chunk_size=8)
    tokens = run(model, random_prompt(1, 20), custom_generate=DecodeOnCPU(), prefill_chunk_size=8)
    assert torch.equal(tokens.cpu(), reference)
    assert {buffer.device for buffer in model.buffers()} == {second_device}


def test_inference_mode_leaves_ordinary_weights():
    model = copy.deepcopy(tiny_model("llama"))
    with torch.inference_mode():
        tokens = run(model, random_prompt(1, 20), custom_generate=IN_FLOAT64)
    assert torch.equal(tokens.cpu(), plain(model, random_prompt(1, 20)))
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))


# --- keep_weights


def test_kept_weights_are_not_copied_again():
    model = copy.deepcopy(tiny_model("llama"))
    watcher = Watcher(lambda: [parameter.data_ptr() for parameter in model.parameters()])
    decode = DecodeOnCPU(torch.float64, keep_weights=True)
    outputs = [run(model, random_prompt(1, 20), custom_generate=decode, streamer=watcher) for _ in range(2)]
    home, decoding = watcher.notes[0], watcher.notes[1]
    assert not set(home) & set(decoding)
    assert watcher.notes[13] == home
    assert watcher.notes[14] == decoding
    assert torch.equal(*outputs)


@pytest.mark.parametrize("how", ["unnoticed by version counters", "in place", "replaced", "rows in another order"])
def test_weights_are_copied_again_when_one_has_changed(how: str):
    model = copy.deepcopy(tiny_model("llama"))
    decode = DecodeOnCPU(torch.float64, keep_weights=True)
    before = run(model, random_prompt(1, 20), custom_generate=decode)
    weight = model.model.layers[1].mlp.down_proj.weight
    if how == "replaced":
        model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(weight.detach() * 3)
    elif how == "in place":
        with torch.no_grad():
            weight *= 3
    elif how == "rows in another order":
        weight.data.copy_(weight.data.flip(0))
    else:
        weight.data *= 3
    after = run(model, random_prompt(1, 20), custom_generate=decode)
    assert not torch.equal(before, after)
    assert torch.equal(after, plain(model, random_prompt(1, 20)))


def test_kept_weights_live_as_long_as_the_model():
    decode = DecodeOnCPU(torch.float64, keep_weights=True)
    model = copy.deepcopy(tiny_model("llama"))
    run(model, random_prompt(1, 9), max_new_tokens=1, custom_generate=decode)
    assert len(decode._kept) == 1
    del model
    gc.collect()
    assert len(decode._kept) == 0


# --- what ends a call early


class Fails(LogitsProcessor):
    """Raises at its fourth call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4:
            raise ZeroDivisionError("from a processor")
        return scores


class Interrupts(BaseStreamer):
    """Raises `KeyboardInterrupt` after three tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 4:
            raise KeyboardInterrupt

    def end(self) -> None:
        raise AssertionError("It did not end.")


@pytest.mark.parametrize("end", ["processor", "interrupt"])
def test_an_exception_while_decoding_leaves_model_and_cache_whole(end: str, moving):
    model, decode = moving
    before, home, cache, ids = snapshot(model), model.device, dynamic(model.config), random_prompt(1, 20)
    reference = plain(model, ids)
    options: Any = {"logits_processor": [Fails()]} if end == "processor" else {"streamer": Interrupts()}
    with pytest.raises(ZeroDivisionError if end == "processor" else KeyboardInterrupt):
        run(model, ids, cache, custom_generate=decode, **options)
    assert_as_before(model, before, home)
    assert whereabouts(cache) == {(model.device, model.dtype)}
    # The prompt is there, and what was computed after it.
    assert cache.get_seq_length() > 20
    cache.crop(19 - cache.get_seq_length())
    assert torch.equal(run(model, ids, cache, custom_generate=decode).cpu(), reference)


def test_an_exception_in_the_prompt_leaves_model_and_cache_at_home(moving):
    model, decode = moving
    before, home, cache, ids = snapshot(model), model.device, dynamic(model.config), random_prompt(1, 20)
    reference = plain(model, ids)

    def stop_at_the_third_chunk(*_: Any) -> None:
        if cache.get_seq_length() >= 10:
            raise KeyboardInterrupt

    with model.model.register_forward_pre_hook(stop_at_the_third_chunk), pytest.raises(KeyboardInterrupt):
        run(model, ids, cache, custom_generate=decode, prefill_chunk_size=5)
    assert_as_before(model, before, home)
    assert whereabouts(cache) == {(home, torch.float32)}
    assert cache.get_seq_length() == 10
    assert torch.equal(run(model, ids, cache, custom_generate=decode).cpu(), reference)


class Homebound(DynamicHybridCache):
    """A cache that cannot be moved to the host, or from it, the first times."""

    def __init__(self, config: Any, refused: torch.dtype, error: BaseException, times: int = 1):
        super().__init__(config)
        self.refused, self.error, self.times = refused, error, times

    def to(self, device: Any, dtype: torch.dtype | None = None) -> None:
        super().to(device, dtype)
        if dtype == self.refused and self.get_seq_length() and self.times > 0:
            self.times -= 1
            raise self.error


@pytest.mark.parametrize("error", [HostMemoryError("no room"), KeyboardInterrupt()], ids=repr)
def test_a_cache_that_cannot_leave_keeps_the_model_at_home(error: BaseException):
    model = tiny_model("llama")
    before, cache = snapshot(model), Homebound(model.config, torch.float64, error)
    with pytest.raises(type(error)):
        run(model, random_prompt(1, 20), cache, custom_generate=IN_FLOAT64)
    assert_as_before(model, before, torch.device("cpu"))
    assert whereabouts(cache) == {(torch.device("cpu"), torch.float32)}
    assert cache.get_seq_length() == 20


def test_restore_when_device_has_no_room_then_all_stays_on_cpu_with_error():
    model = copy.deepcopy(tiny_model("llama"))
    reference = plain(model, random_prompt(1, 20))
    cache = Homebound(model.config, torch.float32, torch.OutOfMemoryError("8 GiB are too many."))
    with pytest.warns(UserWarning, match=r"stay on the CPU.*use model\.to\('cpu'\).*8 GiB are too many"):
        tokens = run(model, random_prompt(1, 20), cache, custom_generate=IN_FLOAT64)
    assert torch.equal(tokens, reference)
    assert model.dtype == torch.float64
    assert whereabouts(cache) == {(torch.device("cpu"), torch.float64)}
    assert run(model, torch.cat([tokens, tokens], dim=1), cache).shape == (1, 76)


def test_restore_when_prompt_fails_and_no_room_then_all_is_on_cpu():
    model = copy.deepcopy(tiny_model("llama"))
    cache = Homebound(model.config, torch.float64, KeyboardInterrupt())
    come_back, refusals = cache.to, iter([torch.OutOfMemoryError("8 GiB are too many.")])

    def to(device: Any, dtype: torch.dtype | None = None) -> None:
        come_back(device, dtype)
        if dtype == torch.float32:
            raise next(refusals)

    cache.to = to
    with pytest.warns(UserWarning, match="stay on the CPU"), pytest.raises(KeyboardInterrupt):
        run(model, random_prompt(1, 20), cache, custom_generate=IN_FLOAT64)
    assert model.dtype == torch.float64
    assert whereabouts(cache) == {(torch.device("cpu"), torch.float64)}


def test_a_return_that_was_interrupted_is_made_again():
    model = copy.deepcopy(tiny_model("llama"))
    before, cache = snapshot(model), Homebound(model.config, torch.float32, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(model, random_prompt(1, 20), cache, custom_generate=IN_FLOAT64)
    assert_as_before(model, before, torch.device("cpu"))
    assert whereabouts(cache) == {(torch.device("cpu"), torch.float32)}


def test_restore_when_interrupted_twice_then_all_stays_on_cpu():
    model = copy.deepcopy(tiny_model("llama"))
    cache = Homebound(model.config, torch.float32, KeyboardInterrupt(), times=2)
    with pytest.raises(KeyboardInterrupt):
        run(model, random_prompt(1, 20), cache, custom_generate=IN_FLOAT64)
    assert model.dtype == torch.float64
    assert whereabouts(cache) == {(torch.device("cpu"), torch.float64)}


@pytest.mark.soak
def test_ended_at_any_line_model_and_cache_are_together():
    ids, decode = random_prompt(1, 20), IN_FLOAT64
    reference = plain(tiny_model("llama"), ids)

    def trial(error: type[BaseException] = KeyboardInterrupt, at_line: int | None = None) -> Interruption:
        model = copy.deepcopy(tiny_model("llama"))
        before, cache = snapshot(model), dynamic(model.config)
        fault = Interruption(error, at_line, folder="decode_phase")
        fault.run(lambda: run(model, ids, cache, custom_generate=decode, prefill_chunk_size=8))
        if fault.place is not None:
            assert whereabouts(cache) <= {(model.device, model.dtype)}, fault.place
            assert_as_before(model, before, torch.device("cpu"))
            cache.reset()
            assert torch.equal(run(model, ids, cache, custom_generate=decode), reference)
            count("faults injected")
        return fault

    lines, chosen = range(trial().lines), random.Random(0)
    for at_line in chosen.sample(lines, min(len(lines), budget(20, 600))):
        trial(chosen.choice([KeyboardInterrupt, RuntimeError]), at_line)


# --- quantized weights


def plain_in_bits(model: PreTrainedModel, ids: torch.Tensor, bits: int, dtype: torch.dtype | None = None) -> Any:
    """The prompt, and so the first token, with the weights as they are, the rest with few bits; stock's cache."""
    model = copy.deepcopy(model).to("cpu")
    cache = stock(model.config)
    ids = run(model, ids, cache, max_new_tokens=1)
    if dtype is not None:
        model = model.to(dtype)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    quantize_weights(model, bits)
    return run(model, ids, cache, max_new_tokens=11)


@pytest.mark.parametrize("bits", [8, 4])
def test_weight_bits_when_decoding_then_prompt_uses_original_weights(moving, bits: int):
    model, _ = moving
    decode = DecodeOnCPU(weights=bits)
    before, ids = snapshot(model), random_prompt(2, 40)
    cache = dynamic(model.config)
    tokens = run(model, ids, cache, custom_generate=decode)
    assert torch.equal(tokens.cpu(), plain_in_bits(model, ids, bits))
    assert_as_before(model, before, model.device)


def test_the_type_may_change_beside_the_bits():
    model, ids = copy.deepcopy(tiny_model("llama")), random_prompt(1, 40)
    before = snapshot(model)
    decode = DecodeOnCPU(dtype=torch.bfloat16, weights=8)
    tokens = run(model, ids, custom_generate=decode)
    assert torch.equal(tokens, plain_in_bits(model, ids, 8, torch.bfloat16))
    assert_as_before(model, before, torch.device("cpu"))


def test_modules_hold_the_same_parameters_as_before_and_codes_meanwhile(moving):
    model, _ = moving
    decode = DecodeOnCPU(weights=4)
    parameters = list(model.parameters())
    watcher = Watcher(lambda: {type(weight) for weight in model.parameters() if weight.dim() == 2})
    run(model, random_prompt(1, 20), custom_generate=decode, streamer=watcher)
    assert watcher.notes[-1] == {QuantizedWeight}
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))


def test_codes_are_kept_for_the_next_call_until_weights_change():
    model = copy.deepcopy(tiny_model("llama"))
    decode, ids = DecodeOnCPU(weights=8, keep_weights=True), random_prompt(1, 30)
    codes = Watcher(lambda: getattr(model.lm_head.weight, "matrices", None))
    for _ in range(2):
        run(model, ids, custom_generate=decode, streamer=codes)
    model.lm_head.weight.data += 0.5
    tokens = run(model, ids, custom_generate=decode, streamer=codes)
    assert torch.equal(tokens, plain_in_bits(model, ids, 8))
    first, second, third = codes.notes[1], codes.notes[14], codes.notes[-1]
    assert first is second
    assert second is not third


def test_a_model_of_few_bits_already_decodes_and_is_not_moved():
    model = copy.deepcopy(tiny_model("llama"))
    quantize_weights(model, 8)
    ids = random_prompt(1, 20)
    assert torch.equal(run(model, ids, custom_generate=DecodeOnCPU()), run(model, ids))
    with pytest.raises(ValueError, match="QuantizedWeight"):
        run(model, ids, custom_generate=DecodeOnCPU(weights=4))


def test_weights_that_cannot_be_of_few_bits_are_named_before_the_prompt():
    model = copy.deepcopy(tiny_model("llama"))
    model.lm_head.weight.data[3, 3] = torch.nan
    cache = dynamic(model.config)
    with pytest.raises(
        ValueError, match=r"lm_head.weight has numbers that are infinite or not a number. Use weights=N"
    ):
        run(model, random_prompt(1, 20), cache, custom_generate=DecodeOnCPU(weights=8))
    assert cache.get_seq_length() == 0


@pytest.mark.soak
def test_ended_at_any_line_the_model_has_its_own_weights_again():
    ids, decode = random_prompt(1, 20), DecodeOnCPU(weights=8)

    def trial(at_line: int | None = None) -> Interruption:
        model = copy.deepcopy(tiny_model("llama"))
        before, cache = snapshot(model), dynamic(model.config)
        fault = Interruption(KeyboardInterrupt, at_line, folder="decode_phase")
        fault.run(lambda: run(model, ids, cache, custom_generate=decode, prefill_chunk_size=8))
        assert_as_before(model, before, torch.device("cpu"))
        assert not any(isinstance(weight, QuantizedWeight) for weight in model.parameters()), fault.place
        cache.reset()
        assert run(model, ids, cache, max_new_tokens=2).shape == (1, 22)
        return fault

    lines, chosen = range(trial().lines), random.Random(0)
    for at_line in chosen.sample(lines, min(len(lines), budget(20, 300))):
        trial(at_line)
        count("faults injected")


def test_too_little_host_memory_is_noticed_before_the_prompt():
    model = copy.deepcopy(tiny_model("llama"))
    # A view of one number: 2**40 of them cost the test nothing.
    model.lm_head.weight.data = torch.ones(1).expand(2**20, 2**20)
    cache = dynamic(model.config)
    with pytest.raises(HostMemoryError, match=r"Weights to decode with on the CPU need 8192\.\d+ GiB more host memory"):
        run(model, random_prompt(1, 20), cache, custom_generate=IN_FLOAT64)
    assert cache.get_seq_length() == 0
    assert model.dtype == torch.float32


# --- arguments


def test_decode_on_cpu_when_checked_by_generate_then_is_a_valid_callable():
    parameters = inspect.signature(DecodeOnCPU()).parameters
    assert "inputs_tensor" in parameters
    assert not {"tokenizer", "assistant_tokenizer"} & set(parameters)
    assert DecodeOnCPU() == DecodeOnCPU(dtype=None, keep_weights=False)
    assert DecodeOnCPU(torch.float32) == DecodeOnCPU(torch.float32)
    assert repr(DecodeOnCPU()) == "DecodeOnCPU(dtype=None, keep_weights=False, weights=None)"


@pytest.mark.parametrize("dtype", ["float32", torch.int8, torch.float8_e4m3fn, 32])
def test_dtypes_that_no_model_decodes_in_are_refused(dtype: Any):
    with pytest.raises(TypeError, match=r"dtype must be None or one of torch\.float64, .*, got "):
        DecodeOnCPU(dtype)


def test_keep_weights_when_not_bool_then_is_refused():
    with pytest.raises(TypeError, match="keep_weights must be True or False, got 1"):
        DecodeOnCPU(keep_weights=1)


def test_other_caches_are_refused():
    model = tiny_model("llama")
    with pytest.raises(TypeError, match=rf"type DynamicCache\. Pass {CACHE_ARGUMENT}=DynamicHybridCache"):
        run(model, random_prompt(1, 5), stock(model.config), custom_generate=DecodeOnCPU())
    with pytest.raises(TypeError, match=r"type DynamicCache\. Pass"):
        model.generate(random_prompt(1, 5), max_new_tokens=2, custom_generate=DecodeOnCPU())


def test_encoder_decoders_are_refused():
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 128}
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    model = BartForConditionalGeneration(BartConfig(**sizes, **layers)).eval()
    with pytest.raises(ValueError, match="decoder-only models, and BartForConditionalGeneration is an encoder-decoder"):
        model.generate(random_prompt(1, 5), max_new_tokens=2, num_beams=1, custom_generate=DecodeOnCPU())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "use_cache=False forbids it. Use use_cache=True"),
        ({"synced_gpus": True}, "synced_gpus=True, but weights shared out to processes cannot be moved"),
        (
            {"dola_layers": "high"},
            r"DOLA_GENERATION is not part of transformers any more \(transformers-community/dola\)",
        ),
        ({"num_beams": 2, "streamer": Interrupts()}, "`streamer` cannot be used with beam search"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        run(tiny_model("llama"), random_prompt(1, 5), custom_generate=DecodeOnCPU(), **options)


def test_an_assistant_with_another_vocabulary_is_refused():
    config = llama()
    config.vocab_size = 99
    assistant = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"vocabulary has 99 tokens and the model's 128.*Use an assistant with"):
        run(tiny_model("llama"), random_prompt(1, 5), custom_generate=DecodeOnCPU(), assistant_model=assistant)


def test_models_that_accelerate_manages_are_refused():
    model = dispatch_model(copy.deepcopy(tiny_model("llama")), {"": "cpu"}, force_hooks=True)
    with pytest.raises(ValueError, match=r"accelerate manages .* device_map='cuda:0'"):
        run(model, random_prompt(1, 5), custom_generate=IN_FLOAT64)
    assert torch.equal(
        run(model, random_prompt(1, 5), custom_generate=DecodeOnCPU()), plain(tiny_model("llama"), random_prompt(1, 5))
    )


def test_quantized_weights_are_refused():
    class Quantizer:
        quantization_config: ClassVar = {"bits": 4}

    model = copy.deepcopy(tiny_model("llama"))
    model.hf_quantizer = Quantizer()
    with pytest.raises(
        ValueError, match=r"Quantized weights \(dict\) cannot be moved or converted\. Load the model unquantized"
    ):
        run(model, random_prompt(1, 5), custom_generate=IN_FLOAT64)


def with_parameter_of_a_class(model: PreTrainedModel) -> None:
    """Plain data under a parameter of a library's own, which has the scales."""

    class Codes(torch.nn.Parameter):
        pass

    model.lm_head.weight = torch.Tensor._make_subclass(Codes, model.lm_head.weight.detach())


def with_tensor_of_a_class(model: PreTrainedModel) -> None:
    class Sharded(torch.Tensor):
        pass

    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().as_subclass(Sharded), requires_grad=False)


def with_codes(model: PreTrainedModel) -> None:
    model.lm_head.register_buffer("codes", torch.zeros(3, dtype=torch.int32))


def with_weights_that_are_no_parameters(model: PreTrainedModel) -> None:
    def add(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}scale"] = torch.ones(3)

    model.lm_head.register_state_dict_post_hook(add)


@pytest.mark.parametrize(
    ("change", "weights", "way_out"),
    [
        (with_parameter_of_a_class, "Weights of type Codes", "with plain tensors"),
        (with_tensor_of_a_class, "Weights of type Sharded", "with plain tensors"),
        (with_codes, r"Weights of type torch\.int32", "unquantized"),
        (
            with_weights_that_are_no_parameters,
            r"Weights that torch\.nn\.modules\.linear\.Linear keeps beside parameters and buffers",
            "unquantized",
        ),
    ],
)
def test_weights_that_are_not_plain_numbers_are_refused(
    change: Callable[[PreTrainedModel], None], weights: str, way_out: str, moving: tuple[PreTrainedModel, DecodeOnCPU]
):
    model, decode = moving
    change(model)
    # On the CPU a model can decode as it is.
    other = r"pass custom_generate=DecodeOnCPU\(\) without" if decode is IN_FLOAT64 else "leave out custom_generate"
    with pytest.raises(
        ValueError, match=rf"{weights} cannot be moved or converted\. Load the model {way_out}, or {other}"
    ):
        run(model, random_prompt(1, 5), custom_generate=decode)


def test_indices_and_masks_in_a_checkpoint_are_moved_along():
    model = copy.deepcopy(tiny_model("llama"))
    model.lm_head.register_buffer("indices", torch.arange(3))
    model.lm_head.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    before = snapshot(model)
    ids = random_prompt(1, 5)
    assert torch.equal(run(model, ids, custom_generate=IN_FLOAT64), plain(model, ids))
    assert_as_before(model, before, torch.device("cpu"))


def test_weights_on_several_devices_are_refused(second_device: torch.device):
    model = copy.deepcopy(tiny_model("llama"))
    model.lm_head.to(second_device)
    with pytest.raises(ValueError, match=r"Weights are on cpu and lazy:0\. Move the model to one device"):
        run(model, random_prompt(1, 5), custom_generate=IN_FLOAT64)


def test_attention_that_needs_a_gpu_is_refused():
    model = copy.deepcopy(tiny_model("llama"))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2 runs only on GPUs. Use model\.set_attn_implementation"):
        run(model, random_prompt(1, 5), custom_generate=IN_FLOAT64)
