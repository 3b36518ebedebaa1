"""The number of tokens that are drafted, by what became of drafts before and by the measured time of passes."""

from bisect import bisect_right
from collections import deque
from statistics import median, median_low

from ..scalars import MOST_ROWS, checked_integer

# Tokens of a draft at most: with the one before them they are as many rows as a step has in one call.
MOST_TOKENS = MOST_ROWS - 1
# Steps that drafts may lose at first and at most, and what each token adds to that.
_FIRST_CREDIT, _MOST_CREDIT, _CREDIT_A_TOKEN = 1.0, 4.0, 0.01
# In the place of the length of a match, for tokens that must come next.
SURE = 2**31
# Lengths of matches, and before anything is known the chance that the token after such a match comes next.
# One of fewer than 3 goes on after a token that differed.
_LENGTHS, _CHANCES = (0, 3, 4, 5, 8, 12, 16, SURE), (0.4, 0.3, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0)
# What is known first counts as so many tokens; a token counts less with each that follows.
_FIRST_WEIGHT, _FADING = 4.0, 0.95
# A row more of a pass takes so much of a step, before any is measured.
_ROW = 0.2
# Passes whose median is the time of one, and how many times as long as expected one with a draft counts at most. Of two
# the lower one is taken: after a first one that has waited nothing would be drafted again, and no other measured.
_PASSES, _LONGEST = 9, 1.5


def checked_drafts(name: str, given: object) -> int:
    """
    A user's number of tokens of a draft at most.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of its range.
    """
    number = checked_integer(name, given)
    if not 0 <= number <= MOST_TOKENS:
        raise ValueError(f"{name} must be from 0 to {MOST_TOKENS}, got {number}.")
    return number


class DraftLength:
    """
    Chooses how many tokens are drafted, so that the most tokens a second come, and drafts never lose much.

    A pass of `k` drafted tokens takes `1 + k * row` steps. A step is the median of the last nine, and `row` that of
    what passes have taken beyond a step, for each token that was drafted: both are measured, so they follow the length
    of the context. The chance that a drafted token comes is counted by the length of the match before it, for matches
    that were not drafted from as well: each of its tokens is compared with those that come. `k` is what makes the
    expected tokens for each step most.

    What a pass may lose, `k * row` steps, is at most the credit: a step first, then what drafts have gained, up to
    four steps, without what they have lost, and a hundredth of a step for each token. So an answer of `n` tokens takes
    at most `1 + n / 100` steps more than without drafts, and what a pass took beyond what was expected of it.
    Nothing is drafted until that is paid back, too, but for what is beyond half as much again: a pass that takes
    longer has waited, or packed a block, unless the next ones do, too.

    Everything is in steps, so the seconds may be those of any clock.
    """

    def __init__(self) -> None:
        self._credit = _FIRST_CREDIT
        self._steps, self._rows = deque[float](maxlen=_PASSES), deque([_ROW], maxlen=_PASSES)
        self._known = [(_FIRST_WEIGHT * chance, _FIRST_WEIGHT) for chance in _CHANCES]

    def tokens(self, match_length: int, most: int) -> int:
        """
        Return how many tokens to draft after a match.

        Args:
            match_length: tokens of the match; `SURE` where tokens must come next.
            most: tokens.
        """
        if len(self._steps) < 2:  # the first one has more to do
            return 0
        row = median_low(self._rows)
        best, best_rate, expected, chance = 0, 1.0, 1.0, 1.0
        for number in range(1, most + 1):
            if number * row > self._credit:
                break
            chance *= self._chance(match_length + number - 1)
            expected += chance
            rate = expected / (1 + number * row)
            if rate > best_rate:
                best, best_rate = number, rate
        return best

    def note_prediction(self, match_length: int, is_right: bool) -> None:
        """Note whether the token after a match came next."""
        place = self._place(match_length)
        right, all_of_them = self._known[place]
        self._known[place] = _FADING * right + is_right, _FADING * all_of_them + 1

    def note_step(self, seconds: float) -> None:
        """Note the time of a pass without a draft."""
        self._steps.append(seconds)
        self._earn(_CREDIT_A_TOKEN)

    def note_draft(self, drafted: int, accepted: int, seconds: float) -> None:
        """Note the time of a pass with a draft, and with that of taking tokens back."""
        steps = seconds / (median(self._steps) or 1.0)
        self._rows.append(max(0.0, steps - 1) / drafted)
        steps = min(steps, _LONGEST * (1 + drafted * median_low(self._rows)))
        self._earn((1 + accepted) * (1 + _CREDIT_A_TOKEN) - steps)

    def _earn(self, steps: float) -> None:
        self._credit = min(_MOST_CREDIT, self._credit + steps)

    def _chance(self, match_length: int) -> float:
        right, all_of_them = self._known[self._place(match_length)]
        return right / all_of_them

    @staticmethod
    def _place(match_length: int) -> int:
        return bisect_right(_LENGTHS, match_length) - 1
