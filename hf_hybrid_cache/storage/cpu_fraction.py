"""How much of the tokens in host memory the CPU attends to while others are streamed, and how that is found out."""

import copy

from .stats import CacheStats

# Layers are watched after a move: at first those whose tokens were on their way already, which do not count.
_NOT_COUNTED, _COUNTED = 64, 128
# Of these, so many have to end one way for a move.
_ONE_WAY = 0.75
_FIRST_STEP, _LAST_STEP, _LATER_STEP = 1 / 4, 1 / 64, 1 / 16
# With so many times as many tokens the equilibrium may be another one.
_LONGER = 1.25
# A CPU that attends to nothing would not be watched.
LEAST_CPU_FRACTION = 1 / 32


class CpuFraction:
    """
    The fraction of each layer's tokens in host memory, oldest first, that the CPU attends to; the others are streamed.

    A fraction that adapts is moved to where CPU and device end together, by steps that are halved at each turn. It soon
    rests there, until the context is a quarter longer, with the CPU the last by a little: where both read all that
    memory gives, more for the CPU costs nothing, and more for the bus does.

    Args:
        fraction: to begin with, more than 0 and at most 1.
        adapts: whether it is moved.
        stats: told what is decided, and why.
    """

    def __init__(self, fraction: float, adapts: bool, stats: CacheStats):
        self._at_first, self.adapts = fraction, adapts
        self._stats = stats
        self.reset()

    def __deepcopy__(self, memo: dict) -> "CpuFraction":
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._stats = copy.deepcopy(self._stats, memo)
        return twin

    @property
    def fraction(self) -> float:
        """Of the tokens in host memory."""
        return self._fraction

    def reset(self) -> None:
        """Forget what was found out."""
        self._fraction = self._at_first
        self._is_moved = self.adapts
        self._step: float = _FIRST_STEP
        self._direction = 0
        self._rests_until = 0
        self._seen = self._cpu_was_last = 0

    def blocks(self, num_blocks: int) -> int:
        """Of so many blocks in host memory, those that the CPU attends to: the first ones."""
        return int(self._fraction * num_blocks)

    def note(self, cpu_was_last: bool, num_tokens: int) -> None:
        """
        Note that attention to a layer has ended.

        Args:
            cpu_was_last: the device had ended before; else the CPU had.
            num_tokens: of the context.
        """
        if not self._is_moved or num_tokens < self._rests_until:
            return
        self._seen += 1
        if self._seen > _NOT_COUNTED:
            self._cpu_was_last += cpu_was_last
        if self._seen == _NOT_COUNTED + _COUNTED:
            self._judge(num_tokens)

    def give_up_streaming(self, num_tokens: int) -> None:
        """Let the CPU attend to all, from now on, because the device has no memory for what is streamed."""
        self._is_moved = False
        self._move_to(1.0, num_tokens, "the device has no memory for tokens that are streamed")

    def _judge(self, num_tokens: int) -> None:
        last, self._seen, self._cpu_was_last = self._cpu_was_last, 0, 0
        one_way = _ONE_WAY * _COUNTED
        direction = -1 if last >= one_way else 1 if last <= _COUNTED - one_way else 0
        if direction == -self._direction:
            self._step /= 2
        self._direction = direction or self._direction
        is_last = direction == 0 or self._step < _LAST_STEP
        step = max(self._step, _LAST_STEP)
        moved = min(1.0, max(LEAST_CPU_FRACTION, self._fraction + direction * step))
        if is_last or moved == self._fraction:
            self._rests_until = int(_LONGER * num_tokens)
            self._step, self._direction = _LATER_STEP, 0
        if moved == self._fraction or (is_last and direction < 0):
            return
        who = "the CPU" if direction < 0 else "the device"
        times = last if direction < 0 else _COUNTED - last
        self._move_to(moved, num_tokens, f"{who} was the last to end in {times} of {_COUNTED} layers")

    def _move_to(self, fraction: float, num_tokens: int, reason: str) -> None:
        self._fraction = fraction
        self._stats.note_decision(num_tokens, "cpu_decode", fraction, reason)
