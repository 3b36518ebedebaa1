"""The form in which a cache stores states, as it was asked for: nothing that is chosen from states counts."""

import hashlib
from collections.abc import Iterable
from itertools import groupby

from ..cache import HybridCache
from ..codecs import describe, weights_of
from ..layers import HybridLayer
from ..storage import KVCodec
from .errors import ModelIdentityError


def layers_of(cache: HybridCache) -> str:
    """Return the indices of the layers that are ours, such as "0-15 of 16"."""
    ours = [index for index, layer in enumerate(cache.layers) if isinstance(layer, HybridLayer)]
    return f"{_ranges(ours) or 'none'} of {len(cache.layers)}"


def codecs_of(cache: HybridCache) -> str:
    """
    Return the codec of each quantized layer, with a digest of the channel scaling that it was given.

    Raises:
        ModelIdentityError: there is no way to describe it.
    """
    layers: dict[str, list[int]] = {}
    for index, codec in sorted(cache.asked_codecs.items()):
        layers.setdefault(_text_of(codec), []).append(index)
    return "; ".join(f"{_ranges(indices)}: {text}" for text, indices in layers.items()) or "none"


def selection_of(cache: HybridCache) -> str:
    """Return the options of top-p page selection, "none" where all is read."""
    selection = cache.selection
    if selection is None:
        return "none"
    dense = _ranges(sorted(selection.dense_layers)) or "none"
    return f"top_p={selection.top_p} most={selection.most} dense_layers={dense}"


def _text_of(codec: KVCodec) -> str:
    try:
        tree = describe(codec)
    except ValueError as error:
        raise ModelIdentityError(str(error)) from error
    name = tree.pop("name")
    text = " ".join([name, *(f"{key}={value}" for key, value in sorted(tree.items()))])
    weights = weights_of(codec)
    if not weights:
        return text
    digest = hashlib.blake2b(digest_size=16)
    for role, each in sorted(weights.items()):
        digest.update(f"{role} {tuple(each.shape)} {each.dtype}\n".encode())
        digest.update(each.cpu().contiguous().numpy().tobytes())
    return f"{text} weights={digest.hexdigest()}"


def _ranges(indices: Iterable[int]) -> str:
    """Return sorted indices as text, such as "0-3, 7"."""
    runs = ([index for _, index in run] for _, run in groupby(enumerate(indices), key=lambda each: each[1] - each[0]))
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
