"""The command `plan`: its first lines, its tables and its JSON."""

import json
import re
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from transformers import Gemma2Config

from hf_hybrid_cache.planning.candidates import BITS

from .commands import run
from models.tiny_models import COMMON, FAMILIES, tiny_model

LLAMA = ["--model", "meta-llama/llama-3.2-1b", "--context", "128K"]
CARD = ["--gpu-memory", "8GiB", "--host-memory", "32GiB"]
LAPTOP = ["--model", "meta-llama/Llama-3.2-3B", "--gpu-memory", "0", "--host-memory", "16GiB"]
HOST = ["--host-bandwidth", "30GB/s"]
BANDWIDTHS = [*HOST, "--gpu-bandwidth", "300GB/s", "--bus-bandwidth", "12GB/s"]


def printed(*arguments: str, code: int = 0) -> str:
    return run("plan", *arguments, code=code).stdout


def plans_of(*arguments: str, code: int = 0) -> dict:
    """Return the JSON; the exit code is 1 where nothing fits."""
    answer: dict = json.loads(printed(*arguments, "--json", code=code))
    assert (answer["recommended"] is None) == (code == 1)
    return answer


def in_one_line(text: str) -> str:
    return " ".join(text.split())


# The answer


def test_first_lines_say_when_the_first_token_comes_and_how_to_run_it():
    text = printed(*LAPTOP, *HOST)
    first, command, *_ = text.split("\n\n")
    assert "with 8,192 tokens, the default of --context; up to 131,072 fit, which take" in in_one_line(first)
    assert "Recommended: weights, keys and values in 8 bits (quantized-8, on the CPU)" in in_one_line(first)
    assert re.search(r"The first token comes after [\d.]+ (s|min|h), the others at [\d.]+ tokens/s", in_one_line(first))
    of_model = "hf-hybrid-cache generate --model meta-llama/Llama-3.2-3B"
    asked = '--document FILE --question "..."'
    assert command == f"{of_model} --bits 8 --weights 8 {asked}"
    lines = text.splitlines()
    assert f"{of_model} {asked}" in lines
    assert f"{of_model} --bits 4 --weights 4 {asked}" in lines
    assert "4-bit weights want a calibrated model: docs/weights.md." in lines
    assert "host memory 30 GB/s (as given), products on the CPU" in in_one_line(text)


def test_rows_are_in_80_columns_and_for_a_gpu_said_to_be_calculated():
    text = printed(*LLAMA, *CARD)
    lines = text.splitlines()
    rows = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("stock", "offloaded", *BITS)]
    assert rows[:6] == ["stock", "dynamic", "offloaded", "offloaded", "dynamic", "offloaded"]
    assert rows[6:] == [name for name in BITS if name != "dynamic" for _ in range(5)]
    assert all(len(line) <= 80 for line in lines if not line.startswith(("model", "cache =", "hf-hybrid-cache")))
    assert "Recommended: weights, keys and values as they are (dynamic, on the GPU)" in in_one_line(text)
    assert "cache = DynamicHybridCache(model.config)" in lines
    assert "There is no such GPU here: times with one are only calculated" in in_one_line(text)
    assert "Caches take within 3% of what is said" in in_one_line(text)
    assert "8.0 GiB of GPU memory and 32.0 of host memory are there" in in_one_line(text)


def test_reading_of_a_long_context_on_a_cpu_is_said_in_hours():
    text = in_one_line(printed(*LAPTOP, "--context", "128K", *HOST))
    assert re.search(r"The first token comes after [\d.]+ h", text)
    assert "the default of --context" not in text


def test_without_a_gpu_everything_is_on_the_cpu():
    answer = plans_of(*LLAMA, "--gpu-memory", "0", "--host-memory", "32GiB", *HOST)
    plans = [(plan["cache"], plan["weights"]) for plan in answer["plans"]]
    assert plans[:6] == [(name, None) for name in ("stock", *BITS)]
    assert plans[6:] == [("dynamic", 8), ("quantized-8", 8), ("dynamic", 4), ("quantized-4", 4)]
    assert {plan["strategy"] for plan in answer["plans"]} == {"on the CPU"}
    assert answer["speeds"]["host_bandwidth"] == 30e9
    chosen = [answer["recommended"], *answer["alternatives"]]
    assert [(plan["cache"], plan["weights"]) for plan in chosen] == [plans[7], plans[1], plans[9]]


def test_what_does_not_fit_says_what_is_short_and_how_far_it_goes():
    large = ["--model", "meta-llama/Llama-3.1-8B", "--gpu-memory", "0", "--host-memory"]
    text = in_one_line(printed(*large, "3GiB", code=1))
    assert "Nothing fits." in text
    assert "has no room for a single token. Use a smaller model, or more memory." in text
    plans = plans_of(*large, "3GiB", code=1)["plans"]
    assert all(plan["short_host_bytes"] > 0 == plan["longest_context"] for plan in plans)
    far = in_one_line(printed(*large, "7GiB", "--context", "64K", code=1))
    assert re.search(r"is short of [\d.]+ GiB of host memory, and goes up to [\d,]+ tokens", far)


def test_a_card_with_bandwidths_divides_the_cache_and_has_python_only():
    text = printed(*LLAMA, "--gpu-memory", "6GiB", "--host-memory", "32GiB", *BANDWIDTHS)
    assert "GPU + host: as much as fits is on the GPU" in text
    assert "device_tokens=" in text
    first_line = in_one_line(text.split("\n\n")[0])
    assert "(quantized-8, on the GPU)" in first_line or "GPU + host" in first_line
    assert "bits=2" not in text


def test_plan_when_given_a_local_folder_then_reads_its_config(tmp_path: Path):
    tiny_model("gemma3").config.save_pretrained(tmp_path)
    answer = plans_of("--model", str(tmp_path), *CARD, "--dtype", "float32", "--batch-size", "3")
    assert {plan["context"] for plan in answer["plans"]} == {512}
    assert str(tmp_path) in answer["recommended"]["code"]
    one = plans_of("--model", str(tmp_path), *CARD, "--dtype", "bfloat16")
    held, held_by_one = (each["recommended"]["kv_device_bytes"] for each in (answer, one))
    assert held == pytest.approx(6 * held_by_one, rel=0.01)
    assert "--dtype float32" in printed("--model", str(tmp_path), *CARD, "--dtype", "float32")


def test_names_with_control_characters_are_escaped(tmp_path: Path):
    folder = tmp_path / "a\x1b[31mb\x85"
    tiny_model("llama").config.save_pretrained(folder)
    assert not {"\x1b", "\x85"} & set(printed("--model", str(folder), *CARD))
    text = printed("--model", str(folder), *CARD, "--json")
    assert not {"\x1b", "\x85"} & set(text)
    code = json.loads(text)["recommended"]["code"]
    assert str(folder) in json.loads(code.split("from_pretrained(")[1].split(",")[0])


def test_continuations_take_less_than_sequences_where_the_cpu_attends():
    several = ["--gpu-memory", "0", "--host-memory", "32GiB", *HOST]
    text = printed(*LLAMA, *several, "--continuations", "8")
    assert "8 sequences continue one prompt; the last 512 tokens are each one's own" in in_one_line(text)
    assert "num_return_sequences=8" in text
    assert "hf-hybrid-cache generate" not in text
    shared, copied = (
        {plan["cache"]: plan for plan in plans_of(*LLAMA, *several, *options)["plans"] if plan["weights"] is None}
        for options in (["--continuations", "8"], ["--batch-size", "8"])
    )
    assert shared["stock"]["kv_host_bytes"] == copied["stock"]["kv_host_bytes"]
    assert shared["dynamic"]["kv_host_bytes"] < copied["dynamic"]["kv_host_bytes"] / 4
    assert shared["dynamic"]["seconds_per_token"] is None


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.21"), reason="this transformers leaves soft-capping out with sdpa"
)
def test_attention_that_is_not_measured_is_named(tmp_path: Path):
    Gemma2Config(**COMMON, num_hidden_layers=2).save_pretrained(tmp_path)
    assert "Speeds are not known for the attention of this model" in in_one_line(
        printed("--model", str(tmp_path), *CARD, *HOST)
    )


def test_a_model_without_full_attention_is_told_that_nothing_is_gained(tmp_path: Path):
    FAMILIES["mistral_sliding"]().save_pretrained(tmp_path)
    text = printed("--model", str(tmp_path), "--gpu-memory", "24GiB")
    assert "No layer has full attention over the whole context: these caches change nothing." in in_one_line(text)
    assert "cache = DynamicCache(config=model.config)" in text


def test_experts_are_in_host_memory_where_the_gpu_has_no_room_for_them():
    qwen = ["--model", "qwen3-30b-a3b", "--context", "2K", "--batch-size", "4", "--gpu-memory", "8GiB"]
    text = printed(*qwen, "--host-memory", "64GiB")
    assert "Experts take 54.0 GiB, of which a step reads 12.3; other weights take 2.9." in in_one_line(text)
    assert "\nWith experts in host memory:\n" in text
    assert "(dynamic, on the GPU)" in in_one_line(text.split("\n\n")[0])
    assert 'move_experts_to_host(model)\nmodel.to("cuda")\ncache = DynamicHybridCache(' in text
    few = printed(*qwen, "--host-memory", "32GiB")
    assert "quantization_config=QuantizedWeightsConfig(bits=4, only_experts=True)" in few
    assert plans_of(*qwen, "--host-memory", "64GiB")["experts"]["total_bytes"] == 48 * 128 * 3 * 2048 * 768 * 2
    assert "expert" not in printed(*LLAMA, *CARD)


def test_names_of_models_are_printed_as_json():
    assert "meta-llama/Llama-3.2-1B" in json.loads(printed("--list-models", "--json"))
