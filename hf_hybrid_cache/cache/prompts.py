"""
The prompts that a cache is continued with: longer than it, with its tokens first, for a model that uses it.

A cache is asked how long it is, and never what for. So what its caller knows, such as the prompt, is read from the
caller's frame. Where a function is not as it is here, nothing is read.
"""

import os
import sys
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .. import graph_breaks
from ..cache_argument import CACHE_ARGUMENT, require_use_cache
from ..files import CacheFileError
from ..layers import num_sequences_of
from ..token_ids import first_difference
from .checkpoints import num_sequences
from .contents import Contents
from .forward_passes import ForwardPasses

# Modules whose frames stand between a cache and its caller: decorators, and a cache that holds this one.
_BETWEEN = (f"{__package__}.", graph_breaks.__name__, "torch.", "functools", "transformers.cache_utils")
# The functions of `generate` in which a prompt is computed.
_PREFILL, _ASSISTED = "_prefill", "_assisted_decoding"


class Prompts:
    """
    Refuses prompts that do not continue what is stored, and warns of models that do not use it.

    Attributes:
        token_ids: of the first stored tokens, and perhaps some after them, `[batch, tokens]`, one row if they are those
            of all sequences; `None` if they are not known.
        are_asked_about: whether somebody has asked who will store something next.
    """

    def __init__(self, contents: Contents, passes: ForwardPasses):
        self._contents, self._passes = contents, passes
        self.are_asked_about = False
        # The prompt that `generate` is about to compute, and a model that is about to set its offset of positions.
        self._asked: torch.Tensor | None = None
        self._counter: weakref.ref[torch.nn.Module] | None = None
        # Such models have two forms of rotary embedding, one for short and one for long contexts.
        self._may_leave_border = hasattr(contents.stores.config, "original_max_position_embeddings")
        self._has_left_border = False
        self.reset()

    def reset(self) -> None:
        """Forget the tokens, and the offset of positions."""
        self._contents.forget_keys()
        self.token_ids: torch.Tensor | None = None
        self._rope_deltas: torch.Tensor | None = None

    def note_question(self) -> None:
        """
        Read what is to be computed from the frame of who asks for the length of the cache.

        Refuse a prompt that does not continue what is stored, or is computed anew in each step; warn if the model
        leaves the cache.
        """
        frame = _caller()
        if frame is None:
            return
        if frame.f_code.co_name == _PREFILL:
            require_use_cache(frame.f_locals.get("model_kwargs", {}))
        num_tokens = self._contents.num_tokens
        if (prompt := _whole_prompt(frame, _PREFILL)) is not None:
            length, token_ids, mask = prompt
            if num_tokens and length <= num_tokens:
                self._passes.require_complete()
                self.refuse(f"the prompt of {length:,} tokens")
            if num_tokens and token_ids is not None:
                self._require_recurrent_states_of(len(token_ids))
            self._ask(token_ids, mask)
        if self._may_leave_border and (border := _border_that_drops_the_cache(frame, num_tokens)) is not None:
            self._may_leave_border, self._has_left_border = False, True
            warnings.warn(
                f"The model goes on without this cache, which stays at {num_tokens:,} tokens: beyond {border:,} tokens "
                "its rotary embedding is another one, and transformers computes all tokens again, into a DynamicCache "
                f"of its own. Keep prompt and answer within {border:,} tokens, or fill the cache beyond them in one "
                f"call of the model before generate: model(ids, {CACHE_ARGUMENT}=cache, logits_to_keep=1).",
                stacklevel=2,
            )
        if "rope_deltas" in frame.f_code.co_names:
            # A model that counts positions on from images keeps their offset itself, and sets it after this question.
            asking = frame.f_locals.get("self")
            counters: list[Any] = [asking, getattr(asking, "model", None)]
            self._counter = next((weakref.ref(each) for each in counters if hasattr(each, "rope_deltas")), None)
            self.are_asked_about |= self._counter is not None

    def note_assisted_decoding(self) -> None:
        """Refuse assisted decoding if it is about to compute a whole prompt, and something is stored."""
        frame, num_tokens = _caller(), self._contents.num_tokens
        prompt = None if frame is None else _whole_prompt(frame, _ASSISTED)
        if prompt is None:
            return
        if num_tokens:
            raise ValueError(
                "An assistant and prompt_lookup_num_tokens compute the whole prompt, and the cache holds "
                f"{num_tokens:,} tokens already: those of the prompt would be in it twice. Use a new cache, or "
                "custom_generate=PromptLookup() of this package, which drafts from the prompt and goes on from a cache."
            )
        _, token_ids, mask = prompt
        self._ask(token_ids, mask)

    def note_stored(self) -> None:
        """Note what was asked about, once the first of it is stored: an error may have ended it before."""
        self.are_asked_about = False
        asked, self._asked = self._asked, None
        if asked is not None and _is_computing(asked):
            self._keep(asked)
        if self._counter is not None:
            self._rope_deltas = getattr(self._counter(), "rope_deltas", None)
            self._counter = None

    def refuse(self, prompt: str) -> NoReturn:
        """Raise a `ValueError` about a prompt without new tokens."""
        raise ValueError(
            f"There are no tokens to compute: {prompt} is not longer than the {self._contents.num_tokens:,} tokens "
            "that the cache holds already. A cache goes on with the text that is in it: pass the whole conversation as "
            "the prompt, or for another text use a new cache, or cache.reset()."
        )

    def refuse_file(self, path: str | os.PathLike[str]) -> None:
        """Raise `CacheFileError` if positions go on from images: in another process they would go on elsewhere."""
        if self._rope_deltas is not None and bool(self._rope_deltas.any()):
            raise CacheFileError(
                path,
                "was not written: positions go on from images, by an offset that the model keeps itself (rope_deltas), "
                "so an answer from the file would be another one. Here use copy.deepcopy(cache); for another process "
                "keep text and images, and read them again.",
            )

    def _require_recurrent_states_of(self, rows: int) -> None:
        """Refuse more sequences than recurrent states have: these are read before attention would repeat them."""
        recurrent = (each for each in self._contents.theirs if isinstance(each, LinearAttentionCacheLayerMixin))
        held = next((number for each in recurrent if (number := num_sequences_of(each)) is not None), rows)
        if held != rows:
            raise ValueError(
                f"generate computes {rows} sequences, and recurrent states are stored of {held}. Call "
                f"cache.batch_repeat_interleave({rows}) before, if all of them go on from one."
            )

    def _ask(self, token_ids: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        """Refuse a prompt that begins with other tokens than those that are known to be stored; remember it."""
        self._asked = None
        if token_ids is None or token_ids.dim() != 2:
            return
        self.require_prefix(token_ids, mask)
        # Of states whose tokens are not known, nobody says that a prompt has them.
        if self.token_ids is not None or not self._contents.num_tokens:
            self._asked = token_ids
            self.are_asked_about = True

    def require_prefix(self, given: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """
        Raise a `ValueError` if a prompt, `[batch, tokens]`, does not begin with the stored tokens that are known.

        Tokens that `mask` hides may be any.
        """
        if self.token_ids is None:
            return
        num_tokens = self._contents.num_tokens
        known = self.token_ids[:, : min(num_tokens, given.shape[1])]
        if len(known) not in (1, len(given)):
            return  # another batch, which the layers refuse
        known = known.expand(len(given), -1)
        given = given[:, : known.shape[1]].to("cpu", torch.long)
        if mask is not None:
            given = torch.where(mask[:, : known.shape[1]].to("cpu") == 0, known, given)
        different = first_difference(known, given)
        if different is not None:
            sequence, position = different
            raise ValueError(
                f"The prompt does not go on with the {num_tokens:,} tokens that the cache holds: token {position:,} of "
                f"sequence {sequence} is {int(given[different])}, and the cache holds {int(known[different])} there "
                "(counted from 0). Pass the whole conversation as the prompt, or go back to what both begin with by "
                "cache.keep_common_prefix(input_ids), or use a new cache, or cache.reset()."
            )

    def num_common(self, given: torch.Tensor) -> int:
        """Return how many tokens a prompt, `[batch, tokens]`, has in common with those that are known to be stored."""
        num_tokens, known = self._contents.num_tokens, self.token_ids
        if known is None:
            raise ValueError(
                f"It is not known which {num_tokens:,} tokens the cache holds: they are known of prompts of prefill "
                "and generate. Name them with cache.note_tokens(token_ids), or forget them with cache.reset()."
            )
        if len(known) != len(given) and 1 not in (len(known), len(given)):
            raise ValueError(
                f"The prompt has {len(given)} sequences, and the cache holds {len(known)}: pass a prompt for each, or "
                "one for all."
            )
        most = min(num_tokens, known.shape[1], given.shape[1])
        different = first_difference(known[:, :most], given[:, :most].to("cpu", torch.long))
        return most if different is None else different[1]

    def stored(self) -> torch.Tensor | None:
        """Return the tokens that are stored, `[batch, tokens]`; `None` unless all are known."""
        num_tokens, known = self._contents.num_tokens, self.token_ids
        if not num_tokens or known is None or known.shape[1] < num_tokens:
            return None
        rows = num_sequences(self._contents.layers) or 1
        return known[:, :num_tokens].expand(rows if len(known) == 1 else -1, -1)

    def keep_stored(self) -> None:
        """Forget the tokens after those that are stored, which others may follow."""
        self._contents.forget_keys()
        num_tokens = self._contents.num_tokens
        if self.token_ids is not None:
            self.token_ids = self.token_ids[:, :num_tokens] if num_tokens else None

    def note_reordered(self) -> None:
        """Keep what all sequences begin with, as they change places: that is known of each."""
        if self.token_ids is not None and len(self.token_ids) > 1:
            different = first_difference(self.token_ids[:1], self.token_ids)
            self.token_ids = self.token_ids[:1, : None if different is None else different[1]]

    def change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow a change of sequences, if the tokens are not those of all of them."""
        if self.token_ids is not None and len(self.token_ids) > 1:
            try:
                self.token_ids = change(self.token_ids)
            except IndexError:  # the caller has noted the tokens of fewer sequences
                self.token_ids = None

    def note_tokens(self, token_ids: torch.Tensor | None) -> None:
        """Note which tokens a generation has computed; warn if it left the cache empty, and no warning told why."""
        self.token_ids = None
        if token_ids is not None:
            self._keep(token_ids)
        if self._contents.of_text and not self._contents.num_tokens and not self._has_left_border:
            warnings.warn(
                "The model has not used the cache that it was passed, which is empty: it keeps none, or one of its "
                "own.",
                stacklevel=3,
            )

    def _keep(self, token_ids: torch.Tensor) -> None:
        """Keep a copy: the caller may write to the tensor."""
        with torch.inference_mode(False):
            self.token_ids = token_ids.detach().to("cpu", torch.long, copy=True)


def _caller() -> FrameType | None:
    """Return the frame of the function that called the cache."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _whole_prompt(frame: FrameType, step: str) -> tuple[int, torch.Tensor | None, torch.Tensor | None] | None:
    """
    Return the whole prompt that `step`, a function of `generate`, is about to compute, if `frame` is of this function.

    Returns:
        Its length; token ids, or `None` where embeddings were passed; and a mask, 0 where nothing attends, or `None`.
        All with the tokens that are stored already: where only the new ones were given, there is no whole prompt.
    """
    found = frame.f_locals
    if frame.f_code.co_name != step:
        return None
    try:
        options, ids = found["model_kwargs"], found["input_ids"]
        if found.get("use_inputs_embeds"):
            return int(options["inputs_embeds"].shape[1]), None, None
        mask = options.get("decoder_attention_mask" if found["self"].config.is_encoder_decoder else "attention_mask")
        # A mask of ones is dropped, and its length is kept.
        masked = getattr(found["generation_config"], "_mask_length", None) if mask is None else mask.shape[1]
        return (int(masked), ids, mask) if masked == ids.shape[1] else None
    except (KeyError, AttributeError):
        return None


def _is_computing(token_ids: torch.Tensor) -> bool:
    """Whether a function of `generate` that has called the cache, through a model, computes this very prompt."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in (_PREFILL, _ASSISTED) and frame.f_locals.get("input_ids") is token_ids:
            return True
        frame = frame.f_back
    return False


def _border_that_drops_the_cache(frame: FrameType, num_tokens: int) -> int | None:
    """
    Return the number of tokens at which a model stops using this cache, if it is about to do so.

    What it has computed with the rotary embedding for short contexts does not fit the one for long ones.
    """
    found = frame.f_locals
    if "original_max_position_embeddings" not in frame.f_code.co_names:
        return None
    try:
        border = int(found["self"].config.original_max_position_embeddings)
        return border if num_tokens <= border < found["input_ids"].shape[1] else None
    except (KeyError, AttributeError, TypeError):
        return None
