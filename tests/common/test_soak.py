"""The options behind the make targets of tests: skipped tests, settings in every test process, and records."""

import json
import os
import subprocess
import sys
from itertools import combinations as combinations_of
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import soak
from common.slow import mark_all_but_covering

TESTS = Path(__file__).parents[1]
SEARCHES = """
import pytest
from common.soak import budget, count

@pytest.mark.parametrize("search", range(2))
def test_that_holds(search):
    count("examples", budget(3, 50))

def test_that_fails():
    assert budget(3, 50) == 3
"""


@pytest.mark.slow
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


def test_a_search_is_brief_unless_it_is_to_be_thorough_or_to_soak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(soak._EFFORT)
    budgets = [soak.budget(41, 1000)]
    for effort in ("brief", "thorough", "soak"):
        soak.set_effort(effort)
        budgets.append(soak.budget(41, 1000))
    assert budgets == [9, 9, 41, 1000]
    assert soak.budget(1, 1) == 1


class Combination:
    """A case of a test that is marked as `covering(count)`, as far as the choice among them looks at it."""

    def __init__(self, test: str, count: int, **params: int):
        self.nodeid, self.callspec = f"{test}[{params}]", SimpleNamespace(params=params)
        self.markers = {"covering": pytest.mark.covering(count).mark}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers[marker.name] = marker.mark


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("sizes", [{"a": 5, "b": 3}, {"a": 4, "b": 3, "c": 3}, {"a": 6, "b": 12, "c": 3, "d": 2}])
def test_any_values_meet_in_a_case_that_is_not_slow(sizes: dict[str, int], count: int):
    combinations = [dict(zip(sizes, values, strict=True)) for values in product(*map(range, sizes.values()))]
    cases = [Combination(test, count, **params) for test in ("one", "other") for params in combinations]
    mark_all_but_covering(cases)
    for test in ("one", "other"):
        quick = [case.callspec.params for case in cases if test in case.nodeid and "slow" not in case.markers]
        met = {group for params in quick for group in combinations_of(params.items(), count)}
        assert met == {group for params in combinations for group in combinations_of(params.items(), count)}
        assert len(quick) <= 1.3 * prod(sorted(sizes.values())[-count:])


def test_the_page_on_reliability_states_what_the_last_soak_did():
    page = (TESTS.parent / "docs/reliability.md").read_text()
    records = [json.loads(path.read_text()) for path in (TESTS.parent / "results/soak").glob("*.json")]
    assert records
    for record in records:
        assert record["exit_status"] == 0
        assert [number for number in record["counts"].values() if f" {number:,} " not in page] == []
