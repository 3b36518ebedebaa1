"""The devices for states that were saved from a device."""

import torch


class Devices:
    """
    The devices for states that were saved from a device.

    Args:
        wanted: everything; `None` for the devices where it was.
    """

    def __init__(self, wanted: torch.device | str | None):
        self._wanted = wanted
        self._known: dict[str, torch.device] = {}

    def __call__(self, saved: str) -> torch.device:
        name = str(self._wanted or saved)
        if name not in self._known:
            try:
                # The device gets its index, as the states of a model have it.
                self._known[name] = torch.empty(0, device=name).device
            except (RuntimeError, AssertionError, ImportError) as error:
                raise ValueError(
                    f"there is no device {name} here; pass device='cpu', or the one of the model"
                ) from error
        if self._known[name].type == "meta":
            raise ValueError("a meta device holds no keys and values")
        return self._known[name]
