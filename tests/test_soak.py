"""What `make soak` relies on: switches reach every test process, and a record says what they did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SEARCHES = """
import pytest
from soak import budget, count

@pytest.mark.parametrize("search", range(2))
def test_that_holds(search):
    count("examples", budget(3, 50))

def test_that_fails():
    assert budget(3, 50) == 3
"""


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_record_has_what_all_test_processes_did_and_what_failed(tmp_path: Path, processes: str):
    searches = tmp_path / "test_searches.py"
    searches.write_text(SEARCHES)
    options = ["-p", "conftest", "-c", TESTS.parent / "setup.cfg", "-n", processes]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--soak", "--soak-record", tmp_path, searches],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert record["counts"] == {"examples": 100}
    assert (record["tests_passed"], record["exit_status"]) == (2, 1)
    assert [test.rpartition("::")[2] for test in record["tests_failed"]] == ["test_that_fails"]
    assert record["seconds"] > 0
    assert record["environment"]["versions"]["torch"]


def test_the_page_on_reliability_states_what_the_last_soak_did():
    page = (TESTS.parent / "docs/reliability.md").read_text()
    records = [json.loads(path.read_text()) for path in (TESTS.parent / "results/soak").glob("*.json")]
    assert records
    for record in records:
        assert record["exit_status"] == 0
        for name, number in record["counts"].items():
            assert f"| {name} | {number:,} |" in page
