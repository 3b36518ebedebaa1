"""The measurements of a machine with a GPU, the most valuable first; each step is a program of its own."""

from dataclasses import dataclass
from pathlib import Path

from experiments.common import records
from experiments.gpu.machine import has_gpu

FOLDER = "gpu"
# Memory that a card is held to for the table of the source: a desktop card of today, and a small one.
_CARDS = ("24GiB", "8GiB")
_STREAMING = ("dynamic", "stock-offloaded", "offloaded", "streamed-8", "streamed-4", "streamed-2")
_WITHOUT_CUDNN = ("stock", "dynamic", "stock-offloaded", "offloaded", "codes-4", "streamed-4")
_QUANTIZED = (
    *("stock", "dynamic", "codes-8", "codes-4", "codes-4-2", "codes-2"),
    *("offloaded", "streamed-8", "streamed-4", "streamed-2"),
)
# Peers have a step of their own: quanto compiles code when it is first used, which takes minutes and may fail.
_PEERS = ("stock", "codes-4", "hqq-4", "quanto-4")
_HOST = ("cpu-attention", "cpu-attention-4", "host", "host-4", "host-weights-4", "host-4-weights-4")
_BOTH_PLACES = (
    *("dynamic", "offloaded", "cpu-attention", "cpu-attention-4"),
    *("half-streamed", "half-cpu-attention", "half-cpu-attention-4", "half-in-three", "half-in-three-4"),
)
_PLACEMENTS = (
    *("offloaded", "offloaded-pageable", "offloaded-2-ahead"),
    *(f"offloaded-resident-{share}%" for share in (25, 50, 75, 100)),
)


@dataclass(frozen=True)
class Step:
    """
    One program, which ends with a record.

    Attributes:
        name: of its records' folder.
        command: what `python` is told to run.
        limit_minutes: after which it is ended, whatever time is left.
    """

    name: str
    command: tuple[str, ...]
    limit_minutes: float


@dataclass(frozen=True)
class Sizes:
    """The context lengths of each measurement."""

    streaming: tuple[int, ...] = (32_768, 65_536)
    table: tuple[int, ...] = (32_768, 65_536, 131_072)
    quantized: tuple[int, ...] = (32_768, 131_072)
    attention: tuple[int, ...] = (4096, 32_768, 131_072)
    host: int = 131_072
    placements: int = 65_536
    prompt: int = 131_072
    prompt_before_cpu: int = 32_768
    new_tokens: int = 20


_SMALL = Sizes((300, 600), (320,), (300, 700), (300, 700), 300, 300, 700, 300, 4)


def all_steps(root: Path, is_rehearsal: bool, other_transformers: list[Path]) -> list[Step]:
    """
    Return the steps, the most valuable first.

    Args:
        root: folder of all results.
        is_rehearsal: with small sizes.
        other_transformers: folders with other versions, for the tests.
    """
    sizes = _SMALL if is_rehearsal else Sizes()

    def step(name: str, module: str, limit: float, *options: object) -> Step:
        rehearse = ("--rehearse",) if is_rehearsal else ()
        out = "--out", str(root / FOLDER / name)
        return Step(name, ("-m", f"experiments.gpu.{module}", *map(str, options), *rehearse, *out), limit)

    def decode(name: str, context: int, caches: tuple[str, ...], *options: object, limit: float = 4) -> Step:
        fewer = ("--rounds", 1, "--steps", 1) if is_rehearsal else ()
        return step(name, "decode", limit, "--context", context, "--caches", *caches, *options, *fewer)

    others = ("--other-transformers", *other_transformers) if other_transformers else ()
    few_rounds = ("--rounds", 1) if is_rehearsal else ()
    small_prompts = ("--context", sizes.host, "--prompts", sizes.host) if is_rehearsal else ()
    return [
        step("suites", "suites", 8, *others),
        *(decode(f"streaming-{context}", context, _STREAMING) for context in sizes.streaming),
        *(
            decode(f"without-cudnn-{context}", context, _WITHOUT_CUDNN, "--without-cudnn")
            for context in reversed(sizes.streaming)
        ),
        *(decode(f"quantized-{context}", context, _QUANTIZED) for context in reversed(sizes.quantized)),
        step("peaks", "peaks", 4, "--context", sizes.prompt, "--decoded-context", sizes.prompt_before_cpu),
        step("attention", "attention", 3, "--contexts", *sizes.attention, *few_rounds),
        decode("host", sizes.host, _HOST, "--rounds", 3, "--steps", 2, "--threads", *_thread_counts(), limit=6),
        *(decode(f"both-places-{context}", context, _BOTH_PLACES) for context in sizes.quantized),
        step("experts", "experts", 6, *few_rounds, *small_prompts),
        *(decode(f"peers-{context}", context, _PEERS, limit=6) for context in sizes.quantized),
        # The longest; what is above answers all aims.
        *_tables(root, sizes, is_rehearsal),
        decode("placements", sizes.placements, _PLACEMENTS),
    ]


def _tables(root: Path, sizes: Sizes, is_rehearsal: bool) -> list[Step]:
    """Return the steps of the context sweep with limited GPU memory."""
    found = []
    for card in _CARDS[:1] if is_rehearsal else _CARDS:
        name = f"{records.machine_name()}-as-{card.lower()}"
        options: list[object] = ["--caches", "dynamic", *([] if is_rehearsal else ["offloaded"])]
        options += ["--decode-devices", "gpu", "cpu"]
        options += ["--contexts", *sizes.table, "--new-tokens", sizes.new_tokens, "--prefill", "real"]
        options += ["--time-limit", 120, "--out", root / "context_sweep" / name]
        options += ["--gpu-memory", card] if has_gpu() else []
        found.append(Step(f"table-{card}", ("-m", "experiments.context_sweep", *map(str, options)), 10))
    return found


def _thread_counts() -> list[int]:
    """Return 1, 2, 4, and so on, and the number of all threads."""
    cores = records.num_cores()
    return sorted({*(2**power for power in range(cores.bit_length())), cores})
