"""Copies beside the computation, which events order. Nothing here knows the data that is copied."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

# Something that happens once; `None` has always happened.
Event = Any


class Streams:
    """
    The timelines of one device: the computation, copies to the device, and copies to the host.

    Work on one timeline runs in order; between timelines only events order it. In this class they are one: work on the
    CPU is done when a call returns, and for an accelerator without streams only the host waits.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._issued: Event = device if is_accelerator(device) else None

    def copy_to_device(self, *copies: Callable[[], object], after: Iterable[Event]) -> Event:
        """Run `copies` on their own timeline once all of `after` has happened; the event says when they are done."""
        for copy in copies:
            copy()
        return self._issued

    # The same on the timeline of the other direction.
    copy_to_host = copy_to_device

    def computed(self) -> Event:
        """Return an event that happens when all computation issued so far is done."""
        return self._issued

    def compute_after(self, event: Event) -> None:
        """Let computation issued from now on wait for `event`."""

    def wait(self, event: Event) -> None:
        """Block the calling thread until `event` has happened."""
        if event is not None:
            torch.accelerator.synchronize(self.device)


class AcceleratorStreams(Streams):
    """Side streams of a CUDA device, or of another accelerator that `torch.Stream` supports."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._to_device = torch.Stream(device)
        self._to_host = torch.Stream(device)
        self._process = os.getpid()

    def __deepcopy__(self, memo: dict) -> "AcceleratorStreams":
        # `with stream` may keep on the stream the state that it restores, so two threads must not share one.
        return AcceleratorStreams(self.device)

    def copy_to_device(self, *copies: Callable[[], object], after: Iterable[Event]) -> Event:
        return self._run(self._to_device, copies, after)

    def copy_to_host(self, *copies: Callable[[], object], after: Iterable[Event]) -> Event:
        return self._run(self._to_host, copies, after)

    def computed(self) -> Event:
        return torch.accelerator.current_stream(self.device).record_event()

    def compute_after(self, event: Event) -> None:
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)

    def wait(self, event: Event) -> None:
        # A forked child has no part in the work of the device, and may not ask about it.
        if event is not None and os.getpid() == self._process:
            event.synchronize()

    @staticmethod
    def _run(stream: torch.Stream, copies: Iterable[Callable[[], object]], after: Iterable[Event]) -> Event:
        for event in after:
            if event is not None:
                stream.wait_event(event)
        try:
            with stream:
                for copy in copies:
                    copy()
            return stream.record_event()
        except BaseException:
            stream.synchronize()  # the started work has no event, and must not outlive its memory
            raise


def streams_for(device: torch.device) -> Streams:
    """Return the streams of `device`."""
    if is_accelerator(device):
        with suppress(RuntimeError):  # an accelerator without streams
            return AcceleratorStreams(device)
    return Streams(device)


class Issued:
    """Work that this thread has issued on an accelerator by now; any thread may wait for it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._event: Event = None
        with suppress(RuntimeError):  # an accelerator without streams
            self._event = torch.accelerator.current_stream(device).record_event()

    def wait(self) -> None:
        """Block the calling thread until the work is done."""
        if self._event is None:
            torch.accelerator.synchronize(self._device)
        else:
            self._event.synchronize()

    @property
    def is_done(self) -> bool:
        """Whether the work is known to be done, without waiting."""
        return self._event is not None and self._event.query()


def is_accelerator(device: torch.device) -> bool:
    """Return whether torch computes on `device` beside this thread."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type
