"""Tests of a transformers checkout run with stock and with our caches, and are sorted by their outcomes."""

import textwrap
from pathlib import Path

import pytest

from experiments import stock_tests

CHECKOUT = """
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache, DynamicLayer

    CONFIG = LlamaConfig(num_hidden_layers=1)

    def test_of_any_cache():
        assert DynamicCache(config=CONFIG).get_seq_length() == 0

    def test_of_a_type_of_layer():
        assert type(DynamicCache(config=CONFIG).layers[0]) is DynamicLayer

    def test_without_a_cache():
        pass

    def test_without_a_config():
        assert type(DynamicCache()) is DynamicCache

    def test_that_stock_fails():
        assert DynamicCache(config=CONFIG).get_seq_length() == 1
"""


@pytest.mark.slow
def test_stock_tests_run_with_ours_where_they_make_a_cache(tmp_path: Path):
    file = "test_caches.py"
    (tmp_path / file).write_text(textwrap.dedent(CHECKOUT))
    stock = stock_tests.run(tmp_path, None, [file], limit=300)
    comparable = [test for test, outcome in stock.items() if stock_tests.is_comparable(outcome)]
    ours = stock_tests.run(tmp_path, "DynamicHybridCache", comparable, limit=300)
    (cell,) = stock_tests.cells_of(stock, {"DynamicHybridCache": ours})
    (failed,) = cell.pop("failed_by_us")
    assert failed["test"] == f"{file}::test_of_a_type_of_layer"
    assert "HybridLayer" in failed["error"]
    assert cell == {
        "file": file,
        "cache": "DynamicHybridCache",
        "passed": 1,
        "not_reached": 0,
        "failed_by_stock": 1,
        "skipped_by_stock": 0,
        "without_a_cache": 2,
    }


def test_a_test_that_ended_the_process_failed_and_others_were_not_reached():
    lines = [{"begun": "f.py::a"}, {"test": "f.py::a", "outcome": "passed", "caches": 1}, {"begun": "f.py::b"}]
    ours = stock_tests.outcomes_of(lines)
    assert [each["outcome"] for each in ours.values()] == ["passed", "failed"]
    stock = {f"f.py::{name}": {"outcome": "passed", "caches": 1} for name in "abc"}
    cells = stock_tests.cells_of(stock, {"ours": ours})
    assert stock_tests.table(cells).splitlines()[-1] == "| `ours` | 1 | 1 | 1 | 0 |"
