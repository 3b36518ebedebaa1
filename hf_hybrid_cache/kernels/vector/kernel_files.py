"""
Compiled kernels on disk: one folder for each state of the sources, of Numba, and of the processor.

Numba itself would keep the files beside the sources, which may be read-only, and would notice changes of only one
module of the sources.
"""

import hashlib
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import llvmlite
import numba
from filelock import FileLock
from numba.core.caching import IndexDataCacheFile, NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target

from ...system.user_folder import cache_home, make_private_folders, why_not_trusted

# A kernel that takes longer makes the process say so, once.
_SECONDS_IN_SILENCE = 3.0
# Another process that compiles a kernel for longer has stopped.
_SECONDS_TO_WAIT = 60.0
_SECONDS_BETWEEN_LOOKS = 0.02
# Each change of the sources leaves a folder behind.
_SECONDS_TO_KEEP = 30 * 24 * 3600.0

# Set where a process has said that it compiles, or says it in its own words.
is_said = threading.Event()
_has_warned = False


@cache
def kernel_folder() -> Path | None:
    """
    Make the folder of compiled kernels: under `$NUMBA_CACHE_DIR` if it is set, else under `cache_home()`.

    It is `None`, with a warning, if there is no home, or if files in it may be from another user, whose code would run.
    A folder that cannot be made is one that cannot be written.
    """
    given = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    try:
        home = Path(given) / "hf_hybrid_cache" if given else cache_home()
    except FileNotFoundError as error:
        _warn_not_kept("they have no place", error)
        return None
    folder = home / "kernels" / _state()
    with suppress(OSError):
        if make_private_folders(folder, home):
            _delete_old(folder.parent)
    reason = why_not_trusted(folder, home)
    if reason is None:
        return folder
    _warn(
        f"Compiled kernels in {folder} are not used, because {reason}: each process compiles them again, which takes "
        f"seconds. Remove that folder, or set {_variable()} to one that only you can write to."
    )
    return None


def _state() -> str:
    """A name for the sources, the compiler, and the processor that it compiles for."""
    processor = cpu_target.target_context.codegen().magic_tuple()
    compiler = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, processor
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


def _delete_old(kernels: Path) -> None:
    """Delete the folders to which no file was added for long: their sources have changed since."""
    for folder in kernels.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _SECONDS_TO_KEEP:
                shutil.rmtree(folder, ignore_errors=True)


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
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._timer: threading.Timer | None = None

    @property
    def cache_path(self) -> str | None:
        """The folder; `None` if there is none to trust."""
        folder = kernel_folder()
        return None if folder is None else str(folder)

    def exist(self) -> bool:
        """Whether there is a file of this kernel."""
        folder = kernel_folder()
        return folder is not None and (folder / f"{self._name}.nbi").exists()

    @contextmanager
    def turn(self, seconds: float = _SECONDS_TO_WAIT) -> Iterator[bool]:
        """
        Hold the lock of this kernel, so that one process compiles it and the next one finds the file.

        The block runs without the lock if the folder is read-only, or if another process or thread holds the lock for
        longer than `seconds`; then it gets `False`.
        """
        folder, is_free = kernel_folder(), True
        with ExitStack() as held:
            if folder is not None:
                lock = FileLock(folder / f"{self._name}.lock", poll_interval=_SECONDS_BETWEEN_LOOKS)
                try:
                    held.enter_context(lock.acquire(seconds))
                except TimeoutError:
                    is_free = False
                except (OSError, RuntimeError):
                    pass
            yield is_free

    def are_being_written(self) -> bool:
        """Whether another process or thread holds the lock at the moment."""
        with self.turn(0) as is_free:
            return not is_free

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """Load the compiled code for a signature; `None` if there is none to trust, or the file is damaged."""
        found, folder = None, kernel_folder()
        if folder is not None:
            index = self._index(folder)
            try:
                target_context.refresh()
                data = index.load(sig)
                found = None if data is None else CompileResult._rebuild(target_context, *data)
            except OSError:
                pass
            except Exception:  # pickle may raise any exception
                with suppress(OSError):
                    index.flush()
        if found is None and not is_said.is_set():
            self._timer = threading.Timer(_SECONDS_IN_SILENCE, _say)
            self._timer.daemon = True
            with suppress(RuntimeError):  # the system gives no more threads
                self._timer.start()
        return found

    def save_overload(self, sig: Any, cres: CompileResult) -> None:
        """Keep the compiled code for a signature."""
        folder = kernel_folder()
        if folder is None:
            return
        library: Any = cres.library  # type: ignore[attr-defined]
        assert not library.has_dynamic_globals, f"{self._name} refers to memory of this process."
        try:
            self._index(folder).save(sig, cres._reduce())
        except OSError as error:
            _warn_not_kept(f"{folder} cannot be written", error)

    def _index(self, folder: Path) -> IndexDataCacheFile:
        return IndexDataCacheFile(str(folder), self._name, folder.name)

    def end_timer(self) -> None:
        """Do not say that this kernel takes long: it is done."""
        if self._timer is not None:
            self._timer.cancel()


def _say() -> None:
    """Print that kernels are compiled, once in a process."""
    if is_said.is_set() or sys.stderr is None:
        return
    is_said.set()
    said = "compiling kernels, once on this machine: all of a quantized cache take up to some minutes"
    with suppress(OSError, ValueError):
        print(said, file=sys.stderr, flush=True)


def _warn_not_kept(reason: str, error: OSError) -> None:
    _warn(
        f"Compiled kernels are not kept, because {reason} ({error}): each process compiles them again, which takes "
        f"seconds. Set {_variable()} to a folder that can be written."
    )


def _variable() -> str:
    """The variable of the environment that says where the folder is."""
    return "NUMBA_CACHE_DIR" if numba.config.CACHE_DIR else "HF_HYBRID_CACHE_HOME"  # type: ignore[attr-defined]


def _warn(said: str) -> None:
    """Warn once in a process."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(said, stacklevel=2)
