"""The kernel compiles for GPUs that are not here, and fits them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.slow import combination
from device_kernels import interpreted

TESTS = Path(__file__).parent.parent
# Bytes that the threads of a program may share (CUDA C++ Programming Guide, technical specifications by capability).
SHARED = {89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@pytest.mark.skipif(interpreted.why_not() is not None, reason=str(interpreted.why_not()))
@pytest.mark.slow
@pytest.mark.parametrize("capability", [each if each == 89 else combination(each) for each in SHARED])
def test_the_kernel_compiles_and_fits_into_shared_memory(capability: int, tmp_path: Path):
    # A process of its own, where Triton does not interpret.
    environment = {name: value for name, value in os.environ.items() if name != interpreted.VARIABLE}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
    command = [sys.executable, "-m", "device_kernels.ahead", str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) > 1
    assert all(each["shared"] <= SHARED[capability] for each in found), found
