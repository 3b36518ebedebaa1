"""`hf-hybrid-cache batch`: many questions about many documents, each of which is read once."""

import re
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from .answers import Answers, model_digest
from .batch_progress import BatchProgress
from .batch_reader import BatchOptions, BatchReader, without_missing
from .console import UsageError, consoles, exit_codes, note, raising_interrupts
from .options import ANSWER, DOCUMENT, AnswerOptions, Cache, Model, Prompt, Store, option, with_options
from .questions import by_document, read_questions


@with_options
def batch(
    questions: Annotated[
        Path,
        typer.Argument(
            help='Lines such as {"document": "report.txt", "question": "Who wrote it?", "id": 7}; the id may be left '
            "out, and other fields are those of the answer too. A document is a file or a folder, or a list of them; "
            "names are relative to this file's folder."
        ),
    ],
    out: Annotated[
        Path, option(ANSWER, "File for a line of JSON for each answer, as they come; - for standard output.")
    ],
    prompt: Prompt,
    cache: Cache,
    model: Model,
    answer: AnswerOptions,
    store: Store,
    at_once: Annotated[
        str,
        option(
            ANSWER,
            "Questions about one document that are answered together, at most: a step reads the weights once for all "
            "of them. Each takes memory for its own tokens, and for a copy of the document where it is not shared: "
            "quantized, on a device. Where memory ends, half as many go on; auto begins with 32. The default is 1, "
            "because in 16 bits, and with sampling, answers depend on those beside them.",
            metavar="NUMBER|auto",
        ),
    ] = "1",
    shard: Annotated[
        str | None,
        option(
            DOCUMENT,
            "Answer only the questions about every N-th document, from the K-th one on: one of N processes, each with "
            "its own --out.",
            metavar="K/N",
        ),
    ] = None,
) -> None:
    """
    Answer many questions about many documents.

    A document is computed once for all of its questions. What is answered already is not asked again, wherever its line
    is: the same command goes on after an interruption, and asks what is new. A document that cannot be read is an
    answer with an error; the exit code is 1 then, 0 if all questions are answered.
    """
    _, notes = consoles()
    with exit_codes(notes):
        cache.require_ours("batch")
        options = BatchOptions(prompt, cache, model, answer, store, _parsed_at_once(at_once))
        share, path = _parsed_shard(shard), _path_of_answers(out)
        asked = list(chain.from_iterable(by_document(read_questions(questions))[share]))
        folder = questions.parent.absolute()
        if store.folder is not None:
            from ..prefix_store import StoredPrompts

            StoredPrompts(store.folder)  # raises an error if it cannot be used; a `PrefixStore` imports torch first
        answers = Answers(path, asked, options.settings, folder, partial(note, notes))
        with answers.alone():
            digest = model_digest(model.name)
            settled, loaded = answers.settle(digest), None
            if without_missing(by_document(settled.unanswered), folder)[1]:
                from .loading import load_model

                loaded = load_model(model, notes)
                digest = model_digest(model.name)  # of what came from the Hub just now
                settled = answers.settle(digest)
            missing, groups = without_missing(by_document(settled.unanswered), folder)
            progress = BatchProgress(notes, len(asked), len(asked) - len(settled.unanswered))
            if others := settled.num_others:
                note(notes, f"answers to questions that are not asked any more: {others:,}; they stay in {out}")
            if settled.num_changed:
                changed = f"{settled.num_changed:,} of {len(asked):,} questions"
                note(notes, f"{changed} are asked again, because a document or the model has changed since")
            if progress.done:
                note(notes, f"{progress.done:,} of {len(asked):,} questions were answered before")
            failed = []
            read = () if loaded is None else BatchReader(loaded, options, folder, progress, notes).outcomes(groups)
            try:
                with raising_interrupts(), closing(progress):
                    for question, fields in chain(missing, read):
                        answers.add({**question.fields, **fields, "model_digest": digest, "settings": options.settings})
                        failed += [(question, fields["error"])] if "error" in fields else []
                        progress.answered(is_error="error" in fields)
            except KeyboardInterrupt:
                way_on = "the same command goes on" if path else "a file as --out goes on where it was"
                answered = f"{progress.done - len(failed):,} of {len(asked):,} questions"
                note(notes, f"stopped; {answered} are answered, {way_on}")
                raise
        for question, reason in failed:
            note(notes, f"{questions}, line {question.line}: {question.fields['document']}: {reason}")
        where = f" in {out}" if path else ""
        note(notes, f"{len(asked) - len(failed):,} of {len(asked):,} questions are answered{where}")
        if failed:
            raise typer.Exit(1)


def _parsed_at_once(text: str) -> int | None:
    """The number that --at-once names; `None` for auto."""
    if text != "auto" and not re.fullmatch("0*[1-9][0-9]*", text):
        raise UsageError(f"--at-once must be a number from 1 on, or auto, got {text!r}.")
    return None if text == "auto" else int(text)


def _parsed_shard(text: str | None) -> slice:
    """The documents that --shard K/N names: every N-th, from the K-th one on."""
    if text is None:
        return slice(None)
    given = re.fullmatch("([0-9]+)/([0-9]+)", text)
    if given is None or not 1 <= int(given[1]) <= int(given[2]):
        raise UsageError(f"--shard must be K/N, such as 2/8 for the second of 8 processes, got {text!r}.")
    return slice(int(given[1]) - 1, None, int(given[2]))


def _path_of_answers(out: Path) -> Path | None:
    """The file that --out names; `None` for standard output."""
    if str(out) == "-":
        return None
    if not out.parent.is_dir():
        raise UsageError(f"There is no folder {out.parent} for --out.")
    if out.exists() and not out.is_file():
        raise UsageError(f"--out {out} is no regular file: name one, or - for standard output.")
    return out
