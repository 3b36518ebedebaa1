"""Other processes that run the same model at the same time: what they tell each other, and which one is lost."""

from .errors import LostProcessError, OutOfStepError
from .peers import Peers

__all__ = ["LostProcessError", "OutOfStepError", "Peers"]
