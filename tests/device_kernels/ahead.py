"""Compiles the kernels for GPUs that are not here, in a process in which Triton does not interpret."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_hybrid_cache.device_kernels.split_kernels import attend_kernel, merge_kernel
from hf_hybrid_cache.device_kernels.splits import OPTIONS, shape_arguments, types_of_products
from hf_hybrid_cache.kernels import PackedLayout

# Each case: bits, head_dim of keys and values, rows, the kind of mask and the type of the states.
CASES = [
    ((4, 4), (64, 64), 4, "none", torch.bfloat16),
    ((8, 2), (128, 128), 32, "bias", torch.float16),
    ((4, 2), (256, 256), 32, "visible", torch.bfloat16),
    ((8, 8), (256, 256), 32, "none", torch.float32),
    ((8, 8), (256, 256), 32, "bias", torch.bfloat16),
]
# Each case: head_dim of values, whether results are mapped, and their type.
MERGED = [
    (64, True, torch.bfloat16),
    (80, True, torch.float16),
    (256, True, torch.float32),
    (128, False, torch.bfloat16),
]
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_STRIDES = ("batch", "head", "token", "block", "row", "query")


def attention(capability: int, case: Any) -> int:
    """Compile the attention kernel; return the bytes of shared memory that a program takes."""
    bits, dims, rows, mask, dtype = case
    layouts = PackedLayout.of_keys(bits[0], dims[0], 64, True), PackedLayout.of_values(bits[1], dims[1], 64, True)
    of_codes, of_states = types_of_products(dtype)
    constants, options = shape_arguments(dtype, rows, dims, *layouts)
    constants |= {"MASK": mask, "OF_CODES": of_codes, "OF_STATES": of_states}
    states = f"*{_NAMES[dtype]}"
    pointers = {"query": states, "turned": "*fp32", "keys": states, "values": states, "mask": states}
    pointers |= {"packed_keys": "*u8", "packed_values": "*u8", "outs": "*fp32", "lse": "*fp32"}
    if mask == "visible":
        pointers["mask"] = "*u8"
    # Strides, as Triton finds them in a model, are multiples of 16, but those of masks.
    strides = [name for name in attend_kernel.arg_names if name.endswith(_STRIDES) and not name.startswith("mask")]
    return compiled(attend_kernel, capability, pointers | {"scale": "fp32"}, constants, options, strides)


def merging(capability: int, case: Any) -> int:
    """Compile the merging kernel; return the bytes of shared memory that a program takes."""
    value_dim, is_mapped, dtype = case
    pointers = {"outs": "*fp32", "lse": "*fp32", "result_map": "*fp32", "merged": f"*{_NAMES[dtype]}"}
    constants = {"VALUE_DIM": value_dim, "VALUE_TILE": triton.next_power_of_2(value_dim), "IS_MAPPED": is_mapped}
    return compiled(merge_kernel, capability, pointers, constants, OPTIONS, [])


def compiled(
    kernel: Any,
    capability: int,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: dict[str, Any],
    strides: list[str],
) -> int:
    """Compile a kernel; `types` are those of arguments that are not integers, and addresses are multiples of 16."""
    names = kernel.arg_names
    aligned = [name for name in names if types.get(name, "").startswith("*") or name in strides]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return int(done.metadata.shared)


def check(capability: int, most: int) -> None:
    """Compile all cases for a GPU; check that none takes more bytes of shared memory than it has."""
    for compile_case, cases in ((attention, CASES), (merging, MERGED)):
        for case in cases:
            assert compile_case(capability, case) <= most, case
