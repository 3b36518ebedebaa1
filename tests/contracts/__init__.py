"""The contracts of buffers, stores and codecs: a test of a new one inherits a class, and says how to make one."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.buffers", f"{__name__}.codecs", f"{__name__}.stores")
