"""Communication with other processes that run the same model, and detection of lost ones."""

from .errors import LostProcessError, OutOfStepError
from .peers import Peers

__all__ = ["LostProcessError", "OutOfStepError", "Peers"]
