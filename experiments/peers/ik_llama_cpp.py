"""
ik_llama.cpp, through the ctypes interface of ik-llama-cpp-python and what that leaves out of the library's own.

The library in the package is built for AVX2. `IK_LLAMA_CPP_LIB_PATH` names another one, such as what
`cmake -DGGML_NATIVE=ON` makes of the sources in the package's source distribution.
"""

import ctypes
import importlib
from importlib.metadata import version
from typing import Any

import numpy as np

from experiments.peers import llama_cpp
from experiments.peers.llama_cpp import PREFILL_CHUNK, Form

PACKAGE = "ik-llama-cpp-python"
INSTALL = f"pip install {PACKAGE}"
GGML_TYPES = {"GGML_TYPE_F16": 1, "GGML_TYPE_Q4_0": 2, "GGML_TYPE_Q8_0": 8}
_STATE, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
# Functions without a declaration there: what they return, and their arguments.
_MISSING: dict[str, tuple[Any, list[Any]]] = {
    "llama_print_system_info": (ctypes.c_char_p, []),
    "llama_state_seq_get_size": (_SIZE, [_STATE, _INT, _INT]),
    "llama_state_seq_get_data": (_SIZE, [_STATE, ctypes.c_void_p, _SIZE, _INT, _INT]),
    "llama_state_seq_set_data": (_SIZE, [_STATE, ctypes.c_void_p, _SIZE, _INT, _INT]),
    "llama_kv_cache_seq_cp": (None, [_STATE, _INT, _INT, _INT, _INT]),
    "llama_kv_cache_seq_rm": (ctypes.c_bool, [_STATE, _INT, _INT, _INT]),
}


class Model(llama_cpp.Model):
    """The weights; repacked means rows interleaved for its own kernels."""

    def _import(self) -> Any:
        return interface()

    def _options(self, repacked: bool) -> Any:
        options = self.api.llama_model_default_params()
        options.repack_tensors = repacked
        options.use_mmap = not repacked  # mapped weights cannot be changed
        return options


class Engine(llama_cpp.Engine):
    position_words = (1, 2)

    def _options(self, form: Form, num_tokens: int, threads: int) -> Any:
        options = self._api.llama_context_default_params()
        options.n_ctx = num_tokens
        options.n_batch = options.n_ubatch = PREFILL_CHUNK
        options.n_threads = options.n_threads_batch = threads
        options.n_seq_max = 2
        options.type_k = options.type_v = GGML_TYPES[form.ggml_type]
        options.flash_attn = form.flash
        return options

    def _batch(self, array: Any) -> Any:
        return self._api._lib.llama_batch_get_one(array, len(array), self.num_tokens, 0)

    def _saved_bytes(self, sequence: int) -> int:
        return self._api._lib.llama_state_seq_get_size(self._state, sequence, 0)

    def _write(self, saved: np.ndarray, sequence: int) -> None:
        self._api._lib.llama_state_seq_get_data(self._state, saved.ctypes.data, saved.nbytes, sequence, 0)

    def _restore(self, saved: np.ndarray, sequence: int) -> None:
        if not self._api._lib.llama_state_seq_set_data(self._state, saved.ctypes.data, saved.nbytes, sequence, 0):
            raise RuntimeError("ik_llama.cpp does not restore what it saved.")

    def _share(self, source: int, target: int, end: int) -> None:
        self._api._lib.llama_kv_cache_seq_cp(self._state, source, target, 0, end)

    def _forget(self, sequence: int) -> None:
        self._api._lib.llama_kv_cache_seq_rm(self._state, sequence, -1, -1)


def interface() -> Any:
    """The module with the functions, and in its library those that it has no declaration of."""
    api = importlib.import_module("ik_llama_cpp._ctypes_api")
    for name, (result, arguments) in _MISSING.items():
        function = getattr(api._lib, name)
        function.restype, function.argtypes = result, arguments
    tokens = ctypes.POINTER(ctypes.c_int32)
    api._lib.llama_batch_get_one.restype = api.llama_batch
    api._lib.llama_batch_get_one.argtypes = [tokens, _INT, _INT, _INT]
    return api


def report() -> dict[str, Any]:
    """The package, and the instructions that it was built for."""
    system = interface()._lib.llama_print_system_info().decode().strip()
    return {"package": f"{PACKAGE} {version(PACKAGE)}", "system": system}
