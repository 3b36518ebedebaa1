"""Keys and values of one layer in two places at once: both ends on the compute device, the middle in host memory."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from .buffered_store import BufferedStore, LocalStore, WholePart
from .cpu_fraction import CpuFraction
from .growth import GRANULE
from .host_store import HostStore
from .joined_states import JoinedStates
from .kv_store import KVShape, Pair
from .quantized_store import RECENT_TOKENS, QuantizedStore
from .resident_store import ResidentStore
from .scratch import Scratch
from .stats import CacheStats
from .streamed_store import StreamedStore
from .token_buffer import TokenBuffer

# Of the tokens on the device, as many leave it at once, so that the others are seldom moved.
_LEAVING_AT_ONCE = 1 / 8

_AddToHost = Callable[[torch.Tensor, torch.Tensor], Pair | None]


def first_tokens_on_device(device_tokens: int, sink_tokens: int) -> int:
    """Of `device_tokens` for both ends, those for the first ones: whole sinks, or none where they leave no block."""
    return sink_tokens if device_tokens >= sink_tokens + GRANULE else 0


class SplitStore(LocalStore):
    """
    Keys and values of one layer: the first and the most recent tokens on the device, those between in host memory.

    Example, first_tokens=64, device_tokens=192, 500 tokens:
        device [0..63]   host [64..383]   device [384..499]

    Tokens leave the device once, in whole blocks of 64, when there would be more than `device_tokens` on it. Where
    tokens are removed that were in host memory, those that follow are on the device again.

    Args:
        shape: of the states.
        device: for both ends, empty; the last tokens follow the first ones.
        host: for the middle, empty.
        first_tokens: that never leave the device.
        device_tokens: on the device at most; at least a block more than `first_tokens`.
        scratch: where all states are put together.
        stats: told where fewer tokens are on the device than there should be.
        cpu_fraction: of what is in host memory, if the CPU attends to a part of it, and the others are streamed.

    Attributes:
        is_staged: what is in host memory, or what of it is streamed, is on the device too, or on its way, to be
            attended to there.
    """

    def __init__(
        self,
        shape: KVShape,
        device: ResidentStore,
        host: HostStore | QuantizedStore,
        first_tokens: int,
        device_tokens: int,
        scratch: Scratch,
        stats: CacheStats,
        cpu_fraction: CpuFraction | None = None,
    ):
        super().__init__(shape)
        assert device_tokens >= first_tokens + GRANULE
        self.device, self.host = device, host
        self._first_tokens, self._device_tokens = first_tokens, device_tokens
        self._scratch = scratch
        self._stats = stats
        self.cpu_fraction = cpu_fraction
        self.is_staged = False

    def __deepcopy__(self, memo: dict) -> "SplitStore":
        self.wait_for_copies()
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.device, twin.host = copy.deepcopy(self.device, memo), copy.deepcopy(self.host, memo)
        twin._scratch, twin._stats = copy.deepcopy((self._scratch, self._stats), memo)
        twin.cpu_fraction = copy.deepcopy(self.cpu_fraction, memo)
        return twin

    @property
    def is_intact(self) -> bool:
        parts = self.device.is_intact and self.host.is_intact
        return super().is_intact and parts and self.device.num_tokens + self.host.num_tokens == self.num_tokens

    @property
    def first_tokens(self) -> int:
        """Tokens on the device that come before those in host memory."""
        return min(self._first_tokens, self.device.num_tokens)

    @property
    def wants_queries(self) -> bool:
        return self.host.wants_queries

    @property
    def held_bytes(self) -> int:
        return self.host.held_bytes

    def observe(self, query: torch.Tensor) -> None:
        self.host.observe(query)

    def take_pending(self) -> None:
        self.host.take_pending()

    def fits_on_device(self, new_tokens: int) -> bool:
        """Whether all tokens are on the device, also with so many new ones."""
        return not self.host.num_tokens and self.num_tokens + new_tokens <= self._device_tokens

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new states; returns all, put together, or the new ones as they are if they are all."""
        only_these, new_tokens = self.num_tokens == 0, keys.shape[2]
        if self.fits_on_device(new_tokens):
            self._add(keys, values, self.host.extend)
            return (keys, values) if only_these else self.device.read()
        # Memory that may be refused is taken before anything changes.
        states = None if only_these else self._scratch.lend_states(self.shape, self.num_tokens + new_tokens)
        was_empty, self.is_staged = self.host.num_tokens == 0, True
        add_to_host: _AddToHost = self.host.append
        if isinstance(self.host, QuantizedStore) and not was_empty:
            self.host.take_pending()
            add_to_host = self.host.stage
        middle = self._add(keys, values, add_to_host)
        if states is None:
            return keys, values
        if was_empty and not self.held_bytes:  # what comes first is returned as it came, not quantized
            middle = None
        return self._put_together(states, middle)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._scratch.release()
        # It gives up what it has on the device.
        was_staged, self.is_staged = self.is_staged, False
        self._add(keys, values, self.host.extend, in_any_case=was_staged)

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new states; what is in host memory, but for the share of the CPU, is on its way to the device then."""
        self._scratch.release()
        assert isinstance(self.host, StreamedStore | QuantizedStore)
        # Memory that may be refused is taken before anything changes, and is there when it is asked for again.
        room = self._room_for_staged(keys.shape[2])
        self.is_staged = True
        self._add(keys, values, self.host.stage, in_any_case=True)
        del room

    def staged_range(self) -> tuple[int, int]:
        """Of the tokens in host memory, the first that is used on the device now, and the one after the last."""
        if self.cpu_fraction is None:
            return 0, self.host.num_tokens
        assert isinstance(self.host, StreamedStore | QuantizedStore)
        return self.host.staged_range()

    def read_staged(self) -> Pair:
        """These tokens, on the device; once for each `stage`, because the next time is prepared from then on."""
        if self.cpu_fraction is None:
            return self.host.read()
        assert isinstance(self.host, StreamedStore | QuantizedStore)
        states = self.host.read_staged()
        entries = self.host.packed if isinstance(self.host, QuantizedStore) else self.host
        assert isinstance(entries, StreamedStore)
        entries.stream_from(self.cpu_fraction.blocks(entries.num_blocks))
        return states

    def _room_for_staged(self, new_tokens: int) -> Pair | None:
        """Where codes that are streamed will be put together."""
        if not isinstance(self.host, QuantizedStore) or self.host.held_bytes:
            return None
        start, end = self.staged_range()
        more = self._leaving(self.device.num_tokens + new_tokens)
        return self._scratch.lend_states(self.shape, end - start + more)

    @property
    def is_split(self) -> bool:
        """Whether the CPU attends to a part of what is in host memory, and the others are streamed."""
        return self.cpu_fraction is not None and self.cpu_fraction.fraction < 1

    def note_ended(self, cpu_was_last: bool) -> None:
        """Note whether the CPU was the last to end, where its share adapts."""
        assert self.cpu_fraction is not None
        self.cpu_fraction.note(cpu_was_last, self.num_tokens)

    def read(self) -> Pair:
        if not self.host.num_tokens:
            return self.device.read()
        return self._put_together(self._scratch.lend_states(self.shape, self.num_tokens))

    def whole_parts(self) -> dict[str, WholePart]:
        parts = self.host.whole_parts()
        name = self._name_of_states
        on_host = parts[name].form
        num_tokens = self.device.num_tokens + on_host.num_tokens
        return parts | {name: WholePart(num_tokens, on_host, False, lambda: self._whole(on_host, num_tokens))}

    def take_parts(self, parts: Mapping[str, BufferedStore]) -> None:
        states = parts[self._name_of_states]
        first = min(self._first_tokens, states.num_tokens)
        middle = self._leaving(states.num_tokens)
        if isinstance(self.host, QuantizedStore) and parts["packed"].num_tokens:
            # After quantized blocks come tokens that are not, as when they were quantized.
            middle = max(middle, min(self.host.sink_tokens + RECENT_TOKENS, states.num_tokens - first))
        self.device.extend_from(states, 0, first)
        if isinstance(self.host, QuantizedStore):
            full = HostStore.like(states, middle)
            full.extend_from(states, first, first + middle)
            self.host.take_parts({**parts, "full": full})
        else:
            self.host.extend_from(states, first, first + middle)
        self.device.extend_from(states, first + middle, states.num_tokens)
        self._set_length(self.device.num_tokens + self.host.num_tokens)

    def buffers(self) -> Iterable[TokenBuffer]:
        return *self.device.buffers(), *self.host.buffers()

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        on_host = self.planned_host_tokens(lengths)
        yield from self.device.planned_bytes([each - middle for each, middle in zip(lengths, on_host, strict=True)])
        yield from self.host.planned_bytes(on_host)

    def planned_host_tokens(self, lengths: Sequence[int]) -> list[int]:
        """How many tokens would be in host memory once this empty store had grown to each of `lengths`."""
        on_host = [0]
        for length in lengths:
            on_host.append(on_host[-1] + self._leaving(length - on_host[-1]))
        return on_host[1:]

    def truncate(self, num_tokens: int) -> None:
        middle = self.host.num_tokens
        if num_tokens >= self.first_tokens + middle:
            self.device.truncate(num_tokens - middle)
        else:
            first = min(num_tokens, self.first_tokens)
            with self._changing():
                self.host.truncate(num_tokens - first)
                self.device.truncate(first)
        self._set_length(num_tokens)

    def tokens_on_host(self, num_tokens: int) -> int:
        """Of the first `num_tokens`, those in host memory."""
        return min(self.host.num_tokens, num_tokens - min(num_tokens, self.first_tokens))

    def select_batch(self, indices: torch.Tensor) -> None:
        with self._changing():
            self.device.select_batch(indices)
            self.host.select_batch(indices)
            self.shape = self.shape._replace(batch=len(indices))
            self.version += 1

    def wait_for_copies(self) -> None:
        self.host.wait_for_copies()

    def close(self) -> None:
        super().close()
        self.device.close()
        self.host.close()
        self._scratch.release()

    @property
    def _name_of_states(self) -> str:
        """Of the part that the tokens on the device belong to."""
        return "full" if isinstance(self.host, QuantizedStore) else "states"

    def _leaving(self, on_device: int) -> int:
        """How many of so many tokens on the device have to leave it."""
        too_many = on_device - self._device_tokens
        if too_many <= 0:
            return 0
        at_once = max(1, int((self._device_tokens - self._first_tokens) * _LEAVING_AT_ONCE) // GRANULE) * GRANULE
        return -(-too_many // at_once) * at_once

    def _add(
        self, keys: torch.Tensor, values: torch.Tensor, add_to_host: _AddToHost, in_any_case: bool = False
    ) -> Pair | None:
        """
        Store new states; what does not fit on the device goes to the host, in the way that is given.

        The host is told `in_any_case`, also where nothing goes there.
        """
        new_tokens, held = keys.shape[2], self.device.num_tokens
        count = self._make_room(new_tokens)
        if not count and not in_any_case:
            self.device.extend(keys, values)
            self._set_length(self.num_tokens + new_tokens)
            return None
        first, missing = self.first_tokens, min(self._first_tokens - self.first_tokens, new_tokens)
        leaving = [
            JoinedStates(old[:, :, first:], new[:, :, missing:])[:count]
            for old, new in zip(self.device.read(), (keys, values), strict=True)
        ]
        if count <= held - first:  # they may be on their way for a while, and others will take their places
            leaving = [states.clone() for states in leaving]
        before = self.host.num_tokens
        try:
            middle = add_to_host(leaving[0], leaving[1])
        except BaseException:
            has_quantized = isinstance(self.host, QuantizedStore) and self.host.num_tokens != before
            if has_quantized or not self.host.is_intact:
                self._is_changing = True  # what was quantized on the way is not taken back
            else:
                self.host.truncate(before)  # these tokens are on the device, or new
            raise
        from_device = min(count, held - first)
        skipped = count - from_device
        with self._changing():
            if from_device:
                self.device.remove(first, first + from_device)
            for start, end in ((0, missing), (missing + skipped, new_tokens)) if skipped else ((0, new_tokens),):
                self.device.extend(keys[:, :, start:end], values[:, :, start:end])
            self._set_length(self.num_tokens + new_tokens)
        return middle

    def _make_room(self, new_tokens: int) -> int:
        """
        Let the device have capacity for what stays there; where it has none fewer tokens stay, from now on.

        Returns:
            How many tokens have to leave it.
        """
        on_device = self.device.num_tokens + new_tokens
        while True:
            count = self._leaving(on_device)
            try:
                self.device.reserve(on_device - count)
                return count
            except torch.OutOfMemoryError:
                fewer = max(self.device.capacity, self._device_tokens // 2) // GRANULE * GRANULE
                if not self._first_tokens + GRANULE <= fewer < self._device_tokens:
                    raise
                warnings.warn(
                    f"The device ran out of memory: of some layers it keeps {fewer:,} tokens from now on, not "
                    f"{self._device_tokens:,}. Use fewer device_tokens, or a smaller prefill_chunk_size in generate.",
                    stacklevel=2,
                )
                self._device_tokens = fewer
                reason = "the device has no memory for more"
                self._stats.note_decision(self.num_tokens, "device_tokens", fewer, reason)

    def _put_together(self, states: Pair, middle: Pair | None = None) -> Pair:
        """All states, written into those that were lent; what is in host memory is read, or is `middle`."""
        first, last = self.first_tokens, self.first_tokens + self.host.num_tokens
        between = states[0][:, :, first:last], states[1][:, :, first:last]
        if middle is None and isinstance(self.host, QuantizedStore):
            self.host.read_into(between)
        else:
            for target, source in zip(between, middle or self.host.read(), strict=True):
                target.copy_(source)
        for target, ends in zip(states, self.device.read(), strict=True):
            target[:, :, :first] = ends[:, :, :first]
            target[:, :, last:] = ends[:, :, first:]
        return states

    def _whole(self, on_host: BufferedStore, num_tokens: int) -> BufferedStore:
        """The tokens of both ends and those of `on_host` between them, in one store in host memory."""
        whole, first = HostStore.like(on_host, num_tokens), self.first_tokens
        whole.extend_from(self.device, 0, first)
        whole.extend_from(on_host, 0, on_host.num_tokens)
        whole.extend_from(self.device, first, self.device.num_tokens)
        return whole
