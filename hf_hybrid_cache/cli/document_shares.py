"""How much of each document was read where not all of them fit, and how that is said."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from .documents import Documents
from .prompts import Prompt

# Names of documents in a list of them at most.
_MOST_NAMES = 10


@dataclass(frozen=True)
class Share:
    """
    What was read of a document.

    Attributes:
        document: its name.
        tokens: that it has, those of the line that names it too.
        read_tokens: how many of them, from its start.
    """

    document: str
    tokens: int
    read_tokens: int


def shares_of(documents: Documents, tokenizer: PreTrainedTokenizerBase, read_tokens: int) -> list[Share]:
    """One for each document, where so many tokens of all were read; a token is of the document that it begins in."""
    sections = documents.sections
    if tokenizer.is_fast:
        encoded = tokenizer(documents.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]]
        ends = [bisect_left(starts, end) for end in accumulate(map(len, sections))]
    else:  # tells no token's place
        ends = list(accumulate(len(ids) for ids in tokenizer(sections, add_special_tokens=False)["input_ids"]))
    return [
        Share(document.name, end - start, min(max(read_tokens - start, 0), end - start))
        for document, start, end in zip(documents.files, [0, *ends], ends, strict=False)
    ]


def what_was_left_out(prompt: Prompt, longest: int, asked_for: int | None, shares: Sequence[Share]) -> str:
    """
    What stands before an answer to a question about documents that were cut.

    Args:
        prompt: what was read.
        longest: the model's context.
        asked_for: `--context`.
        shares: of all documents.
    """
    left = prompt.document_tokens - prompt.kept_tokens
    reason = f"the model's context is {longest:,}" if asked_for is None else f"--context {asked_for:,}"
    whose = "document's" if len(shares) == 1 else f"{len(shares):,} documents'"
    each = "" if len(shares) == 1 else _of_each(shares)
    return (
        f"[Only the first {prompt.kept_tokens:,} of the {whose} {prompt.document_tokens:,} tokens were read "
        f"({reason}).{each} The answer knows nothing of the last {left:,}.]\n\n"
    )


def _of_each(shares: Sequence[Share]) -> str:
    whole = [share.document for share in shares if share.read_tokens == share.tokens]
    cut = [
        f"{share.document} ({share.read_tokens:,} of {share.tokens:,} tokens)"
        for share in shares
        if 0 < share.read_tokens < share.tokens
    ]
    unread = [share.document for share in shares if share.read_tokens == 0]
    said = (("Whole", whole), ("Cut", cut), ("Left out", unread))
    return "".join(f" {what}: {_listed(names)}." for what, names in said if names)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
