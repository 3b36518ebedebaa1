"""A conversation that is kept goes on as if it had never ended."""

from pathlib import Path

import pytest

from hf_hybrid_cache.prefix_store import PrefixStoreError

from .prompts import FORMS, Talk
from .test_families import model_of, tokens
from models.tiny_models import FAMILIES, random_prompt, tiny_model

# The models have short contexts, and kernels of other packages are not installed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The prompt has .* context is", "ignore:The model has not used the cache"
)

LLAMA, DOCUMENT = tiny_model("llama"), random_prompt(1, 700)


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("full", "llama"), ("offloaded", "gemma3"), ("quantized", "gemma3"), ("quantized", "qwen3_next")),
        *(("full", name) for name in ("FalconH1Config", "Lfm2Config", "Llama4TextConfig", "NemotronHConfig")),
    ],
)
def test_conversation_when_resumed_then_goes_on_to_the_bit(form: str, name: str, tmp_path: Path):
    model = tiny_model(name) if name in FAMILIES else model_of(name)
    talk = Talk(tmp_path, model, FORMS[form], DOCUMENT if name in FAMILIES else tokens(130, 0))
    for seed in (1, 2):
        talk.tokens = talk.said(20, seed)
        own_id = talk.keep(title="of two questions")
    (stored,) = talk.store.prompts()
    assert stored == talk.stored(own_id)
    assert stored.token_ids.tolist() == talk.tokens[0].tolist()
    assert (stored.document_tokens, stored.title, stored.is_conversation) == (talk.length, "of two questions", True)
    talk.assert_goes_on_alike(stored, 40, seed=3)


def test_turn_when_kept_then_writes_about_its_own_tokens(tmp_path: Path):
    talk = Talk(tmp_path, LLAMA, FORMS["full"], random_prompt(1, 2300))
    of_document, talk.tokens = num_bytes(tmp_path), talk.said(130)
    talk.keep()
    # And what is stored again of the block that the document ends in, and the rest of the last block.
    most = talk.tokens.shape[1] - talk.length + 2 * 64
    assert num_bytes(tmp_path) - of_document < most / talk.length * of_document + 2**14


def test_conversation_when_resumed_in_another_form_then_refused(tmp_path: Path):
    talk = Talk(tmp_path, LLAMA, FORMS["full"], DOCUMENT)
    (stored,) = talk.store.prompts()
    with pytest.raises(PrefixStoreError, match="another form of cache"):
        talk.store.resume(talk.model, stored, FORMS["quantized"](talk.model.config))
    talk.store.remove(stored)
    assert talk.store.prompts() == []
    assert num_bytes(tmp_path) == 0
    with pytest.raises(PrefixStoreError, match="cannot be gone on with"):
        talk.store.resume(talk.model, stored, FORMS["full"](talk.model.config))
