"""Records: what was measured, on what machine, with which versions. Written whole or not at all."""

import io
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import llvmlite.binding
import psutil
import torch

import hf_hybrid_cache
from hf_hybrid_cache.system.durable_files import replaced_when_whole

RESULTS = Path(__file__).parents[2] / "results"
_PACKAGES = ("torch", "transformers", "numpy", "numba")


def environment() -> dict[str, Any]:
    """The machine and the software that a result belongs to."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "git_clean": None
        if (changes := _git("status", "--porcelain", "--untracked-files=no")) is None
        else changes == "",
        "cpu": cpu_name(),
        "microarchitecture": llvmlite.binding.get_host_cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpu_driver": _gpu("driver_version"),
        "gpu_bus": _gpu("pcie.link.gen.max,pcie.link.width.max"),
        "python": platform.python_version(),
        "versions": {"hf_hybrid_cache": hf_hybrid_cache.__version__} | {name: version(name) for name in _PACKAGES},
    }


def cpu_name() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine_name() -> str:
    """A name for results of this machine, such as `amd-epyc-znver3-2-cores`: brands tell no generation."""
    parts = [cpu_name(), llvmlite.binding.get_host_cpu_name(), f"{num_cores()} cores"]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(r\)|\(tm\)", "", " ".join(parts).lower())).strip("-")


def save(experiment: str, record: dict[str, Any], folder: Path | None = None) -> Path:
    """Write `record` with its environment to `results/EXPERIMENT/MACHINE.json`, or into `folder`; returns the path."""
    path = (folder or RESULTS / experiment) / f"{machine_name()}.json"
    with written_whole(path) as file:
        file.write(json.dumps({"experiment": experiment, **record, "environment": environment()}, indent=1) + "\n")
    return path


@contextmanager
def written_whole(path: Path) -> Iterator[TextIO]:
    """A file to write, which takes the place of `path` once it is complete; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_when_whole(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        yield text
        text.detach()


def num_cores() -> int:
    """Return the number of physical cores, or of processors where a virtual machine does not tell its cores."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def git_revision() -> str | None:
    """Return `GIT_REVISION`, for a copy of a checkout without its Git folder, or the commit; `None` without either."""
    return os.environ.get("GIT_REVISION") or _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    return _printed("git", *arguments)


def _gpu(query: str) -> str | None:
    """Ask NVIDIA's driver about the current device: for its bus, `5, 16` is the generation and the width."""
    if not torch.cuda.is_available():
        return None
    return _printed("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={_gpu_number()}")


def _gpu_number() -> str:
    """Return the UUID of the current device, by which `nvidia-smi` knows it whatever `CUDA_VISIBLE_DEVICES` hides."""
    return f"GPU-{torch.cuda.get_device_properties().uuid}"


def _printed(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
