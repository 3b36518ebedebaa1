"""Standard input, and lines of JSON."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from ..documents import read_text as read_text
from .console import UsageError

# Control characters act on a terminal, and many programs end a line at a separator.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
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


def json_line(value: Any) -> str:
    """A value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_ESCAPES) + "\n"


def strict_json(line: str) -> Any:
    """
    Parse JSON that can be written again as it is: each key is given once, numbers are finite, text is UTF-8.

    Raises:
        ValueError: it is not such JSON.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(line, object_pairs_hook=_with_keys_once)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _with_keys_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its keys and values; raises `ValueError` if a key is given twice."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {key!r} is given twice")
        fields[key] = value
    return fields
