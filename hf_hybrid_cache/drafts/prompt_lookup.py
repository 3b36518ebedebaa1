"""Prompt lookup decoding: `generate(..., custom_generate=PromptLookup())`."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ..cache import border_of_angles, kinds_that_stay
from ..cache_argument import arguments_kept_back, loop_of, passed_cache
from ..storage import GRANULE
from .draft_length import MOST_TOKENS, SURE, DraftLength, checked_drafts
from .index import SHORTEST, Index, Match

# Inputs of a step that have an entry for each token; with any other tensor a step has one token.
_OF_TOKENS = {"input_ids", "position_ids", "attention_mask"}
# Of the tokens of a text so far, returns those that must come next, as far as it knows.
Forced = Callable[[Sequence[int]], list[int]]


class PromptLookup:
    """
    Drafts the next tokens from the text so far, and checks all of them in one pass: for `custom_generate`.

    Where the last 3 to 5 tokens stood before, in the prompt or in the answer, what followed them there is a draft, and
    so is what must come next, such as the name of a property in JSON of a schema. The model's own decoding loop runs,
    and gets the logits of one token after the other: it chooses each token from its own logits, and a draft counts as
    far as it is chosen. So processors, criteria, limits, streamers and random numbers are those of decoding one by one,
    and rejected tokens leave nothing in the cache. Logits are the same bits where a row's do not depend on the rows
    beside it (`FusedDecode.repeats_rows`); elsewhere a pass of several rows rounds otherwise.

    How many tokens are drafted follows from what was accepted and from the measured time of passes, see `DraftLength`.
    Without a match a step is as it was. There are no drafts for several sequences, beams, several processes, where
    attentions or hidden states are asked for, and with layers that cannot go back; `print` tells.

    Args:
        max_tokens: of a draft, up to 15; 0 for none.
        forced: takes the tokens of prompt and answer so far, and returns those that must come next, as far as it knows,
            for instance by a grammar that a logits processor holds the answer to.
        clock: seconds.

    Attributes:
        drafted_tokens: that were checked.
        accepted_tokens: of them, that were chosen.
        passes: that checked any.
        without: the number of generations without drafts, by the reason.

    Raises:
        TypeError: `max_tokens` is not an integer.
        ValueError: `max_tokens` is another number; or `generate` has an assistant or `prompt_lookup_num_tokens`, too.

    Example:
        >>> lookup = PromptLookup()
        >>> model.generate(**inputs, cache=cache, custom_generate=lookup)
        >>> print(lookup)
        161 of 187 drafted tokens were accepted, in 21 passes
    """

    def __init__(
        self,
        max_tokens: int = MOST_TOKENS,
        *,
        forced: Forced | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._max_tokens, self._forced, self._clock = checked_drafts("max_tokens", max_tokens), forced, clock
        self.drafted_tokens = self.accepted_tokens = self.passes = 0
        self.without: Counter[str] = Counter()

    @classmethod
    def of(cls, drafts: "PromptLookup | int | None") -> "PromptLookup | None":
        """
        Return what drafts, of what an argument `drafts` is given.

        Args:
            drafts: one, or tokens of a draft at most; `None` for none.

        Raises:
            TypeError: it is something else.
            ValueError: it is another number.
        """
        return drafts if drafts is None or isinstance(drafts, cls) else cls(checked_drafts("drafts", drafts))

    def __repr__(self) -> str:
        counted = f"{self.accepted_tokens:,} of {self.drafted_tokens:,} drafted tokens were accepted"
        others = [f"\n  {count:,} generations without drafts: {why}" for why, count in self.without.most_common()]
        return f"{counted}, in {self.passes:,} passes{''.join(others)}"

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        generation_config: GenerationConfig,
        **prepared: Any,
    ) -> Any:
        """
        Run the decoding loop of the model; `generate` calls this with what it has prepared.

        transformers passes no tokenizer to a `custom_generate`: instead of `stop_strings` pass
        `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.

        Args:
            model: that generates.
            input_ids: the prompt, `[1, tokens]`.
            generation_config: of the call.
            **prepared: other arguments of the loop.

        Returns:
            What `generate` returns.
        """
        given = {name: value for name, value in arguments_kept_back().items() if value is not None} | prepared
        if given.pop("assistant_model", None) is not None or generation_config.prompt_lookup_num_tokens is not None:
            raise ValueError(
                "PromptLookup drafts tokens, and so would an assistant_model or prompt_lookup_num_tokens: leave that "
                "out, or custom_generate."
            )
        loop = loop_of(model, generation_config, given.get("streamer"))
        return self.run(loop, model, input_ids, generation_config=generation_config, **given)

    def run(self, loop: Callable[..., Any], model: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        """
        Run a decoding loop of transformers.

        Args:
            loop: such as `GenerationMixin._sample`.
            model: that it is of.
            input_ids: the prompt, `[sequences, tokens]`.
            **prepared: all that the loop takes.

        Returns:
            What the loop returns.
        """
        drafting = self.drafting(loop, model, input_ids, prepared)
        if drafting is None:
            return loop(model, input_ids, **prepared)
        with closing(drafting):
            return loop(drafting, input_ids, **prepared)

    def drafting(
        self, loop: Callable[..., Any], model: Any, input_ids: torch.Tensor, prepared: Mapping[str, Any]
    ) -> "Drafting | None":
        """
        Return what drafts tokens in a decoding loop, until it is closed; `None` without drafts.

        Args:
            loop: of transformers, or that whose place another one takes.
            model: that it is of.
            input_ids: the prompt, `[sequences, tokens]`.
            prepared: all else that the loop takes.
        """
        if why := self._why_none(loop, model, input_ids, prepared):
            self.without[why] += 1
            return None
        return Drafting(self, model, input_ids, prepared)

    def _why_none(
        self, loop: Callable[..., Any], model: Any, input_ids: torch.Tensor, prepared: Mapping[str, Any]
    ) -> str:
        """Return why a generation has no drafts, as far as that is known before; or an empty string."""
        config, cache = prepared["generation_config"], passed_cache(prepared)
        if not self._max_tokens:
            return "they are turned off"
        if loop is not GenerationMixin._sample:
            return f"the decoding loop is {loop.__qualname__}"
        if len(input_ids) != 1:
            return "there are several sequences"
        if model.config.is_encoder_decoder or not isinstance(cache, DynamicCache) or not prepared.get("use_cache"):
            return "the tokens are not kept in a cache that grows"
        if config.output_attentions or config.output_hidden_states:
            return "attentions or hidden states are asked for"
        is_shared = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        if is_shared or prepared.get("synced_gpus"):
            return "several processes run the model in step"
        if model.device.type == "mps":
            return "the loop takes back steps itself on mps"
        return ""


@dataclass
class _Pass:
    """
    A pass that checks a draft.

    Attributes:
        draft: the tokens after the first one, of which the loop has chosen some.
        length: tokens of the cache before it.
        outputs: of the model for all rows; `None` until it ends.
        seconds: that it took.
        accepted: tokens of the draft that the loop has chosen.
    """

    draft: list[int]
    length: int
    outputs: Any = None
    seconds: float = 0.0
    accepted: int = 0


class Drafting:
    """
    Stands in the place of a model in a decoding loop of transformers, which asks it for one token after the other.

    Of a token that was drafted, the loop gets the logits that are there already; any other takes back what was rejected
    and runs a pass, with a draft after the token if there is one. All else is the model's.
    """

    def __init__(self, lookup: PromptLookup, model: Any, input_ids: torch.Tensor, prepared: Mapping[str, Any]):
        self._lookup, self._model, self._prompt = lookup, model, input_ids
        self._cache: Any = passed_cache(prepared)
        self._most_tokens, self._border = prepared["generation_config"].max_length, border_of_angles(model.config)
        self._draft_length = DraftLength()
        self._can_draft = True
        self._index: Index | None = None
        self._match: Match | None = None
        self._pass: _Pass | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **options: Any) -> dict[str, Any]:
        """Take the token that the loop has chosen; return the inputs of its step, none if its logits are there."""
        if self.take(int(input_ids[0, -1])):
            return {}
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(input_ids, **options)
        return inputs

    def take(self, token: int) -> bool:
        """Take the token that the loop has chosen; return whether its logits are there."""
        self._note(token)
        checked = self._pass
        if checked is not None and token in checked.draft[checked.accepted : checked.accepted + 1]:
            checked.accepted += 1
            return True
        self._settle()
        return False

    def __call__(self, **inputs: Any) -> Any:
        steps = self.steps(inputs)
        try:
            given = next(steps)
            while True:
                given = steps.send(self._run(given))
        except StopIteration as end:
            return end.value

    def steps(self, inputs: dict[str, Any]) -> Generator[dict[str, Any], tuple[Any, float], Any]:
        """Return the outputs of a step; yields the inputs of a pass if it needs one, for its outputs and seconds."""
        if self._pass is None:
            if not (draft := self._draft(inputs)):
                outputs, seconds = yield inputs
                self._draft_length.note_step(seconds)
                return outputs
            for layer in _recorders(self._cache):
                layer.activate_past_recording()
            checked = self._pass = _Pass(draft, self._cache.get_seq_length())
            checked.outputs, checked.seconds = yield _extended(inputs, draft)
        outputs, row = self._pass.outputs, self._pass.accepted
        return type(outputs)(**{**outputs, "logits": outputs.logits[:, row : row + 1]})

    def close(self) -> None:
        """Take back what the loop has not chosen; a pass that ended half-way is left to the cache, as any other is."""
        if self._pass is not None and (self._pass.outputs is not None or self._is_whole(self._pass)):
            self._settle()
        for layer in _recorders(self._cache):
            layer.record_past = False

    def _note(self, token: int) -> None:
        """Compare a token with the one after the match, add it to the text, and find the match that it ends."""
        if not self._can_draft:
            return
        if self._index is None:  # once the first token is out, and recurrent layers hold states
            if stay := kinds_that_stay(self._cache.layers):
                self._lookup.without[f"layers of type {', '.join(stay)} cannot go back"] += 1
                self._can_draft = False
                return
            self._index = Index(self._prompt[0].tolist())
        if self._match is not None:
            end, length = self._match
            is_next = self._index.following(end, 1) == [token]
            self._draft_length.note_prediction(length, is_next)
            # A token that differs may stand for another one, as in an edit: the match goes on after it, but not twice.
            self._match = Match(end + 1, length + 1 if is_next else 0) if is_next or length >= SHORTEST else None
        self._index.add(token)
        if self._match is None or self._match.length < SHORTEST:
            self._match = self._index.newest_match() or self._match

    def _draft(self, inputs: Mapping[str, Any]) -> list[int]:
        """Return the tokens to check after the one at hand, or none."""
        if self._index is None:
            return []
        forced = self._lookup._forced(self._index.token_ids) if self._lookup._forced else []
        if self._match is None and not forced:
            return []
        if passed_cache(inputs) is not self._cache or not _is_of_one_token(inputs):
            return []
        held = self._cache.get_seq_length()
        # Where a block becomes due to be quantized, with the token that completes another, a pass of its own begins.
        until_border = min(self._border - held, GRANULE - (held + 1) % GRANULE)
        room = min(self._most_tokens - len(self._index.token_ids), until_border) - 1  # a pass gives a token itself, too
        most, copied = min(self._lookup._max_tokens, room), list[int]()
        if self._match is not None:
            copied = self._index.following(self._match.end, self._draft_length.tokens(self._match.length, most))
        forced = forced[: self._draft_length.tokens(SURE, min(len(forced), most))]
        return copied if copied[: len(forced)] == forced else forced

    def _run(self, inputs: Mapping[str, Any]) -> tuple[Any, float]:
        """Run a pass; return what the model gives, and the seconds that it took."""
        start = self._lookup._clock()
        outputs = self._model(**inputs)
        if not outputs.logits.is_cpu:
            outputs.logits[0, -1, 0].item()  # waits for the device
        return outputs, self._lookup._clock() - start

    def _settle(self) -> None:
        """Take back the tokens of a draft that were not chosen, and note what became of it."""
        if (checked := self._pass) is None:
            return
        start, recorders = self._lookup._clock(), _recorders(self._cache)
        rejected = self._cache.get_seq_length() - (checked.length + 1 + checked.accepted)
        if rejected or recorders:  # layers that record the past forget it then
            self._cache.crop(-rejected)
        for layer in recorders:
            layer.record_past = False
        self._pass = None
        seconds = checked.seconds + self._lookup._clock() - start
        self._draft_length.note_draft(len(checked.draft), checked.accepted, seconds)
        self._lookup.passes += 1
        self._lookup.drafted_tokens += len(checked.draft)
        self._lookup.accepted_tokens += checked.accepted

    def _is_whole(self, checked: _Pass) -> bool:
        """Whether a pass that an interruption ended has reached all layers."""
        lengths = {each.get_seq_length() for each in self._cache.layers if isinstance(each, CacheLayerMixin)} - {0}
        return lengths == {checked.length + 1 + len(checked.draft)}


def _is_of_one_token(inputs: Mapping[str, Any]) -> bool:
    """Whether inputs are those of a step, to which tokens can be added."""
    tensors = {name: value for name, value in inputs.items() if not isinstance(value, bool | int | str | Cache | None)}
    if not tensors.keys() <= _OF_TOKENS or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        return False
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    is_step = inputs["input_ids"].shape[1] == 1 and (positions is None or positions.shape[-1] == 1)
    return is_step and (mask is None or mask.dim() == 2)


def _extended(inputs: Mapping[str, Any], draft: list[int]) -> dict[str, Any]:
    """Return the inputs of a step with the tokens of a draft after its own."""
    token, mask, positions = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
    number = len(draft)
    extended = {**inputs, "input_ids": torch.cat([token, token.new_tensor([draft])], dim=1)}
    if positions is not None:
        extended["position_ids"] = positions + torch.arange(1 + number, device=positions.device)
    if mask is not None:
        extended["attention_mask"] = torch.cat([mask, mask.new_ones(1, number)], dim=1)
    if "logits_to_keep" in inputs:
        extended["logits_to_keep"] = 1 + number
    return extended


def _recorders(cache: Any) -> list[Any]:
    """Return the layers of transformers' own that keep what they would forget, if they are told before a pass."""
    return [layer for layer in cache.layers if hasattr(layer, "record_past")]
