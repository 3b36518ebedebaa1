"""The kernel compiles for GPUs that are not here, and fits them."""

from pathlib import Path

import pytest

from common.programs import run_program
from common.slow import slow
from device_kernels import interpreted

# Bytes that the threads of a program may share (CUDA C++ Programming Guide, technical specifications by capability).
SHARED = {89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@pytest.mark.skipif(interpreted.why_not() is not None, reason=str(interpreted.why_not()))
@pytest.mark.slow
@pytest.mark.parametrize("capability", [each if each == 89 else slow(each) for each in SHARED])
def test_the_kernel_compiles_and_fits_into_shared_memory(capability: int, tmp_path: Path):
    program = f"from device_kernels import ahead; ahead.check({capability}, {SHARED[capability]})"
    run_program(program, TRITON_CACHE_DIR=str(tmp_path))
