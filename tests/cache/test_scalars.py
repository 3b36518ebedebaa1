"""Numbers of NumPy and torch are taken where Python's are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hf_hybrid_cache import (
    DecodeOnCPU,
    DynamicHybridCache,
    HybridCache,
    OffloadedHybridCache,
    Placement,
    QuantizedHybridCache,
    QuantizedWeightsConfig,
    cache_for_budget,
    get_num_threads,
    minmax,
    quantize_weights,
    set_num_threads,
)
from hf_hybrid_cache.scalars import as_float, as_integer

from models.tiny_models import llama, tiny_model

INTEGERS = {"int64": np.int64, "uint8": np.uint8, "array": np.array, "tensor": torch.tensor}
CONFIG = llama()


def codecs(cache: HybridCache) -> dict:
    assert all(type(index) is int for index in cache.codecs)
    return cache.codecs


def num_threads(count: Any) -> int:
    set_num_threads(count)
    try:
        return get_num_threads()
    finally:
        set_num_threads(None)


# Uses of a number, which give something to compare.
USES: dict[str, Callable[[Callable[[int], Any]], Any]] = {
    "bits": lambda of: codecs(QuantizedHybridCache(CONFIG, bits=of(4))),
    "pair of bits": lambda of: codecs(QuantizedHybridCache(CONFIG, bits=(of(8), of(4)))),
    "bits of layers": lambda of: codecs(QuantizedHybridCache(CONFIG, bits={0: of(8), 2: (of(4), of(2))})),
    "layers by index": lambda of: codecs(QuantizedHybridCache(CONFIG, bits={of(0): 8, of(3): of(4)})),
    "codecs by index": lambda of: codecs(HybridCache(CONFIG, codec={of(2): minmax(4)})),
    "group_size": lambda of: minmax(4, group_size=of(32)),
    "sink_tokens": lambda of: minmax(4, sink_tokens=of(100)),
    "max_length": lambda of: DynamicHybridCache(CONFIG, max_length=of(100))._stores.capacity,
    "cpu_decode": lambda of: Placement(cpu_decode=[of(1), of(3)]),
    "counts": lambda of: Placement(True, of(2), of(1), device_tokens=of(128)),
    "device_tokens": lambda of: OffloadedHybridCache(CONFIG, of(2), of(1), device_tokens=of(128))._stores.placement,
    "threads": lambda of: num_threads(of(1)),
    "weights": lambda of: QuantizedWeightsConfig(of(4), group_size=of(64), head_bits=of(8)).to_json_string(),
    "DecodeOnCPU": lambda of: DecodeOnCPU(weights=of(8)),
    "cache_for_budget": lambda of: cache_for_budget(CONFIG, of(100), of(0), 2**34, of(1), of(64)).codecs,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", INTEGERS.values(), ids=INTEGERS)
@pytest.mark.parametrize("name", USES)
def test_integers_of_numpy_and_torch_are_those_of_python(name: str, kind: Callable[[int], Any]):
    if kind is np.array and name.endswith("by index"):
        pytest.skip("an array is no key of a mapping")
    assert repr(USES[name](kind)) == repr(USES[name](int))


@pytest.mark.parametrize("share", [np.float32(0.5), np.float64(0.5)])
def test_shares_of_numpy_are_those_of_python(share: Any):
    assert repr(Placement(cpu_decode=share)) == repr(Placement(cpu_decode=0.5))


@pytest.mark.parametrize(
    "given", [True, np.True_, torch.tensor(True), 4.0, np.float32(4), torch.tensor(4.0), "4", None]
)
def test_bits_when_no_integer_then_are_refused(given: Any):
    assert as_integer(given) is None
    with pytest.raises(ValueError, match="bits must be 8, 4 or 2"):
        QuantizedHybridCache(CONFIG, bits=given)
    with pytest.raises(TypeError, match="bits must be an integer"):
        quantize_weights(tiny_model("llama"), given)


@pytest.mark.parametrize("given", [True, "0.5", None])
def test_float_when_no_number_then_is_none(given: Any):
    assert as_float(given) is None
