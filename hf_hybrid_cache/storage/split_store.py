"""Keys and values of one layer in two places at once: both ends on the compute device, the middle in host memory."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from .buffered_store import BufferedStore, LocalStore, WholePart
from .cpu_fraction import CpuFraction
from .growth import GRANULE
from .host_store import HostStore
from .joined_states import JoinedStates
from .kv_store import KVShape, Pair
from .layout import Layout
from .quantized_store import QuantizedStore
from .resident_store import ResidentStore
from .scratch import Scratch
from .stats import CacheStats
from .streamed_store import StreamedStore
from .token_buffer import TokenBuffer

_AddToHost = Callable[[torch.Tensor, torch.Tensor], Pair | None]


class SplitStore(LocalStore):
    """
    Keys and values of one layer: the first and the most recent tokens on the device, those between in host memory.

    Tokens leave the device once, in whole blocks of 64, when there would be more than `device_tokens` on it. If tokens
    in host memory are removed, those that follow are on the device again.

    Args:
        shape: of the states.
        device: empty store for both ends; the last tokens follow the first ones.
        host: empty store for the middle.
        layout: layout of the empty store.
        scratch: memory in which all states are put together.
        stats: records if fewer tokens are on the device than there should be.
        cpu_fraction: fraction of the middle that the CPU attends to, if the rest is streamed.

    Attributes:
        is_staged: the tokens in host memory, or those of them that are streamed, are on the device too, or on their
            way, to be attended to there.
    """

    def __init__(
        self,
        shape: KVShape,
        device: ResidentStore,
        host: HostStore | QuantizedStore,
        layout: Layout,
        scratch: Scratch,
        stats: CacheStats,
        cpu_fraction: CpuFraction | None = None,
    ):
        super().__init__(shape)
        self.device, self.host = device, host
        self.layout = layout
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
        parts = self.device.is_intact and self.host.is_intact and self.host.num_tokens == self.layout.host_tokens
        return super().is_intact and parts and self.device.num_tokens + self.host.num_tokens == self.num_tokens

    @property
    def first_tokens(self) -> int:
        """Number of tokens on the device that come before those in host memory."""
        return min(self.layout.first_tokens, self.device.num_tokens)

    @property
    def wants_queries(self) -> bool:
        return self.host.wants_queries

    @property
    def held_bytes(self) -> int:
        return self.host.held_bytes

    @property
    def streamed(self) -> StreamedStore | None:
        return self.host.streamed

    def observe(self, query: torch.Tensor) -> None:
        self.host.observe(query)

    def take_pending(self) -> None:
        self.host.take_pending()

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new states and return all, put together; return the new ones as they are if there are no others."""
        only_these, new_tokens = self.num_tokens == 0, keys.shape[2]
        if not self.layout.after(self.num_tokens + new_tokens).host_tokens:
            self._add(keys, values, self.host.extend)
            return (keys, values) if only_these else self.device.read()
        # Memory that may be refused is taken before anything changes.
        states = None if only_these else self._scratch.lend_states(self.shape, self.num_tokens + new_tokens)
        was_empty, self.is_staged = self.host.num_tokens == 0, True
        add_to_host: _AddToHost = self.host.append
        if self.layout.is_quantized and not was_empty:
            self.host.take_pending()
            add_to_host = self.host.stage
        middle = self._add(keys, values, add_to_host)
        if states is None:
            return keys, values
        if was_empty and not self.held_bytes:  # the first states are returned as they came, not quantized
            middle = None
        return self._put_together(states, middle)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._scratch.release()
        # The host store gives up its copies on the device.
        was_staged, self.is_staged = self.is_staged, False
        self._add(keys, values, self.host.extend, in_any_case=was_staged)

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._scratch.release()
        # Memory that may be refused is taken before anything changes, and lent again when it is used.
        room = self._room_for_staged(keys.shape[2])
        self.is_staged = True
        self._add(keys, values, self.host.stage, in_any_case=True)
        del room

    def staged_range(self) -> tuple[int, int]:
        """Return the range of tokens in host memory that the device uses now, counted from the first of them."""
        return (0, self.host.num_tokens) if self.cpu_fraction is None else self.host.staged_range()

    def read_staged(self) -> Pair:
        if self.cpu_fraction is None or self.streamed is None:
            return self.host.read()
        states = self.host.read_staged()
        # Each use prepares the next one.
        self.streamed.stream_from(self.cpu_fraction.blocks(self.streamed.num_blocks))
        return states

    def _room_for_staged(self, new_tokens: int) -> Pair | None:
        """Lend memory in which streamed blocks will be dequantized; return `None` if none are."""
        if not self.layout.is_quantized or self.held_bytes:
            return None
        start, end = self.staged_range()
        more = self.layout.after(self.num_tokens + new_tokens).host_tokens - self.host.num_tokens
        return self._scratch.lend_states(self.shape, end - start + more)

    @property
    def is_split(self) -> bool:
        """Whether the CPU attends to a part of the tokens in host memory, and the others are streamed."""
        return self.cpu_fraction is not None and self.cpu_fraction.fraction < 1

    def note_ended(self, cpu_was_last: bool) -> None:
        """Note whether the CPU was the last to end, if the CPU fraction adapts."""
        assert self.cpu_fraction is not None
        self.cpu_fraction.note(cpu_was_last, self.num_tokens)

    def read(self) -> Pair:
        if not self.host.num_tokens:
            return self.device.read()
        return self._put_together(self._scratch.lend_states(self.shape, self.num_tokens))

    def read_from(self, start: int) -> Pair:
        first = self.first_tokens
        recent = self.device.read_range(first, self.device.num_tokens)
        on_host = self.host.read_from(start - first)
        keys, values = (torch.cat([old.to(new.device), new], dim=2) for old, new in zip(on_host, recent, strict=True))
        return keys, values

    def whole_parts(self) -> dict[str, WholePart]:
        parts = self.host.whole_parts()
        name = "full" if "packed" in parts else "states"  # the part with the tokens on the device
        on_host = parts[name].form
        num_tokens = self.device.num_tokens + on_host.num_tokens
        return parts | {name: WholePart(num_tokens, on_host, False, lambda: self._whole(on_host, num_tokens))}

    def take_parts(self, parts: Mapping[str, BufferedStore]) -> None:
        states, quantized = (parts["full"], parts["packed"].num_tokens) if "packed" in parts else (parts["states"], 0)
        self.layout = self.layout.holding(states.num_tokens, quantized)
        first = min(self.layout.first_tokens, states.num_tokens)
        middle = self.layout.host_tokens - quantized * GRANULE
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
        on_host = [each.host_tokens for each in self.layout.growing(lengths)]
        yield from self.device.planned_bytes([each - middle for each, middle in zip(lengths, on_host, strict=True)])
        yield from self.host.planned_bytes(on_host)

    def truncate(self, num_tokens: int) -> None:
        layout = self.layout.cropped(num_tokens)
        with self._changing():
            if layout.host_tokens < self.host.num_tokens:
                self.host.truncate(layout.host_tokens)
            self.device.truncate(num_tokens - layout.host_tokens)
            self.layout = layout
        self._set_length(num_tokens)

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

    def _add(
        self, keys: torch.Tensor, values: torch.Tensor, add_to_host: _AddToHost, in_any_case: bool = False
    ) -> Pair | None:
        """
        Store new states; those that do not fit on the device go to the host by `add_to_host`.

        It is called `in_any_case`, even if nothing goes there.
        """
        new_tokens = keys.shape[2]
        layout = self._make_room(new_tokens)
        if layout is self.layout and not in_any_case:
            self.device.extend(keys, values)
            self._set_length(self.num_tokens + new_tokens)
            return None
        before, held = self.host.num_tokens, self.device.num_tokens
        count = layout.host_tokens - before
        first, missing = self.first_tokens, min(layout.first_tokens - self.first_tokens, new_tokens)
        leaving = [
            JoinedStates(old[:, :, first:], new[:, :, missing:])[:count]
            for old, new in zip(self.device.read(), (keys, values), strict=True)
        ]
        if count <= held - first:  # their copy may still run when others take their places
            leaving = [states.clone() for states in leaving]
        try:
            middle = add_to_host(leaving[0], leaving[1])
        except BaseException:
            has_quantized = self.layout.is_quantized and self.host.num_tokens != before
            if has_quantized or not self.host.is_intact:
                self._is_changing = True  # quantization on the way cannot be undone
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
            self.layout = layout
            self._set_length(self.num_tokens + new_tokens)
        return middle

    def _make_room(self, new_tokens: int) -> Layout:
        """
        Grow the device's store for the tokens that stay there. If memory is refused, fewer stay from now on.

        Returns:
            The layout with the new tokens.
        """
        num_tokens = self.num_tokens + new_tokens
        while True:
            layout = self.layout.after(num_tokens)
            try:
                self.device.reserve(num_tokens - layout.host_tokens)
                return layout
            except torch.OutOfMemoryError:
                device_tokens = self.layout.device_tokens
                fewer = max(self.device.capacity, device_tokens // 2) // GRANULE * GRANULE
                if not self.layout.first_tokens + GRANULE <= fewer < device_tokens:
                    raise
                warnings.warn(
                    f"The device ran out of memory: of some layers it keeps {fewer:,} tokens from now on, not "
                    f"{device_tokens:,}. Use fewer device_tokens, or a smaller prefill_chunk_size in generate.",
                    stacklevel=2,
                )
                self.layout = replace(self.layout, device_tokens=fewer)
                reason = "the device has no memory for more"
                self._stats.note_decision(self.num_tokens, "device_tokens", fewer, reason)

    def _put_together(self, states: Pair, middle: Pair | None = None) -> Pair:
        """Write all states into `states`, which were lent; read the middle from host memory unless it is given."""
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
        """Join the tokens of both ends and those of `on_host` between them in one store in host memory."""
        whole, first = HostStore.like(on_host, num_tokens), self.first_tokens
        whole.extend_from(self.device, 0, first)
        whole.extend_from(on_host, 0, on_host.num_tokens)
        whole.extend_from(self.device, first, self.device.num_tokens)
        return whole
