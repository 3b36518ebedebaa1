"""A prompt whose beginning is stored has the bits of one that is read whole."""

from pathlib import Path

import pytest
import torch

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.prefix_store import PrefixStore
from hf_hybrid_cache.prefix_store.keys import Passes

from .prompts import FORMS, are_equal, hits, prompts, read
from model_identity.models import new_llama
from models.tiny_models import random_prompt, tiny_model

CHUNK = 2048

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")


def test_passes_end_where_the_text_says_and_go_on_from_any_end():
    for num_tokens, document, ends in (
        (2049, 0, [2048, 2049]),
        (4223, 0, [2048, 4096, 4223]),
        (600, 600, [600]),
        (3000, 2060, [2060, 2560, 3000]),
        (3000, 2065, [2048, 2065, 2560, 3000]),
        (8050, 7000, [2048, 4096, 6144, 7000, 7168, 7680, 8050]),
    ):
        passes = Passes(num_tokens, document)
        assert passes.ends() == ends
        assert all(passes.ends(end) == ends[index + 1 :] for index, end in enumerate(ends))


def test_hit_when_products_are_wide_then_equals_a_cold_read(tmp_path: Path):
    """Some libraries sum up 2,048 products in another order for fewer rows."""
    model, both = new_llama(intermediate_size=2048), prompts(common=1100, first=150, second=700)
    assert hits(tmp_path, model, FORMS["full"], *both) == [0, 1024]


def test_prefill_when_less_is_stored_than_wanted_then_reads_nothing(tmp_path: Path):
    model, store = new_llama(), PrefixStore(tmp_path)
    document = random_prompt(1, 150)
    for at_least, stored, num_held in ((1, 0, 0), (0, 0, 150), (151, 150, 0), (150, 150, 199)):
        prompt = document if not stored else torch.cat([document, random_prompt(1, 50, 1)], dim=1)
        cache = DynamicHybridCache(model.config)
        reuse = store.prefill(model, prompt, cache, document_tokens=150, at_least=at_least, progress=False)
        assert (reuse.num_tokens, cache.get_seq_length()) == (stored, num_held)


@pytest.mark.parametrize(
    ("family", "form"), [("mistral_sliding", "full"), ("gemma4_shared", "quantized"), ("deepseek_v3", "offloaded")]
)
def test_hit_when_prompts_begin_alike_then_equals_a_cold_read(family: str, form: str, tmp_path: Path):
    """Prompts with documents are read by all families in `test_families.py`."""
    both = prompts(common=2200, first=30, second=150)
    assert hits(tmp_path, tiny_model(family), FORMS[form], *both) == [0, CHUNK]


def test_prompts_when_half_is_common_then_it_is_stored_once(tmp_path: Path):
    model, sizes = tiny_model("llama"), []
    for prompt in prompts(common=2048, first=2049, second=2049):
        read(tmp_path, model, prompt, FORMS["full"](model.config))
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")))
    assert sizes[1] < 1.55 * sizes[0]


def test_read_when_interrupted_then_goes_on_from_the_last_pass(tmp_path: Path):
    model, make, prompt = tiny_model("llama"), FORMS["quantized"], random_prompt(1, 4800)
    _, cold = read(tmp_path / "cold", model, prompt, make(model.config))
    passes: list[int] = []

    def interrupt(num_tokens: int) -> None:
        passes.append(num_tokens)
        if sum(passes) > CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PrefixStore(tmp_path / "store").prefill(model, prompt, make(model.config), progress=interrupt)
    reused, states = read(tmp_path / "store", model, prompt, make(model.config))
    assert reused == 2 * CHUNK
    assert are_equal(states, cold)
