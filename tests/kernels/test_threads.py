"""How many threads the kernels use, and that several callers do not disturb each other."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest

from hf_hybrid_cache import get_num_threads, set_num_threads
from hf_hybrid_cache.kernels.threads import VARIABLE, _cores_of_one_socket, threads
from kernels.test_attention import make, run


@pytest.fixture(autouse=True)
def default_afterwards():
    yield
    set_num_threads(None)


def test_the_default_is_the_physical_cores_of_one_socket(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert 1 <= get_num_threads() <= numba.config.NUMBA_NUM_THREADS
    assert get_num_threads() == min(_cores_of_one_socket(), numba.config.NUMBA_NUM_THREADS)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="asks which processors the process may use")
def test_threads_of_a_core_count_once_and_sockets_are_not_added(tmp_path: Path):
    allowed = sorted(os.sched_getaffinity(0))
    for processor in allowed:
        topology = tmp_path / f"cpu{processor}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text("7\n")
    assert _cores_of_one_socket(tmp_path) == 1
    for processor in allowed:
        (tmp_path / f"cpu{processor}" / "topology" / "physical_package_id").write_text(f"{processor}\n")
    assert _cores_of_one_socket(tmp_path) == 1
    assert _cores_of_one_socket(tmp_path / "nothing") == len(allowed)


def test_a_number_that_is_set_is_used_and_taken_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert get_num_threads() == 1
    set_num_threads(numba.config.NUMBA_NUM_THREADS)
    assert get_num_threads() == numba.config.NUMBA_NUM_THREADS
    set_num_threads(None)
    assert get_num_threads() == 1


@pytest.mark.parametrize("number", [0, -1, 10_000, 1.5, "many"])
def test_numbers_that_cannot_be_had_are_refused(number: object, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=f"num_threads must be an integer from 1 to .* got {number!r}"):
        set_num_threads(number)  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, str(number))
    with pytest.raises(ValueError, match=VARIABLE):
        get_num_threads()


def test_a_call_leaves_the_number_that_numba_uses_elsewhere():
    before = numba.get_num_threads()
    set_num_threads(1)
    with threads() as count:
        assert count == numba.get_num_threads() == 1
    assert numba.get_num_threads() == before


def test_callers_on_several_threads_get_their_own_results():
    cases = [make("bfloat16", 3000 + seed, num_kv_heads=2, group=4, seed=seed) for seed in range(8)]
    alone = [run(*case, 0.125)[0] for case in cases]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda case: run(*case, 0.125)[0], cases * 3))
    for index, result in enumerate(together):
        assert np.array_equal(result, alone[index % 8])


def test_the_pool_without_openmp_does_as_well():
    """Numba's own pool ends the process when two threads enter it at once."""
    program = """
import numba
numba.config.THREADING_LAYER = "workqueue"
from kernels import test_threads
test_threads.test_callers_on_several_threads_get_their_own_results()
assert numba.threading_layer() == "workqueue"
"""
    paths = (Path(__file__).parents[2], Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)
