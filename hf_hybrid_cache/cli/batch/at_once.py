"""The number of questions about a document that are answered at once."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from transformers import PreTrainedModel

from ...cache import HybridCache
from ...planning import CostError, model_cost, this_machine
from ...planning.candidates import Candidate
from ...planning.cost import Held
from ...planning.machine import free_device_bytes
from ...planning.prediction import Strategy
from ..console import note
from .batch_options import BatchOptions
from .following_questions import FollowingQuestion

# More questions at once were not measured (results/continuations).
_MOST_MEASURED = 32
# The rest of free memory is for other programs, and for what a plan does not know.
_PART_OF_FREE = 0.75
# Lengths of questions are rounded up to a power of two, so that a model's cost is computed for few of them.
_LEAST_CHUNK = 64


class QuestionsAtOnce:
    """
    Says how many questions about a document are answered at once, at most.

    Args:
        model: answers.
        options: have the number, or leave it to this class.
        num_jobs: jobs that share the memory of this machine.
        notes: receives a remark on the number that is chosen, and one on each document for which memory lowers it.
    """

    def __init__(self, model: PreTrainedModel, options: BatchOptions, num_jobs: int, notes: Console):
        self._model, self._options, self._num_jobs, self._notes = model, options, num_jobs, notes
        self._has_said = False

    def most(self, following: Sequence[FollowingQuestion], cache: HybridCache) -> int:
        """
        Return the given number, or choose it by what was measured and by the memory that is free.

        Args:
            following: the questions about a document.
            cache: with the document.
        """
        if self._options.at_once is not None:
            return self._options.at_once
        most = min(len(following), _MOST_MEASURED)
        if most < 2:
            return 1
        document = following[0].question.documents[0]
        try:
            chosen = self._with_room(following, cache, most)
        except CostError as error:
            note(self._notes, f"{document}: one question at a time, as the memory of several is not known: {error}")
            return 1
        if chosen < most:
            note(self._notes, f"{document}: memory has room for {chosen:,} of {len(following):,} questions at once")
        elif not self._has_said:
            self._has_said = True
            note(self._notes, f"--at-once auto: at most {_MOST_MEASURED} questions about a document together")
        return chosen

    def _with_room(self, following: Sequence[FollowingQuestion], cache: HybridCache, most: int) -> int:
        """Return the number of questions, at most `most`, for which memory has room at once."""
        options, device = self._options, self._model.device
        longest = max(len(each.token_ids) for each in following)
        chunk = min(options.answer.prefill_chunk_size, max(_LEAST_CHUNK, 1 << (longest - 1).bit_length()))
        own_tokens = longest + options.answer.max_new_tokens
        cost = replace(model_cost(self._model.config, self._model.dtype, 1, chunk), own_tokens=own_tokens)
        is_on_cpu = device.type == "cpu"
        machine = this_machine(0 if is_on_cpu else free_device_bytes(device.index))
        free = [_PART_OF_FREE * size / self._num_jobs for size in (machine.device_bytes, machine.host_bytes)]
        on_device = Strategy.STREAMED if options.cache == "offloaded" else Strategy.GPU
        name = f"quantized-{options.cache_bits}" if options.cache == "quantized" else options.cache
        candidate = Candidate(name, Strategy.CPU if is_on_cpu else on_device)
        return candidate.most_continuations(
            cost, cache.get_seq_length() + own_tokens, Held(int(free[0]), int(free[1])), most
        )
