"""Processes that share a cache keep and find their shares of a prompt, and go on together whatever each finds."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    OutOfStepError,
    PrefixStore,
    PrefixStoreError,
    QuantizedHybridCache,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels

from common.slow import slow
from models.tiny_models import random_prompt, tiny_model
from prefix_store.prompts import are_equal, held, next_logits, prompts
from processes.groups import Group

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo, which this torch was built without", allow_module_level=True)

pytestmark = [
    pytest.mark.xdist_group("groups"),
    pytest.mark.filterwarnings("ignore:The prompt has .* context is 512"),
]

FIRST, SECOND = prompts(common=2500, first=30, second=250)


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with Group(2) as started:
        yield started


def make(bits: int | None, **more: Any) -> HybridCache:
    config = tiny_model("llama").config
    return DynamicHybridCache(config, **more) if bits is None else QuantizedHybridCache(config, bits=bits, **more)


class Read(NamedTuple):
    """The number of tokens of a prompt that came from a store, all states and logits, and an answer."""

    num_tokens: int
    states: list[torch.Tensor]
    answer: list[int]


def read(folder: Path, is_of_each: bool, prompt: torch.Tensor, bits: int | None, document_tokens: int) -> Read:
    """Read a prompt through a store, in a folder of all processes or one of each, and answer it."""
    set_integer_kernels(False)
    model, cache = tiny_model("llama"), make(bits, group=distributed.group.WORLD)
    path = folder / str(distributed.get_rank()) if is_of_each else folder
    reuse = PrefixStore(path).prefill(model, prompt, cache, document_tokens=document_tokens, progress=False)
    states = held(cache)
    tokens = answered(prompt, cache)
    cache.crop(prompt.shape[1] - 1 - cache.get_seq_length())
    return Read(reuse.num_tokens, [*states, next_logits(model, prompt, cache)], tokens)


def read_alone(prompt: torch.Tensor, bits: int | None, document_tokens: int) -> list[int]:
    """Read a prompt in one process without a store, in the same passes, and answer it."""
    cache = make(bits)
    for end in (*range(2048, document_tokens, 2048), document_tokens, prompt.shape[1] - 1):
        next_logits(tiny_model("llama"), prompt[:, :end], cache)
    return answered(prompt, cache)


def answered(prompt: torch.Tensor, cache: HybridCache) -> list[int]:
    answer = tiny_model("llama").generate(prompt, **cache_argument(cache), max_new_tokens=12, do_sample=False)
    return answer[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("bits", "is_of_each", "document_tokens"),
    [(None, False, 2500), (4, True, 2500), (4, False, 130), slow(None, True, 2500), slow(4, False, 2500)],
)
def test_prompt_when_processes_read_it_again_then_as_a_cold_read(
    bits: int | None, is_of_each: bool, document_tokens: int, group: Group, exact_kernels: None, tmp_path: Path
):
    first, second = prompts(common=document_tokens, first=30, second=250)
    alone = read_alone(second, bits, document_tokens)
    cold = group.call(read, tmp_path / "cold", is_of_each, second, bits, document_tokens)
    group.call(read, tmp_path / "store", is_of_each, first, bits, document_tokens)
    hits, again = (group.call(read, tmp_path / "store", is_of_each, second, bits, document_tokens) for _ in range(2))
    read_tokens = second.shape[1] - 1
    assert [each.num_tokens for each in cold] == [0, 0]
    assert [each.num_tokens for each in (*hits, *again)] == [document_tokens] * 2 + [read_tokens] * 2
    for each in (*cold, *hits, *again):
        assert are_equal(each.states, cold[0].states)
        assert each.answer == alone


def keep_and_resume(folder: Path, bits: int | None, is_of_each: bool) -> tuple[bool, list[int], list[int]]:
    """Keep a conversation and go on with it; return whether states are the same, and both answers."""
    set_integer_kernels(False)
    model, group, document = tiny_model("llama"), distributed.group.WORLD, FIRST[:, :2300]
    store = PrefixStore(folder / str(distributed.get_rank()) if is_of_each else folder)
    live, resumed = make(bits, group=group), make(bits, group=group)
    store.prefill(model, document, live, document_tokens=2300, progress=False)
    tokens = torch.cat([document, random_prompt(1, 20)], dim=1)
    for _ in range(2):
        tokens = torch.cat([tokens, torch.tensor([answered(tokens, live)]), random_prompt(1, 90)], dim=1)
        next_logits(model, tokens[:, :-1], live)
        store.keep(model, tokens, live, document_tokens=2300)
    distributed.barrier()  # each lists all shares
    stored = max(store.prompts(), key=lambda each: len(each.token_ids))
    store.resume(model, stored, resumed)
    same = are_equal(held(resumed), held(live))
    return same, answered(tokens, resumed), answered(tokens, live)


@pytest.mark.parametrize(("bits", "is_of_each"), [(None, False), (4, True)])
def test_conversation_when_processes_resume_it_then_goes_on_to_the_bit(
    bits: int | None, is_of_each: bool, group: Group, tmp_path: Path
):
    for same, resumed, live in group.call(keep_and_resume, tmp_path, bits, is_of_each):
        assert same
        assert resumed == live


@pytest.mark.parametrize(
    ("loss", "bits"), [("removed", None), ("altered", 4), slow("altered", None), slow("removed", 4)]
)
def test_prompt_when_one_process_lost_its_files_then_all_read_it(
    loss: str, bits: int | None, group: Group, tmp_path: Path
):
    cold = group.call(read, tmp_path, True, SECOND, bits, 2500)
    if loss == "removed":
        shutil.rmtree(tmp_path / "1")
    else:
        for path in (tmp_path / "1" / "nodes").iterdir():
            data = bytearray(path.read_bytes())
            data[-100] ^= 1
            path.write_bytes(data)
    read_again = group.call(read, tmp_path, True, SECOND, bits, 2500)
    hits = group.call(read, tmp_path, True, SECOND, bits, 2500)
    assert [each.num_tokens for each in (*read_again, *hits)] == [0, 0, 2749, 2749]
    for each in (*read_again, *hits):
        assert are_equal(each.states, cold[0].states)


def refused_in_one(folder: Path) -> str:
    """Read a prompt, with an argument that only the second process refuses; return the error."""
    model, rank = tiny_model("llama"), distributed.get_rank()
    with pytest.raises(PrefixStoreError) as refused:
        PrefixStore(folder).prefill(
            model, FIRST, make(None, group=distributed.group.WORLD), document_tokens=9999 * rank
        )
    return str(refused.value)


def other_prompts(folder: Path) -> str:
    prompt = (FIRST, SECOND)[distributed.get_rank()]
    with pytest.raises(OutOfStepError) as refused:
        PrefixStore(folder).prefill(tiny_model("llama"), prompt, make(None, group=distributed.group.WORLD))
    return str(refused.value)


def without_room(folder: Path) -> list[int]:
    """Read a prompt twice where the second process has no room for its share of the second pass."""
    rank, found = distributed.get_rank(), []
    for _ in range(2):
        store = PrefixStore(folder / str(rank), max_bytes="1200KiB" if rank else None)
        cache = make(None, group=distributed.group.WORLD)
        found.append(store.prefill(tiny_model("llama"), SECOND, cache, progress=False).num_tokens)
    return found


def test_prefill_when_one_process_fails_then_all_are_told(group: Group, tmp_path: Path):
    others, own = group.call(refused_in_one, tmp_path / "refused")
    assert "Rank 1 could not" in others
    assert "document_tokens must be" in own
    assert all("different prompts" in told for told in group.call(other_prompts, tmp_path / "other"))


def test_prefill_when_one_process_has_no_room_then_others_go_on(group: Group, tmp_path: Path):
    assert group.call(without_room, tmp_path) == [[0, 2048], [0, 2048]]
