"""English text that every Python has, as tokens."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from pydoc_data import topics

import torch
from transformers import PreTrainedTokenizerBase

# Long docstrings, and as good as the same in every version of Python.
_DOCUMENTED = (
    "argparse ast asyncio bisect collections contextlib dataclasses datetime decimal dis email enum fractions "
    "functools heapq http inspect itertools json logging os pathlib random re shutil socket statistics subprocess "
    "tempfile threading typing unittest urllib.request zipfile"
)
_SHORTEST = 100  # characters


def _language_reference() -> str:
    return "\n\n".join(topics.topics[key] for key in sorted(topics.topics))


def _docstrings() -> str:
    return "\n\n\n".join(_documented())


def _documented() -> Iterator[str]:
    for module_name in _DOCUMENTED.split():
        for name, member in sorted(vars(importlib.import_module(module_name)).items()):
            text = inspect.getdoc(member) if inspect.isclass(member) or inspect.isfunction(member) else None
            if text is not None and len(text) >= _SHORTEST:
                yield f"{module_name}.{name}\n\n{text}"


# Keys are the names in records.
TEXTS: dict[str, Callable[[], str]] = {"pydoc_data.topics": _language_reference, "docstrings": _docstrings}


def english_ids(
    tokenizer: PreTrainedTokenizerBase, num_tokens: int | None, text: str = "pydoc_data.topics"
) -> torch.Tensor:
    """
    The first tokens of the language reference of Python's own help(), or of another of `TEXTS`, `[1, num_tokens]`.

    Args:
        tokenizer: of a model.
        num_tokens: `None` for all.
        text: a key of `TEXTS`.
    """
    ids = tokenizer(TEXTS[text](), add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
    if num_tokens is not None and ids.shape[1] < num_tokens:
        raise ValueError(f"The text has {ids.shape[1]:,} tokens, fewer than {num_tokens:,}.")
    return ids[:, :num_tokens]
