"""Who is missing after a collective has failed: those that are left sign, and who has not signed is named."""

import threading
import time
from collections.abc import Callable

from torch import distributed

# For one that is still computing and has not noticed yet; if all but one have signed there is no need to wait.
SECONDS_TO_SIGN = 30.0
# For the others to read, before the process that holds the store may end.
_SECONDS_TO_READ = 2.0
_PAUSE = 0.02


def absent_ranks(store: "distributed.Store", rank: int, size: int, seconds: float = SECONDS_TO_SIGN) -> list[int]:
    """
    Ranks that have not signed in the group's store, within `seconds` or until there is only one.

    Args:
        store: that all processes of the group have.
        rank: of this process, which signs.
        size: of the group.
        seconds: to wait where more than one has not signed.

    Returns:
        Their ranks; the first one, which keeps the store unless `torchrun` does, if the store does not answer either.
    """
    found: list[list[int]] = []
    # Of a store whose process was stopped no answer comes, not even an error.
    asking = threading.Thread(target=lambda: found.append(_asked(store, rank, size, seconds)), daemon=True)
    asking.start()
    asking.join(seconds + 2 * _SECONDS_TO_READ)
    return found[0] if found else [0]


def _asked(store: "distributed.Store", rank: int, size: int, seconds: float) -> list[int]:
    others = [each for each in range(size) if each != rank]
    try:
        store.set(f"signed {rank}", "yes")
        absent = _until(lambda: [each for each in others if not store.check([f"signed {each}"])], 1, seconds)
    except RuntimeError:  # its process has ended
        return [0]
    try:
        store.set(f"read {rank}", "yes")
        signed = [each for each in others if each not in absent]
        _until(lambda: [each for each in signed if not store.check([f"read {each}"])], 0, _SECONDS_TO_READ)
    except RuntimeError:
        pass
    return absent


def _until(missing: Callable[[], list[int]], number: int, seconds: float) -> list[int]:
    """What `missing` gives once it is at most so long, or when time is up."""
    end = time.monotonic() + seconds
    while len(found := missing()) > number and time.monotonic() < end:
        time.sleep(_PAUSE)
    return found
