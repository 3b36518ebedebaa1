"""Shares of a sweep: every n-th cell, for one of several machines, or for a job."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from experiments.sweep.running import measured


class Share(NamedTuple):
    """
    One of several shares of the same cells.

    Attributes:
        number: counted from 1.
        of: how many shares there are.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Share":
        """
        Parse a share such as `2/4`.

        Raises:
            argparse.ArgumentTypeError: it is not.
        """
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 2/4: the second of four")
        return cls(int(number), int(of))

    def take(self, items: list[Any]) -> list[Any]:
        return items[self.number - 1 :: self.of]


def shares(options: argparse.Namespace, count: int) -> list[Callable[[], dict[str, int]]]:
    """Return so many jobs, each for a share; a job that runs again measures only cells without a record."""
    each = (Share(number, count) for number in range(1, count + 1))
    return [partial(measured, argparse.Namespace(**{**vars(options), "shard": share})) for share in each]
