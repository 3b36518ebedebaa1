"""
The contract of `custom_generate=DecodeOnCPU()`: the same tokens, and model and cache at home again, whatever happens.

A test class inherits `DecodesOnCpu` and says where models live, and in which type they decode on the CPU. Another type
makes the CPU a place to move to from itself: weights, keys and values are exchanged as between devices.

    class TestOnCuda(DecodesOnCpu):
        device, dtype, way_out = "cuda", None, "leave out custom_generate"
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, quantize_weights
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument
from hf_hybrid_cache.weights.quantized_weight import QuantizedWeight

from common.caches import dynamic, stock
from common.modes import Copying, answer, lookup, similar_model
from models.tiny_models import FAMILIES, VOCAB_SIZE, random_prompt, tiny_model

# More would find no more, and most tests generate several times.
NEW_TOKENS = 8


def decode(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
    """Call `generate` for a prompt moved to the model, greedily by default."""
    ids = ids.to(model.device)
    cache = dynamic(model.config) if cache is None else cache
    return answer(model, ids, cache, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS} | options)


def copied_to_cpu(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model; one on a device weight by weight, since not every device copies as Python does."""
    if model.device.type == "cpu":
        return copy.deepcopy(model)
    twin = type(model)(copy.deepcopy(model.config)).eval()
    twin.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    return twin


def plain(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    """Run a copy of the model on the CPU, with transformers' `DynamicCache`."""
    return decode(copied_to_cpu(model), ids, stock(model.config), **options)


def plain_in_bits(model: PreTrainedModel, ids: torch.Tensor, bits: int, dtype: torch.dtype | None = None) -> Any:
    """The prompt, and so the first token, with the weights as they are, the rest with few bits; stock's cache."""
    model, cache = copied_to_cpu(model), stock(model.config)
    ids = decode(model, ids, cache, max_new_tokens=1)
    if dtype is not None:
        model = model.to(dtype)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    quantize_weights(model, bits)
    return decode(model, ids, cache, max_new_tokens=NEW_TOKENS - 1)


class Home:
    """A model's weights as they are, and where they are: `require` says that they are so again."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.device, self.dtype = model, model.device, model.dtype
        self.parameters, self.tensors = list(model.parameters()), self._named()

    def _named(self) -> dict[str, torch.Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}

    def require(self, cache: DynamicHybridCache | None = None) -> None:
        """Require the same parameters with the same bits, and the cache where the model is."""
        model, after = self.model, self._named()
        assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {self.device}
        assert all(now is then for now, then in zip(model.parameters(), self.parameters, strict=True))
        assert list(after) == list(self.tensors)
        for name, tensor in self.tensors.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor), name
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert cache is None or whereabouts(cache) <= {(self.device, self.dtype)}


def whereabouts(cache: DynamicHybridCache) -> set[tuple[torch.device, torch.dtype]]:
    """Return where layers with tokens are, and in which type, those of transformers' own too."""
    ours = [layer.store.shape for layer in cache.layers if getattr(layer, "store", None)]
    keys = [getattr(layer, "keys", None) for layer in cache.layers if not hasattr(layer, "store")]
    others = {(each.device, each.dtype) for each in keys if each is not None}
    return others | {(shape.device, shape.key_dtype) for shape in ours}


class Watcher(BaseStreamer):
    """
    Notes what `observe` says after the prompt, which `generate` puts first, and after every token.

    Args:
        observe: what is noted.
        finish: called at the end.
    """

    def __init__(self, observe: Callable[[], Any], finish: Callable[[], object] = lambda: None):
        self.observe, self.finish = observe, finish
        self.notes: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.notes.append(self.observe())

    def end(self) -> None:
        self.finish()


class Favour(LogitsProcessor):
    """Prefers a token, with a tensor on the device of the inputs; raises at its call number `fails_at`."""

    def __init__(self, device: torch.device, fails_at: int = -1):
        self.bias = torch.zeros(VOCAB_SIZE, device=device).index_fill(0, torch.tensor(9, device=device), 4.0)
        self.left = fails_at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.device == scores.device
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError("from a processor")
        return scores + self.bias


def interrupting(after: int) -> Watcher:
    """Make a streamer that raises `KeyboardInterrupt` after so many tokens."""

    def observe() -> None:
        if len(streamer.notes) == after:
            raise KeyboardInterrupt

    streamer = Watcher(observe)
    return streamer


class Codes(torch.nn.Parameter):
    """A parameter of a library's own, which has the scales of plain data under it."""


def beside_parameters(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}scale"] = torch.ones(3)


# What is done to a layer, and what the error says.
HIDDEN_WEIGHTS: dict[str, tuple[Callable[[torch.nn.Linear], object], str]] = {
    "parameter of a class": (
        lambda layer: setattr(layer, "weight", torch.Tensor._make_subclass(Codes, layer.weight.detach())),
        r"of type Codes cannot be moved or converted\. Load the model unquantized",
    ),
    "codes": (
        lambda layer: layer.register_buffer("codes", torch.zeros(3, dtype=torch.int32)),
        r"of type torch\.int32 cannot be moved or converted\. Load the model unquantized",
    ),
    "no parameters": (
        lambda layer: layer.register_state_dict_post_hook(beside_parameters),
        r"that a module keeps beside parameters and buffers \(.*\) cannot be .* unquantized",
    ),
}


class DecodesOnCpu:
    """
    The contract.

    Attributes:
        device: where models live.
        dtype: in which they decode; `None` for their own.
        way_out: what a model is told that cannot be moved.
    """

    device: str
    dtype: torch.dtype | None
    way_out: str

    def make_model(self, family: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        return copy.deepcopy(tiny_model(family, dtype)).to(self.device)

    def decoder(self, **options: Any) -> DecodeOnCPU:
        return DecodeOnCPU(**{"dtype": self.dtype} | options)

    def require_as_plain(self, ids: torch.Tensor, **options: Any) -> None:
        """Require the tokens of a model on the CPU, from a model that is as before afterwards."""
        model = self.make_model()
        home, cache = Home(model), dynamic(model.config)
        tokens = decode(model, ids, cache, custom_generate=self.decoder(), **options)
        assert tokens.device == model.device
        assert torch.equal(tokens.cpu(), plain(model, ids))
        home.require(cache)

    def test_assistant_when_decoding_on_cpu_then_drafts_from_its_own_device(self):
        assistant = similar_model(tiny_model("llama"))
        drafts = Watcher(lambda: assistant.device.type)
        with assistant.register_forward_hook(lambda *_: drafts.put(torch.empty(0))):
            self.require_as_plain(random_prompt(1, 30), assistant_model=assistant)
        assert len(drafts.notes) > 1
        assert set(drafts.notes) == {"cpu"}

    def test_drafts_when_from_the_prompt_then_tokens_are_the_same(self):
        model, ids, drafts = self.make_model(), random_prompt(1, 8).repeat(1, 5), lookup()
        options = {"logits_processor": [Copying(8)], "max_new_tokens": 24}
        tokens = decode(model, ids, custom_generate=self.decoder(drafts=drafts), **options)
        assert torch.equal(tokens.cpu(), plain(model, ids, **options))
        assert drafts.accepted_tokens
        assert not drafts.without

    def test_drafts_when_of_the_first_layers_then_tokens_are_the_same(self):
        self.require_as_plain(random_prompt(1, 20), assistant_early_exit=2)

    def test_a_prompt_may_be_new_tokens_alone_or_embeddings(self):
        model, ids = self.make_model(), random_prompt(2, 30).to(self.device)
        cache, expected, options = dynamic(model.config), plain(model, ids)[:, 30:], {"custom_generate": self.decoder()}
        with torch.inference_mode():
            model(ids[:, :18], **cache_argument(cache))
            tokens = decode(model, ids[:, 18:], cache, attention_mask=torch.ones_like(ids), **options)
        assert torch.equal(tokens[:, 12:].cpu(), expected)
        assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        embeds = model.get_input_embeddings()(ids).detach()
        options |= cache_argument(dynamic(model.config)) | {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        assert torch.equal(model.generate(inputs_embeds=embeds, **options).cpu(), expected)

    def test_generate_outputs_when_asked_for_then_are_returned(self):
        model, ids = self.make_model(), random_prompt(2, 20)
        options = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
        cache = dynamic(model.config)
        ours = decode(model, ids, cache, custom_generate=self.decoder(), **options)
        theirs = plain(model, ids, **options)
        assert ours.keys() == theirs.keys()
        assert ours[CACHE_ARGUMENT] is cache
        assert ours.scores[3].device == model.device
        for step, layers in enumerate(theirs.hidden_states):
            assert [states.shape for states in ours.hidden_states[step]] == [states.shape for states in layers]
            assert {states.device for states in ours.hidden_states[step]} == {model.device}

    @pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
    def test_processors_and_criteria_work_where_the_inputs_are(self, options: dict[str, Any]):
        model, ids = self.make_model(), random_prompt(1, 20)
        options |= {"pad_token_id": 0, "eos_token_id": [7, 11], "repetition_penalty": 1.2, "min_new_tokens": 3}

        def theirs(device: torch.device) -> dict[str, Any]:
            last = torch.tensor(9, device=device)
            return {
                "logits_processor": [Favour(device)],
                "stopping_criteria": [lambda ids, scores, **_: ids[:, -1] == last],
            }

        tokens = decode(model, ids, custom_generate=self.decoder(), **options, **theirs(model.device))
        assert torch.equal(tokens.cpu(), plain(model, ids, **options, **theirs(torch.device("cpu"))))

    @pytest.mark.default("values")
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("keep_weights", [False, True])
    @pytest.mark.parametrize(
        ("dtype", "decode_dtype"),
        [(torch.float32, torch.bfloat16), (torch.float32, torch.float64), (torch.bfloat16, torch.float32)],
        ids=["lossy", "wider", "wider_than_bfloat16"],
    )
    def test_weights_come_back_bit_by_bit(
        self, family: str, dtype: torch.dtype, decode_dtype: torch.dtype, keep_weights: bool
    ):
        model = self.make_model(family, dtype)
        home, decoder = Home(model), self.decoder(dtype=decode_dtype, keep_weights=keep_weights)
        watcher = Watcher(lambda: (model.device.type, model.dtype, model.get_output_embeddings().weight.data_ptr()))
        used: list[Any] = []
        for _ in range(2):
            cache, first = dynamic(model.config), len(watcher.notes)
            decode(model, random_prompt(1, 5), cache, max_new_tokens=3, custom_generate=decoder, streamer=watcher)
            assert {note[:2] for note in watcher.notes[first + 1 :]} == {("cpu", decode_dtype)}
            assert watcher.notes[first][2] != watcher.notes[first + 1][2]
            used += watcher.notes[first + 1 :]
            home.require(cache)
        assert len(set(used)) == 1 or not keep_weights

    @pytest.mark.parametrize("where", ["prompt", "processor", "streamer"])
    def test_whatever_ends_a_call_model_and_cache_are_whole_and_at_home(self, where: str):
        model, ids, decoder = self.make_model(), random_prompt(1, 20), self.decoder()
        home, cache, reference = Home(model), dynamic(model.config), plain(model, ids)

        def stop_at_the_third_chunk(*_: Any) -> None:
            if where == "prompt" and cache.get_seq_length() >= 10:
                raise KeyboardInterrupt

        ends: dict[str, Any] = {
            "prompt": {"prefill_chunk_size": 5},
            "processor": {"logits_processor": [Favour(model.device, fails_at=4)]},
            "streamer": {"streamer": interrupting(after=3)},
        }
        with (
            model.model.register_forward_pre_hook(stop_at_the_third_chunk),
            pytest.raises((ZeroDivisionError, KeyboardInterrupt)),
        ):
            decode(model, ids, cache, custom_generate=decoder, **ends[where])
        home.require(cache)
        # What was computed before is there.
        assert cache.get_seq_length() == 10 if where == "prompt" else cache.get_seq_length() > 20
        cache.crop(min(0, 19 - cache.get_seq_length()))
        assert torch.equal(decode(model, ids, cache, custom_generate=decoder).cpu(), reference)

    @pytest.mark.parametrize(("bits", "dtype"), [(8, torch.bfloat16), (4, None)], ids=str)
    def test_weight_bits_when_decoding_then_prompt_uses_original_weights(self, bits: int, dtype: torch.dtype | None):
        model, ids = self.make_model(), random_prompt(2, 40)
        home, cache = Home(model), dynamic(model.config)
        watcher = Watcher(lambda: {type(weight) for weight in model.parameters() if weight.dim() == 2})
        decoder = DecodeOnCPU(dtype, weights=bits)
        tokens = decode(model, ids, cache, custom_generate=decoder)
        assert torch.equal(tokens.cpu(), plain_in_bits(model, ids, bits, dtype))
        home.require(cache)
        decode(model, ids[:1], custom_generate=decoder, streamer=watcher)
        assert watcher.notes[1] == {QuantizedWeight}
        home.require()

    @pytest.mark.parametrize("name", HIDDEN_WEIGHTS)
    def test_weights_that_are_not_plain_numbers_are_refused(self, name: str):
        model, (change, said) = self.make_model(), HIDDEN_WEIGHTS[name]
        change(model.lm_head)
        with pytest.raises(ValueError, match=rf"Weights {said}, or {self.way_out}"):
            decode(model, random_prompt(1, 5), custom_generate=self.decoder())
