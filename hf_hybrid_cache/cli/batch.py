"""`hf-hybrid-cache batch`: many questions about many documents, each of which is read once."""

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..chat.forms import FORMS
from ..documents import DocumentError, read_documents, require_documents
from ..errors import HybridCacheError
from .answer_table import write_table
from .batch_files import Answers, Question, by_document, documents_digest, read_questions
from .console import UsageError, consoles, exit_codes, note, out_of_memory, raising_interrupts, without_controls
from .options import ANSWER, DOCUMENT, Cache, FormedAnswerOptions, Model, Prompt, Store, option, with_options
from .task import answer_fields, say_what_is_stored_otherwise

if TYPE_CHECKING:
    from ..chat import AnswerSettings, Chat
    from .loading import LoadedModel

# A question, and the fields that its answer has beside those of the question.
Outcome = tuple[Question, dict[str, Any]]


@with_options
def batch(
    questions: Annotated[
        Path,
        typer.Argument(
            help='Lines such as {"document": "report.txt", "question": "Who wrote it?", "id": 7}; the id may be left '
            "out, and other fields are those of the answer too. A document is a file or a folder, or a list of them; "
            "names are relative to this file's folder. A line may leave it to --document. With schema (an object, or "
            "the name of a file), choices or regex a line has its own form of answer."
        ),
    ],
    out: Annotated[
        Path, option(ANSWER, "File for a line of JSON for each answer, as they come; - for standard output.")
    ],
    prompt: Prompt,
    cache: Cache,
    model: Model,
    answer: FormedAnswerOptions,
    store: Store,
    document: Annotated[
        list[str] | None,
        option(
            DOCUMENT,
            "Document that lines without one are asked about; several may follow, such as contracts/*.pdf, and each is "
            "one of its own. Default: none.",
            metavar="FILE|FOLDER|URL",
        ),
    ] = None,
    at_once: Annotated[
        int,
        option(
            ANSWER,
            "Questions about one document that are answered together, at most: a step reads the weights once for all "
            "of them. Each takes memory for its own tokens, and for a copy of the document where it is not shared: "
            "quantized, on a device. Where memory ends, half as many go on. In 16 bits, and with sampling, answers "
            "depend on those beside them.",
            min=1,
        ),
    ] = 1,
    csv: Annotated[
        Path | None,
        option(
            ANSWER,
            "File for a table of the answers in --out: a row for each question, a column for each property of an "
            "answer that is an object of JSON.",
        ),
    ] = None,
    again: Annotated[
        bool,
        option(ANSWER, "Ask again what was answered with other options. Default: that is an error.", "--again"),
    ] = False,
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
    is: the same command goes on after an interruption, and asks what is new. A document that cannot be read, or is too
    long without --context, is an answer with an error; the exit code is 1 then, 0 if all questions are answered.
    """
    _, notes = consoles()
    with exit_codes(notes):
        cache.require_ours("batch")
        share, path = _parsed_shard(shard), _path_of_answers(out)
        _check_path_of_table(csv, (questions, out))
        settings = answer.settings()
        asked = list(chain.from_iterable(by_document(read_questions(questions, settings.form, document or ()))[share]))
        folder = questions.parent.absolute()
        store.require_usable()
        kept = _kept_settings(prompt, cache, model, answer)
        answers = Answers(path, asked, kept, folder, partial(note, notes), again)
        with answers.alone():
            left, loaded = answers.left(model.name), None
            missing, groups = _without_missing(by_document(left.questions), folder)
            if groups:
                from .loading import load_model

                loaded = load_model(model, cache.name, notes)
                left = answers.left(model.name)  # the model may have come from the Hub just now
                missing, groups = _without_missing(by_document(left.questions), folder)
            progress = _Progress(notes, len(asked), len(asked) - len(left.questions))
            if left.num_others:
                others = f"answers to questions that are not asked any more: {left.num_others:,}"
                note(notes, f"{others}; they stay in {out}")
            if left.num_changed:
                changed = f"{left.num_changed:,} of {len(asked):,} questions"
                note(notes, f"{changed} are asked again, because a document, the model or an option has changed since")
            if progress.done:
                note(notes, f"{progress.done:,} of {len(asked):,} questions were answered before")
            failed: list[tuple[Question, str]] = []
            num_cut = 0
            read: Iterator[Outcome] = iter(())
            if loaded is not None:
                of_chat = {
                    "system": prompt.system,
                    "context": prompt.context,
                    **cache.arguments,
                    "store": store.open(),
                    "settings": settings,
                    "details": {"model": model.name, "weights": model.weights},
                }
                reader = _Reader(loaded, of_chat, folder, progress, notes, at_once)
                read = chain.from_iterable(map(reader.outcomes, groups))
            try:
                with raising_interrupts(), progress.bar:
                    for question, fields in chain(missing, read):
                        answers.add(question, fields)
                        failed += [(question, fields["error"])] if "error" in fields else []
                        num_cut += bool(question.form) and fields.get("finish_reason") in ("length", "context")
                        progress.answered()
            except KeyboardInterrupt:
                way_on = "the same command goes on" if path else "a file as --out goes on where it was"
                answered = f"{progress.done - len(failed):,} of {len(asked):,} questions"
                note(notes, f"stopped; {answered} are answered, {way_on}")
                raise
        for question, reason in failed:
            note(notes, f"{questions}, line {question.line}: {question.fields['document']}: {reason}")
        if num_cut:
            cut = f"{num_cut:,} answers are cut off before they have their form"
            note(notes, f"{cut}: --max-new-tokens {settings.max_new_tokens:,} may be raised")
        if csv is not None:
            note(notes, write_table(csv, sorted(asked, key=lambda each: each.line), answers.given()))
        where = f" in {out}" if path else ""
        note(notes, f"{len(asked) - len(failed):,} of {len(asked):,} questions are answered{where}")
        if failed:
            raise typer.Exit(1)


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


def _check_path_of_table(table: Path | None, others: Sequence[Path]) -> None:
    """Raise `UsageError` unless --csv is missing, or a file of its own beside one of answers."""
    if table is None:
        return
    if str(others[-1]) == "-":
        raise UsageError("--csv is a table of what is in the file --out: name one instead of -.")
    if not table.parent.is_dir():
        raise UsageError(f"There is no folder {table.parent} for --csv.")
    if table.resolve() in [each.resolve() for each in others] or (table.exists() and not table.is_file()):
        raise UsageError(f"--csv {table} is no file of its own: name another one.")


def _kept_settings(prompt: Prompt, cache: Cache, model: Model, answer: FormedAnswerOptions) -> dict[str, Any]:
    """The settings that all answers in a file have alike; `at_once` may be another one after an interruption."""
    given = asdict(prompt) | asdict(cache) | asdict(model) | asdict(answer)
    for name in ("device", "drafts", *FORMS):
        given.pop(name, None)
    return given | {"cache": cache.name, "max_new_tokens": answer.settings().max_new_tokens}


class _Progress:
    """
    Shows how many questions have an answer or an error, `done`, and the time that is left.

    At a terminal it is a bar, while it is open, and elsewhere a line at each tenth.
    """

    def __init__(self, notes: Console, num_questions: int, done: int):
        self.done, self._num_questions, self._notes = done, num_questions, notes
        self._name, self._num_tokens, self._num_read = "", 0, 0  # of the document at hand
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,} of {task.total:,} questions"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=notes,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays as it is
            disable=not notes.is_interactive,
            speed_estimate_period=3600.0,
        )
        self._task = self.bar.add_task("", total=num_questions, completed=done)

    def read(self, document: str, num_tokens: int) -> None:
        """Show that a document is read from now on."""
        self._name, self._num_tokens, self._num_read = without_controls(Path(document).name), num_tokens, 0
        self.advance(0)

    def advance(self, num_tokens: int) -> None:
        """Show that tokens were read; those of questions are beyond the document."""
        self._num_read = min(self._num_read + num_tokens, self._num_tokens)
        self.bar.update(self._task, description=f"{self._name} {self._num_read / self._num_tokens:.0%}", refresh=True)

    def answered(self) -> None:
        """Show that a question has an answer, or an error."""
        self.done += 1
        self.bar.update(self._task, advance=1, refresh=True)
        if self.bar.disable and self.done * 10 // self._num_questions > (self.done - 1) * 10 // self._num_questions:
            note(self._notes, f"{self.done:,} of {self._num_questions:,} questions")


class _Reader:
    """Answers the questions about one document after the other, with a model; `of_chat` are arguments of `Chat`."""

    def __init__(
        self,
        loaded: "LoadedModel",
        of_chat: Mapping[str, Any],
        folder: Path,
        progress: _Progress,
        notes: Console,
        at_once: int,
    ):
        from ..chat import ChatTemplate, can_answer_together, context_length

        self._model, self._tokenizer, self._of_chat = loaded.model, loaded.tokenizer, of_chat
        self._folder, self._progress, self._notes = folder, progress, notes
        self._settings: AnswerSettings = of_chat["settings"]
        self._context = context_length(loaded.model)
        self._template = ChatTemplate(loaded.tokenizer, of_chat["system"]).given(self._settings)
        self._answer_tokens = self._template.answer_tokens(self._settings, self._context)
        self._looks_in = of_chat["store"]  # for the first document alone: one remark tells
        self._template.start()  # what is refused here no question could have
        self._at_once = at_once
        if at_once > 1 and not can_answer_together(loaded.model):
            note(notes, "not all layers of this model attend to all tokens: its questions are answered one at a time")

    def outcomes(self, questions: Sequence[Question]) -> Iterator[Outcome]:
        """Answer questions about one document; an error that a user can correct becomes that of a question."""
        start = time.perf_counter()
        try:
            digest = documents_digest(questions[0].documents, self._folder)  # before they are read: a change is noticed
            chat, fields = self._chat(questions)
            self._progress.read(questions[0].documents[0], len(chat.token_ids))
            chat.read()
        except (HybridCacheError, MemoryError, RuntimeError) as error:
            yield from _failed(questions, error)
            return
        fields |= {"document_digest": digest, "document_seconds": round(time.perf_counter() - start, 3)}
        left: list[Question] = []
        forms = [question.form for question in questions]
        for question in sorted(questions, key=lambda each: forms.index(each.form)):  # those of a form together
            try:
                chat.require_room(question.text)
                left.append(question)
            except HybridCacheError as error:
                yield from _failed([question], error)
        at_once = self._at_once
        while left:
            _, alike = next(groupby(left, lambda each: each.form))
            form: dict[str, Any] = dict.fromkeys(FORMS) | dict(left[0].form)
            settings = replace(chat.settings, **form)
            try:
                for given in chat.ask_all([question.text for question in alike], at_once, settings):
                    took = {"seconds": round(given.seconds, 3), "at_once": given.together}
                    yield left.pop(0), answer_fields(given, "schema" in settings.form) | took | fields
            except (HybridCacheError, MemoryError, RuntimeError) as error:
                yield from _failed([left.pop(0)], error)
                at_once = 1  # memory ended with a single answer

    def _chat(self, questions: Sequence[Question]) -> tuple["Chat", dict[str, Any]]:
        """A conversation about a document, which is not read yet, and the fields of an answer that describe it."""
        from ..chat import Chat, PromptError

        remark = partial(note, self._notes)
        documents = read_documents(questions[0].documents, remark, self._folder)
        chat = Chat(
            self._model,
            self._tokenizer,
            documents,
            leave=self._template.room_to_ask(
                [each.text for each in questions], self._of_chat["settings"], self._context
            ),
            progress=self._progress.advance if self._notes.is_interactive else True,
            remark=remark,
            **self._of_chat,
        )
        say_what_is_stored_otherwise(self._looks_in, chat, self._notes)
        self._looks_in = None
        read = chat.document
        if read.read_tokens < read.tokens and self._of_chat["context"] is None:
            raise PromptError(
                f"The {documents.counted} {'has' if len(documents.files) == 1 else 'have'} "
                f"{'about ' if read.is_estimate else ''}{read.tokens:,} tokens, of which {read.read_tokens:,} fit into "
                f"a context of {chat.context:,} with the question and {self._answer_tokens:,} tokens of an answer. "
                "Pass --context to read only the start, or use a model with a longer context."
            )
        fields: dict[str, Any] = {"document_tokens": read.tokens, "read_tokens": read.read_tokens}
        if len(documents.files) > 1:
            fields["documents"] = [asdict(part) for part in read.parts]
        if documents.skipped:
            fields["left_out"] = list(documents.skipped)
        return chat, fields


def _without_missing(groups: Sequence[list[Question]], folder: Path) -> tuple[list[Outcome], list[list[Question]]]:
    """The errors of questions about documents that are not there, before a model is loaded; and the other groups."""
    missing: list[Outcome] = []
    others = []
    for questions in groups:
        try:
            require_documents(questions[0].documents, folder)
            others.append(questions)
        except DocumentError as error:
            missing += _failed(questions, error)
    return missing, others


def _failed(questions: Sequence[Question], error: Exception) -> list[Outcome]:
    """The error as that of each question; raises an error that no user can correct."""
    reason = str(error) if isinstance(error, HybridCacheError) else out_of_memory(error)
    return [(question, {"error": reason.partition("\n")[0]}) for question in questions]
