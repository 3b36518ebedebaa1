"""The description of a node: whose states it has, and as which tensors."""

import json
import zlib
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from ...model_identity import Identity
from .states import NodeStates

# Beyond any model of hundreds of layers.
_LONGEST = 2**26


@dataclass(frozen=True)
class NodeDescription:
    """
    The description of a node.

    Attributes:
        identity: of the model and the form of the cache.
        model_name: for lists.
        title: for lists.
        document_tokens: of a conversation, those before the first question; 0 of a prompt.
        rest: token ids of a conversation after those whose states are stored.
        states: its tensors.
    """

    identity: Identity
    model_name: str
    title: str
    document_tokens: int = 0
    rest: tuple[int, ...] = ()
    states: NodeStates | None = None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        identity: Identity,
        title: str,
        document_tokens: int = 0,
        rest: tuple[int, ...] = (),
    ) -> "NodeDescription":
        """Describe a node of a model, without its states."""
        return cls(identity, str(model.config.name_or_path or type(model).__name__), title, document_tokens, rest)

    def with_states(self, states: NodeStates) -> "NodeDescription":
        return replace(self, states=states)

    def to_bytes(self) -> bytes:
        """Return the description as compressed JSON."""
        assert self.states is not None
        tree = {
            "identity": self.identity.to_json(),
            "model_name": self.model_name,
            "title": self.title,
            "document_tokens": self.document_tokens,
            "rest": self.rest,
            "states": self.states.to_tree(),
        }
        return zlib.compress(json.dumps(tree, allow_nan=False).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> "NodeDescription":
        """
        Read what `to_bytes` returned.

        Raises:
            ValueError: it is something else.
        """
        decompressor = zlib.decompressobj()
        try:
            tree = json.loads(decompressor.decompress(data, _LONGEST))
            identity = Identity.from_json(tree["identity"])
            rest = tuple(int(token) for token in tree["rest"])
            states = NodeStates.from_tree(tree["states"])
            told = str(tree["model_name"]), str(tree["title"]), int(tree["document_tokens"])
            return cls(identity, *told, rest, states)
        except (zlib.error, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"does not describe a node ({type(error).__name__}: {error}).") from error
