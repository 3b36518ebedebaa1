"""Processes that share a cache keep and find their shares of a prompt, and go on together whatever each finds."""

import re
import shutil
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
from hf_hybrid_cache.cache import contents_of
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels

from .groups import NEEDS_GROUPS, Group
from common.modes import answer
from common.slow import slow
from models.tiny_models import tiny_model
from prefix_store import prompts
from prefix_store.prompts import alter_states, are_equal

pytestmark = [
    pytest.mark.xdist_group("groups"),
    NEEDS_GROUPS,
    pytest.mark.filterwarnings("ignore:The prompt has .* context is 512"),
]

FIRST, SECOND = prompts.prompts(common=2500, first=30, second=250)


def make(bits: int | None, **more: Any) -> HybridCache:
    config = tiny_model("llama").config
    return DynamicHybridCache(config, **more) if bits is None else QuantizedHybridCache(config, bits, **more)


class Read(NamedTuple):
    """The number of tokens of a prompt that came from a store, all states and logits, and an answer."""

    num_tokens: int
    states: list[torch.Tensor]
    answer: list[int]


def of_this_process(folder: Path, is_of_each: bool) -> Path:
    return folder / str(distributed.get_rank()) if is_of_each else folder


def read(folder: Path, is_of_each: bool, prompt: torch.Tensor, bits: int | None, document_tokens: int) -> Read:
    """Read a prompt through a store, in a folder of all processes or one of each, and answer it."""
    set_integer_kernels(False)
    cache = make(bits, group=distributed.group.WORLD)
    path = of_this_process(folder, is_of_each)
    num_tokens, states = prompts.read(path, tiny_model("llama"), prompt, cache, document_tokens)
    cache.crop(-1)
    return Read(num_tokens, states, answered(prompt, cache))


def read_alone(prompt: torch.Tensor, bits: int | None, document_tokens: int) -> list[int]:
    """Read a prompt in one process without a store, in the same passes, and answer it."""
    cache = make(bits)
    for end in (*range(2048, document_tokens, 2048), document_tokens, prompt.shape[1] - 1):
        prompts.next_logits(tiny_model("llama"), prompt[:, :end], cache)
        contents_of(cache).settle()  # as a store does
    return answered(prompt, cache)


def answered(prompt: torch.Tensor, cache: HybridCache) -> list[int]:
    return answer(tiny_model("llama"), prompt, cache, max_new_tokens=12)[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("bits", "is_of_each", "document_tokens"),
    [(None, False, 600), (4, True, 600), slow(4, False, 130), slow(None, True, 2200), slow(4, False, 2200)],
)
def test_prompt_when_processes_read_it_again_then_as_a_cold_read(
    bits: int | None, is_of_each: bool, document_tokens: int, group: Group, exact_kernels: None, tmp_path: Path
):
    first, second = prompts.prompts(common=document_tokens, first=30, second=250)
    alone, num_read = read_alone(second, bits, document_tokens), second.shape[1] - 1

    def read_by_all(folder: str, prompt: torch.Tensor) -> list[Read]:
        return group.call(read, tmp_path / folder, is_of_each, prompt, bits, document_tokens)

    def found(folder: str) -> list[int]:
        """Let all read the second prompt, as one does without a store; return how many tokens each finds."""
        reads = read_by_all(folder, second)
        for each in reads:
            assert are_equal(each.states, cold.states)
            assert each.answer == alone
        return [each.num_tokens for each in reads]

    cold = read_by_all("cold", second)[0]
    assert cold.num_tokens == 0
    read_by_all("store", first)
    assert [found("store"), found("store")] == [[document_tokens] * 2, [num_read] * 2]
    if is_of_each:  # one process has lost its files, and all of them read
        alter_states(tmp_path / "cold" / "1")
        shutil.rmtree(tmp_path / "store" / "0")
        for folder in ("cold", "store"):
            assert [found(folder), found(folder)] == [[0, 0], [num_read] * 2]


def keep_and_resume(folder: Path, bits: int | None, is_of_each: bool) -> None:
    """Keep a conversation, and go on with it in two caches."""
    set_integer_kernels(False)
    path, group = of_this_process(folder, is_of_each), distributed.group.WORLD
    talk = prompts.Talk(path, tiny_model("llama"), lambda config: make(bits, group=group), FIRST[:, :700])
    talk.new_tokens = 12
    for seed in (1, 2):
        talk.tokens = talk.said(90, seed)
        talk.keep()
    distributed.barrier()  # each lists all shares
    stored = max(talk.store.prompts(), key=lambda each: len(each.token_ids))
    talk.assert_goes_on_alike(stored, 20, seed=3)


@pytest.mark.parametrize(("bits", "is_of_each"), [(None, False), (4, True)])
def test_conversation_when_processes_resume_it_then_goes_on_to_the_bit(
    bits: int | None, is_of_each: bool, group: Group, tmp_path: Path
):
    group.call(keep_and_resume, tmp_path, bits, is_of_each)


def refused(what: str, folder: Path) -> str:
    """Read a prompt, with an argument that only the second process refuses, or another prompt in each."""
    rank = distributed.get_rank()
    given = {"document_tokens": 9999 * rank} if what == "an argument" else {}
    prompt = (FIRST, SECOND)[rank] if what == "other prompts" else FIRST
    cache = make(None, group=distributed.group.WORLD)
    with pytest.raises((PrefixStoreError, OutOfStepError)) as error:
        PrefixStore(folder).prefill(tiny_model("llama"), prompt, cache, **given)
    return f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("an argument", ["PrefixStoreError: .*Rank 1 could not", "PrefixStoreError: .*document_tokens must be"]),
        ("other prompts", ["OutOfStepError: .*different prompts"] * 2),
    ],
)
def test_prefill_when_one_process_fails_then_all_are_told(what: str, told: list[str], group: Group, tmp_path: Path):
    assert all(map(re.match, told, group.call(refused, what, tmp_path)))


def without_room(folder: Path) -> list[int]:
    """Read a prompt twice where the second process has no room for its share of the second pass."""
    rank, found = distributed.get_rank(), []
    for _ in range(2):
        store = PrefixStore(folder / str(rank), max_bytes="1200KiB" if rank else None)
        cache = make(None, group=distributed.group.WORLD)
        found.append(store.prefill(tiny_model("llama"), SECOND, cache, progress=False).num_tokens)
    return found


def test_prefill_when_one_process_has_no_room_then_others_go_on(group: Group, tmp_path: Path):
    assert group.call(without_room, tmp_path) == [[0, 2048], [0, 2048]]
