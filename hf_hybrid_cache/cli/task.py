"""The task of a model: what it is asked, how much of the documents it reads, and what its answer cost."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..documents import Documents
from .console import note, strict_json, think, write
from .options import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from ..chat import Answer, AnswerSettings, Chat, DocumentPrompt
    from ..prefix_store import PrefixStore
    from .loading import LoadedModel


@dataclass(frozen=True)
class Task:
    """
    The task of a model.

    Attributes:
        documents: that it is asked about; `None` for none.
        question: `None` where documents are only kept.
        prompt: the options on what stands before the question.
        settings: of the answer.
    """

    documents: Documents | None
    question: str | None
    prompt: Prompt
    settings: "AnswerSettings"

    def chat(self, loaded: "LoadedModel", notes: Console, **options: Any) -> "Chat":
        """
        Make a conversation that has read nothing yet.

        Args:
            loaded: answers.
            notes: receives remarks.
            options: of `Chat`.

        Raises:
            PromptError: the documents do not fit, or there is no place for a system message.
        """
        from ..chat import Chat, ChatTemplate, context_length

        leave = None
        if self.question is not None:  # documents leave no more room than it takes with its answer
            template = ChatTemplate(loaded.tokenizer, self.prompt.system).given(self.settings)
            leave = template.room_to_ask([self.question], self.settings, context_length(loaded.model))
        given: dict[str, Any] = {"context": self.prompt.context, "system": self.prompt.system, "leave": leave}
        given |= {"settings": self.settings, "progress": not notes.quiet, "remark": partial(note, notes)}
        given["thoughts"] = partial(think, notes)
        return Chat(loaded.model, loaded.tokenizer, self.documents or (), **(given | options))

    def ask(self, chat: "Chat") -> Iterator[str]:
        """Yield the text of the answer, or nothing if nothing is asked; see `Chat.ask`."""
        return iter(()) if self.question is None else chat.ask(self.question)


def say_what_is_read(chat: "Chat", why: str, out: Console, notes: Console) -> None:
    """
    Say how much of the documents is read: in a remark, and before the answer if they were cut.

    Args:
        chat: about documents, or about none.
        why: no more is read.
        out: receives what comes before the answer.
        notes: receives the remark.
    """
    document, documents = chat.document, chat.documents
    if documents is None:
        return
    note(notes, f"{documents.counted}: {document.counts} tokens")
    write_notice(document, why, out)


def why_no_more(chat: "Chat") -> str:
    """The reason why no more of the documents is read."""
    if chat.cut_at is not None:
        return f"--context {chat.cut_at:,}"
    left = chat.context - len(chat.document.token_ids)
    return f"the context is {chat.context:,}, of which {left:,} are left to ask and answer"


def say_what_is_stored_otherwise(store: "PrefixStore | None", chat: "Chat", notes: Console) -> None:
    """Say so if a store has the documents of a conversation, but only of another model, or other weights or bits."""
    if store is None or chat.documents is None:
        return
    document, said = chat.document.token_ids, ""
    for stored in store.prompts():
        if "model" not in stored.details or stored.token_ids[: len(document)].tolist() != document:
            continue
        different = [name for name in ("model", "weights", "bits") if stored.details.get(name) != chat.details[name]]
        if not different:
            return
        theirs, ours = (as_options(different, each) for each in (stored.details, chat.details))
        named = f"{chat.documents.title} {theirs}, which takes it from there; {ours} it is read anew"
        said = said or f"{store.path} has {named}"
    if said:
        note(notes, said)


def as_options(names: Sequence[str], details: Mapping[str, Any]) -> str:
    """The options that give some details, in words."""
    values = [(name.replace("_", "-"), details.get(name)) for name in names]
    return " and ".join(f"without --{name}" if value is None else f"with --{name} {value}" for name, value in values)


def write_notice(document: "DocumentPrompt", why: str, out: Console) -> None:
    """Write before all answers what they do not know, if documents were cut."""
    if notice := document.notice(why):
        write(out, f"[{notice}]\n\n")


def record(chat: "Chat", form: Mapping[str, Any]) -> dict[str, Any]:
    """
    The fields that `generate --json` prints for an answer.

    Args:
        chat: has answered.
        form: the model, and the form of its cache and weights.
    """
    answer, document, documents = chat.last, chat.document, chat.documents
    assert answer is not None
    rate, (device_bytes, host_bytes) = answer.tokens_per_second, _kv_bytes(chat.cache)
    return {
        **form,
        "documents": [
            {"name": part.document, "tokens": part.tokens, "read_tokens": part.read_tokens} for part in document.parts
        ],
        "left_out": [] if documents is None else list(documents.skipped),
        **answer_fields(answer, "schema" in chat.settings.form),
        "document_tokens": document.tokens,
        "read_tokens": document.read_tokens,
        "stored_tokens": 0 if chat.reuse is None else chat.reuse.num_tokens,
        "first_token_seconds": round(answer.first_token_seconds, 3),
        "tokens_per_second": None if rate is None else round(rate, 2),
        "kv_device_bytes": device_bytes,
        "kv_host_bytes": host_bytes,
    }


def on_thought(answer: "Answer", settings: "AnswerSettings", without: str, more: str) -> str | None:
    """
    The remark on a thought without an answer, or one as long as it may be; `None` for any other.

    Args:
        answer: after the thought.
        settings: of the answer.
        without: asks for an answer without a thought.
        more: allows a longer one, before its number of tokens.
    """
    if answer.is_thought_alone:
        ended = f"no answer: it ended within its thought, after {answer.thinking_tokens:,} tokens"
        return f"{ended}; {without} leaves that out"
    if settings.thinking is not False and answer.thinking_tokens >= settings.max_thinking_tokens > 0:
        return f"the thought was long enough to be closed: {more} {2 * settings.max_thinking_tokens} allows more"
    return None


def answer_fields(answer: "Answer", is_json: bool) -> dict[str, Any]:
    """The fields that an answer has in all lines of JSON, in which one that is JSON, and whole, is its value."""
    value: Any = answer.text
    if is_json and answer.finish_reason == "stop":
        with suppress(ValueError, RecursionError):  # not what could not be written again
            value = strict_json(answer.text)
    return {
        "answer": value,
        **({"thinking": answer.thinking, "thinking_tokens": answer.thinking_tokens} if answer.thinking_tokens else {}),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "answer_tokens": len(answer.token_ids),
        "drafted_tokens": answer.drafted_tokens,
        "accepted_tokens": answer.accepted_tokens,
    }


def summary(took: Mapping[str, Any], weights_text: str | None) -> str:
    """The cost of an answer, a `record`, in one line, which ends with what quantized weights take."""
    return (
        f"{took['cache']}: first token after {took['first_token_seconds']:.2f} s, {rate_text(took)} tokens/s, "
        f"{drafts_text(took['drafted_tokens'], took['accepted_tokens'])}"
        f"KV {mebibytes(took['kv_device_bytes'])} on the device, {mebibytes(took['kv_host_bytes'])} on the host"
    ) + ("" if weights_text is None else f"; {weights_text}")


def dtype_text(model: "PreTrainedModel") -> str:
    """The type of a model's weights, without torch's prefix."""
    return str(model.dtype).removeprefix("torch.")


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def rate_text(took: Mapping[str, Any]) -> str:
    return "-" if took["tokens_per_second"] is None else f"{took['tokens_per_second']:.1f}"


def drafts_text(drafted: int, accepted: int) -> str:
    """The part of a sentence that says what became of drafts; empty if there were none."""
    return f"{accepted:,} of {drafted:,} drafted tokens accepted, " if drafted else ""


def _kv_bytes(cache: "Cache") -> tuple[int, int]:
    """Bytes of keys and values in the memory of accelerators, and in host memory."""
    from ..cache import HybridCache
    from ..layers import tensors_of

    if isinstance(cache, HybridCache):
        report = cache.memory()
        return report.device_bytes, report.host_bytes
    tensors = [tensor for layer in cache.layers for tensor in tensors_of(layer)]
    host_bytes = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")
    return sum(tensor.nbytes for tensor in tensors) - host_bytes, host_bytes
