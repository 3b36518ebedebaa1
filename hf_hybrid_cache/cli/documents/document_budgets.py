"""The number of tokens that the prompt keeps of each document."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from ..runs.prompts import Prompt
from .documents import Documents

# A list of documents names so many at most.
_MOST_NAMES = 10


@dataclass(frozen=True)
class DocumentBudget:
    """
    The tokens of one document, and those that the prompt keeps.

    Attributes:
        document: its name.
        tokens: all its tokens, with those of the line that names it.
        read_tokens: the tokens that the prompt keeps, from the start of the document.
    """

    document: str
    tokens: int
    read_tokens: int


def document_budgets(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, read_tokens: int
) -> list[DocumentBudget]:
    """
    Divide the tokens that the prompt keeps among the documents; a token belongs to the document that it begins in.

    Args:
        documents: in the order of the prompt.
        tokenizer: of the model.
        read_tokens: tokens of all documents that the prompt keeps.
    """
    sections = documents.sections
    if tokenizer.is_fast:
        encoded = tokenizer(documents.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]]
        ends = [bisect_left(starts, end) for end in accumulate(map(len, sections))]
    else:  # such a tokenizer does not say where a token begins
        ends = list(accumulate(len(ids) for ids in tokenizer(sections, add_special_tokens=False)["input_ids"]))
    return [
        DocumentBudget(document.name, end - start, min(max(read_tokens - start, 0), end - start))
        for document, start, end in zip(documents.files, [0, *ends], ends, strict=False)
    ]


def truncation_notice(
    prompt: Prompt, model_context: int, asked_context: int | None, budgets: Sequence[DocumentBudget]
) -> str:
    """
    The paragraph before an answer that says which documents were cut, and why.

    Args:
        prompt: keeps the start of the documents.
        model_context: tokens that the model can attend to.
        asked_context: the value of `--context`; `None` without it.
        budgets: of all documents.
    """
    unread = prompt.document_tokens - prompt.kept_tokens
    reason = f"the model's context is {model_context:,}" if asked_context is None else f"--context {asked_context:,}"
    whose = "document's" if len(budgets) == 1 else f"{len(budgets):,} documents'"
    each = "" if len(budgets) == 1 else _documents_by_budget(budgets)
    return (
        f"[Only the first {prompt.kept_tokens:,} of the {whose} {prompt.document_tokens:,} tokens were read "
        f"({reason}).{each} The answer knows nothing of the last {unread:,}.]\n\n"
    )


def _documents_by_budget(budgets: Sequence[DocumentBudget]) -> str:
    """A sentence each for the documents that the prompt keeps whole, cut, and not at all."""
    whole = [budget.document for budget in budgets if budget.read_tokens == budget.tokens]
    cut = [
        f"{budget.document} ({budget.read_tokens:,} of {budget.tokens:,} tokens)"
        for budget in budgets
        if 0 < budget.read_tokens < budget.tokens
    ]
    unread = [budget.document for budget in budgets if budget.read_tokens == 0]
    kinds = (("Whole", whole), ("Cut", cut), ("Left out", unread))
    return "".join(f" {kind}: {_listed(names)}." for kind, names in kinds if names)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
