"""Threads, forked processes, and processes that end in the middle of something."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers.cache_utils import Cache

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.kernels import compile_in_background

from caches import CACHES, QUANTIZED, stock
from kernels import test_threads as kernel_calls
from kernels.programs import TESTS, run_program
from soak import budget, count
from tiny_models import random_prompt, tiny_model

SECONDS_TO_END = 60
ALL_CACHES = CACHES | {name: ours for name, (ours, _) in QUANTIZED.items()}
HAS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


def generate(cache: Cache, seed: int, new_tokens: int = 12) -> list[int]:
    ids = random_prompt(2, 150, seed)
    count("generate calls")
    count("tokens generated", 2 * new_tokens)
    return (
        tiny_model("llama")
        .generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new_tokens, do_sample=False
        )
        .tolist()
    )


def make(name: str) -> Cache:
    return ALL_CACHES[name](tiny_model("llama").config)


@pytest.mark.soak
def test_threads_with_a_cache_each_get_the_tokens_they_get_alone():
    rounds = [(name, seed) for seed in range(budget(1, 50)) for name in ALL_CACHES]
    alone = [generate(make(name), seed) for name, seed in rounds]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda case: generate(make(case[0]), case[1]), rounds))
    assert together == alone


@pytest.mark.parametrize("name", ALL_CACHES)
def test_a_cache_goes_from_one_thread_to_another(name: str):
    first = make(name)
    answer = generate(first, seed=3)
    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(make, name).result()
        assert pool.submit(generate, moved, 3).result() == answer
    ids = torch.tensor(answer)
    steps = []
    for cache in (first, moved):
        cache.crop(-5)
        with torch.no_grad():
            steps.append(tiny_model("llama")(ids[:, cache.get_seq_length() :], past_key_values=cache).logits)
    assert torch.equal(*steps)


def test_two_threads_that_run_a_model_with_one_cache_are_told():
    cache = DynamicHybridCache(tiny_model("llama").config)
    states = torch.randn(1, 2, 3, 16)
    cache.update(states, states, 0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cache.update, states, states, 0).result()
    with pytest.raises(RuntimeError, match=r"Two threads run a model with the same cache .* its own cache"):
        cache.update(states, states, 1)
    cache.reset()
    assert generate(cache, seed=0) == generate(stock(tiny_model("llama").config), seed=0)
