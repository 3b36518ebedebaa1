"""The options behind the make targets of tests: skipped tests, settings in every test process, and records."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import chain, product
from itertools import combinations as combinations_of
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.slow import mark_all_but_default, part_of_slow

TESTS = Path(__file__).parents[1]
SEARCHES = """
import pytest
from common.soak import budget, count

@pytest.mark.parametrize("search", range(2))
def test_that_holds(search):
    count("examples", budget(3))

def test_that_fails():
    assert budget(3) == 3
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_record_has_what_all_test_processes_did_and_what_failed(tmp_path: Path, processes: str):
    searches = tmp_path / "test_searches.py"
    searches.write_text(SEARCHES)
    options = ["-p", "conftest", "-c", TESTS.parent / "setup.cfg", "-n", processes]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--soak", tmp_path, searches],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert record["counts"] == {"examples": 2 * 3 * 50}
    assert (record["tests_passed"], record["exit_status"]) == (2, 1)
    assert [test.rpartition("::")[2] for test in record["tests_failed"]] == ["test_that_fails"]
    assert record["seconds"] > 0
    assert record["environment"]["versions"]["torch"]


class Combination:
    """A case of a test that is marked as `default(what)`, as far as the choice among them looks at it."""

    def __init__(self, test: str, what: str, **params: int):
        self.nodeid, self.callspec = f"{test}[{params}]", SimpleNamespace(params=params)
        self.markers = {"default": pytest.mark.default(what).mark}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers[marker.name] = marker.mark


@pytest.mark.parametrize(("what", "count"), [("values", 1), ("pairs", 2)])
@pytest.mark.parametrize("sizes", [{"a": 5, "b": 3}, {"a": 4, "b": 3, "c": 3}, {"a": 6, "b": 12, "c": 3, "d": 2}])
def test_any_values_meet_in_a_case_that_is_not_slow(sizes: dict[str, int], what: str, count: int):
    combinations = [dict(zip(sizes, values, strict=True)) for values in product(*map(range, sizes.values()))]
    cases = [Combination(test, what, **params) for test in ("one", "other") for params in combinations]
    mark_all_but_default(cases)
    for test in ("one", "other"):
        quick = [case.callspec.params for case in cases if test in case.nodeid and "slow" not in case.markers]
        met = {group for params in quick for group in combinations_of(params.items(), count)}
        assert met == {group for params in combinations for group in combinations_of(params.items(), count)}
        assert len(quick) <= 1.3 * prod(sorted(sizes.values())[-count:])


def test_each_slow_case_is_in_one_part_and_each_other_in_all():
    cases = [Combination("test", "values", a=a, b=b) for a in range(9) for b in range(7)]
    mark_all_but_default(cases)
    combinations = [case for case in cases if "slow" in case.markers]
    for case in (slow_ones := combinations[::2]):
        case.add_marker(pytest.mark.slow)
    parts = [part_of_slow(f"{turn}/8", cases) for turn in range(3, 11)]
    times = dict.fromkeys(cases, 8) | dict.fromkeys(combinations, 0) | dict.fromkeys(slow_ones, 1)
    assert Counter(chain(*(chosen for chosen, _ in parts))) == Counter(times)
    assert all({*chosen} | {*left_out} == {*cases} for chosen, left_out in parts)


def test_the_page_on_reliability_states_what_the_last_soak_did():
    page = (TESTS.parent / "docs/reliability.md").read_text()
    records = [json.loads(path.read_text()) for path in (TESTS.parent / "results/soak").glob("*.json")]
    assert records
    for record in records:
        assert record["exit_status"] == 0
        assert [number for number in record["counts"].values() if f" {number:,} " not in page] == []
