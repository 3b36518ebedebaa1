"""Whatever happened to caches that are kept: prompts find the bits of a cold read, and a resumed cache its own."""

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
from transformers import PreTrainedModel

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    OffloadedHybridCache,
    PrefixStore,
    PrefixStoreError,
    minmax,
    prefill,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.prefix_store.keys import Passes

from .prompts import are_equal, held, read
from common.soak import count, search_at_random
from models.tiny_models import random_prompt, tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")

TEXT = random_prompt(1, 3000)


def of_bits(bits: int | tuple[int, int]) -> Callable[[Any, int], HybridCache]:
    return lambda config, sink_tokens: HybridCache(config, codec=minmax(bits, sink_tokens=sink_tokens))


# Of a config and a number of sinks.
MAKERS: dict[str, Callable[[Any, int], HybridCache]] = {
    "full": lambda config, _: DynamicHybridCache(config),
    "offloaded": lambda config, _: OffloadedHybridCache(config),
    **{f"{bits} bits": of_bits(bits) for bits in (8, 4, 2, (4, 2))},
}


class Form(NamedTuple):
    """A form of a cache, and what its model computes with."""

    maker: str = "4 bits"
    sink_tokens: int = 64
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"

    def model(self) -> PreTrainedModel:
        return model_of(self.dtype, self.attention)

    def make(self) -> HybridCache:
        return MAKERS[self.maker](self.model().config, self.sink_tokens)

    def read(self, folder: Path, num_tokens: int, num_own: int, after_document: int, seed: int) -> Any:
        """
        Read a prompt through the store of a folder, and one token more, see `prompts.read`; return its passes, too.

        The prompt begins as the text does, but for its own last tokens. Without a seed it has no document.
        """
        common, document = max(0, num_tokens - num_own), max(0, num_tokens - after_document) if seed else 0
        prompt = torch.cat([TEXT[:, :common], random_prompt(1, num_tokens - common + 1, seed)], dim=1)
        return *read(folder, self.model(), prompt, self.make(), document), Passes(num_tokens, document), prompt


@functools.cache
def model_of(dtype: torch.dtype, attention: str) -> PreTrainedModel:
    model = copy.deepcopy(tiny_model("llama", dtype))
    model.set_attn_implementation(attention)
    return model


class Told:
    """A cache with a text whose tokens it has, and what programs do with one."""

    def __init__(self, folder: Path, form: Form, model: PreTrainedModel | None = None):
        self.folder, self.form, self.model = folder, form, model or form.model()
        self.store, self.own_id, self.read_through = PrefixStore(folder), None, list[np.ndarray]()
        self.cache = self.make()

    def make(self) -> HybridCache:
        return MAKERS[self.form.maker](self.model.config, self.form.sink_tokens)

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
        self.cache = self.make()
        ids = TEXT[:, : count + 2]
        self.store.prefill(self.model, ids, self.cache, document_tokens=min(document, count), progress=False)

    def prompt(self, *prompt: int) -> None:
        """Read a prompt with another cache: it has the bits of a cold read, and finds what prompts before it kept."""
        found, states, passes, tokens = self.form.read(self.folder, *prompt)
        assert are_equal(states, cold(self.form, *prompt))
        keys, ends = passes.keys(tokens[0].numpy()), [0, *passes.ends()]
        kept = [end for start, end in itertools.pairwise(ends) if passes.is_kept(start, end)]
        known = [end for end in kept if any(np.array_equal(each[:end], keys[:end]) for each in self.read_through)]
        assert found >= max(known, default=0)
        self.read_through.append(keys)
        count("prompts read from a folder with others")

    def anew(self, *_: int) -> None:
        self.cache.reset()

    def crop(self, count: int, _: int) -> None:
        self.cache.crop(-min(count, self.num_tokens))

    def edit(self, count: int, role: int) -> None:
        """Change the states of one token."""
        layer: Any = self.cache.layers[-1]
        if self.num_tokens > count:
            states = layer.keys.clone(), layer.values.clone()
            states[role % 2][:, :, count] += 1.0
            layer.set(*states)

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
        again = self.make()
        self.store.resume(self.model, stored[own_id], again)
        if stored[own_id].is_conversation:
            assert are_equal(held(again), held(self.cache))
            whole = TEXT[:, : self.num_tokens + count]
            for cache in (again, self.cache):
                prefill(self.model, whole, cache, chunk_size=64, progress=False)
            assert are_equal(held(again), held(self.cache))
        self.cache = again


@functools.cache
def cold(form: Form, *prompt: int) -> list[torch.Tensor]:
    with TemporaryDirectory() as folder:
        states: list[torch.Tensor] = form.read(Path(folder), *prompt)[1]
        return states


LENGTHS = st.one_of(*map(st.integers, (2, 128, 1000), (400, 1300, 2900)))
STEPS = [Told.of_store, Told.read, Told.embed, Told.crop, Told.edit, Told.keep, Told.keep, Told.anew]
STEP = st.tuples(st.sampled_from(STEPS), st.integers(1, 330), st.integers(1, 300))
PROMPT = st.tuples(st.just(Told.prompt), LENGTHS, st.integers(0, 200), st.integers(0, 200), st.integers(0, 3))
FORMS = st.builds(
    Form,
    maker=st.sampled_from([*MAKERS]),
    sink_tokens=st.sampled_from([0, 64, 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    attention=st.sampled_from(["sdpa", "eager"]),
)
LONGER_ONES = [(3000, 50, 0, 0), (2700, 0, 0, 0), (2900, 0, 0, 0), (1300, 0, 100, 1), (1500, 300, 300, 2)]
# A document whose first block is due in the pass that follows it, and chooses the codec.
FIRST_BLOCKS = [(170, 20, 20, 1), (300, 150, 150, 1)]
# Documents that end before the sinks do, and prompts that go on from there.
SHORT_ONES = [(50, 20, 20, 1), (330, 300, 300, 1), (330, 300, 300, 1), (400, 170, 100, 1), (400, 170, 100, 1)]
PROMPTS = [(Told.prompt, *each) for each in (*LONGER_ONES, *FIRST_BLOCKS, *SHORT_ONES)]
FILLED = [(Told.embed, 300, 1), (Told.keep, 0, 0), (Told.anew, 0, 0), (Told.read, 300, 300), (Told.keep, 0, 0)]
CROPPED = [(Told.of_store, 300, 150), (Told.read, 300, 64), (Told.crop, 450, 0), (Told.keep, 1, 0), (Told.read, 99, 99)]
# Back to the end of a pass that is stored, and of one that was too short to be.
TO_AN_END = [(Told.of_store, 150, 150), (Told.read, 299, 64), (Told.crop, 300, 0), (Told.keep, 1, 0)]
TO_A_SHORT_ONE = [(Told.of_store, 100, 50), (Told.read, 299, 64), (Told.crop, 299, 0), (Told.keep, 1, 0)]
EDITED = [(Told.of_store, 300, 300), (Told.edit, 100, 0), (Told.keep, 1, 0), (Told.edit, 9, 1), (Told.keep, 1, 0)]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
def test_any_history_of_a_folder_leaves_the_bits_of_a_cold_read(tmp_path: Path):
    folders = map(str, itertools.count())

    @search_at_random(5)
    @given(FORMS, st.lists(STEP | PROMPT, max_size=8))
    @example(Form("(4, 2) bits"), PROMPTS[:7])
    @example(Form("8 bits", attention="eager"), PROMPTS[5:])
    @example(Form(), FILLED)
    @example(Form(), [(Told.read, 300, 300), (Told.keep, 0, 0)])
    @example(Form("full"), CROPPED)
    @example(Form(), CROPPED)
    @example(Form(), TO_AN_END)
    @example(Form(), TO_A_SHORT_ONE)
    @example(Form(), EDITED)
    def search(form: Form, history: list[tuple[Any, ...]]) -> None:
        told = Told(tmp_path / next(folders), form)
        for step, *numbers in history:
            if told.num_tokens + numbers[0] < TEXT.shape[1] or step == Told.prompt:
                step(told, *numbers)
        for prompt in ((500, 0, 0, 0), (331, 0, 31, 1), (302, 0, 152, 1), (102, 0, 52, 1)):
            told.prompt(*prompt)

    search()


def test_conversation_when_another_has_its_tokens_then_has_its_own_states(tmp_path: Path):
    first, second = (Told(tmp_path, Form(), tiny_model("gemma3")) for _ in range(2))
    for told, step in ((first, first.embed), (second, second.read)):
        told.of_store(300, 300)
        step(100, 50)
        told.keep(1, 0)
    assert len({*(each.id for each in first.store.prompts())}) == 2


def test_keep_when_there_are_several_sequences_then_refused(tmp_path: Path):
    told = Told(tmp_path, Form("full"))
    told.read(100, 100)
    told.cache.batch_repeat_interleave(2)
    with pytest.raises(PrefixStoreError, match="cannot be kept: layer 0 does not have states of 100 tokens"):
        told.keep(0, 0)
    assert told.store.prompts() == []


def test_document_when_a_pass_would_have_one_token_ends_with_its_chunk(tmp_path: Path):
    told = Told(tmp_path, Form("full"))
    told.of_store(1, 1)
    assert told.store.prompts() == []
