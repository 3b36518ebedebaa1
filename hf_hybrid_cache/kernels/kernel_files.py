"""
Compiled kernels on disk: one folder for each state of the sources, of Numba, and of the processor.

Numba itself would keep them beside the sources, where nothing may be written, and look at one module of the sources
only.
"""

import hashlib
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import llvmlite
import numba
from filelock import FileLock
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache, _CacheLocator
from numba.core.registry import cpu_target

from ..user_folder import cache_home

# For another process to compile a kernel: one that takes longer was stopped.
_SECONDS_TO_WAIT = 60.0
_SECONDS_BETWEEN_LOOKS = 0.02
# Every change of the sources leaves a folder behind.
_SECONDS_TO_KEEP = 30 * 24 * 3600.0
_has_warned = False


@cache
def kernel_folder() -> Path:
    """
    Where compiled kernels are kept: under `$NUMBA_CACHE_DIR` if it is set, else under `cache_home()`.

    Raises:
        FileNotFoundError: there is no home.
    """
    given = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    home = Path(given) / "hf_hybrid_cache" if given else cache_home()
    return home / "kernels" / _state()


def _state() -> str:
    """A name for the sources, the compiler, and the processor that it compiles for."""
    compiler = numba.__version__, llvmlite.__version__, cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(_SOURCES + repr(compiler).encode()).hexdigest()[:16]


def _of_sources() -> bytes:
    digest = hashlib.sha256()
    for source in sorted(files(__package__ or "").iterdir(), key=lambda each: each.name):
        if source.name.endswith((".py", ".pyc")):
            digest.update(f"\n{source.name}\n".encode() + source.read_bytes())
    return digest.digest()


# Read when they are imported: what is compiled later is of this state, whatever is edited meanwhile.
_SOURCES = _of_sources()


class KernelFiles(NullCache):
    """
    The files of one kernel, which Numba asks for and writes.

    Nothing is touched until the kernel is needed. What cannot be read is compiled again. Where it cannot be kept, that
    is said once in a process.

    Args:
        function: the kernel, in Python.
    """

    def __init__(self, function: Any):
        self._function = function
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    @property
    def cache_path(self) -> str | None:
        """The folder; `None` where there is no home."""
        with suppress(FileNotFoundError):
            return str(kernel_folder())
        return None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one process at a time compile this kernel: the next one finds it."""
        with ExitStack() as held:
            # Nobody waits where nothing can be written, or for a process that does not go on.
            with suppress(OSError, RuntimeError):
                held.callback(self._lock(_SECONDS_TO_WAIT).release)
            yield

    def are_being_written(self) -> bool:
        """Whether somebody has the turn at the moment."""
        try:
            self._lock(seconds=0).release()
        except TimeoutError:
            return True
        except (OSError, RuntimeError):  # where nothing can be written
            return False
        return False

    def exist(self) -> bool:
        """Whether anything was kept."""
        return self.cache_path is not None and any(Path(self.cache_path).glob(f"{self._name}-*.nbi"))

    def _lock(self, seconds: float) -> FileLock:
        """A lock, acquired."""
        folder = kernel_folder()
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _delete_old(folder.parent)
        lock = FileLock(folder / f"{self._name}.lock", seconds, poll_interval=_SECONDS_BETWEEN_LOOKS)
        lock.acquire()
        return lock

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for a signature; `None` if nothing was, or it is damaged."""
        try:
            return self._files.load_overload(sig, target_context)
        except OSError:
            return None
        except Exception:  # pickle raises what it likes
            with suppress(OSError, RuntimeError):
                self.flush()
            return None

    def save_overload(self, sig: Any, cres: Any) -> None:
        """Keep what was compiled for a signature."""
        try:
            self._files.save_overload(sig, cres)
        except (OSError, RuntimeError) as error:
            _warn(self.cache_path, error)

    def flush(self) -> None:
        """Forget what is kept."""
        self._files.flush()

    @cached_property
    def _files(self) -> FunctionCache:
        return _Files(self._function)


class _KernelFolder(_CacheLocator):
    """Tells Numba the folder."""

    def __init__(self, line: int):
        self._line = line

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_KernelFolder":
        return cls(py_func.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        return str(kernel_folder())

    def get_source_stamp(self) -> str:
        return kernel_folder().name

    def get_disambiguator(self) -> str:
        return str(self._line)


class _FilesOfKernel(CompileResultCacheImpl):
    _locator_classes: list[Any] = [_KernelFolder]  # noqa: RUF012


class _Files(FunctionCache):
    _impl_class = _FilesOfKernel


def _delete_old(kernels: Path) -> None:
    """Folders to which nothing was added for long, of sources that have changed since."""
    for folder in kernels.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _SECONDS_TO_KEEP:
                shutil.rmtree(folder, ignore_errors=True)


def _warn(folder: str | None, error: Exception) -> None:
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    place = "they have no place" if folder is None else f"{folder} cannot be written"
    warnings.warn(
        f"Compiled kernels are not kept, because {place} ({error}): each process compiles them again, which takes "
        "seconds. Set HF_HYBRID_CACHE_HOME to a folder that can be written.",
        stacklevel=2,
    )
