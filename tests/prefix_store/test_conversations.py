"""A conversation that is kept goes on as if it had never ended."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hybrid_cache import HybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.prefix_store import PrefixStore, PrefixStoreError, StoredPrompt

from .prompts import FORMS, are_equal, held, hits
from models.tiny_models import random_prompt, tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")

DOCUMENT = random_prompt(1, 2300)


class Talk:
    """A conversation about the document, whose states are in a store."""

    def __init__(self, folder: Path, form: str = "full", family: str = "llama", length: int = 2300):
        self.folder, self.form, self.length = folder, form, length
        self.model, self.store, self.tokens = tiny_model(family), PrefixStore(folder), DOCUMENT[:, :length]
        self.cache = FORMS[form](self.model.config)
        self.store.prefill(self.model, self.tokens, self.cache, document_tokens=length, progress=False)

    def said(self, count: int, seed: int = 1, cache: HybridCache | None = None) -> torch.Tensor:
        """Read a question of `count` tokens, and generate 70 token by token; return all tokens."""
        whole = torch.cat([self.tokens, random_prompt(1, count, seed)], dim=1)
        options = cache_argument(self.cache if cache is None else cache)
        return self.model.generate(whole, **options, max_new_tokens=70, do_sample=False)

    def keep(self, **options: Any) -> str:
        return self.store.keep(self.model, self.tokens, self.cache, document_tokens=self.length, **options)

    def resumed(self, stored: StoredPrompt) -> HybridCache:
        """Return another cache, which has the same states."""
        cache = FORMS[self.form](self.model.config)
        self.store.resume(self.model, stored, cache)
        assert cache.get_seq_length() == self.cache.get_seq_length()
        assert are_equal(held(cache), held(self.cache))
        return cache

    def assert_goes_on_alike(self, other: HybridCache, count: int, seed: int) -> None:
        """Let both caches go on, and compare tokens and states."""
        tokens = self.said(count, seed, other)
        self.tokens = self.said(count, seed)
        assert torch.equal(tokens, self.tokens)
        assert are_equal(held(other), held(self.cache))


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "nodes").iterdir())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_conversation_when_resumed_then_goes_on_to_the_bit(family: str, form: str, tmp_path: Path):
    talk = Talk(tmp_path, form, family)
    for seed in (1, 2):
        talk.tokens = talk.said(20, seed)
        talk.keep(title="of two questions")
    (stored,) = talk.store.prompts()
    assert stored.token_ids.tolist() == talk.tokens[0].tolist()
    assert talk.store.prompts() == [stored]
    assert (stored.document_tokens, stored.title, stored.is_conversation) == (2300, "of two questions", True)
    talk.assert_goes_on_alike(talk.resumed(stored), 20, seed=3)


@pytest.mark.parametrize(
    ("family", "length", "questions"),
    [("llama", 100, (90, 90)), ("llama", 20, (20, 20, 200)), ("gemma3", 20, (20, 20, 200))],
)
def test_conversation_when_codecs_are_chosen_late_then_goes_on(
    family: str, length: int, questions: tuple[int, ...], tmp_path: Path
):
    talk, own_id = Talk(tmp_path, "quantized", family, length), None
    for seed, count in enumerate(questions):
        own_id = talk.keep(replaces=own_id)
        stored = next(each for each in talk.store.prompts() if each.id == own_id)
        talk.assert_goes_on_alike(talk.resumed(stored), count, seed)


def test_turn_when_kept_then_writes_about_its_own_tokens(tmp_path: Path):
    talk = Talk(tmp_path)
    before = {file: file.read_bytes() for file in (tmp_path / "nodes").iterdir()}
    of_document, talk.tokens = num_bytes(tmp_path), talk.said(130)
    talk.keep()
    assert all(file.read_bytes() == content for file, content in before.items())
    # And what is stored again of the block that the document ends in, and the rest of the last block.
    most = talk.tokens.shape[1] - talk.length + 2 * 64
    assert num_bytes(tmp_path) - of_document < most / talk.length * of_document + 2**14


@pytest.mark.parametrize("form", FORMS)
def test_answers_when_a_prompt_has_them_then_are_read_again(form: str, tmp_path: Path):
    talk = Talk(tmp_path / "store", form)
    talk.tokens = talk.said(200)
    talk.keep()
    assert hits(tmp_path, talk.model, FORMS[form], talk.tokens, document=talk.length) == [talk.length]


@pytest.mark.parametrize("form", FORMS)
def test_conversation_when_a_turn_is_taken_back_then_kept_anew(form: str, tmp_path: Path):
    talk = Talk(tmp_path, form)
    first = talk.tokens = talk.said(90)
    talk.keep()
    second = talk.tokens = talk.said(90, seed=2)
    talk.keep(title="second")
    talk.cache.crop(-(talk.cache.get_seq_length() - first.shape[1] + 30))
    talk.tokens = first[:, : talk.cache.get_seq_length()]
    talk.tokens = talk.said(90, seed=3)
    talk.keep(title="third")
    stored = {each.title: each for each in talk.store.prompts()}
    assert list(stored["third"].token_ids) == talk.tokens[0].tolist()
    assert list(stored["second"].token_ids) == second[0].tolist()
    talk.resumed(stored["third"])


@pytest.mark.parametrize("form", ["full", "quantized"])
def test_conversation_when_kept_twice_at_a_border_then_is_one(form: str, tmp_path: Path):
    talk = Talk(tmp_path, form)
    talk.tokens = talk.said(63)
    assert talk.cache.get_seq_length() % 64 == 0
    ids = [talk.keep() for _ in range(2)]
    (stored,) = talk.store.prompts()
    assert ids == [stored.id] * 2


def test_conversation_when_resumed_in_another_form_then_refused(tmp_path: Path):
    talk = Talk(tmp_path)
    (stored,) = talk.store.prompts()
    with pytest.raises(PrefixStoreError, match="another form of cache"):
        talk.store.resume(talk.model, stored, FORMS["quantized"](talk.model.config))
    talk.store.remove(stored)
    assert talk.store.prompts() == []
    assert num_bytes(tmp_path) == 0
    with pytest.raises(PrefixStoreError, match="cannot be gone on with"):
        talk.resumed(stored)


@pytest.mark.parametrize("length", [90, 2100])
def test_document_when_its_last_pass_is_short_then_no_prompt_finds_it(length: int, tmp_path: Path):
    talk = Talk(tmp_path / "store", length=length)
    talk.tokens = talk.said(30)
    talk.keep()
    (stored,) = (each for each in talk.store.prompts() if each.is_conversation)
    assert stored.document_tokens == length
    hits(tmp_path, talk.model, FORMS["full"], torch.cat([DOCUMENT[:, :length], random_prompt(1, 300, 2)], dim=1))
