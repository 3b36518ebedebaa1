"""Checkpoints: a cache goes back to what it was, whatever its layers have forgotten since."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    IncompleteCacheError,
    NoCheckpointError,
    QuantizedHybridCache,
    prefill,
)
from hf_hybrid_cache.cache_argument import cache_argument

from common.caches import CACHES, QUANTIZED, SPLIT, group_of_one
from common.interruptions import Interruption
from common.modes import generate
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
DOCUMENT = 40
MakeCache = Callable[[PreTrainedConfig], HybridCache]


def read(model: PreTrainedModel, cache: HybridCache, tokens: int = DOCUMENT, batch: int = 1) -> torch.Tensor:
    """Read a document in chunks that the caller of a fresh cache reads again; return its ids."""
    ids = random_prompt(batch, tokens) % 90
    with torch.no_grad():
        for chunk in ids.split(150, dim=1):
            model(chunk, **cache_argument(cache))
    return ids


def answered(model: PreTrainedModel, cache: HybridCache, ids: torch.Tensor, seed: int, length: int = 9) -> torch.Tensor:
    """Ask a question about a document; return the logits of the answer."""
    question = random_prompt(len(ids), length, seed=seed) % 90
    _, logits = generate(model, torch.cat([ids, question], dim=1), cache, max_new_tokens=5, eos_token_id=None)
    return logits


@pytest.fixture(params=FORGETFUL)
def forgetful(request: pytest.FixtureRequest) -> PreTrainedModel:
    return small_model(request.param)


def test_answer_after_going_back_when_layers_forget_then_is_a_fresh_caches(forgetful: PreTrainedModel):
    fresh, cache = DynamicHybridCache(forgetful.config), DynamicHybridCache(forgetful.config)
    ids = read(forgetful, fresh)
    expected = answered(forgetful, fresh, ids, seed=2)
    read(forgetful, cache)
    cache.checkpoint()
    for _ in range(2):
        answered(forgetful, cache, ids, seed=1)
        cache.crop(DOCUMENT - cache.get_seq_length())
        assert cache.get_seq_length() == DOCUMENT
        assert torch.equal(answered(forgetful, cache, ids, seed=2), expected)
        cache.go_back(DOCUMENT)


def test_crop_when_layers_forget_then_is_refused_and_changes_nothing(forgetful: PreTrainedModel):
    cache = DynamicHybridCache(forgetful.config)
    ids = read(forgetful, cache)
    cache.checkpoint()
    answered(forgetful, cache, ids, seed=1)
    twin, held = copy.deepcopy(cache), cache.get_seq_length()
    with pytest.raises(NoCheckpointError, match=f"Checkpoints are at: {DOCUMENT}") as error:
        cache.crop(-2)
    assert "go_back" in str(error.value)
    assert cache.get_seq_length() == held
    longer = random_prompt(1, held + 1) % 90
    assert torch.equal(*(generate(forgetful, longer, each, max_new_tokens=3)[1] for each in (cache, twin)))


def test_crop_when_layers_forget_then_succeeds_only_where_right(forgetful: PreTrainedModel):
    cache, shorter = (DynamicHybridCache(forgetful.config) for _ in range(2))
    ids = read(forgetful, cache, 12)
    with torch.no_grad():
        forgetful(ids[:, :9], **cache_argument(shorter))
    try:
        cache.crop(-3)
    except NoCheckpointError:
        return
    logits = (answered(forgetful, each, ids[:, :9], seed=1) for each in (cache, shorter))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*CACHES, *QUANTIZED])
def test_states_after_going_back_when_long_then_are_those_of_before(name: str):
    model = tiny_model("gemma3")
    make: MakeCache = CACHES[name] if name in CACHES else QUANTIZED[name][0]
    fresh, cache = make(model.config), make(model.config)
    if cache.group is not None and cache.codecs:
        pytest.skip("several processes have no checkpoints of quantized layers")
    ids = read(model, fresh, 330)
    before = states(fresh)
    expected = answered(model, fresh, ids, seed=2)
    read(model, cache, 330)
    cache.checkpoint()
    answered(model, cache, ids, seed=1, length=100)
    cache.crop(330 - cache.get_seq_length())
    assert all(torch.equal(*pair) for pair in zip(states(cache), before, strict=True))
    found = answered(model, cache, ids, seed=2)
    # Where tokens that have left the device stay in host memory, attention is divided in another way.
    if name not in SPLIT and name != "quantized_split_in_three":
        assert torch.equal(found, expected)


def states(cache: HybridCache) -> list[torch.Tensor]:
    twin = copy.deepcopy(cache)  # looking must not change where layers are
    return [each for layer in twin.layers for each in (layer.keys, layer.values)]


def test_go_back_when_between_checkpoints_then_goes_to_the_last_before():
    model = tiny_model("gemma3")
    cache = DynamicHybridCache(model.config)
    ids = read(model, cache, 30)
    cache.checkpoint()
    with torch.no_grad():
        model(random_prompt(1, 10), **cache_argument(cache))
        cache.checkpoint()
        model(random_prompt(1, 10), **cache_argument(cache))
    assert cache.checkpoints == (30, 40)
    assert cache.go_back(50) == 50 == cache.get_seq_length()
    assert cache.go_back(45) == 40 == cache.get_seq_length()
    assert cache.go_back(39) == 30 == cache.get_seq_length()
    assert cache.checkpoints == (30,)
    with pytest.raises(NoCheckpointError):
        cache.go_back(29)
    with pytest.raises(ValueError, match="from 0 to the 30 tokens"):
        cache.go_back(31)
    cache.drop_checkpoint(30)
    assert cache.checkpoints == ()
    assert ids.shape[1] == cache.get_seq_length()


def test_go_back_when_all_layers_can_be_cropped_then_is_exact():
    model = tiny_model("llama")
    cache = DynamicHybridCache(model.config)
    read(model, cache, 30)
    assert cache.go_back(17) == 17 == cache.get_seq_length()


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_keep_common_prefix_when_layers_forget_then_goes_to_a_checkpoint(with_checkpoint: bool):
    model = tiny_model("gemma3")
    cache, fresh = DynamicHybridCache(model.config), DynamicHybridCache(model.config)
    ids = random_prompt(1, DOCUMENT) % 90
    prefill(model, ids, cache, progress=False)
    if with_checkpoint:
        cache.checkpoint()
    answered(model, cache, ids, seed=1, length=30)
    prompt = torch.cat([ids, random_prompt(1, 30, seed=1)[:, :20] % 90, random_prompt(1, 9, seed=2) % 90], dim=1)
    assert cache.keep_common_prefix(prompt) == (DOCUMENT if with_checkpoint else 0) == cache.get_seq_length()
    prefill(model, ids, fresh, progress=False)
    expected, found = (generate(model, prompt, each, max_new_tokens=3)[0] for each in (fresh, cache))
    assert torch.equal(found, expected)


def test_checkpoint_when_nothing_is_stored_then_is_refused():
    with pytest.raises(ValueError, match="holds no tokens"):
        DynamicHybridCache(tiny_model("gemma3").config).checkpoint()


def test_checkpoint_when_quantized_layers_are_shared_then_is_refused():
    model = tiny_model("llama")
    cache = QuantizedHybridCache(model.config, group=group_of_one())
    read(model, cache, 30)
    if cache.group is not None:
        with pytest.raises(ValueError, match=r"cache\.save"):
            cache.checkpoint()


def test_checkpoints_when_the_cache_is_reset_or_cropped_then_are_dropped():
    model = tiny_model("llama")
    cache = DynamicHybridCache(model.config)
    read(model, cache, 30)
    cache.checkpoint()
    cache.crop(-1)
    assert cache.checkpoints == ()
    cache.checkpoint()
    cache.reset()
    assert cache.checkpoints == ()


# Sequences


def quantized_4(config: PreTrainedConfig) -> HybridCache:
    return QuantizedHybridCache(config, bits=4)


BATCHED = [(family, make) for family in ("gemma3", "qwen3_next", "llama") for make in (DynamicHybridCache, quantized_4)]


@pytest.mark.parametrize(("family", "make"), BATCHED)
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (
            lambda cache: (cache.batch_repeat_interleave(2), cache.reorder_cache(torch.arange(5, -1, -1))),
            [2, 2, 1, 1, 0, 0],
        ),
    ],
    ids=["reorder", "select", "repeat", "both"],
)
def test_checkpoint_when_sequences_change_then_follows(
    family: str, make: MakeCache, change: Callable[[HybridCache], object], rows: list[int]
):
    model = tiny_model(family)
    fresh, cache = make(model.config), make(model.config)
    ids = read(model, fresh, 200, batch=3)
    change(fresh)
    read(model, cache, 200, batch=3)
    cache.checkpoint()
    answered(model, cache, ids, seed=1, length=90)
    change(cache)
    cache.go_back(200)
    expected, found = (answered(model, each, ids[rows], seed=2) for each in (fresh, cache))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_document_when_beams_have_followed_then_is_gone_back_to(family: str):
    model = tiny_model(family)
    fresh, cache = DynamicHybridCache(model.config), DynamicHybridCache(model.config)
    ids = read(model, fresh, 150)
    expected = answered(model, fresh, ids, seed=2)
    read(model, cache, 150)
    cache.checkpoint()
    generate(model, torch.cat([ids, random_prompt(1, 5)], dim=1), cache, num_beams=4)
    cache.go_back(150)
    cache.batch_select_indices(torch.tensor([0]))
    torch.testing.assert_close(answered(model, cache, ids, seed=2), expected)


@pytest.mark.parametrize(("family", "make"), BATCHED)
def test_copy_of_a_cache_when_one_goes_on_then_has_checkpoints_of_its_own(family: str, make: MakeCache):
    model = tiny_model(family)
    cache = make(model.config)
    ids = read(model, cache, 200)
    cache.checkpoint()
    twin = copy.deepcopy(cache)
    answered(model, cache, ids, seed=1, length=90)
    cache.go_back(200)
    cache.reset()
    expected = answered(model, copy.deepcopy(twin), ids, seed=2)
    answered(model, twin, ids, seed=1, length=90)
    twin.go_back(200)
    assert torch.equal(answered(model, twin, ids, seed=2), expected)


# Places


@pytest.mark.parametrize(("family", "make"), BATCHED)
def test_checkpoint_when_the_cache_takes_another_type_then_has_it_too(family: str, make: MakeCache):
    model, narrower = tiny_model(family), tiny_model(family, torch.bfloat16)
    cache = make(model.config)
    ids = read(model, cache, 200)
    cache.checkpoint()
    fresh = copy.deepcopy(cache).to(torch.bfloat16)
    answered(model, cache, ids, seed=1, length=90)
    cache.to(torch.bfloat16)
    cache.go_back(200)
    assert torch.equal(*(answered(narrower, each, ids, seed=2) for each in (cache, fresh)))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_memory_when_there_is_a_checkpoint_then_counts_small_states_alone(family: str):
    model = tiny_model(family)
    cache = DynamicHybridCache(model.config)
    read(model, cache, 300)
    before = cache.memory()
    cache.checkpoint()
    kept = cache.memory().host_bytes - before.host_bytes
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(random_prompt(1, 300), **cache_argument(stock))
    layers = [layer for layer, ours in zip(stock.layers, cache.layers, strict=True) if type(layer) is type(ours)]
    assert 0 < kept == sum(each.nbytes for layer in layers for each in _tensors(layer))
    cache.drop_checkpoint(300)
    assert cache.memory() == before


def _tensors(layer: object) -> Iterator[torch.Tensor]:
    for value in vars(layer).values():
        yield from (each for each in (value.values() if isinstance(value, dict) else [value]) if torch.is_tensor(each))


# Passes that end half-way


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_go_back_when_a_pass_has_ended_half_way_then_the_cache_is_whole(family: str):
    model = tiny_model(family)
    cache = DynamicHybridCache(model.config)
    ids = read(model, cache)
    cache.checkpoint()
    expected = answered(model, copy.deepcopy(cache), ids, seed=2)

    def fail(*_: object) -> None:
        raise RuntimeError("ended")

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="ended"):
            answered(model, cache, ids, seed=1)
    finally:
        hook.remove()
    with pytest.raises(IncompleteCacheError, match=rf"go_back\(n\) to a checkpoint \({DOCUMENT}\)"):
        cache.drop_unfinished()
    cache.go_back(DOCUMENT)
    assert torch.equal(answered(model, cache, ids, seed=2), expected)


def test_document_when_read_by_prefill_then_is_gone_back_to():
    model = tiny_model("gemma3")
    ids = random_prompt(1, 100)
    cache = prefill(model, ids, DynamicHybridCache(model.config))
    cache.checkpoint()
    expected = answered(model, copy.deepcopy(cache), ids, seed=2)
    answered(model, cache, ids, seed=1)
    cache.go_back(100)
    assert torch.equal(answered(model, cache, ids, seed=2), expected)


@pytest.mark.parametrize(("family", "make"), BATCHED)
def test_go_back_when_interrupted_anywhere_then_is_done_or_refused(family: str, make: MakeCache):
    model = tiny_model(family)
    cache = make(model.config)
    ids = read(model, cache, 200)
    cache.checkpoint()
    expected = answered(model, copy.deepcopy(cache), ids, seed=2)
    answered(model, cache, ids, seed=1, length=90)
    counting = Interruption()
    twin = copy.deepcopy(cache)
    counting.run(lambda: twin.go_back(200))
    for line in range(1, counting.lines, max(1, counting.lines // 12)):
        twin = copy.deepcopy(cache)
        Interruption(KeyboardInterrupt, line).run(lambda twin=twin: twin.go_back(200))
        try:
            twin.go_back(200)
            assert torch.equal(answered(model, twin, ids, seed=2), expected)
        except IncompleteCacheError:
            twin.reset()
