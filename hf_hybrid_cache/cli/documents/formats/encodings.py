"""Decoding text."""

import re
from collections.abc import Callable

from ...console import UsageError
from ...files import BYTE_ORDER_MARK, plain_text

_MARKS = {BYTE_ORDER_MARK: "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_NO_TEXT = re.compile("[\0-\b\x0e-\x1f\x7f\ufffd]")


def decoded(name: str, content: bytes, remark: Callable[[str], None], encoding: str = "utf-8") -> str:
    """
    Decode text by its first bytes, or else as it says; what is not UTF-8 and has no control characters is cp1252.

    Args:
        name: for messages.
        content: the whole file.
        remark: receives that it was read as cp1252.
        encoding: the one that the file names.

    Raises:
        UsageError: it is not in the encoding that it names, is binary, or is empty.
    """
    encoding = next((marked for mark, marked in _MARKS.items() if content.startswith(mark)), encoding)
    try:
        return plain_text(name, content.decode(encoding).removeprefix("\ufeff").encode())
    except (LookupError, UnicodeError) as error:
        if encoding != "utf-8":
            why = " ".join(f"says that it is in {encoding}, and is not: {error}".split())
            raise UsageError(f"{name} {why}. Save it in UTF-8.") from None
    text = content.decode("cp1252", errors="replace")
    if _NO_TEXT.search(text):
        return plain_text(name, content)  # which says what is wrong
    remark(f"{name}: not UTF-8, so read as cp1252 (Western European): if letters are wrong, save it in UTF-8")
    return plain_text(name, text.encode())
