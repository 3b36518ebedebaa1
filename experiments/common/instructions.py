"""Fewer instructions than the processor has, for Numba and for torch."""

from llvmlite import binding

# The most that oneDNN may use where a feature is missing.
_OF_ONEDNN = {
    "avx512f": "AVX2",
    "avx512vnni": "AVX512_CORE",
    "avx512bf16": "AVX512_CORE_VNNI",
    "amx-bf16": "AVX512_CORE_BF16",
}


def variables_without(*names: str) -> dict[str, str]:
    """
    Return the variables of the environment by which Numba and torch do without some instructions of this processor.

    Args:
        names: each hides all features in whose names LLVM has it: "avx512", "avx10", "vnni", "bf16", "amx", ...

    Raises:
        ValueError: LLVM knows no such feature of this kind of processor.
    """
    features = binding.get_host_cpu_features()
    for name in names:
        hidden = [feature for feature in features if name and name in feature]
        if not hidden:
            raise ValueError(f"No feature has {name!r} in its name. There are {', '.join(sorted(features))}.")
        features |= dict.fromkeys(hidden, False)
    if not names:
        return {}
    # torch keeps what it has compiled under names without the instructions that it was compiled for.
    variables = {"NUMBA_CPU_FEATURES": features.flatten(), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    if not features.get("avx512f"):
        variables["ATEN_CPU_CAPABILITY"] = "avx2"
    for feature, most in _OF_ONEDNN.items():
        if not features.get(feature):
            return variables | {"ONEDNN_MAX_CPU_ISA": most}
    return variables
