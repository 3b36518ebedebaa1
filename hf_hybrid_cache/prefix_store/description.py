"""The description of a prompt: whose states it has, and how lists show it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..model_identity import Identity
from ..scalars import as_count
from .keys import MOST_TOKEN_IDS


@dataclass(frozen=True)
class Description:
    """
    The description of a node.

    Attributes:
        identity: of the model and the form of the cache.
        model_name: of the model.
        title: given by who keeps it.
        details: likewise, by names, as JSON has them.
        document_tokens: of a conversation, those before the first question; 0 of a prompt.
        rest: token ids of a conversation after those whose states are stored.
    """

    identity: Identity
    model_name: str
    title: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    document_tokens: int = 0
    rest: tuple[int, ...] = ()

    def to_json(self) -> str:
        """
        Return the description as text.

        Raises:
            TypeError, ValueError: JSON does not have some details.
        """
        tree = vars(self) | {"identity": self.identity.to_json(), "details": dict(self.details)}
        return json.dumps(tree, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Description":
        """
        Read what `to_json` returned.

        Raises:
            ValueError: it is something else.
        """
        try:
            tree = json.loads(text, parse_constant=_refused)
            identity = Identity.from_json(str(tree["identity"]))
            rest = tuple(as_count(token, MOST_TOKEN_IDS) for token in tree["rest"])
            title, details = str(tree["title"]), dict(tree["details"])
            return cls(identity, str(tree["model_name"]), title, details, as_count(tree["document_tokens"]), rest)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"does not describe a node ({type(error).__name__}: {error}).") from error


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
