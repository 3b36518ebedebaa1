from collections.abc import Iterator

import pytest

from serve.running import Running, serving

from models.byte_tokenizer import byte_tokenizer, model_in


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model writes any text, and can end it."""
    tokenizer = byte_tokenizer(only_printable=True)
    with serving(model_in(tmp_path_factory.mktemp("model"), 2**13, tokenizer, eos_token_id=2)) as running:
        yield running
