"""The report of `generate --compare`: the same answer with all caches, and a table of what each took."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pydoc_data import topics
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from ..chat import CACHES
from ..documents import Document, Documents
from ..weights import NothingToQuantizeError
from .console import note, print_json, write
from .loading import LoadedModel, quantize_loaded
from .task import Task, dtype_text, mebibytes, rate_text, record, say_what_is_read, why_no_more

SAMPLE_QUESTION = "What is a convenient way to insert debugging assertions into a program?"
_SAMPLE_ANSWER = r"Assert statements are a convenient way[^:.]*"
# Bits of weights in the last row, on a CPU.
_FEW_WEIGHT_BITS = 4
# Tokens of documents that each cache reads, unless --context says how many.
MOST_TOKENS = 4096
_WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Row:
    """The answer with a cache, as tokens and as a `record`; the name is that of the cache, and of its own weights."""

    name: str
    record: Mapping[str, Any]
    token_ids: list[int]


def sample_document() -> Documents:
    """The language reference that Python's help() prints: 465 KB of English prose that every machine has."""
    text = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
    return Documents((Document("Python's language reference", text),), ())


def compare_caches(
    task: Task, loaded: LoadedModel, form: Mapping[str, Any], as_json: bool, out: Console, notes: Console
) -> None:
    """
    Print the answer of stock, a table of what each cache took, and the answers that differ; or lines of JSON.

    On a CPU the quantized cache answers a second time, with quantized weights, if the model has none.

    Args:
        task: what is asked; without documents the question is about the sample document.
        loaded: answers.
        form: the model, its weights, and the bits of a quantized cache.
        as_json: whether lines of JSON are printed.
        out: receives answers.
        notes: receives remarks.
    """
    text_out = read_out = Console(quiet=True) if as_json else out
    quoted = None
    if task.documents is None:
        read_out = Console(quiet=True)
        quoted = re.search(_SAMPLE_ANSWER, sample_document().text) if task.question is None else None
        task = replace(task, documents=sample_document(), question=task.question or SAMPLE_QUESTION)
    adds_weights = loaded.weights_text is None and loaded.model.device.type == "cpu"
    task = _shortened(task, loaded, len(CACHES) + adds_weights, read_out, notes)
    rows: list[Row] = []

    def add(cache: str, name: str, **others: object) -> None:
        bits = form["bits"] if cache == "quantized" else None
        rows.append(_row(task, loaded, name, {**form, "cache": cache, "bits": bits, **others}, notes))
        if as_json:
            print_json(out, rows[-1].record)

    for cache in CACHES:
        add(cache, cache)
        if cache == "stock":
            write(text_out, f"{rows[0].record['answer']}\n")
            if quoted:
                write(text_out, f"\nThe document says: {' '.join(quoted[0].split())}.\n")
    if adds_weights and _has_few_bits(loaded.model, notes):
        add("quantized", f"{_FEW_WEIGHT_BITS}-bit weights and quantized", weights=_FEW_WEIGHT_BITS)
    if not as_json:
        out.print(_table(rows))
        write(out, _conclusion(rows, dtype_text(loaded.model)))


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The position, counted from 1, of the first token that differs; `None` if none does."""
    pairs = zip_longest(ours, theirs)
    return next((position for position, (a, b) in enumerate(pairs, 1) if a != b), None)


def _shortened(task: Task, loaded: LoadedModel, num_rows: int, out: Console, notes: Console) -> Task:
    """Let each cache read the first tokens of the documents alone, unless the user said how many; tell how many."""
    chat = task.chat(loaded, notes, cache="stock")
    most, why = chat.document.read_tokens, why_no_more(chat)
    if task.prompt.context is None and most > MOST_TOKENS:
        why = f"by each of {num_rows} caches; --context {most} reads more"
        task = replace(task, prompt=replace(task.prompt, context=MOST_TOKENS))
        chat = task.chat(loaded, notes, cache="stock")
    say_what_is_read(chat, why, out, notes)
    return task


def _has_few_bits(model: PreTrainedModel, notes: Console) -> bool:
    """Quantize the weights of a model, and return whether it has any that can be."""
    try:
        quantize_loaded(model, _FEW_WEIGHT_BITS, notes)
    except NothingToQuantizeError as error:
        note(notes, str(error))
        return False
    return True


def _row(task: Task, loaded: LoadedModel, name: str, form: Mapping[str, Any], notes: Console) -> Row:
    """Answer with a cache, after two steps that compile what is compiled once."""
    of_cache = {"cache": form["cache"], "bits": form["bits"]}
    warm = task.chat(loaded, Console(quiet=True), **of_cache, context=_WARM_UP_TOKENS)
    for _ in warm.ask("Why?", replace(task.settings, max_new_tokens=2)):
        pass
    chat = task.chat(loaded, notes, **of_cache)
    for _ in task.ask(chat):
        pass
    assert chat.last is not None
    return Row(name, record(chat, form), chat.last.token_ids)


def _table(rows: Sequence[Row]) -> Table:
    """A table with a line for each cache; that of stock comes first."""
    table = Table(box=box.SIMPLE)
    table.add_column("cache", max_width=13)
    for heading in ("prefill\nseconds", "decode\ntokens/s", "KV on\ndevice", "KV on\nhost"):
        table.add_column(heading, justify="right")
    table.add_column("same tokens\nas stock")
    for row in rows:
        different = first_difference(row.token_ids, rows[0].token_ids)
        table.add_row(
            row.name,
            f"{row.record['first_token_seconds']:.2f}",
            rate_text(row.record),
            mebibytes(row.record["kv_device_bytes"]),
            mebibytes(row.record["kv_host_bytes"]),
            "yes" if different is None else f"no, from {different}",
        )
    return table


def _conclusion(rows: Sequence[Row], dtype: str) -> str:
    """Say how many answers differ and from where, explain why if a data type has few digits, and give these."""
    stock, *ours = rows
    first = {row.name: first_difference(row.token_ids, stock.token_ids) for row in ours}
    different = [row for row in ours if first[row.name]]
    if not different:
        return f"All {len(ours)} give the same answer as stock.\n"
    earliest = min(position for position in first.values() if position)
    text = f"{len(different)} of {len(ours)} answers differ from that of stock, at token {earliest} at the earliest.\n"
    if dtype != "float32":
        text += f"In {dtype} attention that adds up in another order rounds differently: try --dtype float32.\n"
    return text + "".join(f"\n{row.name} answers: {row.record['answer']}\n" for row in different)
