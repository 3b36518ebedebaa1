"""Standard input, and lines of JSON."""

import sys

from ..documents import read_text as read_text
from .console import UsageError
from .console import json_line as json_line
from .console import strict_json as strict_json

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
STANDARD_INPUT = STANDARD_OUTPUT = "-"


def require_standard_input() -> None:
    """
    Check that standard input can be read.

    Raises:
        UsageError: it is closed.
    """
    if sys.stdin is None:
        raise UsageError("Standard input is closed: let it come from a terminal, a file or a pipe.")
