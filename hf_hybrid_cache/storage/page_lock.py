"""Page-locking memory that grows, so that a CUDA device copies from and to it beside the computation."""

import contextlib
import warnings
import weakref

import torch

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable
_has_warned = False


class PageLock:
    """
    The page-locked part of one piece of memory, from its start on.

    Args:
        data: the memory, page aligned.
        device: a CUDA device; `None` if nothing will be locked.

    Attributes:
        cuts: where separately locked ranges meet, in the unit of `extend`. A copy must not span two of them.
        refused: the system refused once; nothing more is locked.
    """

    def __init__(self, data: torch.Tensor, device: torch.device | None):
        self.cuts: list[int] = []
        self.refused = False
        self._device = device
        self._start = data.data_ptr()
        self._addresses: list[int] = []
        # The data is an argument so that it outlives the lock.
        self.release = weakref.finalize(self, _unlock, self._addresses, device, data)
        self.release.atexit = False

    def extend(self, start: int, end: int, unit_bytes: int) -> None:
        """Lock from `start` to `end`, both in units of `unit_bytes`; they must lie at page borders."""
        if self.refused:
            return
        assert self._device is not None
        address = self._start + start * unit_bytes
        if _lock(address, (end - start) * unit_bytes, self._device):
            self.cuts.append(end)
            self._addresses.append(address)
        else:
            self.refused = True


def _lock(address: int, num_bytes: int, device: torch.device) -> bool:
    error = _register(address, num_bytes, device)
    if error == 0:
        return True
    _clear_error(device)
    _warn_once(num_bytes, error)
    return False


def _register(address: int, num_bytes: int, device: torch.device) -> int:
    with torch.cuda.device(device):
        return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _FOR_ALL_DEVICES))


def _warn_once(num_bytes: int, error: int) -> None:
    """Of the first refusal in the process: every buffer of every layer is likely to be refused after it."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warnings.warn(
        f"The system refused to page-lock {num_bytes / 2**20:.0f} MiB of host memory (CUDA error {error}); copies "
        "between it and the device will not overlap with the computation. Raise the limit of locked memory "
        "(ulimit -l), or pass pin_memory=False. This is said once.",
        stacklevel=2,
    )


def _clear_error(device: torch.device) -> None:
    """Let the error of a refused call end here: CUDA reports it again with the next kernel, whoever launches that."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1)


def _unlock(addresses: list[int], device: torch.device | None, data: torch.Tensor) -> None:
    if addresses:
        # A copy may still be reading or writing the memory.
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            for address in addresses:
                torch.cuda.cudart().cudaHostUnregister(address)
