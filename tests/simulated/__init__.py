"""
A simulated accelerator, the device "sim": what orders copies beside the computation is tried on it, without a GPU.

`accelerator.cpp`, which is built once, in a minute, keeps memory of the device in host memory. Copies are jobs on
streams, and a schedule says which of them run when: as late as events allow, or at random. Memory is filled with NaN
when it is taken and when it is given back. A copy that an event should have ordered, and did not, shows as wrong
numbers.

    load(folder)
    with schedule("copies late"):  # at the end all jobs are done, and nothing has used memory that was given back
        on_device = torch.ones(3).pin_memory().to("sim", non_blocking=True)
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME, SOURCE = "simulated_accelerator", Path(__file__).with_name("accelerator.cpp")

# The probability that a stream's next job runs whenever one is submitted: of the computation, and of copies.
SCHEDULES = {
    "copies late": (1.0, 0.0),
    "computation late": (0.0, 1.0),
    "all late": (0.0, 0.0),
    "at random": (0.5, 0.5),
}

_loaded: Any = None


def why_not() -> str | None:
    """Return the reason why it cannot be built here; `None` if it can."""
    if sys.platform != "linux":
        return "the simulated accelerator is for Linux"
    if shutil.which("g++") is None:
        return "the simulated accelerator needs g++"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the simulated accelerator needs the headers of Python"
    return None


def load(folder: Path) -> Any:
    """
    Make the device "sim" a device of torch in this process, for good.

    Args:
        folder: where it is built, unless it is there.
    """
    global _loaded
    if _loaded is None:
        torch.utils.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", _device_module())
        path = build(folder)
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None
        assert spec.loader is not None
        _loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_loaded)
        torch.utils.generate_methods_for_privateuse1_backend()
    return _loaded


def build(folder: Path) -> Path:
    """Return the path of the library, which is compiled in about a minute if it is not in `folder` yet."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    path = folder / f"{NAME}-{key}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        includes = [f"-isystem{each}" for each in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
        libraries = [f"-L{each}" for each in cpp_extension.library_paths()]
        command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *includes, str(SOURCE), *libraries]
        subprocess.run(
            [*command, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", str(unfinished)], check=True
        )
        unfinished.replace(path)
    return path


@contextmanager
def schedule(name: str, seed: int = 0) -> Iterator[None]:
    """
    Run streams by this schedule inside the block, and complete them at its end.

    Raises:
        AssertionError: something used memory that was no longer its own.
    """
    _loaded.set_schedule(*SCHEDULES[name], seed)
    try:
        yield
    finally:
        errors = _loaded.check()
        _loaded.set_schedule(1.0, 1.0, 0)
    assert not errors, errors


def memory_allocated(device: int = 0) -> int:
    """Bytes in use on the device."""
    return _loaded.memory_allocated(device)


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Limit the memory of each device to so many bytes."""
    _loaded.set_memory_limit(num_bytes)
    try:
        yield
    finally:
        _loaded.set_memory_limit(None)


def _device_module() -> types.ModuleType:
    """Make the module that torch expects at `torch.sim`."""
    module = types.ModuleType("torch.sim")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
