"""A conversation that is kept goes on as if it had never ended."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_hybrid_cache import HybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.prefix_store import PrefixStore, PrefixStoreError

from .prompts import FORMS, are_equal, held
from .test_families import model_of, tokens
from models.tiny_models import FAMILIES, random_prompt, tiny_model

# The models have short contexts, and kernels of other packages are not installed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The prompt has .* context is", "ignore:No layer of this model", "ignore:The model has not used the cache"
)

LLAMA, DOCUMENT = tiny_model("llama"), random_prompt(1, 700)


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))


def generated(model: PreTrainedModel, tokens: torch.Tensor, cache: HybridCache) -> torch.Tensor:
    """Return the tokens after some that a cache may have, and an answer to a question of 20 more."""
    whole = torch.cat([tokens, random_prompt(1, 20) % 80 + 5], dim=1)
    return model.generate(whole, **cache_argument(cache), max_new_tokens=20, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("full", "llama"), ("offloaded", "gemma3"), ("quantized", "gemma3"), ("quantized", "qwen3_next")),
        *(("full", name) for name in ("FalconH1Config", "Lfm2Config", "Llama4TextConfig", "NemotronHConfig")),
    ],
)
def test_conversation_when_resumed_then_goes_on_to_the_bit(form: str, name: str, tmp_path: Path):
    model, store = tiny_model(name) if name in FAMILIES else model_of(name), PrefixStore(tmp_path)
    document = DOCUMENT if name in FAMILIES else tokens(130, 0)
    cache, length = FORMS[form](model.config), document.shape[1]
    store.prefill(model, document, cache, document_tokens=length, progress=False)
    talk = document
    for _ in range(2):
        talk = generated(model, talk, cache)
        own_id = store.keep(model, talk, cache, document_tokens=length, title="of two questions")
    (stored,) = store.prompts()
    assert (stored.id, stored.token_ids.tolist()) == (own_id, talk[0].tolist())
    assert (stored.document_tokens, stored.title, stored.is_conversation) == (length, "of two questions", True)
    resumed = FORMS[form](model.config)
    store.resume(model, stored, resumed)
    assert are_equal(held(resumed), held(cache))
    assert torch.equal(generated(model, talk, resumed), generated(model, talk, cache))
    assert are_equal(held(resumed), held(cache))


def test_turn_when_kept_then_writes_about_its_own_tokens(tmp_path: Path):
    document, store, cache = random_prompt(1, 2300), PrefixStore(tmp_path), FORMS["full"](LLAMA.config)
    store.prefill(LLAMA, document, cache, document_tokens=2300, progress=False)
    of_document, talk = num_bytes(tmp_path), generated(LLAMA, document, cache)
    store.keep(LLAMA, talk, cache, document_tokens=2300)
    # And what is stored again of the block that the document ends in, and the rest of the last block.
    most = talk.shape[1] - 2300 + 2 * 64
    assert num_bytes(tmp_path) - of_document < most / 2300 * of_document + 2**14


def test_conversation_when_resumed_in_another_form_then_refused(tmp_path: Path):
    store, full = PrefixStore(tmp_path), FORMS["full"]
    store.prefill(LLAMA, DOCUMENT, full(LLAMA.config), document_tokens=700, progress=False)
    (stored,) = store.prompts()
    with pytest.raises(PrefixStoreError, match="another form of cache"):
        store.resume(LLAMA, stored, FORMS["quantized"](LLAMA.config))
    store.remove(stored)
    assert store.prompts() == []
    assert num_bytes(tmp_path) == 0
    with pytest.raises(PrefixStoreError, match="cannot be gone on with"):
        store.resume(LLAMA, stored, full(LLAMA.config))
