"""
The options of the commands: a field of a dataclass is an option, and its help is its documentation.

Nothing here imports torch or transformers, so a wrong option is told at once.
"""

import functools
import inspect
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ..chat.settings import DEFAULT_BITS
from ..drafts import MOST_TOKENS
from ..scalars import parse_bytes
from .console import UsageError, fail, json_object

if TYPE_CHECKING:
    from ..chat import AnswerSettings
    from ..prefix_store import PrefixStore

_T = TypeVar("_T")
# The groups of options in a help text.
DOCUMENT, ANSWER, CACHE, MODEL = "Document", "Answer", "Cache", "Model"
WeightBits = Literal[8, 4]
DType = Literal["float32", "bfloat16", "float16"]
DEFAULT_MODEL = "smollm2-135m"
# Tokens of an answer at most; with --compare, of the answer of each cache.
NEW_TOKENS, COMPARED_TOKENS = 256, 64


def option(panel: str, help_text: str, *names: str, **more: Any) -> Any:
    """An option of typer, in a group of the help text; names are needed where the field does not give them."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **more)


def document_option(default: str, others: str = "") -> Any:
    """The option for documents, with its default, and what it takes beside files, folders and addresses."""
    return option(
        DOCUMENT,
        f"Text, PDF, docx, HTML or mail to ask about, a folder of them, an address (https){others}; several may "
        f"follow, and it may be repeated. What does not fit is cut off and said. Default: {default}.",
        metavar="FILE|FOLDER|URL" + "|-" * bool(others),
    )


# Options that several commands have, and that are not of one of the dataclasses.
AsJson = Annotated[bool, option(ANSWER, "Print lines of JSON.", "--json")]
Quiet = Annotated[bool, option(ANSWER, "No remarks, and no progress.", "--quiet")]

_SAMPLING = ("--temperature", "--top-p", "--top-k", "--min-p", "--repetition-penalty", "--seed")
# Two options that exclude each other in every command that has both, and what is said where both are given.
EXCLUDING: tuple[tuple[str, str, str], ...] = (
    ("--compare", "--cache", "--compare takes every cache: drop --cache."),
    ("--compare", "--cpu-decode", "--compare is of caches as they are: drop --cpu-decode."),
    ("--compare", "--store", "--store is for one cache, --compare for all: drop one of them."),
    *(("--compare", option, f"--compare takes the likeliest token each time: drop {option}.") for option in _SAMPLING),
    ("--resume", "--document", "--resume goes on with the document of the conversation: drop --document."),
    ("--resume", "--system", "--resume goes on with the system message of the conversation: drop --system."),
    ("--resume", "--name", "--resume goes on with a conversation that has its name: drop --name."),
    ("--export", "--remove", "--export is of a conversation that stays: drop --remove."),
    ("--export", "--verify", "--verify is of all files: drop it, or --export."),
    *(("--json", option, f"--json is of the list: drop it, or {option}.") for option in ("--remove", "--verify")),
)


def check_exclusions(given: Collection[str]) -> None:
    """Raise `UsageError` if two of the given options are a row of `EXCLUDING`; `with_options` calls it."""
    for first, second, way_out in EXCLUDING:
        if first in given and second in given:
            raise UsageError(way_out)


def parsed(option: str, text: str | None, parse: Callable[[str], _T]) -> _T | None:
    """The value that an option names, `None` without it; raises `UsageError` where `parse` raises `ValueError`."""
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def given_text(option: str, text: str) -> str:
    """The text of an option, from its bytes where a locale such as C could not decode them; or raise `UsageError`."""
    try:
        return os.fsencode(text).decode() if any("\ud800" <= letter <= "\udfff" for letter in text) else text
    except UnicodeError:
        raise UsageError(f"{option} {text!r} is not UTF-8 text.") from None


@dataclass(frozen=True)
class Prompt:
    """The part of a prompt before the first question, beside the documents."""

    context: Annotated[
        int | None,
        option(
            DOCUMENT,
            "Tokens of each question's documents to read at most. Default: what fits the model's context.",
            min=1,
        ),
    ] = None
    system: Annotated[
        str | None, option(DOCUMENT, "System message, before the document. Default: that of the chat template.")
    ] = None

    def __post_init__(self) -> None:
        if self.system is not None:
            object.__setattr__(self, "system", given_text("--system", self.system))


@dataclass(frozen=True)
class ConversationPrompt(Prompt):
    """The part of a prompt before the first question of a conversation, whose tokens have a limit."""

    context: Annotated[
        int | None,
        option(
            DOCUMENT,
            "Tokens of documents, questions and answers together at most. Default: the model's context.",
            min=1,
        ),
    ] = None


@dataclass(frozen=True)
class Cache:
    """The cache that answers; raises `UsageError` for a value that there is not, or that the cache would ignore."""

    cache: Annotated[
        Literal["stock", "dynamic", "offloaded", "quantized"] | None, option(CACHE, "Default: dynamic.")
    ] = None
    bits: Annotated[
        Literal[8, 4, 2] | None,
        option(CACHE, f"Bits of keys and values, not of weights: a quantized cache. Its default: {DEFAULT_BITS}."),
    ] = None
    cpu_decode: Annotated[
        Literal["yes", "no"] | None,
        option(CACHE, "The CPU attends to tokens in host memory. Default: yes for a model on the CPU."),
    ] = None

    def __post_init__(self) -> None:
        if self.bits is not None and self.name != "quantized":
            raise UsageError(f"--bits is for --cache quantized, and the cache is {self.name}: drop one of them.")
        if self.cpu_decode is not None and self.name == "stock":
            raise UsageError("--cache stock is transformers' own: drop --cpu-decode.")

    @property
    def name(self) -> str:
        """Name of the cache; `--bits` alone means "quantized", and neither option "dynamic"."""
        return self.cache or ("dynamic" if self.bits is None else "quantized")

    @property
    def quantized_bits(self) -> int | None:
        """Bits of keys and values in a quantized cache; `None` for another cache."""
        return (self.bits or DEFAULT_BITS) if self.name == "quantized" else None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `Chat` that say so."""
        on_cpu = None if self.cpu_decode is None else self.cpu_decode == "yes"
        return {"cache": self.name, "bits": self.bits, "cpu_decode": on_cpu}

    def require_ours(self, what: str) -> None:
        """Raise `UsageError` if the cache is transformers' own, where an option or a command needs one of ours."""
        if self.name == "stock":
            raise UsageError(f"--cache stock is transformers' own, and {what} needs one of ours: drop --cache.")


@dataclass(frozen=True)
class Model:
    """The model that answers, and how it holds its weights."""

    model: Annotated[
        str, option(MODEL, f"{DEFAULT_MODEL}, a model of the Hugging Face Hub, a folder, or a GGUF file.")
    ] = DEFAULT_MODEL
    weights: Annotated[
        WeightBits | None,
        option(
            MODEL,
            "Bits of each weight, for a model on the CPU, or with --experts of experts alone. Default: as they are, "
            "also with --bits.",
        ),
    ] = None
    experts: Annotated[
        Literal["host"] | None,
        option(MODEL, "A mixture of experts keeps them in host memory. Default: where the model is."),
    ] = None
    dtype: Annotated[DType | None, option(MODEL, "Of weights and states. Default: the checkpoint's.")] = None
    device: Annotated[
        str | None, option(MODEL, "cpu, cuda, cuda:1, ... Default: the accelerator, if there is one.")
    ] = None

    @property
    def name(self) -> str:
        return self.model


@dataclass(frozen=True)
class AnswerOptions:
    """Settings of an answer; raises `UsageError` for what `AnswerSettings` refuses."""

    max_new_tokens: Annotated[
        int | None,
        option(ANSWER, f"Tokens of the answer at most. Default: {NEW_TOKENS}."),
    ] = None
    thinking: Annotated[
        bool | None,
        option(ANSWER, "Let the model think before it answers, or not. Default: that of the chat template."),
    ] = None
    max_thinking_tokens: Annotated[
        int | None,
        option(ANSWER, "Tokens of a thought at most; it is closed then, so that an answer comes. Default: 2048."),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        option(
            ANSWER,
            """Values of variables of the chat template, such as '{"reasoning_effort": "low"}'. Default: its own.""",
            metavar="JSON",
        ),
    ] = None
    temperature: Annotated[float, option(ANSWER, "Of sampling; 0 takes the likeliest token each time.")] = 0.0
    top_p: Annotated[
        float | None, option(ANSWER, "Sample from the likeliest tokens with this probability together. Default: 1.")
    ] = None
    top_k: Annotated[int | None, option(ANSWER, "Sample from so many of the likeliest tokens. Default: all.")] = None
    min_p: Annotated[
        float | None,
        option(ANSWER, "Sample from tokens with this share of the likeliest one's probability. Default: 0."),
    ] = None
    repetition_penalty: Annotated[
        float | None, option(ANSWER, "Above 1: tokens that have occurred become less likely. Default: none.")
    ] = None
    seed: Annotated[
        int | None, option(ANSWER, "Seed of sampling: the same one gives the same answer. Default: none.")
    ] = None
    stop: Annotated[
        list[str] | None,
        option(ANSWER, "End the answer before this text; may be repeated. Default: none.", metavar="TEXT"),
    ] = None
    drafts: Annotated[
        int,
        option(ANSWER, "Tokens to draft from document and answer at most, and check in one pass; 0: none."),
    ] = MOST_TOKENS

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", [given_text("--stop", text) for text in self.stop or ()] or None)
        self.settings()

    def settings(self, default_max_new_tokens: int = NEW_TOKENS) -> "AnswerSettings":
        """The settings as `hf_hybrid_cache.chat` takes them; raises `UsageError` for one that is out of its range."""
        from ..chat import AnswerSettings, SettingError

        max_new_tokens = default_max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        given = {name: value for name, value in asdict(self).items() if value is not None}
        given |= {"max_new_tokens": max_new_tokens, "stop": tuple(self.stop or ())}
        if self.chat_template_kwargs is not None:
            given["chat_template_kwargs"] = parsed("--chat-template-kwargs", self.chat_template_kwargs, json_object)
        try:
            return AnswerSettings(**given)
        except SettingError as error:  # whose message begins with the name of the setting
            name, _, reason = str(error).partition(" ")
            raise UsageError(f"--{name.replace('_', '-')} {reason}") from error


@dataclass(frozen=True)
class FormedAnswerOptions(AnswerOptions):
    """Settings of an answer that may have a form."""

    schema: Annotated[
        str | None,
        option(ANSWER, "File with a JSON Schema: the answer is JSON of it. Default: any text.", metavar="FILE"),
    ] = None
    choices: Annotated[
        list[str] | None,
        option(
            ANSWER,
            "The answer is one of these: all words up to the next option. Default: any text.",
            metavar="WORD...",
        ),
    ] = None
    regex: Annotated[
        str | None, option(ANSWER, "The answer has the form of this regular expression. Default: any text.")
    ] = None

    def __post_init__(self) -> None:
        choices = [given_text("--choices", text) for text in self.choices or ()]
        object.__setattr__(self, "choices", choices or None)
        if self.regex is not None:
            object.__setattr__(self, "regex", given_text("--regex", self.regex))
        super().__post_init__()


@dataclass(frozen=True)
class Store:
    """The prefix store; raises `UsageError` for a limit that is no size, or of no store."""

    folder: Annotated[
        Path | None,
        option(
            DOCUMENT,
            "Folder of a prefix store, made if needed: it keeps what is read, and gives what was read before.",
            "--store",
        ),
    ] = None
    store_max: Annotated[
        str | None,
        option(DOCUMENT, "Its size at most, such as 20GiB; what was used longest ago goes first. Default: the disk's."),
    ] = None

    def __post_init__(self) -> None:
        if self.store_max is None:
            return
        if self.folder is None:
            raise UsageError("--store-max is the limit of a prefix store: name its folder with --store.")
        parsed("--store-max", self.store_max, parse_bytes)

    def require_usable(self) -> None:
        """Check that the folder can be used, if there is one; torch is not imported, as for a `PrefixStore`."""
        if self.folder is not None:
            from ..prefix_store import StoredPrompts

            StoredPrompts(self.folder)

    def open(self) -> "PrefixStore | None":
        """Open the store, whose folder is made if there is none; `None` without the option."""
        if self.folder is None:
            return None
        self.require_usable()
        from ..prefix_store import PrefixStore

        return PrefixStore(self.folder, max_bytes=self.store_max)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """
    Make of a command's dataclass parameters the options that typer reads, one for each field.

    The command is called with the dataclasses. An error that one of them raises, or that two options exclude each
    other, is a line on standard error and exit code 2.

    Example:
        >>> @app.command()
        ... @with_options
        ... def generate(model: Model, store: Store, document: DocumentOption = None) -> None:
        ...     "Answer a question about a document."
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in own if is_dataclass(each.annotation)}
    parameters = [each for each in own if each.name not in groups]
    parameters += [each for group in groups.values() for each in inspect.signature(group).parameters.values()]
    assert len({each.name for each in parameters}) == len(parameters), f"{command.__name__} has an option twice"

    @functools.wraps(command)
    def run(**values: Any) -> None:
        try:
            check_exclusions({_name_of(each) for each in parameters if values[each.name] not in (each.default, [])})
            made = {
                name: group(**{each.name: values.pop(each.name) for each in fields(group)})
                for name, group in groups.items()
            }
        except UsageError as error:
            raise fail(str(error)) from error
        command(**values, **made)

    vars(run)["__signature__"] = inspect.Signature([each.replace(kind=each.KEYWORD_ONLY) for each in parameters])
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _name_of(parameter: inspect.Parameter) -> str:
    """The name of an option on the command line, of which typer keeps a given one as the default."""
    given = [each.default for each in getattr(parameter.annotation, "__metadata__", ())]
    return given[0] if given and isinstance(given[0], str) else f"--{parameter.name.replace('_', '-')}"
