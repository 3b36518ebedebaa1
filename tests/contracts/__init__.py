"""Contracts of stores, codecs, generation and decoding: a new variant is a row of a table, or inherits a class."""

import pytest

_CONTRACTS = ("codecs", "decoding", "generation", "stores")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _CONTRACTS))
