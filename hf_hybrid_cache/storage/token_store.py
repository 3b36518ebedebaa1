"""A store: the tokens of a layer as a list of segments, and how they are read and copied."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .codec import CodecChoice, KVCodec
from .cpu_fraction import CpuFraction
from .kv_shape import KVShape, Pair
from .memory.host_memory import require_host_bytes
from .runs.run import Run
from .runs.streamed import Streamed
from .runs.token_buffer import TokenBuffer
from .scratch import Scratch
from .segments import Segment, in_two, num_entries, put_together, rows_of, tokens_from


class RecentStates(NamedTuple):
    """
    The states in full precision after the quantized blocks of a layer, as they came.

    Attributes:
        start: number of tokens before them, which stay as they are while others follow.
        host_tokens: tokens of a split layer that are in host memory; `None` to let its layout decide.
        states: keys and values, `[batch, num_kv_heads, tokens, head_dim]`.
    """

    start: int
    host_tokens: int | None
    states: Pair

    def of_sequences(self, indices: torch.Tensor) -> "RecentStates":
        """Return the states of some sequences, in that order."""
        keys, values = (each.index_select(0, indices.to(each.device)) for each in self.states)
        return self._replace(states=(keys, values))


class TokenStore(ABC):
    """
    Tokens of a layer, which change as a whole or not at all: the base of all stores.

    Attributes:
        shape: of the states.
        num_tokens: tokens of the sequence, of which a shard may hold some.
        version: counts changes of the tokens, not of their form.
        is_staged: the last tokens were stored for a use on the device.
        cpu_fraction: fraction of the tokens in host memory that the CPU attends to, if the rest is streamed.
        streamed: the run that grows with the sequence, or that of a prefix, if it is streamed to the device.
    """

    shape: KVShape
    num_tokens = 0
    version = 0
    is_staged = False
    _choice: CodecChoice | None
    _scratch: Scratch
    _is_changing = False

    cpu_fraction: CpuFraction | None = None
    streamed: Streamed | None = None

    @abstractmethod
    def segments(self) -> list[Segment]:
        """Return the tokens in order, with segments that are empty; no two of them hold the same entries."""

    @abstractmethod
    def write(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        """Store new states like `add`, but keep the memory in which states are put together."""

    @abstractmethod
    def settle(self) -> None:
        """Pack the blocks that are due."""

    @property
    def codec(self) -> KVCodec | None:
        """The codec, asked for or chosen; `None` if the layer is not quantized."""
        return None if self._choice is None else self._choice.codec

    @property
    def wants_queries(self) -> bool:
        """Whether the store needs queries to choose its codec."""
        return self._choice is not None and not self._choice.is_made

    @property
    def lacks_queries(self) -> bool:
        """Whether the queries of a pass of few tokens are needed to choose its codec, too."""
        return self._choice is not None and self._choice.num_lacking > 0

    @property
    def waits(self) -> bool:
        """Whether tokens that are due wait for the choice of the codec."""
        return self.waiting_bytes > 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tokens in full precision that wait for the choice of the codec."""
        return 0

    def observe(self, query: torch.Tensor, came: Pair | None = None) -> None:
        """
        Take note of queries that attend to these states, `[batch, query_heads, query_length, head_dim]`; settle.

        `came` are all states that are stored, if somebody has them.
        """
        if self._choice is not None:
            self._choice.observe(query, self.shape)
            self.settle_if_due(came)

    def settle_if_due(self, came: Pair | None = None) -> None:
        """Settle, but let the choice of a codec wait for more tokens where there are few."""
        self.settle()

    @abstractmethod
    def settled_after(self, lengths: Sequence[int]) -> int:
        """
        Return how many first tokens, in whole blocks, stay as they are while others follow.

        Args:
            lengths: numbers of tokens that the store has had in turn by then; it is settled at the last.
        """

    @property
    def num_settled(self) -> int:
        """Number of first tokens that stay as they are once the store is settled."""
        return self.settled_after([self.num_tokens])

    @property
    def num_shown(self) -> int:
        """Number of tokens that the newest ones may attend to, the last ones."""
        return self.num_tokens

    @property
    def own_tokens(self) -> int:
        """Number of tokens that this process keeps."""
        return self.num_tokens

    @property
    def runs(self) -> Iterable[Run]:
        """All runs that hold tokens of the layer."""
        return dict.fromkeys(each.run for each in self.segments())

    def add(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        """
        Store the states of new tokens, `[batch, num_kv_heads, new_tokens, head_dim]`.

        Args:
            keys: of any device and type.
            values: likewise.
            on_device: the device uses the tokens next: the copies of those in host memory are started.

        Raises:
            ValueError: there are no codes for some of the tokens; nothing has changed then.
            HostMemoryError: the host has no room for them; nothing has changed then.

        After any other error the tokens are those of before, or the new ones too, or `is_intact` is false.
        """
        if self._scratch.pieces:
            self._scratch.release()
        self.write(keys, values, on_device)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """
        Store new states like `add`, and return all, `[batch, num_kv_heads, num_tokens, head_dim]`, on the device.

        The new ones are returned as they are if there are no others.
        """
        held = self.num_tokens
        if held and self._choice is not None:
            self.settle_if_due()
        if held and self.streamed is not None:
            self.streamed.stream_from(0)
        self.write(keys, values, on_device=True)
        return self.read() if held else (keys, values)

    def extend_recent(self, recent: RecentStates) -> None:
        """Store recent states again after the tokens that were before them."""
        self.add(*recent.states)

    def read(self) -> Pair:
        """Return all keys and values, on the compute device."""
        return put_together(self.segments(), self._scratch.lend_states(self.shape, self.own_tokens))

    def read_copy(self) -> Pair:
        """Return all keys and values, contiguous, in memory that is not the store's."""
        shape, num_tokens = self.shape, self.own_tokens
        if shape.device.type == "cpu":
            require_host_bytes(num_tokens * sum(shape.token_bytes), f"A copy of {num_tokens:,} tokens needs")
        return put_together(self.segments(), shape.empty(num_tokens))

    def copy_from(self, start: int) -> Pair:
        """Copy the states from token `start`, which is not packed; those of a split layer to host memory."""
        self.wait_for_copies()
        return tokens_from(self.segments(), start)

    def recent_states(self) -> RecentStates:
        """Copy the states that later tokens would quantize."""
        return RecentStates(self.num_settled, None, self.copy_from(self.num_settled))

    def entries(self) -> dict[str, int]:
        """Return how many entries there are of each part of the layer, by its name in a file."""
        full, packed = in_two(self.segments())
        return {"full": num_entries(full), "packed": num_entries(packed)} if packed else {"states": num_entries(full)}

    def rows(self, part: str, start: int = 0) -> Pair:
        """Return rows of a part as a file has them, from entry `start` on, the first of a row; a copy where needed."""
        return rows_of(in_two(self.segments())[part == "packed"], start)

    def select(self, indices: torch.Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was."""
        self.settle()
        with self._changing():
            for run in self.runs:
                run.select(indices)
            self.shape = self.shape._replace(batch=len(indices))
            self.version += 1

    def buffers(self) -> Iterable[TokenBuffer]:
        """Return all buffers that hold memory for this layer alone."""
        return [buffer for run in self.runs for buffer in run.buffers()]

    def wait_for_copies(self) -> None:
        """Block the calling thread until no copy reads or writes the stored states, and all of them are there."""
        for run in self.runs:
            run.wait_for_copies()

    def close(self) -> None:
        """Give back memory that is shared with other layers. The store must not be used afterwards."""
        self.version += 1
        for run in self.runs:
            run.close()
        self._scratch.release()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the store as not whole if the change inside ends half-way."""
        self._is_changing = True
        yield
        self._is_changing = False

    def _set_length(self, num_tokens: int) -> None:
        self.version += 1  # first: after an interruption here, earlier handles are stale
        self.num_tokens = num_tokens
