"""Nodes with forged descriptions are not used, or the model goes on from them: a decode step, and a prompt."""

import contextlib
import shutil
import warnings
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from transformers import PreTrainedModel

from fuzz.altered import altered
from hf_hybrid_cache import HostMemoryError, HybridCache, IncompleteCacheError, Placement, PrefixStore, minmax

from common.soak import count, search_at_random
from models.tiny_models import random_prompt, tiny_model
from prefix_store.forged import describe, description_of, nodes_of
from prefix_store.prompts import FORMS, next_logits

# The models have short contexts.
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")]
PLACEMENTS = FORMS | {
    "gemma3": FORMS["full"],
    "dequantized": lambda config: HybridCache(config, codec=minmax(4), placement=Placement(cpu_decode=False)),
    "split": lambda config: HybridCache(
        config, codec=minmax(4), placement=Placement(cpu_decode=True, offload=True, device_tokens=192)
    ),
}
PROMPT = random_prompt(1, 1400)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a prompt, by the names of placements."""
    folder = tmp_path_factory.mktemp("prompts")
    for name, make in PLACEMENTS.items():
        model = model_of(name)
        PrefixStore(folder / name).prefill(model, PROMPT[:, :1281], make(model.config), progress=False)
    return folder


def model_of(name: str) -> PreTrainedModel:
    return tiny_model("gemma3" if name == "gemma3" else "llama")


@search_at_random(25)
@given(data=st.data(), name=st.sampled_from([*PLACEMENTS]))
def test_a_forged_node_is_not_used_or_can_be_gone_on_from(data: st.DataObject, name: str, stored: Path, tmp_path: Path):
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    shutil.copytree(stored / name, tmp_path / "store")
    node = data.draw(st.sampled_from(nodes_of(tmp_path / "store")))
    tree = description_of(node)
    tree["states"] = data.draw(altered(tree["states"]))
    describe(node, tree)
    model = model_of(name)
    cache = PLACEMENTS[name](model.config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*( removed|removed from the store)")
        try:
            reuse = PrefixStore(tmp_path / "store").prefill(model, PROMPT[:, :1281], cache, progress=False)
        except HostMemoryError:
            return
    again = PLACEMENTS[name](model.config)
    # What was not used is read, and kept anew.
    store = PrefixStore(tmp_path / "store")
    assert reuse.num_tokens or store.prefill(model, PROMPT[:, :1281], again, at_least=1280).num_tokens == 1280
    count(f"forged nodes that were {'gone on from' if reuse.num_tokens else 'not used'}")
    # States of other sizes are told from new ones, and layers without states from those that have some.
    with contextlib.suppress(ValueError, IncompleteCacheError):
        for length in (1281, 1282, 1400):
            assert next_logits(model, PROMPT[:, :length], cache).isfinite().all()
