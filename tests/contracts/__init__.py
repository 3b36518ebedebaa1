"""The contracts of stores and codecs: a new store is a row of a table, and a test of a new codec inherits a class."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.codecs", f"{__name__}.stores")
