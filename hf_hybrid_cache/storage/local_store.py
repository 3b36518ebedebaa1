"""A store of a layer's whole sequence, which another one of the same form can take over, or a file."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .kv_store import KVStore

if TYPE_CHECKING:
    from .buffered_store import BufferedStore


class WholePart(NamedTuple):
    """
    What a store holds in one form, as one sequence.

    Attributes:
        num_entries: tokens, or records of coded blocks.
        form: a store of such entries.
        is_own: whether that is the store that holds them.
        made: gives the store that holds them, which is made of several where none does.
    """

    num_entries: int
    form: "BufferedStore"
    is_own: bool
    made: "Callable[[], BufferedStore]"

    @classmethod
    def own(cls, store: "BufferedStore") -> "WholePart":
        """What `store` holds."""
        return cls(store.num_tokens, store, True, lambda: store)


class LocalStore(KVStore):
    """Keys and values of all tokens of one layer."""

    @abstractmethod
    def whole_parts(self) -> dict[str, WholePart]:
        """What is stored, by name; the same for stores of the same states and codes, wherever they keep them."""

    @abstractmethod
    def take_parts(self, parts: "Mapping[str, BufferedStore]") -> None:
        """Store, in this empty store, such parts; those that are its own are filled already."""

    def take_from(self, other: KVStore) -> None:
        assert isinstance(other, LocalStore)
        self.take_parts({name: part.made() for name, part in other.whole_parts().items()})
