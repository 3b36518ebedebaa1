"""The options with which llama.cpp is fastest here, found by trying."""

from collections.abc import Mapping
from pathlib import Path

from experiments.peers.llama_cpp import FORMS, Form
from experiments.peers.llama_process import CHOICE_STEPS, Settings, fastest
from experiments.peers.step_rows import Row

# Forms of keys and values, by bits; few bits need flash attention.
KV_FORMS: dict[int, dict[str, Form]] = {
    16: {"plain": FORMS["llama.cpp-f16"], "flash": FORMS["llama.cpp-f16-flash"]},
    8: {"flash": FORMS["llama.cpp-q8_0"]},
    4: {"flash": FORMS["llama.cpp-q4_0"]},
}
WEIGHT_ORDERS = {"as in the file": False, "repacked": True}
SHORT_CONTEXT = 256  # where a step is reading weights
LONGEST_CONTEXT = 32_768  # both kinds of attention are tried at most here; the faster one is used beyond it too


class BestOptions:
    """
    Finds the fastest options of each library, and remembers them.

    Args:
        pythons: that have the libraries, by library.
        files: weights, by bits.
        threads: to compute with.

    Attributes:
        tried: median seconds of what was tried, or why it does not run.
    """

    def __init__(self, pythons: Mapping[str, str], files: Mapping[int, Path], threads: int):
        self.tried: dict[str, dict[str, float | str]] = {}
        self._pythons, self._files, self._threads = pythons, files, threads
        self._best: dict[str, str] = {}

    def settings(self, row: Row, context: int, steps: int) -> Settings:
        """
        Return the fastest settings for a row of one of the libraries.

        Raises:
            LlamaProcessError: it does not run here.
        """
        form = KV_FORMS[row.kv_bits][self._attention(row.engine, row.kv_bits, context)]
        return self._settings(
            row.engine, row.weight_bits, self._order(row.engine, row.weight_bits), form, context, steps
        )

    def _order(self, library: str, bits: int) -> str:
        candidates = {
            order: self._settings(library, bits, order, KV_FORMS[16]["plain"], SHORT_CONTEXT, CHOICE_STEPS)
            for order in WEIGHT_ORDERS
        }
        return self._fastest(f"{library} W{bits}", library, candidates)

    def _attention(self, library: str, kv_bits: int, context: int) -> str:
        forms = KV_FORMS[kv_bits]
        if len(forms) == 1:
            return next(iter(forms))
        context, bits = min(context, LONGEST_CONTEXT), min(self._files)
        order = self._order(library, bits)
        candidates = {
            name: self._settings(library, bits, order, form, context, CHOICE_STEPS) for name, form in forms.items()
        }
        return self._fastest(f"{library} KV{kv_bits}, {context:,} tokens", library, candidates)

    def _fastest(self, choice: str, library: str, candidates: dict[str, Settings]) -> str:
        if choice not in self._best:
            self._best[choice], self.tried[choice] = fastest(self._pythons[library], candidates)
        return self._best[choice]

    def _settings(self, library: str, bits: int, order: str, form: Form, context: int, steps: int) -> Settings:
        return Settings(library, str(self._files[bits]), WEIGHT_ORDERS[order], form, context, steps, self._threads)
