"""The orders in which an accelerator may run work that programs leave unordered."""

from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import LlamaConfig

import simulated

_accelerator = torch.accelerator.current_accelerator()
IS_SIMULATED = _accelerator is not None and _accelerator.type == "sim"
# A name, so that tests can be collected without an accelerator.
DEVICE = "cuda" if _accelerator is None else _accelerator.type
ORDERS = list(simulated.SCHEDULES) if IS_SIMULATED else ["as it comes"]

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 4
CONFIG = LlamaConfig(
    num_hidden_layers=NUM_LAYERS, num_attention_heads=4, num_key_value_heads=NUM_KV_HEADS, hidden_size=16, vocab_size=8
)


def in_order(name: str, seed: int = 0) -> AbstractContextManager[None]:
    """Run streams in this order; at the end wait for them, and check that none has used freed memory."""
    return simulated.schedule(name, seed) if IS_SIMULATED else nullcontext()


def states(num_tokens: int, seed: int, batch: int = 1) -> torch.Tensor:
    """Return random states in page-locked memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, NUM_KV_HEADS, num_tokens, HEAD_DIM, generator=generator).pin_memory()


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the device in the order of the current stream."""
    return tensor.to(DEVICE, non_blocking=True)


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host in the order of the current stream; read it after `torch.accelerator.synchronize`."""
    return tensor.to("cpu", non_blocking=True)
