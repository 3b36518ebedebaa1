"""Memory limits of a process that really has them, and memory that hundreds of `generate` calls leave as it was."""

import copy
import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.cache_utils import Cache

from hf_hybrid_cache import DynamicHybridCache, HostMemoryError, HybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.storage.memory.host_memory import _SPARE_BYTES

from common.caches import CACHES, QUANTIZED, stock
from common.programs import run_program, wait_for_compilation
from common.soak import budget, count
from models.tiny_models import COMMON, random_prompt, tiny_model

if sys.platform == "linux":
    import resource

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs limits and files of Linux")
MIB = 2**20
# A token of the tiny model in so many sequences takes 64 KiB.
BATCH = 64
TOKEN_BYTES = BATCH * 1024
# Files of a control group's limit and usage, in version 2 and in version 1.
GROUP_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


@contextmanager
def limited(free: int, kind: str = "AS", used: str = "vms") -> Iterator[None]:
    """Let this process have `free` bytes for caches, beside what it has now and what is left to the rest of it."""
    gc.collect()
    wait_for_compilation()
    number = getattr(resource, f"RLIMIT_{kind}")
    limit = getattr(psutil.Process().memory_info(), used) + free + _SPARE_BYTES
    resource.setrlimit(number, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(number, (resource.RLIM_INFINITY,) * 2)


def generate(cache: Cache, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    model = tiny_model("llama")
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), **cache_argument(cache), max_new_tokens=new_tokens, do_sample=False
    )


def store(cache: HybridCache, num_tokens: int) -> None:
    """Give a cache random states of `num_tokens` more, as a prompt in chunks would; codecs see a query."""
    num_layers = len(cache.layers)
    while num_tokens:
        states = torch.randn(BATCH * 4 // num_layers, 2, min(200, num_tokens), 16)
        for layer in range(num_layers):
            held = cache.update(states, states, layer)
            if cache.layers[layer].store.wants_queries:  # until then states wait in full precision
                scaled_dot_product_attention(states[:, :, -1:], *held)
            del held
        num_tokens -= states.shape[2]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(HostMemoryError) as caught:
        act()
    return str(caught.value)


def refusal_of(cache: HybridCache, num_tokens: int) -> str:
    # A view of one number, which takes nothing.
    states = torch.ones(1).expand(BATCH * 4 // len(cache.layers), 2, num_tokens, 16)
    return refusal(lambda: cache.update(states, states, 0))


def generate_up_to_the_limit(make: Callable[..., HybridCache]) -> None:
    cache, ids = make(tiny_model("llama").config), random_prompt(BATCH, 100)
    with limited(20 * MIB):
        message = refusal(lambda: generate(cache, ids, 2000))
        assert "limit of address space (RLIMIT_AS, ulimit -v)" in message
        cache.drop_unfinished()  # where memory ended after the first layer
        length = cache.get_seq_length()
        assert ids.shape[1] + 20 < length < 2000
        assert {layer.get_seq_length() for layer in cache.layers} == {length}
        cache.crop(120 - length)
        cache.batch_select_indices(torch.tensor([0]))
    # The tokens that are kept are right: the model continues from them as if nothing had happened.
    expected = generate(stock(tiny_model("llama").config), ids[:1], 30)
    assert torch.equal(generate(cache, expected[:, :121], 9), expected)


def take_memory_as_tokens_come() -> None:
    """Memory is taken for the tokens and a chunk, not for the model's context."""
    # A large limit, beside which the reserves of allocators are small.
    with limited(200 * MIB):
        cache = DynamicHybridCache(LlamaConfig(**COMMON, num_hidden_layers=16))
        assert "6,000 tokens need" in refusal_of(cache, 6000)
        before = psutil.Process().memory_info().vms
        store(cache, 464)
        assert psutil.Process().memory_info().vms - before < 2 * 464 * TOKEN_BYTES


def refuse_max_length_at_once() -> None:
    with limited(40 * MIB):
        # The first blocks are quantized with 640 tokens.
        for make, num_tokens in ((DynamicHybridCache, 1), (QuantizedHybridCache, 640)):
            cache = make(tiny_model("llama").config, max_length=20_000)
            assert "20,000 tokens (max_length) need" in refusal_of(cache, num_tokens)
            assert cache.get_seq_length() == 0


def refuse_beyond_the_limit_of_data() -> None:
    cache = DynamicHybridCache(tiny_model("llama").config)
    with limited(300 * MIB, "DATA", "data"):
        assert "limit of data (RLIMIT_DATA, ulimit -d)" in refusal_of(cache, 12_000)
        store(cache, 500)


def refuse_copies() -> None:
    """Nothing changes where a copy does not fit."""
    warnings.filterwarnings("ignore", "Host memory will end")
    cache = OffloadedHybridCache(tiny_model("llama").config)
    store(cache, 1000)
    with limited(25 * MIB):
        assert "A copy of 1,000 tokens needs" in refusal(lambda: copy.deepcopy(cache))
        cache.batch_repeat_interleave(2)  # which share their blocks
        cache.batch_select_indices(torch.arange(BATCH))
    with limited(250 * MIB):
        assert copy.deepcopy(cache).get_seq_length() == 1000
    cache = OffloadedHybridCache(tiny_model("llama").config, cpu_decode=0.5)
    store(cache, 1000)
    with limited(25 * MIB):
        assert "3 copies of 1,000 tokens need" in refusal(lambda: cache.batch_repeat_interleave(3))
    assert cache.get_seq_length() == 1000


def refuse_beyond_the_limit_of_the_group(folder: str) -> None:
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    limit, usage = next(pair for pair in GROUP_FILES.items() if Path(folder, pair[0]).exists())
    # Memory that the process has taken already counts for its old group.
    Path(folder, limit).write_text(str(int(Path(folder, usage).read_text()) + 200 * MIB))
    cache = DynamicHybridCache(tiny_model("llama").config)
    assert "memory limit of its container (control group)" in refusal_of(cache, 10_000)
    store(cache, 1000)


def all_in_a_limited_process(folder: str) -> None:
    """Run with each limit that a process has, and in a control group if there is a folder for one."""
    warnings.simplefilter("error")
    for make in (DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache):
        # Compiled and with all threads before there is a limit, as in a process that has served for a while.
        generate(make(tiny_model("llama").config), random_prompt(BATCH, 300), 2)
    generate_up_to_the_limit(DynamicHybridCache)
    take_memory_as_tokens_come()
    refuse_max_length_at_once()
    refuse_beyond_the_limit_of_data()
    refuse_copies()
    if folder:
        refuse_beyond_the_limit_of_the_group(folder)


@pytest.fixture
def control_group() -> Iterator[str]:
    """Make a group in that of this process; yield its folder, or nothing where none can be made that limits memory."""
    groups = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= {name: path.lstrip("/") for name in controllers.split(",")}
    root = Path("/sys/fs/cgroup")
    folder = root / "memory" / groups["memory"] if "memory" in groups else root / groups.get("", "")
    folder /= f"hf-hybrid-cache-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield ""
        return
    yield str(folder) if any((folder / limit).exists() for limit in GROUP_FILES) else ""
    folder.rmdir()


def test_limits_of_a_process_are_kept_told_and_survived(control_group: str):
    run_program(f"from memory import test_limits; test_limits.all_in_a_limited_process({control_group!r})")


class Footprint(NamedTuple):
    """The resources of a process that a leak takes."""

    rss: int
    threads: int
    files: int
    mappings: int

    @classmethod
    def now(cls) -> "Footprint":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # The allocator's reserve differs by megabytes.
        process = psutil.Process()
        folders = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        return cls(process.memory_info().rss, *folders, len(Path("/proc/self/maps").read_text().splitlines()))


def generate_again_and_again(rounds: int) -> None:
    makes = [*CACHES.values(), *(ours for ours, _ in QUANTIZED.values())]
    ids = random_prompt(2, 300)
    for number in range(rounds):
        for make in makes:
            generate(make(tiny_model("llama").config), ids, 4)
        if number == 2:
            early = Footprint.now()
    late = Footprint.now()
    # A cache of 300 tokens holds 1.2 MB, and most rounds add nothing at all.
    assert late.rss - early.rss < 2 * MIB, (early, late)
    assert late.threads <= early.threads, (early, late)
    assert late.files <= early.files, (early, late)
    assert late.mappings - early.mappings < 10, (early, late)


@pytest.mark.slow
@pytest.mark.soak
def test_resources_when_many_caches_are_made_then_do_not_grow():
    rounds = 3 + budget(4)
    run_program(f"from memory import test_limits; test_limits.generate_again_and_again({rounds})")
    count("generate calls", rounds * (len(CACHES) + len(QUANTIZED)))
