"""The command `plan`: its first lines, its tables, what it measures, and its JSON."""

import json
import re
from pathlib import Path

import pytest

from hf_hybrid_cache.models.shapes import SHAPES
from hf_hybrid_cache.planning.candidates import BITS
from hf_hybrid_cache.scalars import PREFILL_CHUNK_SIZE

from .commands import error_of, run
from models.gguf_files import write_gguf
from models.tiny_models import FAMILIES, random_prompt, tiny_model

FEW = ["--prefill-chunk-size", "512"]
LLAMA = ["--model", "meta-llama/llama-3.2-1b", "--context", "128K"]
CARD = ["--gpu-memory", "8GiB", "--host-memory", "32GiB"]
LAPTOP = ["--model", "meta-llama/Llama-3.2-3B", "--gpu-memory", "0", "--host-memory", "16GiB"]
OLMOE = ["--model", "olmoe-1b-7b-0924", "--context", "2K", "--batch-size", "4", "--gpu-memory", "4GiB", *FEW]


FEW_BITS = ("--bits 8 --weights 8 ", "--bits 4 --weights 4 ")


def printed(*arguments: str, code: int = 0) -> str:
    return run("plan", *arguments, code=code).stdout


def plans_of(*arguments: str, code: int = 0) -> dict:
    """Return the JSON; the exit code is 1 where nothing fits."""
    answer: dict = json.loads(printed(*arguments, "--json", code=code))
    assert (answer["recommended"] is None) == (code == 1)
    return answer


def in_one_line(text: str) -> str:
    return " ".join(text.split())


SAID = {  # in the text of a plan, which has its lines joined, or as a line of it
    tuple(LAPTOP): [
        "with 8,192 tokens, the default of --context; up to 76,736 fit Recommended:",
        "Recommended: weights, keys and values as they are (dynamic, on the CPU). It takes 7.8 GiB of host memory.",
        "4-bit weights want a calibrated model: docs/weights.md.",
        "No times were measured: --measure does it, on this machine",
    ],
    (*LLAMA, *CARD, *FEW): [
        "Recommended: weights, keys and values as they are (dynamic, on the GPU)",
        "cache = DynamicHybridCache(model.config)",
        "Caches take within 3% of what is said",
        "8.0 GiB of GPU memory and 32.0 of host memory are there",
    ],
    (*LLAMA, "--gpu-memory", "6GiB", "--host-memory", "32GiB"): [
        "GPU + host: as much as fits is on the GPU",
        "device_tokens=",
    ],
    ("--model", "Qwen/Qwen3-4B", "--context", "32K", *CARD): [
        "(dynamic, on the CPU). It takes 13.4 GiB of host memory. The GPU is not used: with weights as they are, a",
        "process, 8.4 GiB would be there before any keys and values. Weights in 8 bits of another library "
        "(bitsandbytes, GPTQ), about 4.2 GiB, fit there, with keys and values as they are (offloaded, GPU + host)",
    ],
    (*OLMOE, "--host-memory", "16GiB"): [
        "Experts take 12.0 GiB, other weights 0.9.",
        "With experts in host memory:",
        "(dynamic, on the GPU)",
        'move_experts_to_host(model) model.to("cuda") cache = DynamicHybridCache(',
    ],
    (*OLMOE, "--host-memory", "7GiB"): ["quantization_config=QuantizedWeightsConfig(bits=4, only_experts=True)"],
}


@pytest.mark.parametrize("options", SAID)
def test_a_plan_says_what_is_recommended_and_on_what_it_rests(options: tuple[str, ...]):
    printed_lines = printed(*options)
    text = in_one_line(printed_lines)
    assert [said for said in SAID[options] if said not in text] == []
    assert ("expert" in text) == (OLMOE[1] in options)
    assert ("the default of --context" in text) == ("--context" not in options)
    if options == tuple(LAPTOP):
        asked = '--document FILE --question "..."'
        commands = [f"hf-hybrid-cache generate --model {LAPTOP[1]} {bits}{asked}" for bits in ("", *FEW_BITS)]
        assert printed_lines.split("\n\n")[1] == commands[0]
        assert {*commands} < {*printed_lines.splitlines()}


@pytest.mark.parametrize(
    "quantized",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "w_bit": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
    ],
)
def test_weights_that_another_library_keeps_have_its_sizes(quantized: dict, tmp_path: Path):
    config = SHAPES["Qwen/Qwen3-4B"]()
    config.quantization_config = quantized
    config.save_pretrained(tmp_path)
    options = ("--model", str(tmp_path), "--context", "32K", *CARD)
    text = in_one_line(printed(*options))
    assert "Recommended: weights, keys and values as they are (offloaded, GPU + host). It takes 7.3 GiB of GPU" in text
    assert "Weights take in 4 bits of another library, which must be there, about 2.5 GiB" in text
    assert "--weights" not in text
    assert {each["weights"] for each in plans_of(*options)["plans"]} == {None}
    assert "drop it" in error_of("plan", *options, "--measure")
    config.quantization_config = {"quant_method": "mxfp4"}  # which a CPU does not keep
    config.save_pretrained(tmp_path)
    assert "Weights take 7.5 GiB" in in_one_line(printed(*options))


def test_a_plan_counts_the_passes_that_its_command_reads_a_prompt_in():
    card = ["--model", "meta-llama/Llama-3.2-1B", *CARD]
    text = printed(*card)
    assert f"a chunk of {PREFILL_CHUNK_SIZE:,} tokens of the prompt" in in_one_line(text)
    assert "hf-hybrid-cache generate --model" in text
    assert "hf-hybrid-cache generate --model" not in printed(*card, *FEW)


def test_times_when_asked_for_then_are_measured_and_printed(tmp_path: Path):
    config = FAMILIES["llama"]()
    config.max_position_embeddings = 2048
    config.save_pretrained(tmp_path)
    measured = run("plan", "--model", str(tmp_path), "--gpu-memory", "0", "--measure")
    times = r"The first token comes after [\d.]+ (s|min|h), the others at [\d.]+ tokens/s\. It takes"
    assert len(re.findall(times, in_one_line(measured.stdout))) == 3
    assert "Times were measured here, beside whatever else runs, with 4 of the layers." in in_one_line(measured.stdout)
    assert "tokens/s" in next(line for line in measured.stdout.splitlines() if line.startswith(" cache"))
    assert "measuring weights, keys and values in 8 bits (quantized-8, on the CPU)" in measured.stderr


def test_plans_when_printed_then_have_a_row_each_in_80_columns():
    lines = printed(*LLAMA, *CARD).splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith(("model", "cache =", "hf-hybrid-cache")))
    rows = [words[0] for words in map(str.split, lines) if words and words[0] in ("stock", "offloaded", *BITS)]
    assert rows[:5] == ["stock", "dynamic", "offloaded", "offloaded", "dynamic"]
    assert rows[5:] == [name for name in BITS if name != "dynamic" for _ in range(4)]


def test_what_does_not_fit_says_what_is_short_and_how_far_it_goes():
    large = [*LLAMA, "--gpu-memory", "0", "--host-memory"]
    text = in_one_line(printed(*large, "1GiB", code=1))
    assert "Nothing fits." in text
    assert "has no room for a single token. Use a smaller model, or more memory." in text
    plans = plans_of(*large, "1GiB", code=1)["plans"]
    assert all(plan["short_host_bytes"] > 0 == plan["longest_context"] for plan in plans)
    far = in_one_line(printed(*large, "2GiB", code=1))
    assert re.search(r"is short of [\d.]+ GiB of host memory, and goes up to [\d,]+ tokens", far)


def test_a_local_folder_is_planned_by_its_config_and_its_name_escaped(tmp_path: Path):
    folder = tmp_path / "a\x1b[31mb\x85"
    tiny_model("gemma3").config.save_pretrained(folder)
    local = ["--model", str(folder), *CARD, "--dtype", "float32"]
    one, three = (plans_of(*local, "--batch-size", size)["recommended"] for size in ("1", "3"))
    assert three["kv_device_bytes"] == pytest.approx(3 * one["kv_device_bytes"], rel=0.01)
    assert str(folder) in json.loads(one["code"].split("from_pretrained(")[1].split(",")[0])
    text = printed(*local)
    assert "with 512 tokens" in in_one_line(text)
    assert "--dtype float32" in text
    assert not {"\x1b", "\x85"} & set(text + printed(*local, "--json"))


def test_commands_and_programs_run_as_they_are_printed(tmp_path: Path):
    model = tiny_model("llama")
    tokens = ["!!", *(chr(32 + index) for index in range(1, model.config.vocab_size))]
    tokenizer = {"tokenizer_model": "gpt2", "token_list": tokens, "token_merges": ["! !"], "eos_token_id": 1}
    write_gguf(tmp_path / "tiny.gguf", model, **tokenizer, rope_freq_base=10_000.0, context_length=2048)
    file = str(tmp_path / "tiny.gguf")
    text = printed("--model", file, "--gpu-memory", "0")
    assert f"hf-hybrid-cache generate --model {file} --bits 8 --weights 8 " in text
    for plan in plans_of("--model", file, "--gpu-memory", "0")["plans"]:
        code, names = plan["code"].replace("=200", "=4"), {"inputs": {"input_ids": random_prompt(1, 70)}}
        exec(code, names)
        assert names["cache"].get_seq_length() == 73
    text = printed("--model", "smollm2-135m", "--gpu-memory", "0")
    assert "hf-hybrid-cache generate --model smollm2-135m --bits 8" in text
    assert 'load("smollm2-135m", ' in text
    assert "--model allenai/OLMoE-1B-7B-0924" in printed("--model", "olmoe-1b-7b-0924", "--gpu-memory", "0")


def test_a_model_that_gains_no_memory_is_told(tmp_path: Path):
    FAMILIES["mistral_sliding"]().save_pretrained(tmp_path)
    text = printed("--model", str(tmp_path), "--gpu-memory", "24GiB")
    assert "No layer has full attention over the whole context: these caches save no memory." in in_one_line(text)
    assert "cache = DynamicCache(config=model.config)" in text
