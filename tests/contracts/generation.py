"""
The contract of generation: a cache gives, in every way to generate, what another cache gives.

A `Variant` is a cache beside its reference, which is transformers' own where nothing is quantized; `VARIANTS` has them
all. A test takes the ways to generate from `common.modes`, and runs anywhere:

    VARIANTS["quantized_8"].require(tiny_model("gemma3"), "beams")
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_cache import DecodeOnCPU, HybridCache, Placement, minmax
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels

from common import caches
from common.caches import MakeCache
from common.modes import FOR_QUANTIZED_BLOCKS, MODES, NOT_IN_TRANSFORMERS, Result, skipped_where_stock_fails
from models.tiny_models import FAMILIES

FAMILIES_AND_MODES = [
    (family, mode) for family in FAMILIES for mode in MODES if (family, mode) not in NOT_IN_TRANSFORMERS
]
# Another dtype on the CPU makes the CPU a place to move to: weights, keys and values are exchanged as between devices.
IN_FLOAT64 = DecodeOnCPU(dtype=torch.float64)


@functools.cache
def expected(model: PreTrainedModel, mode: str, make: MakeCache = caches.stock, more: int = 0) -> Result:
    """Generate with a reference; skip the test where transformers cannot do that itself."""
    with skipped_where_stock_fails():
        return MODES[mode](model, make, more)


def require_same(ours: Result, theirs: Result, tolerance: float = 0.0, share_off: float = 0.0) -> None:
    """Require the same tokens, and logits that are rarely off by more than the tolerance, never by five times it."""
    for mine, other in zip(ours, theirs, strict=True):
        if not isinstance(other, torch.Tensor):
            assert mine == other
        elif other.is_floating_point() and tolerance:
            is_off = ~torch.isclose(mine.cpu(), other.cpu(), rtol=tolerance, atol=tolerance)
            assert is_off.float().mean() <= share_off
            torch.testing.assert_close(mine.cpu(), other.cpu(), rtol=5 * tolerance, atol=5 * tolerance)
        else:
            assert mine.dtype == other.dtype
            assert torch.equal(mine.cpu(), other.cpu())


@dataclass(frozen=True)
class Variant:
    """
    A cache, and one that gives the same.

    Attributes:
        make: the cache.
        reference: the other one.
        tolerance: of logits, relative and absolute; 0 for the same bits.
        share_off: of logits that may be off by more: a number midway between two codes gets one or the other by the
            last bit of what attention gave before.
        more: tokens that a prompt has beyond those of short contexts, in which nothing is quantized or leaves a device.
        rounds: whether kernels may round queries and weights to 8 bits, which codes of 8 bits do not show.
        decode: `custom_generate` of the cache.
        is_remembered: whether the reference always gives the same.
        differs_in: modes in which it does not, with the reason.
    """

    make: MakeCache
    reference: MakeCache = caches.stock
    tolerance: float = 0.0
    share_off: float = 0.0
    more: int = 0
    rounds: bool = True
    decode: DecodeOnCPU | None = None
    is_remembered: bool = True
    differs_in: Mapping[str, str] = field(default_factory=dict)

    def require(self, model: PreTrainedModel, mode: str, least_tolerance: float = 0.0) -> None:
        """Generate with both caches, and compare tokens and logits."""
        if mode in self.differs_in:
            pytest.skip(self.differs_in[mode])
        expected(model, mode, caches.stock, self.more)  # skips what transformers itself cannot do
        options = {} if self.decode is None else {"custom_generate": self.decode}
        set_integer_kernels(None if self.rounds else False)
        try:
            ours = MODES[mode](model, self.make, self.more, **options)
            compute = expected if self.is_remembered else expected.__wrapped__
            theirs = compute(model, mode, self.reference, self.more)
        finally:
            set_integer_kernels(None)
        tolerance = max(self.tolerance, least_tolerance)
        if mode == "drafts":  # torch rounds a row by how many there are
            tolerance = max(tolerance, 1e-3)
        if mode == "continuations":  # attention to what is shared is merged with attention to the rest
            tolerance = max(tolerance, 1e-3)
            if model.dtype == torch.bfloat16:
                ours, theirs, tolerance = ours[1][:1], theirs[1][:1], 0.2
        require_same(ours, theirs, tolerance, self.share_off)


def choosing(placement: Placement) -> Variant:
    """Make a cache that chooses its codecs by itself, beside one that is made with these."""
    made: list[HybridCache] = []

    def choose(config: PreTrainedConfig) -> HybridCache:
        made[:] = [HybridCache(config, placement, codec=minmax(4, sink_tokens=0))]
        return made[0]

    def take(config: PreTrainedConfig) -> HybridCache:
        codecs = made[0].codecs
        assert all(codec.is_fitted for codec in codecs.values())
        return HybridCache(config, placement, codec=codecs)

    late = {"chunked_prefill": "a later chunk, after which the codec is chosen, attends to its tokens as they came"}
    return Variant(choose, take, more=FOR_QUANTIZED_BLOCKS, is_remembered=False, differs_in=late)


# With fewer bits, kernels with integer products round queries and weights to 8 bits.
OF_8_BITS = (
    "quantized_8",
    "quantized_balanced",
    "quantized_shared_with_nobody",
    "quantized_split",
    "quantized_split_in_three",
)
PLACES = {"host": Placement(), "streamed": caches.STREAMED}
VARIANTS: dict[str, Variant] = {
    **{name: Variant(make) for name, make in caches.SAME_ATTENTION.items()},
    **{name: Variant(make, tolerance=1e-3) for name, make in caches.OWN_ATTENTION.items()},
    **{name: Variant(make, tolerance=1e-3, more=FOR_QUANTIZED_BLOCKS) for name, make in caches.SPLIT.items()},
    **{
        name: Variant(*pair, more=FOR_QUANTIZED_BLOCKS, rounds=False)
        for name, pair in caches.QUANTIZED_SAME_ATTENTION.items()
    },
    **{
        name: Variant(*pair, 1e-2, 0.01, FOR_QUANTIZED_BLOCKS, rounds=name in OF_8_BITS)
        for name, pair in caches.QUANTIZED_OWN_ATTENTION.items()
    },
    **{f"choosing_on_{name}": choosing(placement) for name, placement in PLACES.items()},
    "decoded_in_float64": Variant(caches.dynamic, tolerance=1e-3, decode=IN_FLOAT64),
}
