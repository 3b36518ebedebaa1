import pytest

from hf_hybrid_cache.byte_sizes import parse_bandwidth, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512MiB", 2**29),
        ("64kB", 64_000),
        ("2T", 2**41),
        ("4096", 4096),
        ("7B", 7),
        ("0", 0),
        (123, 123),
    ],
)
def test_sizes_are_binary_unless_they_end_in_b(text: str | int, num_bytes: int):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 bytes", "8PiB", "1e9", "8iB", "1,000", "8GiB/s", "nan"])
def test_what_is_no_size_is_quoted_with_the_way_out(text: str):
    with pytest.raises(ValueError, match="is not a size in bytes: write it as 8GiB") as raised:
        parse_bytes(text)
    assert repr(text) in str(raised.value)


def test_bandwidths_are_sizes_a_second():
    assert parse_bandwidth("30GB/s") == parse_bandwidth(" 30 gb/s ") == 30e9
    assert parse_bandwidth("1GiB/s") == 2**30
    for text in ("0", "fast", "30GB/h"):
        with pytest.raises(ValueError, match="write it as 30GB/s"):
            parse_bandwidth(text)


def test_tokens_are_counted_in_units_of_1024():
    assert parse_tokens("131072") == parse_tokens("131,072") == parse_tokens("128K") == parse_tokens("128k") == 131_072
    assert parse_tokens("1M") == 2**20
    for text in ("0", "", "-5", "1.5K", "128 KiB"):
        with pytest.raises(ValueError, match="write it as 131072 or 128K"):
            parse_tokens(text)
