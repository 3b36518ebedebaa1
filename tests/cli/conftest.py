from pathlib import Path

import pytest

from models.byte_tokenizer import model_in


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and a tokenizer of bytes."""
    return model_in(tmp_path_factory.mktemp("model"), 2**16)
