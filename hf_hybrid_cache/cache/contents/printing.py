"""The text of a cache: what `repr` and `str` say."""

from collections import Counter
from collections.abc import Iterator

from .contents import Contents
from .memory import measured


def in_one_line(name: str, contents: Contents) -> str:
    """Return the kinds of the layers, their places and sizes, after the name of the cache's class."""
    held = measured(contents)
    places = ((held.device_bytes, "on the device"), (held.host_bytes, "in host memory"))
    sizes = (f"{num_bytes / 2**20:.1f} MiB {place}" for num_bytes, place in places if num_bytes)
    awaited = ["some to be quantized"] if any(layer.pending for layer in contents.ours) else []
    content = ", ".join([f"{held.num_tokens:,} tokens", *awaited, *sizes]) if held.num_tokens else "empty"
    return f"{name}({', '.join(_forms(contents))}; {content})"


def in_lines(name: str, contents: Contents) -> str:
    """Return that line, and a line for each codec with the layers that it quantizes."""
    by_form: dict[str, list[str]] = {}
    for index, codec in contents.stores.codecs.items():
        by_form.setdefault(str(codec), []).append(str(index))
    lines = (f"  layers {', '.join(indices)}: {form}" for form, indices in by_form.items())
    return "\n".join([in_one_line(name, contents), *lines])


def _forms(contents: Contents) -> Iterator[str]:
    """Yield the number of layers of each kind, and their place."""
    placement, peers = contents.stores.placement, contents.stores.peers
    widths = {index: (codec.keys.bits, codec.values.bits) for index, codec in contents.stores.codecs.items()}
    for bits, number in Counter(widths.get(layer.layer_idx) for layer in contents.ours).items():
        kind = "in full precision" if bits is None else f"of {' and '.join(map(str, dict.fromkeys(bits)))} bits"
        yield f"{number} layer{'' if number == 1 else 's'} {kind}"
    if contents.theirs:
        yield f"{len(contents.theirs)} of transformers' own"
    if peers is not None:
        yield f"share {peers.rank + 1} of {peers.size}"
    if placement.offload:
        yield "offloaded"
    if placement.device_tokens:
        yield f"up to {placement.device_tokens:,} tokens of each on the device"
    if any(layer.is_attended_on_cpu for layer in contents.ours):
        yield "attended to on the CPU"
