"""The description of a node: whose states it has, and as which tensors."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from ...model_identity import Identity
from ...prefix_folder import NodeHead
from ...scalars import as_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .states import NodeStates

# Beyond any model of hundreds of layers.
_LONGEST = 2**26
# As many as keys have bits for.
_MOST_TOKEN_IDS = 2**30


@dataclass(frozen=True)
class Label:
    """
    The label of a prompt in lists.

    Attributes:
        title: given by who keeps it.
        details: likewise, by names, as JSON has them.
    """

    title: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeDescription:
    """
    The description of a node.

    Attributes:
        identity: of the model and the form of the cache.
        model_name: for lists.
        label: for lists.
        document_tokens: of a conversation, those before the first question; 0 of a prompt.
        rest: token ids of a conversation after those whose states are stored.
        states: its tensors.
    """

    identity: Identity
    model_name: str
    label: Label
    document_tokens: int = 0
    rest: tuple[int, ...] = ()
    states: "NodeStates | None" = None

    @classmethod
    def of(
        cls,
        model: "PreTrainedModel",
        identity: Identity,
        label: Label,
        document_tokens: int = 0,
        rest: tuple[int, ...] = (),
    ) -> "NodeDescription":
        """Describe a node of a model, without its states."""
        return cls(identity, str(model.config.name_or_path or type(model).__name__), label, document_tokens, rest)

    def with_states(self, states: "NodeStates") -> "NodeDescription":
        return replace(self, states=states)

    def to_bytes(self) -> bytes:
        """Return the description as compressed JSON."""
        assert self.states is not None
        tree = {
            "identity": self.identity.to_json(),
            "model_name": self.model_name,
            "title": self.label.title,
            "details": dict(self.label.details),
            "document_tokens": self.document_tokens,
            "rest": self.rest,
            "states": self.states.to_tree(),
        }
        return zlib.compress(json.dumps(tree, allow_nan=False).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes, with_states: bool = True) -> "NodeDescription":
        """
        Read what `to_bytes` returned.

        Args:
            data: the whole description.
            with_states: whether its states are read, too, for which torch is imported.

        Raises:
            ValueError: it is something else.
        """
        decompressor = zlib.decompressobj()
        try:
            tree = json.loads(decompressor.decompress(data, _LONGEST), parse_constant=_refused)
            identity = Identity.from_json(tree["identity"])
            rest = tuple(as_count(token, _MOST_TOKEN_IDS) for token in tree["rest"])
            states = _states_of(tree["states"]) if with_states else None
            label = Label(str(tree["title"]), dict(tree.get("details", {})))
            return cls(identity, str(tree["model_name"]), label, as_count(tree["document_tokens"]), rest, states)
        except (zlib.error, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"does not describe a node ({type(error).__name__}: {error}).") from error


def require_described(head: NodeHead) -> None:
    """
    Check that a node has a description, which fits its tokens and its size.

    Raises:
        ValueError: it has none, or that of another node.
    """
    _require_described(head.description, head.start + head.num_tokens, head.payload_bytes)


# A prompt that is kept pass by pass goes through all of its nodes with each pass.
@lru_cache(maxsize=1024)
def _require_described(description: bytes, end: int, payload_bytes: int) -> None:
    described = NodeDescription.from_bytes(description)
    assert described.states is not None
    described.states.require_fit(end, payload_bytes)
    if described.document_tokens > end:
        raise ValueError(f"its document has {described.document_tokens:,} tokens of {end:,}.")


def _states_of(tree: Any) -> "NodeStates":
    from .states import NodeStates

    return NodeStates.from_tree(tree)


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
