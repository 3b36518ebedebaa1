"""Any text is a size, or an error that says how to write one."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from hf_hybrid_cache.scalars import parse_bytes, parse_tokens

from common.soak import search_at_random

pytestmark = pytest.mark.soak
SearchAtRandom = search_at_random(12)
ANY_TEXT = st.one_of(
    st.text(st.characters()),
    st.from_regex(r"[0-9.,_eE+-]{0,30} ?[kKmMgGtTpP\u212a]?[iI\u0131]?[bB]?(/s)?", fullmatch=True),
)
PARSERS = {
    parse_bytes: "is not a size in bytes: write it as 8GiB",
    parse_tokens: "is not a number of tokens: write it as 131072 or 128K",
}


@pytest.mark.parametrize("parse", PARSERS)
@SearchAtRandom
@given(text=ANY_TEXT)
@example(text="9" * 5000)
@example(text="8\u212aiB")
@example(text="\ud800")
def test_any_text_is_a_number_or_an_error_that_quotes_it(parse: Callable[[str], float], text: str):
    try:
        number = parse(text)
    except ValueError as error:
        message = str(error)
        assert message.startswith(f"{text!r} {PARSERS[parse]}")
    else:
        assert 0 <= float(number) < 1e31
        assert number > 0 or parse is parse_bytes


@SearchAtRandom
@given(
    count=st.integers(0, 10**18 - 1),
    unit=st.sampled_from(["KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB", "B", "", "K", "M", "G", "T"]),
)
def test_whole_numbers_come_back_exactly(count: int, unit: str):
    factors = {"K": 1, "M": 2, "G": 3, "T": 4}
    base = 1000 if unit.endswith("B") and "i" not in unit else 1024
    expected = count * base ** factors.get(unit[:1], 0)
    assert parse_bytes(f"{count}{unit}") == expected
    assert parse_bytes(f" {count} {unit.lower()} ") == expected
    if unit in ("K", "M") and count:
        assert parse_tokens(f"{count}{unit}") == parse_tokens(f"{count}{unit.lower()}") == expected
    whole, rest = divmod(count, 4)
    assert parse_bytes(f"{whole}.{25 * rest:02}GiB") == count * 2**28
    if count:
        assert parse_tokens(str(count)) == parse_tokens(f"{count:,}") == count
