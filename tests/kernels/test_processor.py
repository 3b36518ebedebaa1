"""Instructions that are hidden from Numba: no kernel has them, and nothing believes that they are there."""

import json
import os
import subprocess
from typing import Any

import numba
import pytest
import torch
from numba.core.registry import cpu_target

from experiments.common.instructions import variables_without
from hf_hybrid_cache.kernels import has_fast_bfloat16, has_gemm
from hf_hybrid_cache.kernels.vector.intrinsics import transpose
from hf_hybrid_cache.kernels.vector.kernel_files import kernel_folder
from hf_hybrid_cache.kernels.vector.processor import AVX512, has_amx, has_bfloat16_products, has_features

from common.programs import command, environment

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="names instructions of the x86-64 family")
EVERYTHING_FROM_AVX512_ON = ("avx512", "avx10", "amx", "vnni", "bf16")


def instructions() -> dict[str, Any]:
    """Compile a function of vectors of sixteen numbers; tell which instructions it has, and which others believe in."""
    compiled = numba.njit("void(int64, int64)")(lambda source, target: transpose(source, 16, 16, target))
    believed = has_amx(), has_bfloat16_products(), has_fast_bfloat16(), has_gemm()
    return {
        "zmm": "zmm" in compiled.inspect_asm(compiled.signatures[0]),
        "ymm": "ymm" in compiled.inspect_asm(compiled.signatures[0]),
        "avx512": has_features(AVX512),
        "torch": torch.backends.cpu.get_cpu_capability(),
        "others": any(believed),
        "folder": kernel_folder().name,
        "features": cpu_target.target_context.codegen().magic_tuple()[2],
    }


def test_instructions_when_hidden_then_are_in_no_kernel():
    here = instructions()
    program = "import json; from kernels.test_processor import instructions; print(json.dumps(instructions()))"
    run = subprocess.run(
        command(program),
        env=environment(**variables_without(*EVERYTHING_FROM_AVX512_ON)),
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    there = json.loads(run.stdout)
    assert here["zmm"] == here["avx512"] == (here["torch"] == "AVX512")
    assert (there.pop("folder") == here["folder"]) == (there.pop("features") == here["features"])
    assert there == {"zmm": False, "ymm": True, "avx512": False, "others": False, "torch": "AVX2"}


def test_a_name_of_no_instruction_is_refused():
    for name in ("avx1024", ""):
        with pytest.raises(ValueError, match=f"No feature has '{name}' in its name. There are 64bit, adx, .* avx512f"):
            variables_without("avx512", name)
