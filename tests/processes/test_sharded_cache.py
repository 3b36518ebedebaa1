"""Processes that keep a share of a cache each give what one process gives, whatever is done with the cache."""

import copy
import os
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, PreTrainedConfig

from hf_hybrid_cache import (
    CacheFileError,
    DynamicHybridCache,
    HybridCache,
    Placement,
    QuantizedHybridCache,
    SameLogits,
    minmax,
    prefill,
    quanto,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels

from .groups import NEEDS_GROUPS, Group
from common.caches import channel_scaled_codecs, group_of_one, stock
from common.modes import FOR_QUANTIZED_BLOCKS, MODES, NOT_IN_TRANSFORMERS, Result, skipped_where_stock_fails
from common.slow import slow_but
from models.tiny_models import FAMILIES, random_prompt, tiny_model

pytestmark = [pytest.mark.xdist_group("groups"), NEEDS_GROUPS]

IN_FULL = ("dynamic",)


def on_the_cpu(codec: Any = None) -> Callable[..., HybridCache]:
    return lambda config, **more: HybridCache(config, Placement(cpu_decode=True), codec=codec, **more)


CACHES: dict[str, Callable[..., HybridCache]] = {
    "dynamic": on_the_cpu(),
    "quantized_8": on_the_cpu(minmax(8, rotate=True)),
    "quantized_2": on_the_cpu(minmax(2, sink_tokens=128, rotate=False)),
    "quantized_balanced": lambda config, **more: on_the_cpu(channel_scaled_codecs(config, 4))(config, **more),
    "quantized_auto": lambda config, **more: QuantizedHybridCache(config, 4, cpu_decode=True, **more),
}


@pytest.fixture(params=[2, 3])
def group(request: pytest.FixtureRequest, group_of: Callable[[int], Group]) -> Group:
    return group_of(request.param)


def shared(name: str, config: PreTrainedConfig) -> HybridCache:
    return CACHES[name](config, group=distributed.group.WORLD)


def contract(name: str, family: str, mode: str, more: int) -> Result:
    set_integer_kernels(False)
    return MODES[mode](tiny_model(family), lambda config: shared(name, config), more)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, mode) for family in FAMILIES for mode in MODES if (family, mode) not in NOT_IN_TRANSFORMERS],
)
@pytest.mark.parametrize(
    ("cache", "more"),
    [("dynamic", 0), *((cache, FOR_QUANTIZED_BLOCKS) for cache in CACHES)],  # nothing is quantized in short prompts
)
def test_tokens_and_logits_are_those_of_one_process(
    cache: str, family: str, mode: str, more: int, group: Group, exact_kernels: None
):
    model = tiny_model(family)
    with skipped_where_stock_fails():
        alone = MODES[mode](model, stock if cache in IN_FULL else CACHES[cache], more)
    answers = group.call(contract, cache, family, mode, more)
    for answer in answers:
        for ours, first, theirs in zip(answer, answers[0], alone, strict=True):
            if not isinstance(theirs, torch.Tensor):
                assert ours == theirs
                continue
            assert torch.equal(ours, first)
            if not theirs.is_floating_point():
                assert cache == "quantized_2" or torch.equal(ours, theirs)
            elif cache in IN_FULL:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            elif cache != "quantized_2":
                # A number midway between two codes gets one or the other by the last bit of what came before.
                is_off = ~torch.isclose(ours, theirs, rtol=1e-2, atol=1e-2)
                assert is_off.float().mean() < 0.05


class TwoCaches:
    """A shared cache and that of one process, to which the same is done at random."""

    def __init__(self, name: str, seed: int):
        self.random = random.Random(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        self.dtype = self.random.choice([torch.float32, torch.bfloat16])
        self.heads, self.query_heads, self.key_dim = 2, 4, self.random.choice([16, 32])
        self.value_dim = self.random.choice([self.key_dim, 48])
        if name == "quantized_balanced":
            self.key_dim = self.value_dim = 16
        self.batch = self.random.choice([1, 2])
        config = LlamaConfig(
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=8,
        )
        self.config, self.name = config, name
        self.caches: list[HybridCache] = [shared(name, config), CACHES[name](config)]

    def states(self, tokens: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(self.batch, heads, tokens, dim, generator=self.torch_random).to(self.dtype)

    def update(self) -> None:
        tokens = self.random.choice([1, 1, 2, 20, 63, 64, 70, 130, 300])
        for layer in range(2):
            keys = self.states(tokens, self.heads, self.key_dim)
            values = self.states(tokens, self.heads, self.value_dim)
            query = self.states(tokens, self.query_heads, self.key_dim)
            length = self.caches[0].get_seq_length(layer) + tokens
            mask = self.mask(tokens, length)
            ours, theirs = (
                scaled_dot_product_attention(
                    query, *cache.update(keys, values, layer), attn_mask=mask, enable_gqa=True
                ).float()
                for cache in self.caches
            )
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2, equal_nan=True)

    def mask(self, tokens: int, length: int) -> torch.Tensor | None:
        seen = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
        seen = seen & (torch.rand(self.batch, 1, tokens, length, generator=self.torch_random) < 0.9)
        seen[..., length - tokens] = True
        kind = self.random.choice(["none", "seen", "added"])
        if kind == "none":
            return None
        return seen if kind == "seen" else torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, -torch.inf)

    def crop(self) -> None:
        count = self.random.choice([1, 5, 64, 100, 400])
        for cache in self.caches:
            cache.crop(-count)

    def reorder(self) -> None:
        indices = torch.randint(0, self.batch, (self.batch,), generator=self.torch_random)
        for cache in self.caches:
            cache.reorder_cache(indices)

    def repeat(self) -> None:
        if self.batch < 4:
            indices = torch.arange(self.batch).repeat_interleave(2)
            self.batch *= 2
            ours, theirs = self.caches
            ours.batch_repeat_interleave(2)
            theirs.batch_select_indices(indices)  # one process would share a prompt, and a group copies it

    def select(self) -> None:
        for cache in self.caches:
            cache.batch_select_indices(torch.tensor([self.batch - 1]))
        self.batch = 1

    def reset(self) -> None:
        if self.random.random() < 0.3:
            for cache in self.caches:
                cache.reset()

    def copied(self) -> None:
        self.caches = [copy.deepcopy(cache) for cache in self.caches]

    def to(self) -> None:
        if self.dtype == torch.bfloat16:  # to bfloat16 and back would lose something
            self.dtype = torch.float32
            for cache in self.caches:
                cache.to("cpu", torch.float32)

    def saved(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            alone = Path(folder) / "alone.kv"
            together = [os.fspath(Path(folder) / "together.kv")]
            distributed.broadcast_object_list(together)
            ours, theirs = self.caches
            ours.save(together[0])
            theirs.save(alone)
            assert Path(together[0]).read_bytes() == alone.read_bytes()
            dtype, verify = self.dtype, self.random.choice([True, False])
            group = distributed.group.WORLD
            self.caches[1] = HybridCache.load(together[0], self.config, dtype=dtype)
            self.caches[0] = HybridCache.load(alone, self.config, dtype=dtype, group=group, verify=verify)
            distributed.barrier()

    def compare(self) -> None:
        for ours, theirs in zip(self.caches[0].layers, self.caches[1].layers, strict=True):
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.is_initialized == theirs.is_initialized
            if ours.is_initialized:
                assert torch.equal(ours.keys, theirs.keys)
                assert torch.equal(ours.values, theirs.values)


def do_at_random(name: str, seed: int) -> int:
    set_integer_kernels(False)
    two = TwoCaches(name, seed)
    others = [two.crop, two.reorder, two.repeat, two.select, two.reset, two.copied, two.to, two.saved]
    for _ in range(25):
        two.random.choice([two.update, two.update, two.update, *others])()
        two.compare()
    return two.caches[0].get_seq_length()


@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize("seed", slow_but([0], range(4)))
@pytest.mark.parametrize("name", CACHES)
def test_shared_cache_when_any_operations_then_equals_one_process(name: str, seed: int, group: Group):
    assert len(set(group.call(do_at_random, name, seed))) == 1


def filled(cache: HybridCache) -> tuple[int, int, str]:
    """Fill a cache with 20,000 tokens; return its bytes and tokens, and what it says of itself."""
    states = torch.randn(1, 2, 20_000, 16)
    for layer in range(4):
        cache.update(states, states, layer)
    report = cache.memory()
    return report.host_bytes, report.num_tokens, repr(cache)


def filled_share(name: str) -> tuple[int, int, str]:
    return filled(shared(name, tiny_model("llama").config))


@pytest.mark.parametrize("name", ["dynamic", "quantized_8"])
def test_shared_cache_when_filled_then_each_process_holds_its_share(name: str, group: Group):
    size, (whole, *_) = len(group.pipes), filled(CACHES[name](tiny_model("llama").config))
    for rank, (num_bytes, num_tokens, text) in enumerate(group.call(filled_share, name)):
        assert num_tokens == 20_000
        assert num_bytes < (1 / size + 0.05) * whole
        assert f"share {rank + 1} of {size}" in text


def eager() -> Result:
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation("eager")
    return MODES["greedy"](model, lambda config: shared("dynamic", config), FOR_QUANTIZED_BLOCKS)


@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
def test_attention_that_asks_for_the_states_gets_those_of_all_processes(group: Group):
    expected = MODES["greedy"](tiny_model("llama"), stock, FOR_QUANTIZED_BLOCKS)
    for answer in group.call(eager):
        assert torch.equal(answer[0], expected[0])


def converted(name: str, num_tokens: int) -> list[bool]:
    """Convert a cache to another type; return for each layer whether it holds the same states."""
    config = tiny_model("llama").config
    generator = torch.Generator().manual_seed(0)
    cache = shared(name, config)
    shape = 1, config.num_key_value_heads, num_tokens, config.head_dim
    for index in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, generator=generator).bfloat16() for _ in range(2)), index)
    before = [layer.keys for layer in cache.layers]
    cache.to("cpu", torch.float32)
    return [
        torch.equal(layer.keys.bfloat16(), keys) and layer.keys.dtype == torch.float32
        for layer, keys in zip(cache.layers, before, strict=True)
    ]


@pytest.mark.parametrize("name", ["dynamic", "quantized_8", "quantized_2"])
@pytest.mark.parametrize("num_tokens", [107, 363, 500])
def test_shared_cache_when_converted_then_holds_the_same(name: str, num_tokens: int, group: Group):
    for answer in group.call(converted, name, num_tokens):
        assert all(answer)


def sampled_with_other_logits() -> list[list[int]]:
    """Sample with another model in each process, which exaggerates the rounding of other processors."""
    rank = distributed.get_rank()
    model = tiny_model("llama", seed=rank)
    options = {"max_new_tokens": 5, "do_sample": False, "logits_processor": [SameLogits(distributed.group.WORLD)]}
    return model.generate(random_prompt(1, 10), **cache_argument(stock(model.config)), **options).tolist()


def test_the_logits_of_the_first_process_can_be_those_of_all(group: Group):
    answers = group.call(sampled_with_other_logits)
    assert all(answer == answers[0] for answer in answers)


def raised_by(what: str, path: str) -> str:
    """The error of something that a user may get wrong."""
    config, world = tiny_model("llama").config, distributed.group.WORLD
    ids = random_prompt(1, 200)
    cache = DynamicHybridCache(config, group=world)
    rank = distributed.get_rank()
    of_first = distributed.new_group([0])
    not_here = of_first if rank else distributed.GroupMember.NON_GROUP_MEMBER

    def generate(prompt: torch.Tensor) -> None:
        tiny_model("llama").generate(prompt, **cache_argument(cache), max_new_tokens=2, do_sample=False)

    def save(target: str) -> None:
        generate(ids)
        cache.save(target)

    def load_mapped() -> None:
        save(path)
        HybridCache.load(path, config, group=world, mmap=True)

    wrong: dict[str, Callable[[], Any]] = {
        "no group": lambda: DynamicHybridCache(config, group="world"),
        "others": lambda: DynamicHybridCache(config, group=not_here),
        "on the device": lambda: DynamicHybridCache(config, cpu_decode=False, group=world),
        "some layers": lambda: HybridCache(config, Placement(cpu_decode=[0]), group=world),
        "offloaded": lambda: QuantizedHybridCache(config, offload=True, group=world),
        "other tokens": lambda: generate(random_prompt(1, 200, seed=rank)),
        "no folder": lambda: save("/no/such/folder/cache.kv"),
        "mapped": load_mapped,
        "other lengths": lambda: generate(ids[:, rank:]),
        "no kernel": lambda: MODES["greedy"](
            tiny_model("llama"), lambda config: HybridCache(config, codec=quanto(4), group=world), 0
        ),
    }
    try:
        wrong[what]()
    except (TypeError, ValueError, CacheFileError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no group", "TypeError: group must be a process group of torch.distributed, .* got 'world'"),
        ("others", "ValueError: This process is not in the group"),
        ("on the device", "ValueError: With group= all layers are kept in host memory .* leave out offload"),
        ("some layers", "ValueError: With group= all layers"),
        ("offloaded", "ValueError: With group= all layers"),
        ("other tokens", r"OutOfStepError: Rank \d and rank \d compute different tokens: .*set_seed"),
        ("no folder", "CacheFileError: .*(there is no folder /no/such/folder|rank 0 could not, and says why)"),
        ("mapped", "CacheFileError: .*one process attends to on the CPU.* or mmap=False"),
        (
            "other lengths",
            r"OutOfStepError: A cache has \d+ tokens at rank \d and \d+ at rank \d: call the model",
        ),
        ("no kernel", "ValueError: .*There is no kernel that attends to"),
    ],
)
def test_shared_cache_when_misused_then_error_has_way_out(what: str, message: str, group: Group, tmp_path: Path):
    if what == "no kernel":
        pytest.importorskip("optimum.quanto")
    for answer in group.call(raised_by, what, str(tmp_path / "cache.kv")):
        assert re.match(message, answer), answer


def read_with_checkpoint(folder: str, name: str) -> tuple[str, int, bool]:
    """Read a prompt, go on from the file into another cache; return its share, its tokens, and whether all agree."""
    model, path = tiny_model("llama"), Path(folder, name)
    ids = random_prompt(1, 500)
    if name == "missing":
        path = Path(folder, f"{distributed.get_rank()}.kv")
        if distributed.get_rank() == 0:
            path.touch()
    try:
        for _ in range(2):
            cache = DynamicHybridCache(model.config, group=distributed.group.WORLD)
            prefill(model, ids, cache, chunk_size=300, progress=False, checkpoint=path)
    except CacheFileError as error:
        return str(error), 0, False
    keys = cache.layers[0].keys
    alone = prefill(model, ids, DynamicHybridCache(model.config), progress=False)
    return repr(cache), cache.get_seq_length(), torch.allclose(keys, alone.layers[0].keys, atol=1e-5)


def test_shared_cache_when_filled_from_checkpoint_then_each_has_its_share(group: Group, tmp_path: Path):
    for rank, (text, num_tokens, are_equal) in enumerate(group.call(read_with_checkpoint, str(tmp_path), "cache.kv")):
        assert f"share {rank + 1} of " in text
        assert num_tokens == 500
        assert are_equal
    assert HybridCache.load(tmp_path / "cache.kv", tiny_model("llama").config).get_seq_length() == 500
    for text, *_ in group.call(read_with_checkpoint, str(tmp_path), "missing"):
        assert re.search(r"is there for 1 of the \d processes that share the cache: give all of them the same", text)


def test_shared_cache_when_group_has_one_process_then_is_plain():
    ours, theirs = (
        MODES["greedy"](tiny_model("llama"), make, FOR_QUANTIZED_BLOCKS)
        for make in (lambda config: CACHES["dynamic"](config, group=group_of_one()), stock)
    )
    assert torch.equal(ours[0], theirs[0])
