"""Page-locked host memory, so that an accelerator copies from and to it beside the computation."""

import contextlib
import functools
import os
import warnings
import weakref

import torch

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable
_has_warned = False
# Locks that could not be released while CUDA recorded a graph: addresses, device and memory of each.
_kept: list[tuple[list[int], torch.device, torch.Tensor]] = []


@functools.cache
def can_page_lock(device_type: str) -> bool:
    """Return whether torch has page-locked memory for copies from and to devices of this type."""
    if device_type in ("cuda", "meta"):  # a meta device stands for a CUDA device that is planned for
        return True
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device_type != accelerator.type:
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


def locks_in_place(device: torch.device | None) -> bool:
    """Return whether existing memory can be page-locked for copies from and to `device`. Only CUDA can."""
    return device is not None and device.type in ("cuda", "meta")


class PageLock:
    """
    The page-locked part of one piece of memory, from its start on.

    The owner of the memory waits for copies from and to it before it drops the lock.

    Args:
        data: the memory, page aligned.
        device: a CUDA device.

    Attributes:
        cuts: where separately locked ranges meet, in the unit of `extend`. A copy must not span two of them.
        refused: the system refused once; nothing more is locked.
    """

    def __init__(self, data: torch.Tensor, device: torch.device):
        self.cuts: list[int] = []
        self.refused = False
        self._device = device
        self._start = data.data_ptr()
        self._addresses: list[int] = []
        # The data is an argument so that it outlives the lock.
        weakref.finalize(self, _unlock, self._addresses, device, data, os.getpid()).atexit = False

    def extend(self, start: int, end: int, unit_bytes: int) -> None:
        """Lock from `start` to `end`, both in units of `unit_bytes`; they must lie at page borders."""
        if self.refused:
            return
        _unlock_kept()
        address, num_bytes = self._start + start * unit_bytes, (end - start) * unit_bytes
        error = _register(address, num_bytes, self._device)
        if error:
            self.refused = True
            _clear_error(self._device)
            _warn_once(num_bytes, error)
        else:
            self.cuts.append(end)
            self._addresses.append(address)


def _register(address: int, num_bytes: int, device: torch.device) -> int:
    with torch.cuda.device(device):
        return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _FOR_ALL_DEVICES))


def _warn_once(num_bytes: int, error: int) -> None:
    """Warn of the first refusal in the process only: all later buffers are likely to be refused, too."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warnings.warn(
        f"The system refused to page-lock {num_bytes / 2**20:.0f} MiB of host memory (CUDA error {error}); copies "
        "between it and the device will not overlap with the computation. Raise the limit of locked memory "
        "(ulimit -l), or use Placement(pin_memory=False). This is said once.",
        stacklevel=2,
    )


def _clear_error(device: torch.device) -> None:
    """Clear the error of a refused call, which CUDA would report again with the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1)


def _unlock(addresses: list[int], device: torch.device, data: torch.Tensor, process: int) -> None:
    # In a forked child nothing is locked, and CUDA must not be called.
    if addresses and os.getpid() == process:
        _kept.append((addresses, device, data))
        _unlock_kept()


def _unlock_kept() -> None:
    # To unlock memory would end the recording of a graph.
    while _kept and not _is_recording_graph():
        addresses, device, _ = _kept.pop()
        _unregister(addresses, device)


def _is_recording_graph() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _unregister(addresses: list[int], device: torch.device) -> None:
    with torch.cuda.device(device):
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)
