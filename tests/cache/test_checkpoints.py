"""Checkpoints: a cache goes back to what it was, whatever its layers have forgotten since."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    IncompleteCacheError,
    NoCheckpointError,
    QuantizedHybridCache,
)
from hf_hybrid_cache.layers import tensors_of

from common.caches import QUANTIZED, group_of_one, stock
from common.interruptions import Interruption
from common.modes import generate, read
from common.slow import slow_but
from models.architectures import small_model
from models.tiny_models import random_prompt, tiny_model

# Layers that forget, of every kind that transformers has.
FORGETFUL = [
    "BambaConfig",
    "DeepseekV4Config",
    "FalconH1Config",
    "Gemma3TextConfig",
    "GptOssConfig",
    "GraniteMoeHybridConfig",
    "InklingTextConfig",
    "JambaConfig",
    "Lfm2Config",
    "Llama4TextConfig",
    "MistralConfig",
    "NemotronHConfig",
    "Qwen3NextConfig",
]
# One of each kind of layer, alone and with others.
KINDS = [
    "DeepseekV4Config",
    "Gemma3TextConfig",
    "InklingTextConfig",
    "JambaConfig",
    "Llama4TextConfig",
    "Qwen3NextConfig",
]
MakeCache = Callable[[PreTrainedConfig], HybridCache]


class Document:
    """
    A document in two caches: `fresh` has just read it, and `cache` has a checkpoint after it.

    Any test asks questions, and ends with `assert_back`:

        document = Document(model)
        document.ask()
        document.assert_back()
    """

    def __init__(
        self,
        model: PreTrainedModel,
        make: MakeCache = DynamicHybridCache,
        tokens: int = 40,
        batch: int = 1,
    ):
        self.model, self.tokens = model, tokens
        self.ids = random_prompt(batch, tokens) % 90
        self.fresh, self.cache = make(model.config), make(model.config)
        for cache in (self.fresh, self.cache):
            self.forward(cache, self.ids)
        self.cache.checkpoint()

    def forward(self, cache: HybridCache, ids: torch.Tensor) -> None:
        for chunk in ids.split(150, dim=1):
            read(self.model, chunk, cache)

    def answer(self, cache: HybridCache, seed: int = 2, length: int = 9) -> torch.Tensor:
        """Ask a question; return the logits of the answer."""
        ids = torch.cat([self.ids, random_prompt(len(self.ids), length, seed=seed) % 90], dim=1)
        return generate(self.model, ids, cache, max_new_tokens=5, eos_token_id=None)[1]

    def ask(self) -> None:
        """Ask something that is long enough to let windows forget, and blocks be quantized."""
        self.answer(self.cache, seed=1, length=200)

    def assert_back(self, tolerance: float = 0.0) -> None:
        """Check twice that the cache holds, and answers, at its checkpoint what the fresh one does."""
        held, expected = states(self.fresh), self.answer(self.fresh)
        for _ in range(2):
            self.cache.go_back(self.tokens)
            assert self.cache.get_seq_length() == self.tokens
            assert all(torch.equal(*pair) for pair in zip(states(self.cache), held, strict=True))
            torch.testing.assert_close(self.answer(self.cache), expected, rtol=tolerance, atol=tolerance)


def states(cache: HybridCache) -> list[torch.Tensor]:
    twin = copy.deepcopy(cache)  # looking must not change where layers are
    found = [getattr(layer, name, None) for layer in twin.layers for name in ("keys", "values")]
    return [each for each in found if torch.is_tensor(each)]


some_caches = pytest.mark.parametrize(
    ("family", "make"),
    [("gemma3", partial(QuantizedHybridCache, bits=4)), ("qwen3_next", DynamicHybridCache)],
    ids=["gemma3, 4 bits", "qwen3_next"],
)


@pytest.fixture(scope="module", params=slow_but(KINDS, FORGETFUL))
def forgetful(request: pytest.FixtureRequest) -> PreTrainedModel:
    return small_model(request.param)


def test_layers_that_forget_go_back_to_a_checkpoint_and_nowhere_else(forgetful: PreTrainedModel):
    document = Document(forgetful)
    cache = document.cache
    document.ask()
    twin, held = copy.deepcopy(cache), cache.get_seq_length()
    with pytest.raises(NoCheckpointError, match=r"Checkpoints are at: 40(.|\n)*go_back"):
        cache.crop(60 - held)
    assert cache.get_seq_length() == held
    longer = random_prompt(1, held + 1) % 90
    assert torch.equal(*(generate(document.model, longer, each, max_new_tokens=3)[1] for each in (cache, twin)))
    cache.crop(40 - cache.get_seq_length())  # goes back, too
    assert cache.get_seq_length() == 40
    document.assert_back()


def test_crop_when_layers_forget_then_succeeds_only_where_right(forgetful: PreTrainedModel):
    document = Document(forgetful, tokens=9)
    longer = DynamicHybridCache(document.model.config)
    document.forward(longer, torch.cat([document.ids, random_prompt(1, 3) % 90], dim=1))
    try:
        longer.crop(-3)
    except NoCheckpointError:
        return
    torch.testing.assert_close(document.answer(longer), document.answer(document.fresh), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(group_of_one() is None, reason="this torch has no gloo")
def test_checkpoint_when_quantized_layers_are_shared_then_is_refused():
    with pytest.raises(ValueError, match=r"cache\.save"):
        Document(tiny_model("gemma3"), QUANTIZED["quantized_shared_with_nobody"][0])


@pytest.mark.usefixtures("short_prompts_choose")
@some_caches
def test_checkpoint_when_sequences_or_types_change_then_follows(family: str, make: MakeCache):
    document = Document(tiny_model(family), make, 200, batch=3)
    document.fresh = copy.deepcopy(document.cache)  # which has chosen its codecs
    original, document.cache = document.cache, copy.deepcopy(document.cache)
    original.reset()
    document.ask()
    for cache in (document.fresh, document.cache):
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0, 4, 1, 0, 3]))
        cache.batch_select_indices(torch.tensor([True, True, True, False, True, False]))
        cache.to(torch.bfloat16)
    document.ids, document.model = document.ids[[2, 0, 2, 0]], tiny_model(family, torch.bfloat16)
    document.assert_back(1e-5)


def test_go_back_when_between_checkpoints_then_goes_to_the_last_before():
    document = Document(tiny_model("qwen3_next"), tokens=30)
    cache = document.cache
    document.forward(cache, random_prompt(1, 10))
    cache.checkpoint()
    document.forward(cache, random_prompt(1, 10))
    assert cache.checkpoints == (30, 40)
    for asked, reached in ((50, 50), (45, 40), (39, 30)):
        assert cache.go_back(asked) == reached == cache.get_seq_length()
    assert cache.checkpoints == (30,)
    with pytest.raises(NoCheckpointError):
        cache.go_back(29)
    with pytest.raises(ValueError, match="from 0 to the 30 tokens"):
        cache.go_back(31)
    cache.drop_checkpoint(30)
    assert cache.checkpoints == ()
    assert cache.get_seq_length() == 30
    with pytest.raises(ValueError, match="holds no tokens"):
        DynamicHybridCache(tiny_model("qwen3_next").config).checkpoint()
    cropped = Document(tiny_model("llama"), tokens=30).cache
    assert cropped.go_back(17) == 17 == cropped.get_seq_length()
    for drop in (lambda: cropped.crop(-1), cropped.reset):
        cropped.checkpoint()
        drop()
        assert cropped.checkpoints == ()


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_keep_common_prefix_when_layers_forget_then_goes_to_a_checkpoint(with_checkpoint: bool):
    document = Document(tiny_model("qwen3_next"))
    model, cache = document.model, document.cache
    cache.note_tokens(document.ids)
    if not with_checkpoint:
        cache.drop_checkpoint(40)
    document.answer(cache, seed=1, length=30)
    common = random_prompt(1, 30, seed=1)[:, :20]
    prompt = torch.cat([document.ids, common % 90, random_prompt(1, 9, seed=2) % 90], dim=1)
    assert cache.keep_common_prefix(prompt) == (40 if with_checkpoint else 0) == cache.get_seq_length()
    expected, found = (generate(model, prompt, each, max_new_tokens=3)[0] for each in (document.fresh, cache))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_memory_when_there_is_a_checkpoint_then_counts_small_states_alone(family: str):
    document, theirs = Document(tiny_model(family), tokens=300), stock(tiny_model(family).config)
    document.forward(theirs, document.ids)
    forgetful = [layer for layer in theirs.layers if type(layer) is not DynamicLayer]
    kept = sum(states.nbytes for layer in forgetful for states in tensors_of(layer) if states.dim())
    before = document.fresh.memory()
    assert 0 < kept == document.cache.memory().host_bytes - before.host_bytes
    document.cache.drop_checkpoint(300)
    assert document.cache.memory() == before


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_go_back_when_a_pass_has_ended_half_way_then_the_cache_is_whole(family: str):
    document = Document(tiny_model(family))

    def fail(*_: object) -> None:
        raise RuntimeError("ended")

    with document.model.model.layers[2].register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="ended"):
        document.ask()
    with pytest.raises(IncompleteCacheError, match=r"go_back\(n\) to a checkpoint \(40\)"):
        document.cache.drop_unfinished()
    document.assert_back()


@pytest.mark.usefixtures("short_prompts_choose")
@some_caches
def test_go_back_when_interrupted_anywhere_then_is_done_or_refused(family: str, make: MakeCache):
    document, counting = Document(tiny_model(family), make, 200), Interruption()
    expected = document.answer(document.fresh)
    document.ask()
    twin = copy.deepcopy(document.cache)
    counting.run(lambda: twin.go_back(200))
    for line in range(1, counting.lines, max(1, counting.lines // 12)):
        twin = copy.deepcopy(document.cache)
        Interruption(KeyboardInterrupt, line).run(lambda twin=twin: twin.go_back(200))
        try:
            twin.go_back(200)
            assert torch.equal(document.answer(twin), expected)
        except IncompleteCacheError:
            twin.reset()
