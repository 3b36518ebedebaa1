"""Arguments of caches and codecs: what cannot be is refused with the way out, and any library's numbers are taken."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from hf_hybrid_cache import (
    DecodeOnCPU,
    HybridCache,
    KVCodec,
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

CONFIG = llama()
Make = Callable[[], object]


def offloaded(**options: Any) -> Make:
    return lambda: OffloadedHybridCache(CONFIG, **options)


def quantized(**options: Any) -> Make:
    return lambda: QuantizedHybridCache(CONFIG, **options)


def hybrid(**options: Any) -> Make:
    return lambda: HybridCache(CONFIG, **options)


NO_COUNT = "must be an integer of at least 0, got "
NO_BITS = [True, np.True_, torch.tensor(True), 4.0, np.float32(4), torch.tensor(4.0), "4", None, 3, 5, [4, 8], (4, 4.0)]
CODEC = r"codec must be a KVCodec such as minmax\(4\), or None, got "
# What is asked for, and what the error says.
REFUSED: list[tuple[Make, str]] = [
    *(
        (offloaded(**{name: count}), f"{name} {NO_COUNT}{count!r}")
        for name, counts in {
            "prefetch_layers": (-1, 1.5, True, "2"),
            "device_tokens": (-1, 128.0),
        }.items()
        for count in counts
    ),
    *((quantized(max_length=length), f"max_length {NO_COUNT}") for length in (-1, 2.5, "8")),
    (offloaded(device_tokens=127), "at least 128"),
    (offloaded(cpu_decode=1.0), "For all tokens in host memory use True, for none False"),
    (offloaded(cpu_decode=-0.5), "is not a share between 0 and 1"),
    (offloaded(cpu_decode=float("nan")), "is not a share between 0 and 1"),
    *(
        (lambda each=each: Placement(cpu_decode=each), "True, False, None, a share between 0 and 1 or")
        for each in ("all", 3, [1], (0.5,))
    ),
    (quantized(device_tokens=512), "Pass offload=True or cpu_decode=True"),
    (lambda: Placement(device_tokens=512), "all tokens would be on the device"),
    *((quantized(bits=bits), "bits must be 8, 4 or 2, or a pair of these for keys and values") for bits in NO_BITS),
    (quantized(bits={0: 3}), "got 3"),
    (quantized(bits={7: 4}), r"codec names layers \[7\]; the model's full-attention layers are \[0, 1, 2, 3\]"),
    *((lambda bad=bad: minmax(4, rotate=bad), "rotate must be 'auto', True or False") for bad in ("yes", None, 1)),
    (
        lambda: minmax(4, rotate=True, auto_bits=True),
        "auto_bits must be True or False, and needs rotate='auto'",
    ),
    (
        hybrid(placement=Placement),
        r"placement must be a Placement such as Placement\(offload=True\).* the class Placement",
    ),
    (hybrid(codec=minmax), CODEC + "function"),
    (hybrid(codec=4), CODEC + "int"),
    (hybrid(codec={0: KVCodec}), CODEC + "the class KVCodec"),
    (hybrid(codec={0: minmax(4), 1: minmax}), CODEC + "function"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
def test_arguments_that_cannot_be_are_refused_with_the_way_out(make: Make, message: str):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        make()
    assert raised.type is (TypeError if message.startswith(("placement", CODEC)) else ValueError)


@pytest.mark.parametrize(
    "make",
    [
        OffloadedHybridCache,
        lambda config: QuantizedHybridCache(config, bits={0: 4}),
        lambda config: cache_for_budget(config, 100, gpu_memory=0, host_memory="1GiB"),
        lambda config: HybridCache.load("document.kv", config),
    ],
)
def test_config_when_it_is_none_then_error_names_it(make: Callable[[Any], object]):
    given = (None, "NoneType"), (LlamaConfig, "the class LlamaConfig"), (tiny_model("llama"), "LlamaForCausalLM")
    for config, name in given:
        with pytest.raises(TypeError, match=rf"config must be a transformers config such as model\.config, got {name}"):
            make(config)


# Numbers of NumPy and torch


def num_threads(count: Any) -> int:
    set_num_threads(count)
    try:
        return get_num_threads()
    finally:
        set_num_threads(None)


# Uses of a number, which give something to compare.
USES: dict[str, Callable[[Callable[[int], Any]], Any]] = {
    "bits of layers": lambda of: QuantizedHybridCache(CONFIG, bits={0: of(8), 2: (of(4), of(2))}).codecs,
    "codecs by index": lambda of: HybridCache(CONFIG, codec={of(2): minmax(4)}).codecs,
    "minmax": lambda of: minmax(4, group_size=of(32), sink_tokens=of(100)),
    "device_tokens": lambda of: OffloadedHybridCache(CONFIG, of(2), device_tokens=of(128))._stores.placement,
    "threads": lambda of: num_threads(of(1)),
    "weights": lambda of: QuantizedWeightsConfig(of(4), group_size=of(64), head_bits=of(8)).to_json_string(),
    "DecodeOnCPU": lambda of: DecodeOnCPU(weights=of(8)),
    "cache_for_budget": lambda of: cache_for_budget(CONFIG, of(100), of(0), 2**34, of(1), of(64)).codecs,
}


@pytest.mark.parametrize("name", USES)
def test_numbers_of_numpy_and_torch_are_those_of_python(name: str):
    for kind in (np.int64, np.uint8, torch.tensor, *([] if name.endswith("by index") else [np.array])):
        assert repr(USES[name](kind)) == repr(USES[name](int))
    assert repr(Placement(cpu_decode=np.float32(0.5))) == repr(Placement(cpu_decode=0.5))
    assert [as_float(given) for given in (True, "0.5", None)] == [None] * 3
    for bits in NO_BITS[:8]:
        assert as_integer(bits) is None
        with pytest.raises(TypeError, match="bits must be an integer"):
            quantize_weights(tiny_model("llama"), bits)
