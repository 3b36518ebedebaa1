"""The identity of a model with a cache: named texts, and one digest of them. It is read without importing torch."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import HybridCacheError

# The field with the rank of a process that keeps a shard.
RANK = "rank"
# The field with the codecs of a quantized cache.
_CODECS = "codecs"
_WORD = re.compile(r"[^\s=]+=\[[^]]*\]|\S+")  # such as "4-9:" and "bits=[4, 4]"
_DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{8,}\b")


class ModelIdentityError(HybridCacheError, ValueError):
    """The states of a model depend on more than its identity would tell; the message says on what."""


@dataclass(frozen=True)
class Identity:
    """
    All that the states of a model depend on beside the tokens.

    Attributes:
        pairs: name and text of each field, in order.
    """

    pairs: tuple[tuple[str, str], ...]

    @property
    def fields(self) -> Mapping[str, str]:
        """The text of each field by its name, in order."""
        return dict(self.pairs)

    @property
    def digest(self) -> bytes:
        """The 32 bytes of the BLAKE2b digest of all fields."""
        return bytes.fromhex(digest_of(self.pairs))

    def without(self, name: str) -> "Identity":
        """Return the identity without the field of a name."""
        return Identity(tuple(pair for pair in self.pairs if pair[0] != name))

    def differences(self, other: "Identity") -> list[str]:
        """
        List the fields that differ, such as "dtype: float32 there, bfloat16 here".

        Args:
            other: the identity that is there.
        """
        here, there = dict(self.fields), dict(other.fields)
        if _CODECS in here and _CODECS in there and here[_CODECS] != there[_CODECS]:
            ours, theirs = here[_CODECS], there[_CODECS]
            here[_CODECS], there[_CODECS] = _codecs_text(ours, theirs), _codecs_text(theirs, ours)
        return [
            _DIGEST.sub(r"\1…", f"{name}: {there.get(name, 'nothing')} there, {here.get(name, 'nothing')} here")
            for name in dict.fromkeys((*here, *there))
            if here.get(name) != there.get(name)
        ]

    def to_json(self) -> str:
        """Return the fields as text."""
        return json.dumps(self.fields)

    @staticmethod
    def from_json(text: str) -> "Identity":
        """
        Make the identity that `to_json` wrote.

        Raises:
            ValueError: it is no such text.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or not all(isinstance(each, str) for each in fields.values()):
            raise ValueError(f"This is no identity of a model: {text[:80]!r}.")
        return Identity(tuple(fields.items()))


def _codecs_text(codecs: str, others: str) -> str:
    """The words for codecs that others do not have; where those are of full precision, the bits."""
    if codecs == "none":
        return "full precision"
    known = _WORD.findall(others)
    words = [each for each in _WORD.findall(codecs) if (each not in known and others != "none") or "bits=" in each[:5]]
    return re.sub(r"bits=\[(\d+), \1\]|bits=(\d+)", r"\1\2 bits", " ".join(words))


def digest_of(tree: Any) -> str:
    """Return the BLAKE2b digest of plain values, 64 hexadecimal digits, the same for equal ones in any process."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
