"""Attention to the tokens of a store, to each where it is; the partial results are merged."""

import copy
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial

import torch
from torch.nn.functional import pad

from ..storage import (
    MARK_SIZE,
    AnyStore,
    CacheStats,
    OneSequence,
    Shard,
    ShardedStore,
    SharedPrefix,
    SplitStore,
    Store,
)
from .host_attention import HostAttention, has_kernel_for_many
from .queries import MadeOfMasks, Queries, folded, folded_mask, simplified, unfolded
from .scores import Product
from .torch_attention import PartialAttention, attend_to_states, merged, merged_at_once, merged_out

# Attends to some tokens of a layer; computation on the device may wait for the bus from then on.
_Part = Callable[[], PartialAttention]
# Cost of a round of messages, in bytes that could be sent meanwhile: 50 us at 10 Gbit/s.
_WORTH_A_ROUND = 2**16


class StoredAttention:
    """
    Attends for all layers of a cache that keeps keys and values, or some of them, in host memory.

    Args:
        stats: counters of the cache.
        is_asked_for: the user asked for attention on the CPU, instead of leaving the choice to the cache.

    Attributes:
        is_declined: something else reads the states, so that they are better kept as tensors.
        host: attention to tokens in host memory.
        simplified: makes masks of the tokens that are seen of masks that are added to scores, if these say no more.
        products: of queries and keys, whose scores somebody has.
    """

    def __init__(self, stats: CacheStats, is_asked_for: bool):
        self._stats = stats
        self._is_asked_for = is_asked_for
        self.is_declined = self._has_attended = self._has_warned = False
        self.host = HostAttention(stats)
        self._prefix_masks, self._own_masks = MadeOfMasks(folded_mask), MadeOfMasks(_columns_of)
        self.simplified = MadeOfMasks(simplified)
        self.products: weakref.WeakSet[Product] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict) -> "StoredAttention":
        twin = StoredAttention(copy.deepcopy(self._stats, memo), self._is_asked_for)
        twin.is_declined, twin._has_warned = self.is_declined, self._has_warned
        twin._has_attended = self._has_attended
        return twin

    def compute_kept(self) -> None:
        """Compute scores that somebody keeps, as `output_attentions` does, before what they are made of changes."""
        for product in tuple(self.products):
            product.compute("output_attentions")
        self.products.clear()

    def takes_prompts(self, store: AnyStore, as_they_came: bool = False) -> bool:
        """Return whether a sequence's first queries attend to their own tokens in `store`, faster than by torch."""
        return (
            isinstance(store, Store)
            and (as_they_came or store.packed is None)
            and store.is_in_host_blocks
            and store.shape.device.type == "cpu"
            and has_kernel_for_many(store.shape)
        )

    def __call__(self, queries: Queries, store: AnyStore) -> torch.Tensor:
        """
        Attend to the tokens of `store`.

        Args:
            queries: on any device; causal ones only for a store that `takes_prompts`.
            store: its keys and values share batch and head_dim with the queries.

        Returns:
            `[batch, query_heads, query_length, value_dim]`, of the queries' type, on their device.
        """
        self._has_attended = True
        query, mask = queries.states, queries.mask
        if queries.sinks is None:
            whole = _in_one_place(store)
            if whole is not None:
                return self.host.attend(queries, whole)
        try:
            parts = self._parts(queries._replace(sinks=None), store)
            if queries.sinks is not None:
                parts.append(partial(_of_sinks, queries.sinks))
            total = None
            for part in parts[:-1]:
                total = merged(total, part())
            if total is None:
                return parts[0]().out.to(query.dtype)
            return merged_out(total, parts[-1](), mask is not None).to(query.dtype)
        finally:
            wait(self.host.running)
            self.host.running.clear()

    def _parts(self, queries: Queries, store: AnyStore) -> list[_Part]:
        """List the parts of a layer; all processes of a group are one."""
        if isinstance(store, ShardedStore) and not store.shard.is_all:
            own = None if queries.mask is None else self._own_masks.of(queries.mask, store.shard)
            return [partial(_attend_to_shards, queries._replace(mask=own), store, self.host)]
        if isinstance(store, SharedPrefix):
            return self._parts_of_continuations(queries, store)
        return _parts_of(queries, store, self.host)

    def _parts_of_continuations(self, queries: Queries, store: SharedPrefix) -> list[_Part]:
        """
        List the parts of several sequences, whose queries attend to their prefix as more queries of one sequence.

        Source: cascade attention (Ye et al., 2024, https://flashinfer.ai/2024/02/02/cascade-inference.html); Hydragen
        (Juravsky et al., 2024, https://arxiv.org/abs/2402.05099).
        """
        shared, continuations, length = store.prefix.num_tokens, store.continuations, queries.states.shape[2]
        of_tails = queries.of_tokens((shared, store.num_tokens))
        of_prefix = queries.of_tokens((0, shared))
        of_prefix = of_prefix._replace(
            states=folded(queries.states, continuations),
            mask=None if of_prefix.mask is None else self._prefix_masks.of(of_prefix.mask, continuations, length),
        )
        if store.is_staged:
            prefix: list[_Part] = [partial(attend_to_states, of_prefix, store.prefix.read)]
            tails: list[_Part] = [partial(attend_to_states, of_tails, store.tails.read)]
        else:
            prefix = _parts_of(of_prefix, store.prefix, self.host)
            tails = _parts_of(of_tails, store.tails, self.host) if store.tails.num_tokens else []
        *first, last = (partial(_unfolded, part, continuations) for part in prefix)
        return [*first, *tails[:-1], last, *tails[-1:]]

    def decline(self, what: str, num_tokens: int) -> None:
        """
        Note that `what` needs the states of `num_tokens` themselves, and warn of it once.

        Unless the user asked for attention on the CPU they are tensors from now on. Of a model that has read them from
        the first time on, as latent attention does, nothing is said then.
        """
        if not self._is_asked_for and not self.is_declined:
            self.is_declined = True
            self._stats.note_decision(num_tokens, "cpu_decode", False, f"{what} reads keys and values")
        if self._has_warned or not (self._is_asked_for or self._has_attended):
            return
        self._has_warned = True
        consequence = (
            "at every step all of them are copied, which is right and slow"
            if self._is_asked_for
            else "from now on this cache keeps them as tensors and attends by torch, until reset()"
        )
        warnings.warn(
            f"Attention asks for the keys and values that are kept for attention on the CPU ({what} reads them): "
            f"{consequence}. Load the model with attn_implementation='sdpa' to attend where they are, read "
            "cache.layers[i].keys instead of what update() returned, or pass cpu_decode=False to the cache.",
            stacklevel=2,
        )

    def reset(self) -> None:
        """Forget that something needed the states, and give back the memory that attention works in."""
        self.host.reset()
        self.products.clear()
        self.is_declined = self._has_warned = self._has_attended = False


def _parts_of(queries: Queries, store: OneSequence, host: HostAttention) -> list[_Part]:
    """List the parts of a store, those on the device first."""
    if isinstance(store, Store):
        return [host.part(queries, store)]
    on_host, num_tokens = store.middle.num_tokens, store.num_tokens
    first, last = store.first_tokens, store.first_tokens + on_host
    parts: list[_Part] = []
    if store.ends.num_entries:
        parts.append(partial(attend_to_states, queries.of_tokens((0, first), (last, num_tokens)), store.ends.read))
    start, end = store.staged_range() if store.is_staged else (0, 0)
    middle = queries.of_tokens((first, last))
    if start < end:
        parts.append(partial(attend_to_states, middle.of_tokens((start, end)), store.read_staged))
        middle = middle.of_tokens((0, start), (end, on_host))
    if end - start < on_host:
        adapts = bool(parts) and store.cpu_fraction is not None and store.cpu_fraction.adapts
        on_end = store.note_ended if adapts else None
        parts.append(host.part(middle, store.middle, end - start, on_end))
    return parts


def _in_one_place(store: AnyStore) -> Store | None:
    """Return the store that has all tokens of a layer in the host memory of this process; `None` if none has."""
    if isinstance(store, SplitStore):
        return None if store.ends.num_entries or store.is_staged else store.middle
    if isinstance(store, ShardedStore) and not store.shard.is_all:
        return None
    return store if isinstance(store, Store) else None


def _of_sinks(sinks: torch.Tensor) -> PartialAttention:
    """Attention to tokens whose scores are the sinks, and whose values are zero."""
    return PartialAttention(sinks.new_zeros((), dtype=torch.float32), sinks.squeeze(-1).float())


def _unfolded(part: _Part, continuations: int) -> PartialAttention:
    out, lse = part()
    return PartialAttention(unfolded(out, continuations), unfolded(lse, continuations))


def _columns_of(mask: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return the columns of a mask for the tokens of a shard, in host memory."""
    return mask.cpu().index_select(-1, shard.positions(0, mask.shape[-1]))


def _attend_to_shards(queries: Queries, store: ShardedStore, host: HostAttention) -> PartialAttention:
    """
    Attend to all tokens of a sequence whose blocks are distributed over processes. All of them call this at once.

    With few numbers, every process sends its own to all others, and all merge them: one round. With many, each process
    merges some of the rows and sends the merged ones to the others: two rounds. All get the same bits.

    The mask is that of the own shard, in host memory.

    Raises:
        LostProcessError: another process has ended, or does not answer.
        OutOfStepError: it computes something else.
    """
    query, peers = queries.states, store.peers
    shape, width = query.shape[:3], store.shape.value_dim + 1
    message = torch.empty(shape.numel() * width + MARK_SIZE)
    rows, mark = message[:-MARK_SIZE].view(*shape, width), message[-MARK_SIZE:]
    out, lse = PartialAttention(torch.zeros(()), torch.tensor(-torch.inf))
    if store.own_tokens:
        out, lse = host.partial(queries._replace(states=query.cpu()), store)
    rows[..., :-1], rows[..., -1] = out, lse
    mark.copy_(torch.tensor(store.mark()))
    sent_too_often = (peers.size - 1) * message.nbytes * (1 - 2 / peers.size)
    if sent_too_often < _WORTH_A_ROUND:
        all_rows = _merged(store, peers.exchange(message), width)
    else:
        of_each = -(-shape.numel() // peers.size)
        padded = pad(rows.view(-1, width), (0, 0, 0, of_each * peers.size - shape.numel()))
        heard = peers.trade(torch.cat([padded.view(peers.size, -1), mark.expand(peers.size, -1)], dim=1))
        all_rows = peers.exchange(_merged(store, heard, width)).flatten(0, 1)[: shape.numel()]
    all_rows = all_rows.view(*shape, width).to(query.device)
    return PartialAttention(all_rows[..., :-1], all_rows[..., -1])


def _merged(store: ShardedStore, heard: torch.Tensor, width: int) -> torch.Tensor:
    """Merge the messages of all processes, `[size, rows and mark]`, to rows `[rows, width]`."""
    store.require_same(heard[:, -MARK_SIZE:].tolist())
    rows = heard[:, :-MARK_SIZE].unflatten(1, (-1, width))
    # In the order of ranks.
    out, lse = merged_at_once(rows[..., :-1], rows[..., -1])
    return torch.cat([out, lse.unsqueeze(-1)], dim=-1)
