"""The command `plan`, and the measurements that it can start."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Gemma2Config
from typer.testing import CliRunner

from hf_hybrid_cache import HostMemoryError
from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.cli.plan import plan_report
from hf_hybrid_cache.planning import Machine, calibration
from hf_hybrid_cache.planning.calibration import CalibrationBudget, calibrate
from hf_hybrid_cache.planning.candidates import BITS
from hf_hybrid_cache.planning.machine import DeviceSpeed, Speeds, WeightSpeed, load_speeds, save_speeds, speeds_path
from hf_hybrid_cache.planning.plans import predict
from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.memory_limits import Limit
from hf_hybrid_cache.weights import WEIGHT_BITS

from models.tiny_models import COMMON, FAMILIES, tiny_model

SMALL = CalibrationBudget(matrices=1, contexts=(128, 256, 400), chunk=32, layers=1, rounds=1)
LLAMA = ["--model", "meta-llama/llama-3.2-1b", "--context", "128K"]
CARD = ["--gpu-memory", "8GiB", "--host-memory", "32GiB"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def plans_of(*arguments: str) -> dict:
    result = invoke(*arguments, "--json")
    answer: dict = json.loads(result.stdout)
    assert result.exit_code == (1 if answer["recommended"] is None else 0), result.stderr
    return answer


# The answer


def test_plan_when_printed_then_has_row_per_cache_and_code_in_80_columns():
    result = invoke(*LLAMA, *CARD)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "meta-llama/Llama-3.2-1B in bfloat16: 2.3 GiB of weights"
    assert "131,072 tokens" in lines[1]
    assert lines[2].startswith("8.0 GiB of GPU memory, 32.0 GiB of host memory")
    rows = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("stock", "offloaded", *BITS)]
    assert rows == ["stock", "dynamic", "offloaded", "dynamic", "offloaded"] + [
        name for name in BITS if name != "dynamic" for _ in range(4)
    ]
    assert all(len(line) <= 80 for line in lines if not line.startswith(("model", "cache =")))
    assert "Recommended: dynamic, on the GPU" in lines
    assert "cache = DynamicHybridCache(model.config)" in lines
    assert result.stderr.startswith("Speeds are not known where there is a dash: run with --calibrate")


def test_without_a_gpu_everything_is_on_the_cpu():
    answer = plans_of(*LLAMA, "--gpu-memory", "0", "--host-memory", "32GiB")
    assert [plan["cache"] for plan in answer["plans"]] == ["stock", *BITS, *BITS, *BITS]
    assert [plan["weights"] for plan in answer["plans"]] == [None] * 6 + [8] * 5 + [4] * 5
    assert {plan["strategy"] for plan in answer["plans"]} == {"on the CPU"}
    assert answer["recommended"]["cache"] == "dynamic"


def test_what_does_not_fit_says_what_is_short_and_how_far_it_goes():
    result = invoke("--model", "meta-llama/Llama-3.1-8B", "--gpu-memory", "0", "--host-memory", "3GiB")
    assert result.exit_code == 1, result.stderr
    assert "host" in next(line for line in result.stdout.splitlines() if line.strip().startswith("quantized-2"))
    assert "Nothing fits. Without any cache, weights, process and a chunk of the prompt take 15." in result.stdout
    assert "GiB more than there are." in result.stdout
    far = invoke("--model", "meta-llama/Llama-3.1-8B", "--gpu-memory", "0", "--host-memory", "8GiB")
    assert far.exit_code == 1
    assert "Nothing fits. quantized-2, on the CPU, weights in 4 bits goes farthest, up to " in far.stdout
    answer = plans_of("--model", "meta-llama/Llama-3.1-8B", "--gpu-memory", "0", "--host-memory", "3GiB")
    assert answer["recommended"] is None
    assert all(plan["short_host_bytes"] > 0 == plan["longest_context"] for plan in answer["plans"])
    result = invoke("--model", "meta-llama/Llama-3.1-8B", "--gpu-memory", "8GiB", "--host-memory", "64GiB")
    assert "The weights do not fit the GPU: everything is on the CPU." in result.stdout


def test_bandwidths_tell_speeds_without_a_measurement():
    small_card = ["--gpu-memory", "6GiB", "--host-memory", "32GiB"]
    bandwidths = ["--host-bandwidth", "30GB/s", "--gpu-bandwidth", "300GB/s", "--bus-bandwidth", "12GB/s"]
    result = invoke(*LLAMA, *small_card, *bandwidths)
    assert "Recommended: quantized-8, GPU + host" in result.stdout
    assert "Or in full precision, nothing is lost: offloaded, GPU + host" in result.stdout
    assert "device_tokens=" in result.stdout
    assert "real ones are lower" in result.stderr
    given = plans_of(*LLAMA, "--gpu-memory", "0", "--host-memory", "32GiB", "--host-bandwidth", "30GB/s")
    plan = given["recommended"]
    assert plan["seconds_per_token"] == pytest.approx((2_471_628_800 + plan["kv_host_bytes"]) / 30e9)


def test_quantized_weights_when_only_they_fit_then_are_recommended():
    short = ["--model", "meta-llama/Llama-3.2-3B", "--gpu-memory", "0", "--context", "128K"]
    result = invoke(*short, "--host-memory", "10GiB")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "With weights in 8 bits:" in lines
    assert any(line.startswith("Recommended: ") and line.endswith(", weights in 8 bits") for line in lines)
    assert any("quantization_config=QuantizedWeightsConfig(bits=8)" in line for line in lines)
    assert all(len(line) <= 80 for line in lines if not line.startswith(("model", "cache =")))
    assert "weights in" not in invoke(*short, "--host-memory", "64GiB").stdout


def test_4_bit_weights_when_much_faster_then_are_named_with_their_needs():
    small = ["--model", "meta-llama/Llama-3.2-1B", "--context", "1K", "--gpu-memory", "0", "--host-memory", "32GiB"]
    result = invoke(*small, "--host-bandwidth", "30GB/s")
    assert "Recommended: dynamic, on the CPU\n" in result.stdout
    line = next(
        line for line in result.stdout.splitlines() if line.startswith("With weights in 4 bits a token takes 0.")
    )
    assert "4-bit weights want a calibrated model: docs/weights.md." in line
    save_speeds(torch.bfloat16, Speeds(DeviceSpeed(1e9)))
    result = invoke(*small)
    assert "4-bit weights" not in result.stdout
    assert "Speeds with quantized weights are not known: run with --calibrate." in result.stderr
    save_speeds(torch.bfloat16, Speeds(DeviceSpeed(1e9, quantized_weights={4: WeightSpeed(1e8), 8: WeightSpeed(1e9)})))
    result = invoke(*small)
    assert "4-bit weights" not in result.stdout
    assert result.stderr == ""


def test_plan_when_given_a_local_folder_then_reads_its_config(tmp_path: Path):
    tiny_model("gemma3").config.save_pretrained(tmp_path)
    answer = plans_of("--model", str(tmp_path), *CARD, "--dtype", "float32", "--batch-size", "3")
    assert {plan["context"] for plan in answer["plans"]} == {512}
    assert str(tmp_path) in answer["recommended"]["code"]
    one = plans_of("--model", str(tmp_path), *CARD, "--dtype", "bfloat16")
    held, held_by_one = (each["recommended"]["kv_device_bytes"] for each in (answer, one))
    assert held == pytest.approx(6 * held_by_one, rel=0.01)


def test_continuations_take_less_than_sequences_where_the_cpu_attends():
    several = ["--gpu-memory", "0", "--host-memory", "32GiB", "--host-bandwidth", "30GB/s"]
    result = invoke(*LLAMA, *several, "--continuations", "8")
    assert result.exit_code == 0, result.stderr
    assert "8 sequences continue one prompt; the last 512 tokens are each one's own" in result.stdout
    assert "num_return_sequences=8" in result.stdout
    assert "Speeds of sequences that continue one prompt are not predicted" in result.stderr
    one, shared, copied = (
        {(plan["cache"], plan["weights"]): plan for plan in plans_of(*LLAMA, *several, *options)["plans"]}
        for options in ([], ["--continuations", "8"], ["--batch-size", "8"])
    )
    assert shared["stock", None]["kv_host_bytes"] == copied["stock", None]["kv_host_bytes"]
    sizes = [each["dynamic", None]["kv_host_bytes"] for each in (one, shared, copied)]
    assert sizes[0] < sizes[1] < sizes[2] / 4
    assert shared["dynamic", None]["seconds_per_token"] is None


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.21"), reason="this transformers leaves soft-capping out with sdpa"
)
def test_attention_that_is_not_measured_is_named(tmp_path: Path):
    Gemma2Config(**COMMON, num_hidden_layers=2).save_pretrained(tmp_path)
    result = invoke("--model", str(tmp_path), *CARD, "--host-bandwidth", "30GB/s")
    assert "The attention of this model is of a kind that is not measured" in result.stderr


def test_8_and_4_bits_when_shown_then_have_gains_losses_and_code():
    card = ["--gpu-memory", "24GiB", "--host-memory", "64GiB"]
    speeds = ["--host-bandwidth", "30GB/s", "--gpu-bandwidth", "300GB/s", "--bus-bandwidth", "12GB/s"]
    result = invoke("--model", "meta-llama/Llama-3.1-8B", "--context", "128K", *card, *speeds)
    text = result.stdout
    assert "Recommended: quantized-8, GPU + host\n" in text
    assert "GPU + host: as much as fits is on the GPU" in text
    places = [
        text.index(part) for part in ("Recommended: ", "\nOr in full precision, ", "\nOr in 4 bits, which seldom ")
    ]
    assert places == sorted(places)
    assert re.search(r"\n[0-9.]+ tokens/s instead of [0-9.]+, keys and values [0-9.]+ GiB instead of", text)
    assert "\ncache = QuantizedHybridCache(model.config, bits=4)\n" in text
    assert "bits=2" not in text
    answer = plans_of("--model", "meta-llama/Llama-3.1-8B", "--context", "128K", *card, *speeds)
    assert [each["cache"] for each in answer["alternatives"]] == ["offloaded", "quantized-4"]


def test_only_2_bits_are_named_where_nothing_else_fits_and_not_recommended():
    on_cpu = [*LLAMA, "--gpu-memory", "0"]
    needed = {(each["cache"], each["weights"]): each["host_bytes"] for each in plans_of(*on_cpu, *CARD[2:])["plans"]}
    result = invoke(*on_cpu, "--host-memory", str(needed["quantized-2", 4]))
    assert result.exit_code == 1
    assert "Only 2 bits fit, which often change an answer: quantized-2, on the CPU, weights in 4 bits" in result.stdout


def test_names_of_models_are_printed_as_json():
    names = CliRunner().invoke(app, ["plan", "--list-models", "--json"]).stdout
    assert "meta-llama/Llama-3.2-1B" in json.loads(names)


def test_a_model_without_full_attention_is_told_that_nothing_is_gained(tmp_path: Path):
    FAMILIES["mistral_sliding"]().save_pretrained(tmp_path)
    result = invoke("--model", str(tmp_path), "--gpu-memory", "24GiB")
    assert "No layer has full attention over the whole context: these caches change nothing." in result.stdout
    assert "cache = DynamicCache(config=model.config)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "lots"], "--gpu-memory: 'lots' is not a size in bytes: write it as 8GiB"),
        (["--host-memory", "-1"], "--host-memory: '-1' is not a size in bytes"),
        (
            ["--host-memory", "32"],
            "--host-memory: 32 is 32 bytes, which is less than 1MiB. Write 32GiB if these are gibibytes.",
        ),
        (["--host-memory", "1KiB"], "--host-memory: 1KiB is 1,024 bytes, which is less than 1MiB.\n"),
        (["--context", "0"], "--context: '0' is not a number of tokens: write it as 131072 or 128K"),
        (["--context", "129K"], "has a context of 131,072 tokens, and 132,096 were asked for"),
        (["--host-bandwidth", "fast"], "--host-bandwidth: 'fast' is not a bandwidth: write it as 30GB/s"),
        (["--bus-bandwidth", "12GB"], "--bus-bandwidth: '12GB' is not a bandwidth: write it as 30GB/s"),
        (["--gpu-bandwidth", "300/s"], "--gpu-bandwidth: '300/s' is not a bandwidth: write it as 30GB/s"),
        (["--dtype", "int8"], "--dtype 'int8' is not one of float32, bfloat16, float16"),
        (["--batch-size", "0"], "--batch-size"),
        (["--continuations", "0"], "--continuations"),
        (
            ["--continuations", "8", "--batch-size", "2"],
            "--continuations 8 continue one prompt, and --batch-size 2 are as many prompts: drop one of them.",
        ),
        (["--model", "./no/such/folder"], "There is no folder"),
        (["--model", "someone/something"], "HF_HUB_OFFLINE is set"),
        (["--model", "lama-3.2-1b"], "Did you mean meta-llama/Llama-3.2-1B?"),
    ],
)
def test_a_bad_argument_is_named_on_stderr_with_exit_code_2(arguments: list[str], message: str):
    result = invoke(*LLAMA, *CARD, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


# Experts


QWEN = ["--model", "qwen3-30b-a3b", "--context", "2K", "--batch-size", "4"]


def test_what_is_read_of_experts_is_told_for_a_token_a_batch_and_a_chunk():
    result = invoke(*QWEN, *CARD[:2], "--host-memory", "64GiB")
    assert result.exit_code == 0, result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[3].startswith("48 layers of 128 experts, 8 for each token; other weights take 2.9 GiB")
    assert "for one token           8.0         3.38       1.90       1.05" in lines
    assert "for 4 at once          29.1        12.29       6.91       3.84" in lines
    assert "for a chunk of 2,048  128.0        54.00      30.38      16.88" in lines
    assert "on average, if tokens choose each expert equally often, and for each token anew" in lines
    assert all(len(line) <= 80 for line in lines if not line.startswith(("model", "cache =")))
    answer = plans_of(*QWEN, *CARD)["experts"]
    assert [row["tokens"] for row in answer] == [1, 4, 2048, None]
    assert answer[1]["experts"] == pytest.approx(128 * (1 - (120 / 128) ** 4))
    assert answer[-1]["bytes"]["None"] == 48 * 128 * 3 * 2048 * 768 * 2


def test_experts_are_in_host_memory_where_the_gpu_has_no_room_for_them():
    result = invoke(*QWEN, *CARD[:2], "--host-memory", "64GiB")
    assert result.exit_code == 0, result.stderr
    assert "The weights do not fit the GPU: experts are in host memory.\n" in result.stdout
    assert "With experts in host memory:\n" in result.stdout
    assert "Recommended: dynamic, on the GPU, experts in host memory\n" in result.stdout
    assert 'move_experts_to_host(model)\nmodel.to("cuda")\ncache = DynamicHybridCache(' in result.stdout
    few = invoke(*QWEN, *CARD)
    assert few.exit_code == 0, few.stderr
    assert "Recommended: dynamic, on the GPU, experts in host memory, in 4 bits\n" in few.stdout
    assert "quantization_config=QuantizedWeightsConfig(bits=4, only_experts=True)" in few.stdout
    short = invoke(*QWEN, *CARD[:2], "--host-memory", "16GiB")
    assert short.exit_code == 1
    assert "Nothing fits." in short.stdout
    dense = invoke(*LLAMA, *CARD)
    assert "expert" not in dense.stdout


def test_quantized_experts_when_step_takes_less_than_half_then_have_table():
    fast = ["--host-bandwidth", "30GB/s", "--gpu-bandwidth", "900GB/s", "--bus-bandwidth", "20GB/s"]
    result = invoke(*QWEN, *CARD[:2], "--host-memory", "64GiB", *fast)
    line = next(
        line for line in result.stdout.splitlines() if line.startswith("With experts in 4 bits a token takes 0.")
    )
    assert "4-bit weights want a calibrated model" in line
    plain = invoke("--model", "OLMoE-1B-7B-0924", "--gpu-memory", "24GiB", "--host-memory", "32GiB", *fast)
    assert "With all in one place:\n" in plain.stdout
    assert "Recommended: dynamic, on the GPU\n" in plain.stdout


# Measured speeds


@pytest.fixture(scope="module")
def measured() -> Speeds:
    return calibrate(torch.bfloat16, SMALL).speeds


def test_every_cache_is_measured_at_every_context(measured: Speeds):
    assert measured.host is not None
    assert list(measured.host.caches) == ["stock", *BITS]
    for speed in measured.host.caches.values():
        assert len(speed.steps) == len(SMALL.contexts)
        assert all(seconds > 0 for _, seconds in speed.steps)
        assert speed.attention_flops > 0
    assert measured.host.weight_bytes_per_second > 0
    assert set(measured.host.quantized_weights) == set(WEIGHT_BITS)
    for weights in measured.host.quantized_weights.values():
        assert weights.bytes_per_second > 0
        assert weights.flops is not None
        assert weights.flops > 0
    assert (measured.device is None) == (not torch.cuda.is_available())


@pytest.mark.parametrize("cache", ["stock", "offloaded", *BITS])
def test_from_what_was_measured_every_cache_is_predicted(measured: Speeds, cache: str):
    plan = predict(FAMILIES["llama"](), cache, 500, Machine(0, 2**40, measured))
    assert plan.seconds_per_token is not None
    assert plan.seconds_per_token > 0
    assert plan.seconds_to_first_token is not None
    assert plan.seconds_to_first_token > 0


def test_calibrate_measures_and_keeps_the_speeds_that_the_next_plan_uses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_report, "calibrate", partial(calibrate, budget=SMALL))
    monkeypatch.setattr(calibration, "_MOST_USED_BY_OTHERS", 2.0)
    monkeypatch.setattr(calibration, "_MOST_DISAGREEMENT", float("inf"))
    result = invoke(*LLAMA, *CARD, "--calibrate")
    assert result.exit_code == 0, result.stderr
    assert f"kept in {speeds_path()}" in result.stderr
    assert load_speeds(torch.bfloat16).host is not None
    again = invoke(*LLAMA, "--gpu-memory", "0", "--host-memory", "32GiB")
    assert again.stderr == ""
    assert "min" in again.stdout or " h" in again.stdout


def test_what_is_measured_on_a_busy_machine_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_report, "calibrate", partial(calibrate, budget=SMALL))
    monkeypatch.setattr(calibration, "_MOST_USED_BY_OTHERS", -1.0)
    result = invoke(*LLAMA, *CARD, "--calibrate")
    assert result.exit_code == 0, result.stderr
    assert "not kept, because other processes used" in result.stderr
    assert not speeds_path().exists()


@pytest.mark.parametrize(
    ("reading", "used_by_others", "reason"),
    [
        ([0.100, 0.149, 0.110], 0.15, None),
        ([0.100, 0.151, 0.110], 0.0, "took 0.100 s at one moment and 0.151 s at another"),
        ([0.1, 0.1], 0.5, "other processes used 50% of the processor"),
    ],
)
def test_samples_that_disagree_and_other_processes_raise_doubt(reading, used_by_others, reason):
    said = calibration.doubt(reading, used_by_others)
    assert said is None if reason is None else reason in str(said)


def test_speeds_file_when_unusable_then_is_named_and_bandwidth_overrides():
    save_speeds(torch.bfloat16, Speeds(DeviceSpeed(1e9)))
    slow = plans_of(*LLAMA, "--gpu-memory", "0", "--host-memory", "32GiB")["recommended"]
    fast = plans_of(*LLAMA, "--gpu-memory", "0", "--host-memory", "32GiB", "--host-bandwidth", "2GB/s")["recommended"]
    assert slow["seconds_per_token"] == pytest.approx(2 * fast["seconds_per_token"])
    speeds_path().write_text("{}")
    result = invoke(*LLAMA, *CARD)
    assert result.exit_code == 0
    assert f"{speeds_path()} is damaged" in result.stderr


def test_measuring_asks_for_memory_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "tightest_limit", lambda: Limit(2**20, ""))
    with pytest.raises(HostMemoryError, match=r"Measuring speeds needs .* GiB more host memory"):
        calibrate(torch.bfloat16)
