"""
Every causal architecture of transformers: its tokens with our caches, its weights and experts in codes, and loading it.

The configs with which stock itself fails are listed, so that a new failure is seen.
"""

import copy
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, move_experts_to_host, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.weights.expert_layers import expert_modules

from models.architectures import CONFIGS, REPRESENTATIVES, small_config, small_model
from models.tiny_models import random_prompt
from weights.quantized_models import assert_as_quantized_afterwards, note_operations, with_dense_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # some models were not made for generating

# Configs of this version that cannot be shrunk so, or that make no model, or none that generates with stock's cache.
LISTED_VERSION = "5.24.0"
STOCK_CANNOT = """
    Blt CohereCompassText Dbrx DeepseekV2 Dots1 Dots3Note Dots3NoteText Dory Gemma3 Gemma3n Gemma3nText Gemma4
    Gemma4Assistant Gemma4Text Gemma4Unified Gemma4UnifiedAssistant Gemma4UnifiedText Git GotOcr2 Inkling2LoopText
    Inkling2Text LongcatFlash Mamba2 MiniMax MossTranscribeDiarize Musicgen MusicgenMelody OpenAIGPT Phi4Multimodal
    ProphetNet Qwen4Exp Qwen4ExpText Reformer XLNet xLSTM Xmod Zamba Zamba2 Zaya
"""
# What reads the states of those whose attention, where it is written out, does something that handles do not follow.
READS = {
    "BloomConfig": "aten.view",
    "CpmAntConfig": "aten.masked_fill",
    "DeepseekV3Config": "aten.view",
    "FalconConfig": "scaled_dot_product_attention with such arguments",
    "GPTNeoConfig": "aten.where",
    "MptConfig": "aten.masked_fill",
}
READS |= dict.fromkeys(("AXK1Config", "BailingHybridConfig", "Glm4MoeLiteConfig", "GPTNeoXJapaneseConfig"), "aten.view")
READS |= dict.fromkeys(("KimiLinearConfig", "MiniCPM3Config", "MvpConfig", "SarvamMLAConfig"), "aten.view")
READS |= dict.fromkeys(("TrOCRConfig", "XGLMConfig", "YoutuConfig"), "aten.view")
READS |= dict.fromkeys(("GraniteSWAConfig", "GraniteMoeSWAConfig"), "aten.logsumexp")
READS |= {"XLMConfig": "aten.masked_fill_", "JetMoeConfig": "aten.repeat", "DiffLlamaConfig": "aten.split"}
READS |= {"DogeConfig": "aten.transpose"}
# Their layers return their scores whether or not they are asked for, and the loop keeps them into the next layer.
READS |= dict.fromkeys(("MegatronBertConfig", "RemBertConfig", "RoFormerConfig"), "output_attentions")
# Puts 32 tokens of its own before a prompt, and so many are rounded to 8 bits unless kernels are exact.
MORE_TOKENS = {"CpmAntConfig"}
# The scores that choose experts are close to each other in these.
CLOSE_CHOICES = {"BailingHybridConfig", "GraniteMoeConfig", "GraniteMoeSharedConfig"}
# Tokens that come close enough to go to another expert; they are off, and those that see them.
OTHER_EXPERTS = {"ExaoneMoeConfig"}


class Architecture:
    """
    A small model, made once for all that is asked of it; no test changes it.

    Attributes:
        error: what stock raised while it was made, or generated.
        expected: the tokens that it generates with stock's cache.
    """

    def __init__(self, name: str):
        self.name = name
        self._model: PreTrainedModel | None = None
        self.error: Exception | None = None
        try:
            self._model = small_model(name)
            self.expected = generated(self._model, DynamicCache(config=self._model.config))
        except Exception as error:
            self.error = error

    def model(self) -> PreTrainedModel:
        """Return the model; skip the test where there is none."""
        if self._model is None:
            self.skip()
        return self._model

    def skip(self) -> NoReturn:
        pytest.skip(f"stock cannot: {type(self.error).__name__}: {str(self.error)[:100]}")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            name, marks=[pytest.mark.xdist_group(name), *([] if name in REPRESENTATIVES else [pytest.mark.slow])]
        )
        for name in CONFIGS
    ],
)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return Architecture(request.param)


def generated(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    ids = torch.arange(3, 43)[None]
    arguments = cache_argument(cache) | {"use_cache": True, "max_new_tokens": 12, "do_sample": False}
    return model.generate(ids, **arguments, eos_token_id=None)


def logits(model: PreTrainedModel, num_tokens: int) -> torch.Tensor:
    """Return the logits; skip the test where tokens alone do not give them."""
    try:
        with torch.no_grad():
            return model(input_ids=random_prompt(2, num_tokens).clamp(max=90)).logits
    except Exception as error:
        pytest.skip(f"not to be run with tokens alone: {error}")


def test_it_gives_the_tokens_that_it_gives_with_stock(architecture: Architecture):
    if (error := architecture.error) is not None:
        is_known = architecture.name.removesuffix("Config") in STOCK_CANNOT.split()
        if transformers.__version__ == LISTED_VERSION and not is_known:
            raise error
        architecture.skip()
    model = architecture.model()
    for cache in (DynamicHybridCache(model.config), OffloadedHybridCache(model.config, cpu_decode=False)):
        assert torch.equal(generated(model, cache), architecture.expected)
    cache.reset()
    assert torch.equal(generated(model, cache), architecture.expected)


def test_attention_that_is_written_out_gives_its_tokens_without_the_states(architecture: Architecture):
    if architecture.error is not None:
        architecture.skip()
    model, before = architecture.model(), architecture.model().config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        expected = generated(model, DynamicCache(config=model.config))
        cache = DynamicHybridCache(model.config)
        assert torch.equal(generated(model, cache), expected)
    finally:
        model.set_attn_implementation(before)
    if transformers.__version__ == LISTED_VERSION:
        reasons = {each.reason.removesuffix(" reads keys and values") for each in cache.stats.decisions}
        assert reasons == ({READS[architecture.name]} if architecture.name in READS else set())


def test_it_computes_with_its_codes_and_reads_no_weight_in_another_way(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    model, name = architecture.model(), architecture.name
    if name in MORE_TOKENS:
        request.getfixturevalue("exact_kernels")
    logits(model, 6)
    operations = note_operations(monkeypatch)
    with quantize_weights(model, 8, group_size=32, temporary=True):
        ours = logits(model, 6)
        assert not operations
        theirs = logits(with_dense_weights(model), 6)
    errors = (ours - theirs).abs().amax(-1) / theirs.abs().max()
    if name in OTHER_EXPERTS:
        assert errors.median() < 5e-3
    else:
        assert errors.max() < (5e-2 if name in CLOSE_CHOICES else 5e-3)


def test_coded_while_it_is_loaded_it_is_that_which_is_quantized_afterwards(architecture: Architecture, tmp_path: Path):
    dtype = torch.bfloat16
    model = copy.deepcopy(architecture.model()).to(dtype)
    try:
        model.save_pretrained(tmp_path, max_shard_size="40KB")
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    except Exception as error:
        pytest.skip(f"not to be saved and loaded: {error}")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_as_quantized_afterwards(tmp_path, dtype=dtype)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_its_experts_compute_what_they_do_one_after_the_other(architecture: Architecture, num_tokens: int):
    if not expert_modules(architecture.model()):
        pytest.skip(f"{architecture.name} has no stacked experts")
    model = copy.deepcopy(architecture.model())
    model.set_experts_implementation("eager")
    theirs = logits(model, num_tokens)
    with move_experts_to_host(model, temporary=True):
        ours = logits(model, num_tokens)
    # Choices of experts that come close to each other change with the last bits.
    assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()


@pytest.mark.slow
def test_representatives_have_every_kind_of_layer():
    kinds: dict[str, set[str]] = {}
    for name in CONFIGS:
        try:
            MODEL_FOR_CAUSAL_LM_MAPPING[CONFIGS[name]]  # imports kinds of layers of its own
            cache = DynamicCache(config=small_config(name))
        except Exception:
            continue  # listed above
        kinds[name] = {type(layer).__name__ for layer in cache.layers}
    assert set().union(*kinds.values()) == set().union(*(kinds.get(name, set()) for name in REPRESENTATIVES))
