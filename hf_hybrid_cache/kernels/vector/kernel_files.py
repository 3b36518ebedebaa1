"""
Compiled kernels on disk: one folder for each state of the sources, of Numba, and of the processor.

Numba itself would keep the files beside the sources, which may be read-only, and would notice changes of only one
module of the sources.
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

from ...user_folder import cache_home, make_private_folders, why_not_trusted

# Another process that compiles a kernel for longer has stopped.
_SECONDS_TO_WAIT = 60.0
_SECONDS_BETWEEN_LOOKS = 0.02
# Each change of the sources leaves a folder behind.
_SECONDS_TO_KEEP = 30 * 24 * 3600.0
_has_warned = False


@cache
def kernel_folder() -> Path:
    """
    The folder of compiled kernels: under `$NUMBA_CACHE_DIR` if it is set, else under `cache_home()`.

    Raises:
        FileNotFoundError: there is no home.
    """
    return _home() / "kernels" / _state()


def _home() -> Path:
    given = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    return Path(given) / "hf_hybrid_cache" if given else cache_home()


@cache
def _trusted_folder() -> Path | None:
    """
    Make the folder of compiled kernels; `None` where files in it may be from another user, whose code would run.

    A warning says so. A folder that cannot be made is one that cannot be written.

    Raises:
        FileNotFoundError: there is no home.
    """
    folder, home = kernel_folder(), _home()
    with suppress(OSError):
        if make_private_folders(folder, home):
            _delete_old(folder.parent)
    reason = why_not_trusted(folder, home)
    if reason is not None:
        _warn(
            f"Compiled kernels in {folder} are not used, because {reason}: each process compiles them again, which "
            f"takes seconds. Remove that folder, or set {_variable()} to one that only you can write to."
        )
    return folder if reason is None else None


def _state() -> str:
    """A name for the sources, the compiler, and the processor that it compiles for."""
    compiler = numba.__version__, llvmlite.__version__, cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(_SOURCES + repr(compiler).encode()).hexdigest()[:16]


def _of_sources() -> bytes:
    digest = hashlib.sha256()
    # All rooms of the kernels, not only this one.
    folders = [files((__package__ or "").rpartition(".")[0])]
    while folders:
        for source in sorted(folders.pop().iterdir(), key=lambda each: each.name):
            if source.is_dir() and source.name != "__pycache__":
                folders.append(source)
            elif source.name.endswith((".py", ".pyc")):
                digest.update(f"\n{source.name}\n".encode() + source.read_bytes())
    return digest.digest()


# Sources are read at import: code compiled later is of this state, even if a file has been edited since.
_SOURCES = _of_sources()


class KernelFiles(NullCache):
    """
    The files of one kernel, which Numba asks for and writes.

    No file is touched until the kernel is needed. A file that cannot be read is compiled again. Files run as code, so
    those that may be from another user are not read. If there are such, or none can be written, a warning says so once
    in a process.

    Args:
        function: the kernel, in Python.
    """

    def __init__(self, function: Any):
        self._function = function
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    @property
    def cache_path(self) -> str | None:
        """The folder; `None` if there is no home, or files in it may be from another user."""
        with suppress(FileNotFoundError):
            folder = _trusted_folder()
            return None if folder is None else str(folder)
        return None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock of this kernel, so that one process compiles it and the next one finds the file."""
        with ExitStack() as held:
            # Go on without the lock if the folder is read-only, or if another process holds the lock for too long.
            with suppress(OSError, RuntimeError):
                held.callback(self._lock(_SECONDS_TO_WAIT).release)
            yield

    def are_being_written(self) -> bool:
        """Whether another process or thread holds the lock at the moment."""
        try:
            self._lock(seconds=0).release()
        except TimeoutError:
            return True
        except (OSError, RuntimeError):  # the folder is read-only
            return False
        return False

    def exist(self) -> bool:
        """Whether there is a file of this kernel."""
        return self.cache_path is not None and any(Path(self.cache_path).glob(f"{self._name}-*.nbi"))

    def _lock(self, seconds: float) -> FileLock:
        """
        Acquire the lock of this kernel, within some seconds.

        Raises:
            TimeoutError: another process or thread holds it.
            OSError: there is no place for it.
        """
        folder = _trusted_folder()
        if folder is None:
            raise PermissionError("Other users could write there.")
        lock = FileLock(folder / f"{self._name}.lock", seconds, poll_interval=_SECONDS_BETWEEN_LOOKS)
        lock.acquire()
        return lock

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load the compiled code for a signature; `None` if there is none to trust, or the file is damaged."""
        if self.cache_path is None:
            return None
        try:
            return self._files.load_overload(sig, target_context)
        except OSError:
            return None
        except Exception:  # pickle may raise any exception
            with suppress(OSError, RuntimeError):
                self.flush()
            return None

    def save_overload(self, sig: Any, cres: Any) -> None:
        """Keep the compiled code for a signature."""
        try:
            if _trusted_folder() is not None:
                self._files.save_overload(sig, cres)
        except (OSError, RuntimeError) as error:
            place = "they have no place" if self.cache_path is None else f"{self.cache_path} cannot be written"
            _warn(
                f"Compiled kernels are not kept, because {place} ({error}): each process compiles them again, which "
                f"takes seconds. Set {_variable()} to a folder that can be written."
            )

    def flush(self) -> None:
        """Delete the index of the files."""
        if self.cache_path is not None:
            self._files.flush()

    @cached_property
    def _files(self) -> FunctionCache:
        return _Files(self._function)


class _KernelFolder(_CacheLocator):
    """Tells Numba the folder of compiled kernels."""

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
    """Delete the folders to which no file was added for long: their sources have changed since."""
    for folder in kernels.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _SECONDS_TO_KEEP:
                shutil.rmtree(folder, ignore_errors=True)


def _variable() -> str:
    """The variable of the environment that says where the folder is."""
    return "NUMBA_CACHE_DIR" if numba.config.CACHE_DIR else "HF_HYBRID_CACHE_HOME"  # type: ignore[attr-defined]


def _warn(said: str) -> None:
    """Warn once in a process."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(said, stacklevel=2)
