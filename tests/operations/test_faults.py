"""
An interruption anywhere leaves a cache as before or after a change, or marked as not whole.

An exception takes the place of each line of the package that an operation runs, one line at a time.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_hybrid_cache import DynamicHybridCache, HybridCache, IncompleteCacheError, Placement, minmax
from hf_hybrid_cache.cache.forward_passes import HEARS_OF_LINEAR_STATES
from hf_hybrid_cache.cache_argument import cache_argument

from common.caches import CACHES, QUANTIZED, MakeCache
from common.interruptions import Interruption
from common.lazy_streams import copy_late
from common.modes import read
from common.quantized_reference import quantized_reference
from common.slow import slow_but
from common.soak import budget, count, search_at_random
from models.tiny_models import FAMILIES, random_model, random_prompt, tiny_model
from operations.setups import CONFIG, Setup, setups

ERRORS = (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, RuntimeError)
BATCH, TOKENS, LENGTH = 2, 200, 148
ALL: dict[str, MakeCache] = CACHES | {name: ours for name, (ours, _) in QUANTIZED.items()}
States = list[tuple[torch.Tensor, torch.Tensor]]


def random_states(num_tokens: int, seed: int, setup: Setup = Setup()) -> States:  # noqa: B008
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, setup.num_kv_heads, num_tokens)
    return [
        tuple(torch.randn(*shape, dim, generator=generator) for dim in (setup.key_dim, setup.value_dim))
        for _ in range(setup.num_layers)
    ]


def forward(cache: Cache, states: States) -> None:
    """Update a cache as a model does: its length first, then each layer, with attention."""
    cache.get_seq_length()
    for layer, (keys, values) in enumerate(states):
        held = cache.update(keys, values, layer)
        query = torch.ones(BATCH, 2 * keys.shape[1], *keys.shape[2:])
        torch.nn.functional.scaled_dot_product_attention(query, *held, enable_gqa=True)


OPERATIONS: dict[str, Callable[[Cache, Setup], object]] = {
    "one token": lambda cache, setup: forward(cache, random_states(1, 2, setup)),
    "two blocks": lambda cache, setup: forward(cache, random_states(130, 2, setup)),
    "more than was reserved": lambda cache, setup: forward(cache, random_states(600, 2, setup)),
    "crop": lambda cache, _: cache.crop(-150),
    "reorder": lambda cache, _: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache, _: cache.batch_select_indices(torch.tensor([1])),
    "repeat": lambda cache, _: cache.batch_repeat_interleave(2),
}


def contents(cache: Cache) -> States:
    twin = copy.deepcopy(cache)  # looking must not change where layers are
    return [(layer.keys.clone(), layer.values.clone()) for layer in twin.layers]


def same(found: States, *allowed: States, block: int | None = None) -> bool:
    """Whether each layer, or each block of so many tokens of it, is as in one of those that are allowed."""

    def pieces(states: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*(each.split(block or max(1, each.shape[2]), dim=2) for each in states), strict=True))

    return all(
        any(all(map(torch.equal, piece, other)) for other in others)
        for layers in zip(found, *allowed, strict=True)
        for piece, *others in zip(*map(pieces, layers), strict=False)
    ) and {states[0].shape for states in found} <= {states[0].shape for other in allowed for states in other}


class Trial:
    """
    An operation on a cache of `TOKENS`, ended at one line or another.

    Args:
        setup: of the cache.
        operation: a key of `OPERATIONS`.
    """

    def __init__(self, setup: Setup, operation: str):
        self._make = setup.cache
        # Tokens that leave the device let blocks be quantized before the operation is taken back, only some of which
        # stay.
        self._block = 64 if setup.placement.device_tokens else None
        self._operation = lambda cache: OPERATIONS[operation](cache, setup)
        self._first, self._second = random_states(TOKENS - 1, 0, setup), random_states(1, 1, setup)
        reference = setup.reference()
        self._fill(reference)
        self._before = contents(reference)
        self._operation(reference)
        self._after = contents(reference)
        # Blocks that were quantized meanwhile stay quantized.
        added = reference.get_seq_length() - TOKENS
        reference.crop(-max(0, added))
        self._taken_back = contents(reference)
        counting = Interruption()
        cache = self._filled()
        counting.run(lambda: self._operation(cache))
        self.lines = counting.lines

    def run(self, error: type[BaseException], at_line: int) -> None:
        cache = self._filled()
        fault = Interruption(error, at_line)
        ended = fault.run(lambda: self._operation(cache))
        if not ended:  # where it is raised it may be handled
            assert same(contents(cache), self._after), fault.place
        elif not self._is_as_before_or_after(cache, fault.place):
            self._check_reset(cache)
        count("faults injected")

    def _is_as_before_or_after(self, cache: HybridCache, place: str) -> bool:
        """Whether the cache is as before or after and works; otherwise check that it says it is not whole."""
        try:
            if len({layer.get_seq_length() for layer in cache.layers}) > 1:
                with pytest.raises(IncompleteCacheError, match=r"drop_unfinished|reset"):
                    forward(cache, self._second)
                cache.drop_unfinished()
                assert same(contents(cache), self._before, self._taken_back, block=self._block), place
                forward(cache, self._second)
                return True
            found = contents(cache)
        except IncompleteCacheError:
            return False
        is_before = same(found, self._before) or (
            self._block and same(found, self._before, self._taken_back, block=self._block)
        )
        if is_before and not same(found, self._after):
            self._operation(cache)
            found = contents(cache)
        assert same(found, self._after), place
        return True

    def _check_reset(self, cache: HybridCache) -> None:
        with pytest.raises(IncompleteCacheError, match="reset"):
            forward(cache, self._second)
        cache.reset()
        self._fill(cache)
        assert same(contents(cache), self._before)

    def _filled(self) -> HybridCache:
        cache = self._make()
        self._fill(cache)
        return cache

    def _fill(self, cache: Cache) -> None:
        forward(cache, self._first)
        forward(cache, self._second)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.filterwarnings("ignore:The device ran out of memory")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_is_ended_anywhere_is_done_or_not_or_says_so(operation: str):
    kinds = st.tuples(st.booleans(), st.booleans())
    any_setup = kinds.flatmap(lambda kind: setups(torch.float32, is_quantized=kind[0], copies_late=kind[1]))

    @search_at_random(5)
    @given(setup=any_setup, chosen=st.randoms(use_true_random=False))
    def end_anywhere(setup: Setup, chosen: random.Random) -> None:
        with setup.system():
            trial = Trial(setup, operation)
            for at_line in chosen.sample(range(trial.lines), min(trial.lines, 3)):
                trial.run(chosen.choice(ERRORS), at_line)

    end_anywhere()


@contextmanager
def interrupted_in_layer(model: PreTrainedModel, index: int, at_token: int) -> Iterator[None]:
    """Ctrl-C between attention and MLP of a layer, while the token `at_token` is computed."""

    def interrupt(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        nonlocal left
        left -= args[0].shape[1]
        if left < 0:
            raise KeyboardInterrupt

    left = at_token
    hook = model.model.layers[index].mlp.register_forward_pre_hook(interrupt)
    try:
        yield
    finally:
        hook.remove()


def generated(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    return model.generate(ids, **cache_argument(cache), max_length=LENGTH, do_sample=False)


@pytest.mark.parametrize("name", slow_but(["default", "offloaded", "split", "quantized_8"], ALL))
def test_an_interrupted_generate_goes_on_where_it_was(name: str):
    model, ids, make = tiny_model("llama"), random_prompt(1, 140), ALL[name]
    expected = generated(model, ids, make(model.config))
    for layer in (1, 3):
        cache = make(model.config)
        with pytest.raises(KeyboardInterrupt), interrupted_in_layer(model, layer, at_token=142):
            generated(model, ids, cache)
        if layer < 3:
            with pytest.raises(IncompleteCacheError, match=r"the first 2 layers of attention hold 143 tokens, .* 142"):
                generated(model, ids, cache)
        cache.drop_unfinished()
        assert cache.get_seq_length() == 142 + (layer == 3)
        assert torch.equal(generated(model, expected[:, : cache.get_seq_length() + 1], cache), expected)


@pytest.fixture(scope="module")
def linear_model() -> PreTrainedModel:
    """Make two layers of linear attention, then one of full attention, the only one that counts tokens."""
    config = FAMILIES["qwen3_next"]()
    config.num_hidden_layers, config.layer_types = 3, ["linear_attention", "linear_attention", "full_attention"]
    return random_model(config)


UNSEEN = "not all layers of linear attention have seen its tokens"


@pytest.mark.parametrize(
    ("family", "layer", "at_token", "said", "cannot_go_back"),
    [
        ("llama", 1, 5, "The last layers hold nothing", None),
        ("gemma3", 1, 145, "drop_unfinished", None),
        ("linear", 0, 5, UNSEEN, None),
        ("linear", 1, 145, UNSEEN, "LinearAttentionLayer"),
    ],
)
def test_a_pass_that_ended_half_way_is_noticed_and_forgotten_as_a_whole(
    family: str, layer: int, at_token: int, said: str, cannot_go_back: str | None, linear_model: PreTrainedModel
):
    if family == "linear" and not HEARS_OF_LINEAR_STATES:
        pytest.skip("this transformers does not tell a cache of all linear states")
    model, ids = linear_model if family == "linear" else tiny_model(family), random_prompt(1, 140)
    cache = DynamicHybridCache(model.config)
    read(model, ids, cache)
    cache.drop_unfinished()
    assert cache.get_seq_length() == 140
    cache.reset()
    with pytest.raises(KeyboardInterrupt), interrupted_in_layer(model, layer, at_token):
        generated(model, ids, cache)
    for _ in range(2):
        with pytest.raises(IncompleteCacheError, match=said):
            generated(model, ids, cache)
    if cannot_go_back:
        with pytest.raises(IncompleteCacheError, match=f"{cannot_go_back} cannot go back"):
            cache.drop_unfinished()
        cache.reset()
    cache.drop_unfinished()
    cache.go_back(min(100, cache.get_seq_length()))  # some tokens of the prompt are left to compute
    assert torch.equal(generated(model, ids, cache), generated(model, ids, DynamicHybridCache(model.config)))


def prompts(cache: Cache) -> None:
    """Compute a prompt too short for the choice of codecs, and one with which it is made, from pending states."""
    forward(cache, random_states(20, 3))
    forward(cache, random_states(TOKENS, 0))


@pytest.mark.soak
@pytest.mark.parametrize("is_streamed", [False, True])
def test_prompts_when_interrupted_while_choosing_then_equal_the_choice(is_streamed: bool):
    def choosing() -> HybridCache:
        if not is_streamed:
            return HybridCache(CONFIG, codec=minmax(4, sink_tokens=0))
        cache = HybridCache(CONFIG, Placement(True, 1, cpu_decode=False), codec=minmax(4))
        copy_late(cache)
        return cache

    counting, chosen = Interruption(), random.Random(0)
    counting.run(lambda: prompts(choosing()))
    for at_line in chosen.sample(range(counting.lines), min(counting.lines, budget(8))):
        ours = choosing()
        fault = Interruption(chosen.choice(ERRORS), at_line)
        fault.run(lambda ours=ours: prompts(ours))
        try:
            whole = len({layer.get_seq_length() for layer in ours.layers}) == 1 and bool(contents(ours))
        except (IncompleteCacheError, AttributeError):  # not whole, or nothing stored
            whole = False
        if not whole or ours.get_seq_length() != 20 + TOKENS:
            ours.reset()
            prompts(ours)
        for layer in ours.layers:  # as their next update does
            layer.store.settle()
        found = contents(ours)
        assert all(codec.is_fitted for codec in ours.codecs.values()), fault.place
        expected = quantized_reference(CONFIG, ours.codecs)
        prompts(expected)
        assert same(found, contents(expected)), fault.place
        count("faults injected")
