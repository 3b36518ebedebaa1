"""Whatever happened to caches that are kept: prompts find the bits of a cold read, and a resumed cache its own."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    PrefixStore,
    PrefixStoreError,
    QuantizedHybridCache,
    prefill,
)
from hf_hybrid_cache.cache_argument import cache_argument

from .prompts import are_equal, held, read
from common.soak import count, search_at_random
from models.tiny_models import random_prompt, tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")

TEXT = random_prompt(1, 1000)
MAKERS: dict[str, Callable[[Any], HybridCache]] = {
    "full": DynamicHybridCache,
    "4 bits": lambda config: QuantizedHybridCache(config, bits=4),
}


class Told:
    """A cache with a text whose tokens it has, and what programs do with one."""

    def __init__(self, folder: Path, family: str, form: str):
        self.model, self.make = tiny_model(family), MAKERS[form]
        self.store, self.cache, self.own_id = PrefixStore(folder), self.make(self.model.config), None

    @property
    def num_tokens(self) -> int:
        return self.cache.get_seq_length()

    def read(self, count: int, chunk: int) -> None:
        """Go on in the text by a `prefill` without a store, in passes of another size."""
        prefill(self.model, TEXT[:, : self.num_tokens + count], self.cache, chunk_size=chunk, progress=False)

    @torch.no_grad()
    def embed(self, count: int, factor: int) -> None:
        """Go on by a forward pass over embeddings of other tokens than those of the text."""
        ids = TEXT[:, self.num_tokens : self.num_tokens + count]
        embeddings = self.model.get_input_embeddings()(ids) * (1 + factor % 3)
        self.model(inputs_embeds=embeddings, **cache_argument(self.cache))

    def of_store(self, count: int, document: int) -> None:
        """Begin anew with a document that the store reads, or has."""
        self.cache = self.make(self.model.config)
        ids = TEXT[:, : count + 2]
        self.store.prefill(self.model, ids, self.cache, document_tokens=min(document, count), progress=False)

    def anew(self, *_: int) -> None:
        self.cache.reset()

    def crop(self, count: int, _: int) -> None:
        self.cache.crop(-min(count, self.num_tokens))

    def edit(self, count: int, role: int) -> None:
        """Write to the states of one token."""
        layer: Any = self.cache.layers[-1]
        if self.num_tokens > count:
            states = layer.values if role % 2 else layer.keys
            states[:, :, count] += 1.0

    def keep(self, count: int, replaced: int) -> None:
        """
        Keep it, perhaps in the place of the last one, and go on with another cache, which has the same bits.

        Of a document alone these are those of a cold read. Some tokens later both have the same bits again.
        """
        if not self.num_tokens:
            return
        replaces = self.own_id if replaced % 3 else None
        own_id = self.store.keep(self.model, TEXT[:, : self.num_tokens], self.cache, replaces=replaces)
        stored = {each.id: each for each in self.store.prompts()}
        assert replaces in (None, own_id) or replaces not in stored or not stored[replaces].is_conversation
        self.own_id = own_id
        assert stored[own_id].token_ids.tolist() == TEXT[0, : self.num_tokens].tolist()
        again = self.make(self.model.config)
        self.store.resume(self.model, stored[own_id], again)
        if stored[own_id].is_conversation:
            assert are_equal(held(again), held(self.cache))
            whole = TEXT[:, : self.num_tokens + count]
            for cache in (again, self.cache):
                prefill(self.model, whole, cache, chunk_size=64, progress=False)
            assert are_equal(held(again), held(self.cache))
        self.cache = again


STEPS = [Told.of_store, Told.read, Told.embed, Told.crop, Told.edit, Told.keep, Told.keep, Told.anew]
HISTORY = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(1, 330), st.integers(1, 300)), max_size=8)
FILLED = [(Told.embed, 300, 1), (Told.keep, 0, 0), (Told.anew, 0, 0), (Told.read, 300, 300), (Told.keep, 0, 0)]
CROPPED = [(Told.of_store, 300, 150), (Told.read, 300, 64), (Told.crop, 450, 0), (Told.keep, 1, 0), (Told.read, 99, 99)]
# Back to the end of a pass that is stored, and of one that was too short to be.
TO_AN_END = [(Told.of_store, 150, 150), (Told.read, 299, 64), (Told.crop, 300, 0), (Told.keep, 1, 0)]
TO_A_SHORT_ONE = [(Told.of_store, 100, 50), (Told.read, 299, 64), (Told.crop, 299, 0), (Told.keep, 1, 0)]
EDITED = [(Told.of_store, 300, 300), (Told.edit, 100, 0), (Told.keep, 1, 0), (Told.edit, 9, 1), (Told.keep, 1, 0)]


@pytest.mark.soak
def test_any_history_of_kept_caches_leaves_the_bits_of_a_cold_read(tmp_path: Path):
    folders = map(str, itertools.count())

    def prompted(folder: Path, form: str, length: int, document: int) -> list[torch.Tensor]:
        model = tiny_model("llama")
        return read(folder, model, TEXT[:, :length], MAKERS[form](model.config), document)[1]

    @functools.cache
    def cold(*prompt: Any) -> list[torch.Tensor]:
        return prompted(tmp_path / next(folders), *prompt)

    @search_at_random(12)
    @given(st.sampled_from([*MAKERS]), HISTORY)
    @example("4 bits", FILLED)
    @example("4 bits", [(Told.read, 300, 300), (Told.keep, 0, 0)])
    @example("full", CROPPED)
    @example("4 bits", CROPPED)
    @example("4 bits", TO_AN_END)
    @example("4 bits", TO_A_SHORT_ONE)
    @example("4 bits", EDITED)
    def search(form: str, history: list[tuple[Callable[[Told, int, int], None], int, int]]) -> None:
        folder = tmp_path / next(folders)
        told = Told(folder, "llama", form)
        for step, number, other in history:
            if told.num_tokens + number < TEXT.shape[1]:
                step(told, number, other)
        for length, document in ((500, 0), (331, 300), (302, 150), (102, 50)):
            assert are_equal(prompted(folder, form, length, document), cold(form, length, document))
            count("prompts read beside conversations with the same tokens")

    search()


def test_conversation_when_another_has_its_tokens_then_has_its_own_states(tmp_path: Path):
    first, second = Told(tmp_path, "gemma3", "4 bits"), Told(tmp_path, "gemma3", "4 bits")
    for told, step in ((first, first.embed), (second, second.read)):
        told.of_store(300, 300)
        step(100, 50)
        told.keep(1, 0)
    assert len({*(each.id for each in first.store.prompts())}) == 2


def test_keep_when_there_are_several_sequences_then_refused(tmp_path: Path):
    told = Told(tmp_path, "llama", "full")
    told.read(100, 100)
    told.cache.batch_repeat_interleave(2)
    with pytest.raises(PrefixStoreError, match="cannot be kept: layer 0 does not have states of 100 tokens"):
        told.keep(0, 0)
    assert told.store.prompts() == []


def test_document_when_a_pass_would_have_one_token_ends_with_its_chunk(tmp_path: Path):
    told = Told(tmp_path, "llama", "full")
    told.of_store(1, 1)
    assert told.store.prompts() == []
