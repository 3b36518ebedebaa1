"""
The published measurements: an RTX 6000 and a Xeon, Llama 3.2-1B.

Table 1 of J. B. Ioffe, "Optimizing Large Language Model Inference Through CPU-GPU Hybrid Execution" (Cornell Tech).
"""

from dataclasses import dataclass

from experiments.sweep.caches import CPU, GPU

HYPOTHESIS = "decoding on the CPU doubles the context at no more than half the throughput"


@dataclass(frozen=True)
class SourceRow:
    """Tokens a second, None where the GPU's memory did not suffice; `cache` as the sweep calls it."""

    context_tokens: int
    cache: str
    decode_device: str
    tokens_per_second: float | None


TABLE_1 = (
    SourceRow(32_768, "dynamic", GPU, 45.00),
    SourceRow(32_768, "offloaded", GPU, 29.06),
    SourceRow(32_768, "dynamic", CPU, 4.15),
    SourceRow(32_768, "offloaded", CPU, 4.01),
    SourceRow(65_536, "dynamic", GPU, None),
    SourceRow(65_536, "dynamic", CPU, 1.85),
    SourceRow(65_536, "offloaded", CPU, 1.92),
)
