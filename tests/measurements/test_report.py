"""Pages, tables and figures come from records: what a page shows is what they hold."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from experiments import report, stock_tests
from experiments.common.records import RESULTS
from experiments.common.timing import medians
from experiments.peers import peers
from experiments.peers.step_rows import over_reference, ratios
from experiments.processes.busy_machine import cells_of

REPOSITORY = RESULTS.parent


def page_of(name: str) -> str:
    return " ".join((REPOSITORY / name).read_text().split())


def only(folder: str) -> dict[str, Any]:
    (record,) = report.load_records(folder).values()
    return record


def test_the_report_changes_no_page_that_is_committed():
    for path, text in report.pages().items():
        assert path.read_text() == text, f"python -m experiments.report writes {path.name}"


def test_every_figure_of_a_record_is_drawn():
    mpl.use("Agg")
    for path, draw in report.drawings():
        figure, axes = plt.subplots()
        draw(axes)
        assert path.with_suffix(".svg").exists()
        assert axes.lines
        plt.close(figure)


def test_numbers_of_records_follow_from_their_samples():
    checked = Counter[str]()
    for record in (json.loads(path.read_text()) for path in RESULTS.rglob("*.json")):
        cells = record.get("cells", [])
        checked[record.get("experiment")] += len(cells)
        match record.get("experiment"):
            case "peers":
                added = peers.added_per_1000_tokens(cells)
                assert added == record["added_seconds_per_1000_tokens"]
                assert peers.times_ours(added) == record["times_ours"]
            case "busy_machine":
                samples = {(cell["setting"], cell["busy_processes"]): cell["samples_seconds"] for cell in cells}
                assert all(new | old == new for new, old in zip(cells_of(samples), cells, strict=True))
            case "whole_step":
                for cell in cells:
                    groups = [medians(group) for group in cell["samples_seconds"]]
                    reference = next(name for name in groups[0] if all(name in group for group in groups))
                    relative = over_reference(groups, reference)
                    assert relative == cell["over_reference"]
                    assert ratios(relative) == cell["ratios"]
    assert min(checked[name] for name in ("peers", "busy_machine", "whole_step")) > 1


def headline() -> Iterator[str]:
    """Yield what the README says of prompts, whole steps, the server and the prefix store."""
    shape = "llama-3.2-1b-random"
    sweep = report.load_records("context_sweep/amd-epyc-znver4-2-cores")

    def real(cache: str, tokens: int, field: str) -> float:
        return float(sweep[f"{shape}--{cache}--cpu--{tokens}--20--real--0"]["result"][field])

    def both(tokens: int, field: str) -> tuple[float, float]:
        return real("quantized-4-weights-4", tokens, field), real("stock", tokens, field)

    seconds = {tokens: both(tokens, "ttft_seconds") for tokens in (2048, 8192, 32768)}
    pairs = [f"{seconds[tokens][0]:.0f} s ({seconds[tokens][1]:.0f})" for tokens in (2048, 8192)]
    longest = real("quantized-4-weights-4", 131_072, "ttft_seconds") / 60
    pairs += [
        "{:.1f} min ({:.1f})".format(*(each / 60 for each in seconds[32768])),
        f"{longest:.0f} min (not measured)",
    ]
    yield f"| it is read, once | {' | '.join(pairs)} |"
    steps = [[1e3 / each for each in both(tokens, "tokens_per_second")] for tokens in seconds]
    (fused,) = only(f"whole_step/fused-131072-tokens/{shape}")["cells"]
    steps.append([1e3 * fused["median_seconds"][name] for name in ("ours W4/KV4", "stock W16/KV16")])
    yield f"| each token of an answer | {' | '.join(f'{ours:.0f} ms ({stock:,.0f})' for ours, stock in steps)} |"
    cells = report.load_records(f"whole_step/{shape}")["amd-epyc-znver5-2-cores"]["cells"]
    last = {name: 1e3 * each for name, each in cells[-1]["median_seconds"].items()}

    def peer(name: str) -> str:
        """The milliseconds with the faster of its keys and values."""
        return f"{min(last[f'{name} W4/KV{of_states}'] for of_states in (4, 16)):.0f}"

    here = f"There a token takes {last['ours W4/KV4']:.0f} ms on a Zen 5"
    yield f"{here}, with llama.cpp {peer('llama.cpp')} and with its fork ik_llama.cpp {peer('ik_llama.cpp')}."
    asked = only("serving")["first_token_seconds"]["ours"]
    first, later = asked["first question"][0], sorted(asked["another question"])[1]
    yield f"comes after {later:.1f} s instead of {first:.0f}"
    asked = only("serving/llama-3.2-1b-random")["first_token_seconds"]["ours"]
    yield f"that of the 1B shape about 8,192 after {sorted(asked['another question'])[1]:.1f} s"


def few_bits() -> Iterator[str]:
    for folder in ("docstrings", "reparametrized", "qwen2.5-coder-0.5b", "gemma-3-270m"):
        for cell in only(f"quality/{folder}")["cells"]:
            rows = [row["kl_nats"] for name, row in cell["caches"].items() if name != "full"]
            yield from (f"| {nats:.5f} |" if nats < 1 else f"| {nats:.2f} |" for nats in rows)
    for cell in only("quality/passkey")["cells"]:
        found = (cell["found"][name] for name in ("ours-8", "ours-4", "ours-4-2", "ours-2"))
        yield f"| {' | '.join(map(str, [cell['counted'], *found]))} |"


def peaks_of_loading() -> Iterator[str]:
    for cell in only("load_memory")["cells"][1:]:
        ratios = f"{cell['anonymous_ratio']:.2f}x | {cell['resident_ratio']:.2f}x"
        yield f"| {cell['model_bytes'] / 2**30:.2f} GiB | {ratios} |"


def continuations() -> Iterator[str]:
    record = only("continuations")
    questions = record["questions"]["times_as_fast_as_one_after_the_other"]
    yield f"| {questions['8']:.1f}x and {questions['32']:.1f}x |"
    beams = record["beams"]["times_as_fast_as_stock"]
    yield f"| {beams['ours']:.1f}x, a quarter of the memory; with 4 bits {beams['ours, 4 bits']:.1f}x"


SAID: Mapping[str, Callable[[], Iterator[str]]] = {
    "README.md": headline,
    "docs/quantized-cache.md": few_bits,
    "docs/weights.md": peaks_of_loading,
    "docs/continuations.md": continuations,
    "docs/reliability.md": lambda: iter([stock_tests.table(only("stock_tests")["cells"])]),
}


@pytest.mark.parametrize("page", SAID)
def test_figures_of_other_pages_are_those_of_the_records(page: str):
    text = page_of(page)
    for said in SAID[page]():
        assert " ".join(said.split()) in text, said
