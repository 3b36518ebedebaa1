"""The identity of a model with a cache: named texts, and one digest of them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .digests import canonical, digest_of

_DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{8,}\b")


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
        return bytes.fromhex(digest_of(canonical(self.pairs)))

    def without(self, name: str) -> "Identity":
        """Return the identity without the field of a name."""
        return Identity(tuple(pair for pair in self.pairs if pair[0] != name))

    def differences(self, other: "Identity") -> list[str]:
        """
        List the fields that differ, such as "dtype: float32 there, bfloat16 here".

        Args:
            other: the identity that is there.
        """
        here, there = self.fields, other.fields
        return [
            f"{name}: {_short(there.get(name))} there, {_short(here.get(name))} here"
            for name in dict.fromkeys((*here, *there))
            if here.get(name) != there.get(name)
        ]

    def to_json(self) -> str:
        """Return the fields as text."""
        return json.dumps(self.pairs)

    @staticmethod
    def from_json(text: str) -> "Identity":
        """
        Make the identity that `to_json` wrote.

        Raises:
            ValueError: it is no such text.
        """
        try:
            pairs = json.loads(text)
        except ValueError:
            pairs = None
        if not isinstance(pairs, list) or not all(map(_is_field, pairs)):
            raise ValueError(f"This is no identity of a model: {text[:80]!r}.")
        return Identity(tuple((name, value) for name, value in pairs))


def _is_field(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)


def _short(text: str | None) -> str:
    """Return the text of a field with the first digits of each digest."""
    return "nothing" if text is None else _DIGEST.sub(r"\1…", text)
