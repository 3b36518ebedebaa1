"""Compiles the kernel for GPUs that are not here: `python -m device_kernels.ahead CAPABILITY...` from tests/."""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_hybrid_cache.device_kernels.coded_attention import attend_kernel, types_of_products
from hf_hybrid_cache.device_kernels.parts import shape_arguments
from hf_hybrid_cache.kernels import RecordLayout

# By bits, head_dim of keys and values, rows, the kind of mask and the type of the states.
CASES = [
    ((4, 4), (64, 64), 4, "none", torch.bfloat16),
    ((8, 2), (128, 128), 32, "bias", torch.float16),
    ((4, 2), (256, 256), 32, "visible", torch.bfloat16),
    ((8, 8), (256, 256), 32, "none", torch.float32),
]
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_STRIDES = ("batch", "head", "token", "block", "row", "query")


def compiled(capability: int, case: Any) -> dict[str, int]:
    """Bytes of memory that a program shares between its threads."""
    bits, dims, rows, mask, dtype = case
    layouts = RecordLayout.of_keys(bits[0], dims[0], 64, True), RecordLayout.of_values(bits[1], dims[1], 64, True)
    of_codes, of_states = types_of_products(dtype)
    constants, options = shape_arguments(dtype, rows, dims, *layouts)
    constants |= {"HEADS": 8, "LENGTH": 1, "MASK": mask, "OF_CODES": of_codes, "OF_STATES": of_states}
    states = f"*{_NAMES[dtype]}"
    pointers = {"query": states, "turned": "*fp32", "keys": states, "values": states, "mask": states}
    pointers |= {"key_records": "*u8", "value_records": "*u8", "outs": "*fp32", "log_sums": "*fp32"}
    if mask == "visible":
        pointers["mask"] = "*u8"
    names = attend_kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    signature["scale"] = "fp32"
    # As Triton finds them in a model: addresses and strides are multiples of 16.
    aligned = [index for index, name in enumerate(names) if name in pointers or name.endswith(_STRIDES)]
    source = ASTSource(
        fn=attend_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"capability": capability, "shared": done.metadata.shared, "rows": rows}


if __name__ == "__main__":
    print(json.dumps([compiled(int(capability), case) for capability in sys.argv[1:] for case in CASES]))
