"""The contract of every buffer of tokens."""

from abc import ABC, abstractmethod

import pytest
import torch

from hf_hybrid_cache.storage.memory.growth import GRANULE
from hf_hybrid_cache.storage.runs.block_buffer import BlockBuffer
from hf_hybrid_cache.storage.runs.token_buffer import TokenBuffer

SHAPE = (2, 3, 8)
LENGTHS = [1, GRANULE - 1, GRANULE, GRANULE + 1, 255, 256, 257, 320, 321, 1000, 4095, 4097, 9000]


def random_states(num_tokens: int) -> torch.Tensor:
    """`[batch, num_kv_heads, num_tokens, head_dim]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE[0], SHAPE[1], num_tokens, SHAPE[2], generator=generator)


def token_in_memory(buffer: TokenBuffer, index: int) -> torch.Tensor:
    """`[batch, num_kv_heads, head_dim]`, found without the help of the buffer."""
    data = buffer.stored_rows(buffer.capacity)
    if isinstance(buffer, BlockBuffer):
        block, place = divmod(index, GRANULE)
        return data[block, :, :, :, place] if buffer.transposed else data[block, :, :, place, : buffer.shape[2]]
    return data[index] if buffer.token_major else data[:, :, index]


class BufferContract(ABC):
    """A subclass makes an empty buffer; `token_in_memory` knows how it lies in memory."""

    @abstractmethod
    def make(self) -> TokenBuffer:
        """Make an empty buffer for float32 states of `SHAPE`."""

    def filled(self, states: torch.Tensor) -> TokenBuffer:
        buffer = self.make()
        buffer.ensure(states.shape[2], keep=0)
        buffer.write(0, states)
        return buffer

    @pytest.mark.parametrize("num_tokens", LENGTHS)
    def test_buffer_when_written_in_pieces_then_reads_as_one(self, num_tokens: int):
        states, buffer = random_states(num_tokens), self.make()
        start = 0
        for end in [*(length for length in LENGTHS if length < num_tokens), num_tokens]:
            buffer.ensure(end, keep=start)
            buffer.write(start, states[:, :, start:end])
            start = end
        assert torch.equal(buffer.read_range(0, num_tokens), states)
        third = num_tokens // 3
        assert torch.equal(buffer.read_range(third, num_tokens), states[:, :, third:])

    def test_a_token_lies_in_memory_where_who_reads_it_there_looks(self):
        states = random_states(300)
        buffer = self.filled(states)
        for index in (0, 1, GRANULE - 1, GRANULE, GRANULE + 1, 299):
            assert torch.equal(token_in_memory(buffer, index), states[:, :, index])

    @pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[-1:], LENGTHS[:1]], ids=len)
    def test_planned_bytes_are_those_held_after_growing(self, lengths: list[int]):
        planned, buffer = self.make().planned_bytes(lengths), self.make()
        for num_tokens in lengths:
            buffer.ensure(num_tokens, keep=0)
        assert planned == buffer.num_bytes

    def test_writing_no_tokens_changes_nothing_in_a_full_buffer_either(self):
        buffer = self.make()
        buffer.ensure(1, keep=0)
        states = random_states(buffer.capacity)
        buffer.ensure(buffer.capacity, keep=0)
        buffer.write(0, states)
        buffer.write(buffer.capacity, states[:, :, :0])
        assert torch.equal(buffer.read_range(0, buffer.capacity), states)

    @pytest.mark.parametrize("indices", [[1, 0], [0, 0], [1], [0, 1, 1, 0]])
    def test_selected_sequences_are_those_of_index_select(self, indices: list[int], monkeypatch: pytest.MonkeyPatch):
        # A few tokens at a time, so that several pieces are needed.
        monkeypatch.setattr("hf_hybrid_cache.storage.runs.token_buffer._PIECE_BYTES", 7 * 2 * 3 * 8 * 4)
        states = random_states(300)
        selected = self.filled(states).select(torch.tensor(indices), 300)
        assert torch.equal(selected.read_range(0, 300), states[indices])
        selected.ensure(400, keep=300)
        assert torch.equal(selected.read_range(0, 300), states[indices])

    def test_duplicated_buffer_when_written_then_original_stays(self):
        states = random_states(300)
        buffer = self.filled(states)
        twin = buffer.duplicate(200)
        buffer.write(0, torch.zeros_like(states))
        assert torch.equal(twin.read_range(0, 200), states[:, :, :200])

    def test_a_buffer_made_in_inference_mode_is_written_outside_it(self):
        buffer = self.make()
        with torch.inference_mode():
            buffer.ensure(3, keep=0)
            buffer.write(0, torch.ones(2, 3, 3, 8))
        buffer.write(0, torch.zeros(2, 3, 3, 8))
        buffer.ensure(10_000, keep=3)
        buffer.write(3, torch.ones(2, 3, 9, 8))
        assert buffer.read_range(0, 12).sum() == 2 * 3 * 9 * 8
