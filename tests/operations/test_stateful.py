"""
Random sequences of operations on random caches, beside a plain cache: the same states, and the same attention.

`CacheMachine` holds for any cache: a subclass, or the class that `run` makes, says which by `setups`, and may add
rules, or put the tensors on a device and compare later.

    run(setups=setups(torch.float16, is_quantized=True))
"""

import copy
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import repeat_kv

from hf_hybrid_cache import HybridCache
from hf_hybrid_cache.attention import MAX_QUERIES
from hf_hybrid_cache.attention.handles import KVHandle
from hf_hybrid_cache.codecs import MinMaxCodec
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels

from common.quantized_reference import QuantizedDynamicLayer
from common.soak import count, search_at_random
from operations.setups import DTYPES, Setup, setups

MOST_SEQUENCES = 6
MODES = st.sampled_from([nullcontext, torch.no_grad, torch.inference_mode])
Mode = type[AbstractContextManager]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Use:
    """
    The way in which a model uses the states that `update` returns.

    Attributes:
        mask: `None`, "padding" or "bias".
        scale: of the scores.
        repeats_heads: repeat KV heads for their query heads first, as transformers does where there is a mask.
        attends: "at_once"; "last", after all layers got their states, as in models whose layers share them; or "never".
        asks_for_states: read the states themselves.
        holds: hold on to them.
    """

    mask: str | None
    scale: float | None
    repeats_heads: bool
    attends: str
    asks_for_states: bool
    holds: bool
    mode: Mode


USES = st.builds(
    Use,
    mask=st.sampled_from([None, "padding", "bias"]),
    scale=st.sampled_from([None, 0.3]),
    repeats_heads=st.booleans(),
    attends=st.sampled_from(["at_once", "at_once", "last", "last", "never"]),
    asks_for_states=st.sampled_from([False] * 7 + [True]),
    holds=st.booleans(),
    mode=MODES,
)
# Around the size of a block, and chunks that buffers grow by.
PROMPTS = st.sampled_from([63, 64, 65, 128, 255, 257]) | st.integers(MAX_QUERIES + 1, 300)


class CacheMachine(RuleBasedStateMachine):
    """
    The machine.

    Attributes:
        setups: random caches.
        device: where the states are.
    """

    setups: ClassVar[st.SearchStrategy[Setup]]
    device: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.surroundings = ExitStack()
        self.operations = 0

    @initialize(data=st.data(), batch=st.integers(1, 3), new_tokens=st.just(0) | PROMPTS, use=USES)
    def start(self, data: st.DataObject, batch: int, new_tokens: int, use: Use) -> None:
        self.setup = setup = data.draw(self.setups)
        self.surroundings.enter_context(setup.system())
        set_integer_kernels(setup.integer_kernels)
        self.surroundings.callback(set_integer_kernels, None)
        self.generator = torch.Generator().manual_seed(0)
        self.batch, self.dtype = batch, setup.dtype
        self.ours, self.plain = setup.cache(), setup.reference()
        # A copy that is not used any more, and what it holds; tensors that `update` returned, slices of what was read,
        # and what was in them.
        self.twin: tuple[HybridCache, DynamicCache] | None = None
        self.held: list[Pair] = []
        self.slices: list[Pair] = []
        # What the plain cache held at each checkpoint.
        self.kept: dict[int, DynamicCache] = {}
        if new_tokens:
            self.update(new_tokens, use)

    @property
    def num_tokens(self) -> int:
        return self.plain.get_seq_length()

    @property
    def quantized_tokens(self) -> int:
        """The number of quantized tokens in the layer that has most of them."""
        return max(getattr(layer, "quantized_tokens", 0) for layer in self.plain.layers)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    @rule(new_tokens=PROMPTS, use=USES)
    def prompt(self, new_tokens: int, use: Use) -> None:
        self.update(new_tokens, use)

    @rule(new_tokens=st.integers(2, MAX_QUERIES), use=USES)
    def guesses(self, new_tokens: int, use: Use) -> None:
        self.update(new_tokens, use)

    @rule(steps=st.integers(1, 3), use=USES)
    def decode(self, steps: int, use: Use) -> None:
        for _ in range(steps):
            self.update(1, use)

    def update(self, new_tokens: int, use: Use) -> None:
        setup, mask = self.setup, self.mask(use.mask, new_tokens)
        waiting: list[tuple[torch.Tensor, Pair, Pair]] = []
        lent: list[torch.Tensor] = []
        for layer in range(setup.num_layers):
            keys, values = (
                self.random(self.batch, setup.num_kv_heads, new_tokens, dim) for dim in (setup.key_dim, setup.value_dim)
            )
            expected = self.plain.update(keys, values, layer)
            query = self.random(self.batch, setup.num_kv_heads * setup.group, new_tokens, setup.key_dim)
            sent = self.sent(keys), self.sent(values)
            with use.mode():
                returned = self.ours.update(*sent, layer)
            waiting.append((query, returned, expected))
            lent += sent
            if use.attends != "last" or layer == setup.num_layers - 1:
                for query, returned, expected in waiting:
                    if use.attends != "never" and isinstance(returned[0], KVHandle):
                        self.attend(query, returned, expected, mask, use)
                    self.compare(returned, expected, use)
                waiting.clear()
                del returned
        # A first prompt may be attended to as it came.
        if not (self.setup.copies_late or use.holds):
            self.take_back(lent)
        for tensor, content in (*self.held, *self.slices):
            assert torch.equal(tensor, content)

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to where the cache gets it."""
        return tensor.clone()

    def require_same(self, ours: torch.Tensor, theirs: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
        torch.testing.assert_close(ours.to(theirs.dtype) if rtol else ours, theirs, rtol=rtol, atol=atol)

    def hold(self, tensor: torch.Tensor) -> None:
        """Hold on to what `update` returned, which must not change."""
        self.held.append((tensor, tensor.clone()))

    def take_back(self, tensors: list[torch.Tensor]) -> None:
        """Write to tensors that the cache got."""
        for tensor in tensors:
            tensor.zero_()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a slice of what was read of a layer, which must not change."""
        self.slices.append((tensor, tensor.clone()))

    def mask(self, kind: str | None, new_tokens: int) -> torch.Tensor | None:
        """Make a mask `[batch or 1, heads or 1, new_tokens, tokens]`; padding may hide all from a query."""
        tokens = self.num_tokens + new_tokens
        order = torch.arange(tokens)
        visible = order <= torch.arange(self.num_tokens, tokens)[:, None]
        if kind == "padding":
            padding = torch.randint(0, tokens, (self.batch, 1, 1, 1), generator=self.generator)
            return visible & (order >= padding)
        if kind == "bias":
            heads = self.setup.num_kv_heads * self.setup.group
            return self.random(1, heads, new_tokens, tokens).masked_fill(~visible, -torch.inf)
        return None

    def attend(self, query: torch.Tensor, returned: Pair, expected: Pair, mask: torch.Tensor | None, use: Use) -> None:
        with use.mode():
            keys, values = (repeat_kv(part, self.setup.group) for part in returned) if use.repeats_heads else returned
            sent = mask if mask is None else self.sent(mask)
            ours = scaled_dot_product_attention(
                self.sent(query), keys, values, attn_mask=sent, scale=use.scale, enable_gqa=not use.repeats_heads
            )
        exact = mask.double() if mask is not None and mask.is_floating_point() else mask
        theirs = scaled_dot_product_attention(
            query.double(), *(part.double() for part in expected), attn_mask=exact, scale=use.scale, enable_gqa=True
        )
        rounding = torch.finfo(self.dtype).eps
        # Codes: the kernel does not round what they stand for to the type of the states. Where it has integer products,
        # it rounds queries and weights, to 8 bits for codes of 4 and 2.
        codecs = [layer.codec for layer in self.plain.layers if isinstance(layer, QuantizedDynamicLayer)]
        has_few_bits = any(
            isinstance(part, MinMaxCodec) and part.bits < 8 for codec in codecs for part in (codec.keys, codec.values)
        )
        is_exact = self.setup.integer_kernels is False
        few_bits = 2e-2 * max(1.0, (use.scale or 0.0) * self.setup.key_dim**0.5)  # more where scores are steeper
        by_kernel = few_bits if has_few_bits and not is_exact else 1e-4 if is_exact and rounding < 1e-6 else 2e-3
        atol = by_kernel + 4 * rounding if codecs else 1e-5
        if query.shape[2] > MAX_QUERIES or self.setup.placement.device_tokens:
            # torch rounds weights, and what it attends to beside the CPU, to the type of the states.
            atol += 4 * rounding
        self.require_same(ours, theirs.nan_to_num(0.0), max(rounding, 1.3e-6), atol)

    def compare(self, returned: Pair, expected: Pair, use: Use) -> None:
        for ours, theirs in zip(returned, expected, strict=True):
            assert (ours.shape, ours.dtype, ours.device.type) == (theirs.shape, theirs.dtype, self.device)
            if use.asks_for_states or not isinstance(ours, KVHandle):
                self.require_same(ours, theirs)
                if use.holds:
                    self.hold(ours[:, :, -3:] if isinstance(ours, KVHandle) else ours)

    @rule(tokens=st.integers(0, MAX_QUERIES) | st.sampled_from([63, 64, 65]) | st.integers(0, 300), mode=MODES)
    def crop(self, tokens: int, mode: Mode) -> None:
        self.held.clear()
        with mode():
            self.ours.crop(-tokens)
        if tokens:
            self.shorten_plain(max(0, self.num_tokens - tokens))

    @precondition(lambda self: self.num_tokens > 0 and not (self.setup.is_shard and self.ours.codecs))
    @rule(mode=MODES)
    def checkpoint(self, mode: Mode) -> None:
        with mode():
            self.ours.checkpoint()
        self.kept[self.num_tokens] = copy.deepcopy(self.plain)

    @rule(data=st.data(), mode=MODES)
    def go_back(self, data: st.DataObject, mode: Mode) -> None:
        self.held.clear()
        left = data.draw(st.sampled_from([*self.kept, self.num_tokens]) | st.integers(0, self.num_tokens))
        with mode():
            assert self.ours.go_back(left) == left
        self.shorten_plain(left)

    def shorten_plain(self, left: int) -> None:
        self.kept = {length: plain for length, plain in self.kept.items() if length <= left}
        if left in self.kept:
            self.plain = copy.deepcopy(self.kept[left])
        elif self.num_tokens > left:  # transformers 5.17 cannot crop what was never filled
            self.plain.crop(left - self.num_tokens)

    @precondition(lambda self: self.num_tokens > 0 and not self.setup.is_shard)
    @rule(layer=st.integers(0, 3), token=st.integers(0), name=st.sampled_from(["keys", "values"]), mode=MODES)
    def edit(self, layer: int, token: int, name: str, mode: Mode) -> None:
        """Write to a token of a layer."""
        if self.quantized_tokens:
            return  # all tokens are quantized again, by other numbers than in the reference
        layer, token = layer % self.setup.num_layers, token % self.num_tokens
        self.held.clear()
        ours, plain = self.ours.layers[layer], self.plain.layers[layer]
        states = {each: getattr(plain, each).clone() for each in ("keys", "values")}
        states[name][:, :, token] += 1
        with mode():
            ours.set(**{each: self.sent(numbers) for each, numbers in states.items()})
        plain.crop(-self.num_tokens)
        plain.update(**{f"{each[:-1]}_states": numbers for each, numbers in states.items()})
        self.kept = {}

    @precondition(lambda self: self.num_tokens > 0)
    @rule(
        method=st.sampled_from(["reorder_cache", "batch_select_indices", "batch_repeat_interleave"]),
        drawn=st.lists(st.integers(0, MOST_SEQUENCES - 1), min_size=1, max_size=3),
        as_mask=st.booleans(),
        mode=MODES,
    )
    def change_sequences(self, method: str, drawn: list[int], as_mask: bool, mode: Mode) -> None:
        self.held.clear()
        indices = torch.tensor(drawn) % self.batch
        argument: torch.Tensor | int = indices
        if method == "reorder_cache":
            argument = indices.repeat(self.batch)[: self.batch]
        elif method == "batch_repeat_interleave":
            argument = min(len(drawn), MOST_SEQUENCES // self.batch)
        elif as_mask:
            argument = torch.isin(torch.arange(self.batch), indices)
        with mode():
            getattr(self.ours, method)(argument)
        for plain in (self.plain, *self.kept.values()):
            getattr(plain, method)(argument)
        self.batch = self.plain.layers[0].keys.shape[0]

    # Codes that were decoded and rounded once are not those that are decoded for another type.
    @precondition(lambda self: self.dtype == torch.float32 or not self.quantized_tokens)
    @rule(dtype=st.sampled_from(DTYPES), mode=MODES)
    def convert(self, dtype: torch.dtype, mode: Mode) -> None:
        self.held.clear()
        with mode():
            self.ours.to(self.device, dtype)
        for layer in self.plain.layers:
            if layer.is_initialized:
                layer.keys, layer.values, layer.dtype = layer.keys.to(dtype), layer.values.to(dtype), dtype
        self.dtype = dtype
        for length in self.kept:  # it has tokens of the type before, which may say more
            self.ours.drop_checkpoint(length)
        self.kept = {}

    @precondition(lambda self: self.num_tokens > 200)
    @rule(batch=st.integers(1, 3), by_crop=st.booleans())
    def begin_again(self, batch: int, by_crop: bool) -> None:
        """Start anew, by `reset` or by removing all tokens: other sequences may come."""
        self.held.clear()
        if by_crop:
            self.ours.crop(-self.num_tokens)
        else:
            self.ours.reset()
            assert (self.ours.memory().host_bytes, self.ours.memory().working_bytes) == (0, 0)
        # Not `reset`: transformers 5.17 only zeroes what is stored.
        self.plain, self.batch, self.kept = self.setup.reference(), batch, {}

    @rule(goes_on_with_copy=st.booleans(), mode=MODES)
    def copy(self, goes_on_with_copy: bool, mode: Mode) -> None:
        with mode():
            twin = copy.deepcopy(self.ours)
        if goes_on_with_copy:
            self.ours, twin = twin, self.ours
        self.twin = twin, copy.deepcopy(self.plain)

    @precondition(lambda self: self.num_tokens > 0)
    @rule(layer=st.integers(0, 3), mode=MODES)
    def look(self, layer: int, mode: Mode) -> None:
        layer %= self.setup.num_layers
        with mode():
            for name in ("keys", "values"):
                states = getattr(self.ours.layers[layer], name)
                self.require_same(states, getattr(self.plain.layers[layer], name))
                self.keep(states[:, :, -3:])

    @invariant()
    def reports_what_it_holds(self) -> None:
        if not hasattr(self, "held"):
            return
        self.operations += 1
        assert self.ours.get_seq_length() == self.num_tokens
        assert self.ours.checkpoints == tuple(sorted(self.kept))
        assert self.ours.get_mask_sizes(3, 0) == (self.num_tokens + 3, 0)
        report = self.ours.memory()
        assert (report.num_tokens, report.device_bytes) == (self.num_tokens, 0)
        # Copies that are run late stay late: looking at what is stored would run them.
        if not self.setup.copies_late:
            check_same_states(self.ours, self.plain)

    def teardown(self) -> None:
        try:
            # An operation that failed has said so.
            if hasattr(self, "held") and sys.exception() is None:
                check_same_states(self.ours, self.plain)
                if self.twin is not None:
                    check_same_states(*self.twin)
                count("examples of operation sequences")
                count("operations", self.operations)
        finally:
            self.surroundings.close()


def check_same_states(ours: HybridCache, plain: DynamicCache) -> None:
    assert ours.get_seq_length() == plain.get_seq_length()
    if plain.get_seq_length() == 0:
        return
    # A copy is looked at, so that looking does not fetch what the next step should find fetched, or not.
    for mine, theirs in zip(copy.deepcopy(ours).layers, plain.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


def run(kind: type[CacheMachine] = CacheMachine, examples: int = 2, **attributes: object) -> None:
    machine = type("Machine", (kind,), attributes)
    run_state_machine_as_test(machine, settings=search_at_random(examples, stateful_step_count=30))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize("copies_late", [False, True], ids=["copies_at_once", "copies_late"])
@pytest.mark.parametrize("is_quantized", [False, True], ids=["full_precision", "quantized"])
def test_random_cache_when_any_operations_then_equals_plain_cache(is_quantized: bool, copies_late: bool):
    of_any_type = st.sampled_from(DTYPES).flatmap(lambda dtype: setups(dtype, is_quantized, copies_late))
    run(examples=5, setups=of_any_type)
