"""
A plugin of pytest for `experiments.stock_tests`: `DynamicCache(config=...)` makes one of our caches for this run.

Read from the environment: `STOCK_TESTS_CACHE`, a key of `CACHES`, or nothing to leave all as it is, and
`STOCK_TESTS_OUTCOMES`, the file that gets a line of JSON for each test.
"""

import importlib
import json
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache

CACHES: dict[str, tuple[type[HybridCache], dict[str, Any]]] = {
    "DynamicHybridCache": (DynamicHybridCache, {}),
    "OffloadedHybridCache": (OffloadedHybridCache, {}),
    "OffloadedHybridCache(cpu_decode=False)": (OffloadedHybridCache, {"cpu_decode": False}),
    "QuantizedHybridCache(bits=8)": (QuantizedHybridCache, {"bits": 8}),
}
# Tests that need several processes, or what is on the Hub, and packages for it that are not needed otherwise.
_LEFT_OUT = ("tests.test_fsdp_mixin", "tests.test_pipeline_mixin", "tests.test_tensor_parallel_mixin")
# Imported by tests that run, and used by others; some versions have it elsewhere.
_ONLY_IMPORTED = ("transformers.integrations.tensor_parallel", "_get_parameter_tp_plan")


class _WithoutTests(ModuleType):
    """A replacement for a module of mixins: any name in it is a class without tests."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        return type(name, (), {})


class Replacement:
    """
    Lets `DynamicCache(config=...)` make a cache of ours, whoever calls it by whatever name, and counts these calls.

    Without a config, and with keys and values to begin with, it stays transformers': ours cannot be made so.

    Args:
        name: a key of `CACHES`; `None` counts only.

    Attributes:
        made: how many caches were made of a config.
    """

    def __init__(self, name: str | None):
        self.made = 0
        ours = DynamicCache if name is None else self._class_of(*CACHES[name])
        self._is_making = False

        def new(cls: type, ddp_cache_data: Any = None, config: PreTrainedConfig | None = None, **kwargs: Any) -> Any:
            if cls is not DynamicCache or config is None or ddp_cache_data is not None or self._is_making:
                return object.__new__(cls)
            self.made += 1
            return object.__new__(ours)

        DynamicCache.__new__ = new  # type: ignore[method-assign]

    def _class_of(self, kind: type[HybridCache], options: dict[str, Any]) -> type[HybridCache]:
        """Return the class of the kind, which takes the arguments of `DynamicCache`."""

        def initialize(cache: HybridCache, *args: Any, config: PreTrainedConfig, **kwargs: Any) -> None:
            self._is_making = True  # Ours ask transformers' own cache which layers there are.
            try:
                kind.__init__(cache, config, **options)
            finally:
                self._is_making = False

        return type(kind.__name__, (kind,), {"__init__": initialize})


class Outcomes:
    """Writes what becomes of each test, and how many caches of ours it made."""

    def __init__(self, path: Path, replacement: Replacement):
        self._path, self._replacement = path, replacement

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            last_line = str(report.longrepr).strip().splitlines()[-1]
            error = last_line.removeprefix("E").partition(" (/")[0].strip()  # without the folder of a package
            self._write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "error": error, "caches": 0})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # Both runs of a test draw the same numbers.
        common = sys.modules.get("tests.test_modeling_common")
        for generator in (random, getattr(common, "global_rng", random)):
            generator.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        self._replacement.made = 0
        self._outcome: dict[str, Any] = {"test": item.nodeid, "outcome": "passed", "seconds": 0.0}
        self._write({"begun": item.nodeid})
        result = yield
        self._write(self._outcome | {"caches": self._replacement.made})
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with torch.no_grad():  # Ours keep no gradients.
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._outcome["seconds"] += call.duration
        if report.outcome != "passed" and self._outcome["outcome"] != "failed":
            self._outcome["outcome"] = report.outcome
            if report.failed and call.excinfo is not None:
                error = call.excinfo.value
                self._outcome["error"] = f"{type(error).__name__}: {error}".strip()[:500]
        return report

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    sys.modules.update((name, _WithoutTests(name)) for name in _LEFT_OUT)
    module, name = _ONLY_IMPORTED
    vars(importlib.import_module(module)).setdefault(name, None)
    replacement = Replacement(os.environ.get("STOCK_TESTS_CACHE") or None)
    config.pluginmanager.register(Outcomes(Path(os.environ["STOCK_TESTS_OUTCOMES"]), replacement))
