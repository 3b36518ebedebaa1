"""The CPU fraction of the tokens in host memory, and its adaption while the others are streamed."""

from .stats import CacheStats

# Calls of layers after a move: the tokens of the first ones were on their way before it, so they do not count.
_NOT_COUNTED, _COUNTED = 64, 128
# Fraction of the counted calls that has to end the same way for a move.
_ONE_WAY = 0.75
_FIRST_STEP, _LAST_STEP, _LATER_STEP = 1 / 4, 1 / 64, 1 / 16
# Factor of the context's length after which the equilibrium may be another one.
_LONGER = 1.25
# A fraction of 0 would leave nothing to measure on the CPU.
LEAST_CPU_FRACTION = 1 / 32


class CpuFraction:
    """
    The fraction of each layer's tokens in host memory, oldest first, that the CPU attends to; the others are streamed.

    An adaptive fraction moves until CPU and device end together; its step is halved whenever it turns. Then it rests
    until the context is a quarter longer. It rests where the CPU ends a little later: if both use all memory bandwidth,
    more tokens for the CPU cost nothing, and more for the bus do.

    Args:
        fraction: of the tokens in host memory, at first; more than 0 and at most 1.
        adapts: whether the fraction adapts.
        stats: records decisions and their reasons.
    """

    def __init__(self, fraction: float, adapts: bool, stats: CacheStats):
        self._at_first, self.adapts, self._stats = fraction, adapts, stats
        self.reset()

    def reset(self) -> None:
        """Return to the initial fraction and forget all measurements."""
        self.fraction = self._at_first
        self._is_moved = self.adapts
        self._step: float = _FIRST_STEP
        self._direction = 0
        self._rests_until = 0
        self._seen = self._cpu_was_last = 0

    def blocks(self, num_blocks: int) -> int:
        """Return how many of the blocks in host memory, from the first one on, the CPU attends to."""
        return int(self.fraction * num_blocks)

    def note(self, cpu_was_last: bool, num_tokens: int) -> None:
        """Note that attention to a layer has ended, on the CPU after the device or not, in a context of this length."""
        if not self._is_moved or num_tokens < self._rests_until:
            return
        self._seen += 1
        if self._seen > _NOT_COUNTED:
            self._cpu_was_last += cpu_was_last
        if self._seen == _NOT_COUNTED + _COUNTED:
            self._judge(num_tokens)

    def give_up_streaming(self, num_tokens: int) -> None:
        """Let the CPU attend to all tokens from now on, because the device has no memory for streamed ones."""
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
        moved = min(1.0, max(LEAST_CPU_FRACTION, self.fraction + direction * step))
        if is_last or moved == self.fraction:
            self._rests_until = int(_LONGER * num_tokens)
            self._step, self._direction = _LATER_STEP, 0
        if moved == self.fraction or (is_last and direction < 0):
            return
        who = "the CPU" if direction < 0 else "the device"
        times = last if direction < 0 else _COUNTED - last
        self._move_to(moved, num_tokens, f"{who} was the last to end in {times} of {_COUNTED} layers")

    def _move_to(self, fraction: float, num_tokens: int, reason: str) -> None:
        self.fraction = fraction
        self._stats.note_decision(num_tokens, "cpu_decode", fraction, reason)
