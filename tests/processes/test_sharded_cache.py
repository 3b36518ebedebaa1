"""Processes that keep a share of a cache each give what one process gives, whatever is done with the cache."""

import copy
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from torch import distributed
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import (
    CacheFileError,
    DynamicHybridCache,
    HostMemoryError,
    HybridCache,
    Placement,
    QuantizedHybridCache,
    SameLogits,
    minmax,
    prefill,
)
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels
from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.host_memory import Limit

from .groups import NEEDS_GROUPS, Group
from common.caches import channel_scaled_codecs, stock
from common.modes import FOR_QUANTIZED_BLOCKS, MODES, NOT_IN_TRANSFORMERS, Result, answer, skipped_where_stock_fails
from common.quantized_reference import quantized_reference
from common.soak import search_at_random
from models.tiny_models import FAMILIES, random_prompt, tiny_model
from operations.setups import Setup
from operations.test_stateful import CacheMachine

pytestmark = [pytest.mark.xdist_group("groups"), NEEDS_GROUPS]

IN_FULL = ("dynamic",)

CODECS: dict[str, Callable[[PreTrainedConfig], Any]] = {
    "dynamic": lambda config: {},
    "quantized_8": lambda config: minmax(8, rotate=True),
    "quantized_2": lambda config: minmax(2, sink_tokens=128, rotate=False),
    "quantized_balanced": lambda config: channel_scaled_codecs(config, 4),
}


def on_the_cpu(name: str, config: PreTrainedConfig, **more: Any) -> HybridCache:
    if name == "quantized_auto":  # chooses its codecs itself
        return QuantizedHybridCache(config, 4, cpu_decode=True, **more)
    return HybridCache(config, Placement(cpu_decode=True), codec=CODECS[name](config), **more)


# A number midway between two codes gets one or the other, which may choose another token.
OF_FEW_BITS = {"quantized_2", "quantized_auto"}
CACHES = {name: partial(on_the_cpu, name) for name in (*CODECS, "quantized_auto")}


def plain(name: str, config: PreTrainedConfig) -> DynamicCache:
    return quantized_reference(config, CODECS[name](config))


def shared(name: str, config: PreTrainedConfig) -> HybridCache:
    return CACHES[name](config, group=distributed.group.WORLD)


def contract(name: str, family: str, mode: str, more: int) -> Result:
    set_integer_kernels(False)
    return MODES[mode](tiny_model(family), lambda config: shared(name, config), more)


@pytest.mark.default("values")
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize("group", [2, 3], indirect=True)
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
    for found in answers:
        for ours, first, theirs in zip(found, answers[0], alone, strict=True):
            if not isinstance(theirs, torch.Tensor):
                assert ours == theirs
                continue
            assert torch.equal(ours, first)
            if not theirs.is_floating_point():
                if cache in OF_FEW_BITS and not torch.equal(ours, theirs):
                    break  # one code is another one, and what follows another text
                assert torch.equal(ours, theirs)
            elif cache in IN_FULL:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            elif cache != "quantized_2":
                # A number midway between two codes gets one or the other by the last bit of what came before.
                is_off = ~torch.isclose(ours, theirs, rtol=1e-2, atol=1e-2)
                assert is_off.float().mean() < 0.05


class ShardedMachine(CacheMachine):
    """A machine on a cache that processes share: each of them runs it, and draws the same."""

    @precondition(lambda self: self.num_tokens > 0)
    @rule(verify=st.booleans())
    def save_and_load(self, verify: bool) -> None:
        """The file of a shared cache is that of one process, and the other way round."""
        with tempfile.TemporaryDirectory() as folder:
            together = [os.fspath(Path(folder) / "together.kv")]
            distributed.broadcast_object_list(together)
            self.ours.save(together[0])
            alone = HybridCache.load(together[0], self.setup.config)
            alone.save(Path(folder) / "alone.kv")
            assert Path(folder, "alone.kv").read_bytes() == Path(together[0]).read_bytes()
            world = distributed.group.WORLD
            self.ours = HybridCache.load(Path(folder) / "alone.kv", self.setup.config, group=world, verify=verify)
            distributed.barrier()

    def teardown(self) -> None:
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, HypothesisException):
            raise KeyboardInterrupt from error  # Hypothesis would try it again, which the others would wait for
        if hasattr(self, "held") and error is None and self.num_tokens:
            self.save_and_load(verify=True)
        super().teardown()


def at_random(name: str) -> None:
    # Factors of channels are for the heads of the config.
    sizes = {"num_kv_heads": 4, "group": 1} if name == "quantized_balanced" else {"key_dim": 16, "value_dim": 48}
    makers = partial(shared, name), partial(plain, name)
    setup = Setup(makers=makers, num_layers=2, integer_kernels=False, is_shard=True, **sizes)
    # All draw the same.
    options = {"stateful_step_count": 25, "derandomize": True, "database": None, "phases": [Phase.generate]}
    machine = type(
        "Machine", (ShardedMachine,), {"setups": st.sampled_from([setup, replace(setup, dtype=torch.bfloat16)])}
    )
    try:
        run_state_machine_as_test(machine, settings=settings(search_at_random(3), deadline=None, **options))
    except KeyboardInterrupt as interrupt:
        raise AssertionError("A step failed.") from interrupt


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize(
    ("name", "group"),
    [("dynamic", 3), ("quantized_8", 2), ("quantized_2", 3), ("quantized_balanced", 2)],
    indirect=["group"],
)
def test_shared_cache_when_any_operations_then_equals_plain_cache(name: str, group: Group):
    group.call(at_random, name)


def filled(name: str, is_alone: bool = False) -> tuple[int, int, str]:
    """Fill a cache with 20,000 tokens; return its bytes and tokens, and what it says of itself."""
    config, states = tiny_model("llama").config, torch.randn(1, 2, 20_000, 16)
    cache = CACHES[name](config) if is_alone else shared(name, config)
    for layer in range(4):
        cache.update(states, states, layer)
    report = cache.memory()
    return report.host_bytes, report.num_tokens, repr(cache)


@pytest.mark.parametrize(("name", "group"), [("dynamic", 2), ("quantized_8", 3)], indirect=["group"])
def test_shared_cache_when_filled_then_each_process_holds_its_share(name: str, group: Group):
    size, (whole, *_) = len(group.pipes), filled(name, is_alone=True)
    for rank, (num_bytes, num_tokens, text) in enumerate(group.call(filled, name)):
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
    for found in group.call(eager):
        assert torch.equal(found[0], expected[0])


def converted(name: str) -> list[bool]:
    """Convert a cache to another type; return for each layer whether it holds the same states."""
    cache = shared(name, tiny_model("llama").config)
    for index in range(4):
        states = torch.randn(2, 1, 2, 363, 16, generator=torch.Generator().manual_seed(index)).bfloat16()
        cache.update(*states, index)
    before = [layer.keys for layer in cache.layers]
    cache.to("cpu", torch.float32)
    assert {layer.keys.dtype for layer in cache.layers} == {torch.float32}
    return [torch.equal(layer.keys.bfloat16(), keys) for layer, keys in zip(cache.layers, before, strict=True)]


@pytest.mark.parametrize("name", ["quantized_8", "quantized_2"])
def test_quantized_cache_when_converted_then_holds_the_same(name: str, group: Group):
    assert group.call(converted, name) == [[True] * 4] * len(group.pipes)


def sampled_with_other_logits() -> list[list[int]]:
    """Sample with another model in each process, which exaggerates the rounding of other processors."""
    rank = distributed.get_rank()
    model = tiny_model("llama", seed=rank)
    processors = [SameLogits(distributed.group.WORLD)]
    return answer(model, random_prompt(1, 10), stock(model.config), logits_processor=processors).tolist()


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
        answer(tiny_model("llama"), prompt, cache, max_new_tokens=2)

    def save(target: str) -> None:
        generate(ids)
        cache.save(target)

    def load_mapped() -> None:
        save(path)
        HybridCache.load(path, config, group=world, mmap=True)

    def fill_memory() -> None:
        states = torch.ones(1, 2, 200, 16)
        with mock.patch.object(host_memory, "tightest_limit", return_value=Limit(0, "")):
            cache.update(states, states, 0)

    wrong: dict[str, Callable[[], Any]] = {
        "no group": lambda: DynamicHybridCache(config, group="world"),
        "others": lambda: DynamicHybridCache(config, group=not_here),
        "on the device": lambda: DynamicHybridCache(config, cpu_decode=False, group=world),
        "other tokens": lambda: generate(random_prompt(1, 200, seed=rank)),
        "no folder": lambda: save("/no/such/folder/cache.kv"),
        "mapped": load_mapped,
        "other lengths": lambda: generate(ids[:, rank:]),
        "too many tokens": fill_memory,
    }
    try:
        wrong[what]()
    except (TypeError, ValueError, CacheFileError, RuntimeError, HostMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no group", "TypeError: group must be a process group of torch.distributed, .* got 'world'"),
        ("others", "ValueError: This process is not in the group"),
        ("on the device", "ValueError: With group= all layers are kept in host memory .* leave out offload"),
        ("other tokens", r"OutOfStepError: Rank \d and rank \d compute different tokens: .*set_seed"),
        ("no folder", "CacheFileError: .*(there is no folder /no/such/folder|rank 0 could not, and says why)"),
        ("mapped", "CacheFileError: .*one process attends to on the CPU.* or mmap=False"),
        (
            "other lengths",
            r"OutOfStepError: A cache has \d+ tokens at rank \d and \d+ at rank \d: call the model",
        ),
        ("too many tokens", r"HostMemoryError: [\d,]+ tokens need .* These are of one of \d shares: more processes"),
    ],
)
def test_shared_cache_when_misused_then_error_has_way_out(what: str, message: str, group: Group, tmp_path: Path):
    for found in group.call(raised_by, what, str(tmp_path / "cache.kv")):
        assert re.match(message, found), found


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
