"""The methods of caches that go back to fewer tokens: exactly, or to a checkpoint."""

import torch
from transformers.cache_utils import DynamicCache

from ...layers import NoCheckpointError, checked_removal
from ...token_ids import TokenIds, as_token_ids
from ..checks.forward_passes import ForwardPasses
from ..checks.prompts import Prompts
from ..contents.checkpoints import Checkpoint
from ..contents.contents import Contents


class GoingBack(DynamicCache):
    """The part of `HybridCache` that goes back to fewer tokens."""

    _contents: Contents
    _passes: ForwardPasses
    _prompts: Prompts

    def checkpoint(self) -> None:
        """
        Keep what layers will forget of the stored tokens, so that `crop` and `go_back` can return to this length.

        That is all states of layers with a sliding window, chunks, linear attention or convolutions, and of quantized
        layers the last 64 to 127 tokens in full precision; nothing of other layers. `memory` counts it. Checkpoints
        follow a change of sequences, are dropped by `reset` and by going back beyond them, and are not kept in files.

        Raises:
            ValueError: nothing is stored, or several processes keep shares of quantized layers.
            IncompleteCacheError: something ended a change of the cache half-way.

        Example:
            >>> prefill(model, document_ids, cache)
            >>> cache.checkpoint()
            >>> model.generate(torch.cat([document_ids, question_ids], dim=1), cache=cache)
            >>> cache.go_back(document_ids.shape[1])
        """
        self._passes.require_complete()
        self._contents.require_whole()
        num_tokens = self._contents.num_tokens
        if not num_tokens:
            raise ValueError("There is nothing to keep: the cache holds no tokens. Read a prompt into it first.")
        if self._contents.stores.peers is not None and self._contents.stores.codecs:
            raise ValueError(
                "Several processes keep shares of quantized layers, of which there are no checkpoints. Use a cache in "
                "full precision, or keep a file with cache.save."
            )
        with torch.inference_mode(False):
            self._contents.checkpoints.take(num_tokens)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The lengths at which there are checkpoints, in order."""
        return self._contents.checkpoints.lengths

    def drop_checkpoint(self, num_tokens: int) -> None:
        """Forget the checkpoint at a length, if there is one, and give its memory back."""
        self._contents.checkpoints.drop(num_tokens)

    def go_back(self, num_tokens: int) -> int:
        """
        Go back to the first `num_tokens`, or to the last checkpoint before them where not all layers can be cropped.

        The next `generate` with the whole prompt computes what lies between.

        Returns:
            The tokens that are stored now, at most `num_tokens`.

        Raises:
            ValueError: `num_tokens` is not from 0 to the stored tokens.
            NoCheckpointError: a layer cannot be cropped, and there is no checkpoint.
            IncompleteCacheError: something ended a change of the cache half-way.
        """
        self._contents.require_whole()
        held, checkpoints = self._contents.num_tokens, self._contents.checkpoints
        if not 0 <= num_tokens <= held:
            raise ValueError(f"go_back({num_tokens}) takes a length from 0 to the {held:,} tokens that are stored.")
        checkpoint = checkpoints.last(num_tokens)
        if num_tokens < held and not checkpoints.can_crop(num_tokens, held):
            if checkpoint is None:
                checkpoints.refuse(num_tokens, held)
            num_tokens = checkpoint.num_tokens
        if checkpoint is not None and checkpoint.num_tokens == num_tokens:
            self._put_back(checkpoint)
        elif num_tokens < held:
            self.crop(num_tokens - held)
        return num_tokens

    def keep_common_prefix(self, input_ids: TokenIds) -> int:
        """
        Go back to the tokens that a prompt begins with, so that `generate` with this prompt computes the rest.

        At least the last token of the prompt is left to compute. Where not all layers can be cropped, the cache goes
        back to the last checkpoint before; where there is none, it forgets all tokens.

        Tokens are compared as far as they are known, see `require_prefix`; those after them are forgotten. An answer
        is known after `note_tokens(output)`. Images are not compared.

        Args:
            input_ids: of the whole prompt, `[batch, tokens]` or a list.

        Returns:
            The tokens that are stored now.

        Raises:
            ValueError: tokens are stored and it is not known which, or they are those of another number of sequences.
            IncompleteCacheError: something ended a change of the cache half-way.

        Example:
            >>> cache.keep_common_prefix(inputs.input_ids)
            >>> output = model.generate(**inputs, cache=cache, max_new_tokens=200)
            >>> cache.note_tokens(output)
        """
        token_ids = as_token_ids("input_ids", input_ids)
        if not token_ids.numel():
            raise ValueError(f"input_ids has no tokens: {list(token_ids.shape)}.")
        self._contents.require_whole()
        if not self._contents.num_tokens:
            return 0
        common = self._prompts.num_common(token_ids)
        try:
            return self.go_back(min(common, token_ids.shape[1] - 1))
        except NoCheckpointError:
            self.reset()
            return 0

    def crop(self, tokens_to_remove: int) -> None:
        """
        Remove the last `-tokens_to_remove` tokens of each sequence, exactly, or all if there are not that many.

        Where there is a checkpoint at the length that is left, all layers are what they were then, to the bit.

        Raises:
            NoCheckpointError: a layer of transformers' own has forgotten what it held then, and there is no checkpoint
                at that length; `go_back` goes to the last checkpoint before it.
            ValueError: a positive number, which older versions of transformers took for the length to keep.
            IncompleteCacheError: something ended a change of the cache half-way.

        Nothing has changed then.
        """
        checkpoints, held = self._contents.checkpoints, self._contents.num_tokens
        tokens_to_remove = checked_removal(tokens_to_remove, held)
        if tokens_to_remove < 0:
            self._contents.require_whole()
            left = max(0, held + tokens_to_remove)
            checkpoint = checkpoints.at(left)
            if checkpoint is not None:
                self._put_back(checkpoint)
                return
            if not checkpoints.can_crop(left, held):
                checkpoints.refuse(left, held)
            checkpoints.drop_after(left)
        super().crop(tokens_to_remove)
        self._prompts.keep_stored()

    def _put_back(self, checkpoint: Checkpoint) -> None:
        """Make all layers what they were when the checkpoint was taken."""
        self._contents.checkpoints.drop_after(checkpoint.num_tokens)
        with self._contents.changing("crop"), torch.inference_mode(False):
            checkpoint.put_back(self.layers)
        self._passes.note_put_back()
        self._prompts.keep_stored()
