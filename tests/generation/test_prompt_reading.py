"""`prefill`: a prompt is read in chunks, may be interrupted, and goes on from a file."""

import fcntl
import math
import os
import select
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import (
    CacheFileError,
    DynamicHybridCache,
    HybridCache,
    PrefixStore,
    QuantizedHybridCache,
    minmax,
    prefill,
    prompt_reading,
)
from hf_hybrid_cache.prompt_reading import PrefillProgress, seconds_left

from common.modes import answer
from models.architectures import small_model
from models.image_models import model_of_images
from models.tiny_models import FAMILIES, random_prompt, tiny_model

TOKENS = 150
CACHES = {
    "stock": lambda config: DynamicCache(config=config),
    "dynamic": DynamicHybridCache,
    "without_kernel": lambda config: DynamicHybridCache(config, cpu_decode=False),
}


@contextmanager
def forward_passes(model: PreTrainedModel, at: int | None = None, do: Any = None) -> Iterator[list[tuple[int, int]]]:
    """Tokens and logits of each; `do` is done in the pass number `at`, between two of its layers."""
    passes: list[tuple[int, int]] = []

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        passes.append((kwargs["input_ids"].shape[1], output.logits.shape[1]))

    def act(*_: Any) -> None:
        if len(passes) == at:
            do()

    with (
        model.register_forward_hook(note, with_kwargs=True),
        model.model.layers[1].register_forward_hook(act),
    ):
        yield passes


@pytest.mark.parametrize(
    ("family", "name", "chunk"),
    [
        *(("llama", "dynamic", chunk) for chunk in (1, 64, TOKENS - 1, 10_000)),
        ("llama", "without_kernel", 7),
        ("gemma3", "stock", 7),
        ("qwen3_next", "dynamic", 7),
    ],
)
def test_generate_goes_on_from_what_was_read_whatever_the_chunks(family: str, name: str, chunk: int):
    model, ids = tiny_model(family), random_prompt(2, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, :70] = 0
    plain = answer(model, ids, DynamicCache(config=model.config), attention_mask=mask)
    with forward_passes(model) as passes:
        cache = prefill(model, ids[:, :-1], CACHES[name](model.config), attention_mask=mask[:, :-1], chunk_size=chunk)
    assert cache.get_seq_length() == sum(tokens for tokens, _ in passes) == TOKENS - 1
    assert {tokens for tokens, _ in passes[:-1]} <= {chunk}
    assert {logits for _, logits in passes} == {1}
    assert torch.equal(answer(model, ids, cache, attention_mask=mask), plain)


def test_prefill_when_cache_has_a_prefix_then_reads_only_the_rest():
    model, ids = tiny_model("llama"), random_prompt(1, TOKENS)
    cache = prefill(model, ids[:, :100], DynamicHybridCache(model.config))
    with forward_passes(model) as passes:
        assert prefill(model, ids, cache) is cache
    assert passes == [(50, 1)]
    with forward_passes(model) as passes:
        prefill(model, ids, cache)
    assert passes == []
    with pytest.raises(ValueError, match="holds 150 tokens, and the prompt has 120"):
        prefill(model, ids[:, :120], cache)
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 1) % 100
    with pytest.raises(ValueError, match="token 20 of sequence 0"):
        prefill(model, torch.cat([other, ids], dim=1), cache)
    assert cache.get_seq_length() == TOKENS


@pytest.mark.parametrize(("interrupts", "passes_done"), [(1, 2), (2, 1)])
def test_ctrl_c_ends_after_the_chunk_at_hand_and_a_second_one_at_once(interrupts: int, passes_done: int):
    def interrupt() -> None:
        for _ in range(interrupts):
            signal.raise_signal(signal.SIGINT)

    model, ids = tiny_model("llama"), random_prompt(1, TOKENS)
    cache, before = DynamicHybridCache(model.config), signal.getsignal(signal.SIGINT)
    # In a process that a shell started in the background it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with forward_passes(model, 1, interrupt) as passes, pytest.raises(KeyboardInterrupt):
            prefill(model, ids, cache, chunk_size=40)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(passes) == passes_done
    if interrupts == 1:
        assert cache.get_seq_length() == 80
        plain = answer(model, ids, DynamicCache(config=model.config))
        assert torch.equal(answer(model, ids, prefill(model, ids[:, :-1], cache)), plain)


@pytest.fixture
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_reading, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(prompt_reading, "_REST", 0)


@pytest.mark.parametrize(
    "make", [DynamicHybridCache, lambda config: HybridCache(config, codec=minmax(8, sink_tokens=0))]
)
def test_what_a_crash_left_in_the_file_is_not_read_again(make: Any, tmp_path: Path, always_due: None):
    model, ids, path = tiny_model("llama"), random_prompt(1, 450), tmp_path / "report.kv"

    def crash() -> None:
        raise MemoryError

    with forward_passes(model, 3, crash), pytest.raises(MemoryError):
        prefill(model, ids, make(model.config), chunk_size=100, checkpoint=path)
    with forward_passes(model) as passes:
        cache = prefill(model, ids, make(model.config), chunk_size=100, checkpoint=path)
    assert passes == [(100, 1), (50, 1)]
    whole = prefill(model, ids, make(model.config), chunk_size=100)
    longer = torch.cat([ids, random_prompt(1, 3)], dim=1)
    assert torch.equal(answer(model, longer, cache), answer(model, longer, whole))
    with forward_passes(model) as passes:
        prefill(model, ids, make(model.config), checkpoint=path)
    assert passes == []


def test_a_file_is_read_into_any_cache_of_its_form_and_refused_by_others(tmp_path: Path):
    model, ids, path = tiny_model("llama"), random_prompt(1, 300), tmp_path / "report.kv"
    make = partial(QuantizedHybridCache, model.config)
    made = prefill(model, ids, make(bits=8), checkpoint=path)
    for cache in (make(bits=8, max_length=500), make(bits=8, offload=True, cpu_decode=False)):
        with forward_passes(model) as passes:
            assert prefill(model, ids, cache, checkpoint=path) is cache
        assert passes == []
        assert cache.codecs == made.codecs
        assert torch.equal(cache.layers[0].keys, made.layers[0].keys)
    assert not cache.layers[0].is_attended_on_cpu
    for other in (make(bits=(8, 4)), make(bits={0: 8}), DynamicHybridCache(model.config)):
        with pytest.raises(CacheFileError, match=r"quantized in another way: layer \d is keys 8 bits .* there and"):
            prefill(model, ids, other, checkpoint=path)
    with pytest.raises(CacheFileError, match=r"of another text: .* To read the prompt anew, remove the file or name "):
        prefill(model, ids.flip(1), make(bits=8), checkpoint=path)
    with pytest.raises(ValueError, match="pass a new cache to go on from the file"):
        prefill(model, ids, cache, checkpoint=path)
    with pytest.raises(TypeError, match="a cache that has a file"):
        prefill(model, ids, DynamicCache(config=model.config), checkpoint=path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.ones(1, 5)}, "must be integers"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "has no tokens"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask must be as input_ids, \[1, 150\]"),
        ({"chunk_size": 0}, "positive integer, got 0"),
        ({"chunk_size": 2.5}, "positive integer, got 2.5"),
    ],
)
def test_other_arguments_are_refused(arguments: dict[str, Any], message: str):
    model = tiny_model("llama")
    given = {"input_ids": random_prompt(1, TOKENS), "cache": DynamicHybridCache(model.config)} | arguments
    with pytest.raises(ValueError, match=message):
        prefill(model, **given)


def test_models_are_refused_that_cannot_read_and_warned_of_where_they_end():
    encoder = T5Config(num_layers=2, d_model=16, d_kv=8, d_ff=16, num_heads=2, vocab_size=50)
    with pytest.raises(TypeError, match="reads its prompt in the encoder"):
        prefill(T5ForConditionalGeneration(encoder), torch.ones(1, 5, dtype=torch.long), DynamicCache())
    config = FAMILIES["llama"]()
    config.max_position_embeddings = 20
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.warns(UserWarning, match="has 21 tokens, and the model's context is 20: .* Cut the prompt"):
        prefill(model, random_prompt(1, 21), DynamicHybridCache(config))
    prefill(model, random_prompt(1, 20), DynamicHybridCache(config))


@pytest.mark.parametrize("chunks_seen", [3, 5, 10])
def test_time_left_when_chunks_get_slower_then_is_within_a_tenth(chunks_seen: int):
    def seconds(start: int, end: int) -> float:
        return 2e-4 * (end - start) + 3e-8 * (end**2 - start**2) / 2

    reached, times = [0], [0.0]
    for chunk in range(chunks_seen):
        noise = 1 + 0.01 * math.sin(chunk)
        reached.append((chunk + 1) * 512)
        times.append(times[-1] + seconds(chunk * 512, reached[-1]) * noise + (1.0 if chunk == 0 else 0.0))
    estimate = seconds_left(reached, times, 32_768)
    true = seconds(chunks_seen * 512, 32_768)
    # The first chunks tell little of what is far away.
    assert abs(estimate - true) < (0.1 if chunks_seen > 3 else 0.5) * true


def test_a_bar_says_how_many_tokens_are_read_and_what_is_left(monkeypatch: pytest.MonkeyPatch):
    terminal, other_end = os.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    times = iter([0.0, 10.0, 20.0, 30.0])
    with os.fdopen(other_end, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with closing(PrefillProgress(0, 300, True, lambda: next(times))) as bar:
            for reached in (100, 200, 300):
                bar.reach(reached)
                bar._bar.refresh()
        # Output arrives late, and perhaps in parts.
        shown = b""
        while b"300 of 300 tokens" not in shown and select.select([terminal], [], [], 10)[0]:
            shown += os.read(terminal, 100_000)
    os.close(terminal)
    assert "100 of 300 tokens" in shown.decode()
    assert "20.0 s left" in shown.decode()
    assert "300 of 300 tokens" in shown.decode()


def read_by_clock(start: int, seconds: list[float], is_shown: bool = True) -> None:
    """Read chunks of 1,000 tokens, each of which takes so many seconds."""
    times, end = accumulate(seconds, initial=0.0), start + 1000 * len(seconds)
    with closing(PrefillProgress(start, end, is_shown, lambda: next(times))) as progress:
        for reached in range(start + 1000, end + 1, 1000):
            progress.reach(reached)
    assert next(times, None) is None


# The first token, the seconds of each chunk, and the lines: after half a minute, and then a minute, or with each chunk.
LOGS = [
    (
        0,
        [10.0] * 14,
        [
            "prompt: 3,000 of 14,000 tokens, 100 tokens/s, 2 min left",
            "prompt: 9,000 of 14,000 tokens, 100 tokens/s, 50.0 s left",
            "prompt: all 14,000 tokens are read in 2 min, 100 tokens/s",
        ],
    ),
    (
        2000,
        [100.0, 600.0],
        [
            "prompt: 3,000 of 4,000 tokens, 10 tokens/s, 2 min left",
            "prompt: all 4,000 tokens are read in 12 min, 2.9 tokens/s",
        ],
    ),
    (0, [7.0] * 4, []),
]


@pytest.mark.parametrize(("start", "seconds", "lines"), LOGS, ids=range(3))
def test_a_log_gets_few_lines_of_what_is_read_and_left(start, seconds, lines, capsys, monkeypatch):
    for is_shown in (True, False):
        read_by_clock(start, seconds, is_shown)  # standard error is no terminal here
        assert capsys.readouterr().err.splitlines() == (lines if is_shown else [])
    (reader, writer), is_read = os.pipe(), False
    os.close(reader)
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as nobody_reads:
        monkeypatch.setattr(sys, "stderr", nobody_reads)
        read_by_clock(start, seconds)
        is_read = True
    assert is_read


@pytest.mark.parametrize(("name", "chunk"), [("JambaConfig", 39), ("BambaConfig", 20)])
def test_prefill_when_a_model_forgets_between_passes_then_is_refused(name: str, chunk: int):
    model, ids = small_model(name), torch.arange(5, 45)[None]
    if name == "JambaConfig":
        with pytest.raises(ValueError, match=r"JambaMambaMixer .* 40 tokens takes more than one"):
            prefill(model, ids, DynamicHybridCache(model.config), chunk_size=20, progress=False)
    cache = prefill(model, ids[:, :-1], DynamicHybridCache(model.config), chunk_size=chunk, progress=False)
    assert torch.equal(answer(model, ids, cache), answer(model, ids, DynamicCache(config=model.config)))


def test_prefill_when_images_came_before_then_positions_begin_anew(tmp_path: Path):
    model = model_of_images()
    ids = torch.arange(5, 85)[None]
    expected = answer(model, ids, DynamicCache(config=model.config))
    store = PrefixStore(tmp_path)
    for fill in (
        partial(prefill, model, ids[:, :-1]),
        partial(store.prefill, model, ids),
        partial(store.prefill, model, ids),
    ):
        model.model.rope_deltas = torch.tensor([[33]])
        fill(cache := DynamicHybridCache(model.config), progress=False)
        assert torch.equal(answer(model, ids, cache), expected)
