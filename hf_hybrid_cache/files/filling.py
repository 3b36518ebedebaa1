"""Filling the empty layers of a cache with states from a file."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from ..codecs import described_codec
from ..layers import HybridLayer, WindowLayer, stock_form
from ..storage import HostBlocks, KVCodec, OneSequence, SeenQueries, Segment, ShardedStore, Store, require_host_bytes
from .description import DTYPES, SavedLayers, States
from .layers import bytes_of, forms_of, role_names
from .tensor_file import Row, TensorFile, TensorForm

Targets = dict[str, memoryview | Iterable[Row]]
# Fewer, such as codecs of layers, are read sooner than the system can say whether it has memory for them.
_ASKED_BYTES = 2**20


def empty_tensors(file: TensorFile, section: str) -> dict[str, torch.Tensor]:
    """Make memory for the tensors of a section, by their names without that of the section."""
    forms = {name.partition("/")[2]: each.form for name, each in file.tensors(section).items()}
    if (num_bytes := sum(form.num_bytes for form in forms.values())) > _ASKED_BYTES:
        require_host_bytes(num_bytes, f"{section} needs")
    # Inference tensors could not be written to outside inference mode later on.
    with torch.inference_mode(False):
        return {name: torch.empty(form.shape, dtype=DTYPES[form.dtype]) for name, form in forms.items()}


def targets_of(section: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, memoryview]:
    """Return the memory of tensors by their names in a file."""
    return {f"{section}/{name}": bytes_of(tensor) for name, tensor in tensors.items()}


def read_codecs(file: TensorFile, saved: SavedLayers) -> tuple[dict[int, KVCodec], dict[int, SeenQueries]]:
    """Return codecs, and the queries by which others are to be chosen, by layer; `ValueError` if a file has none."""
    codecs, queries = {}, {}
    for index, tree in saved.codecs.items():
        name, states = f"codecs.{index}", saved.layers[index].states
        tensors = empty_tensors(file, name)
        file.read(name, targets_of(name, tensors))
        squares, number = tensors.pop("squares", None), tensors.pop("number", None)
        try:
            codecs[index] = described_codec(tree, tensors)
        except (TypeError, AttributeError, ImportError) as error:
            raise ValueError(f"{name}: there is no such codec ({error})") from error
        if squares is None or states is None:
            continue
        fits = squares.dtype == torch.float32 and squares.shape == (states.num_kv_heads, states.key_dim)
        are_squares = fits and bool((squares.isfinite() & (squares >= 0)).all())
        if not are_squares or number is None or number.dtype != torch.int64 or number.shape != (1,) or int(number) < 1:
            raise ValueError(f"{name}: there are no means of squares of queries")
        queries[index] = SeenQueries(squares, int(number))
    return codecs, queries


class Filling:
    """
    Fills the empty layers of a cache from a file.

    Args:
        file: whose header is used; it is open where its tensors are to be mapped.
        saved: the layers in it.
        device: where the model computes; `None` for where it did.
        mmap: let keys and values be those of the file, not read.

    Attributes:
        targets: memory that is to be filled with tensors of the file, by name; those that are mapped have none.
    """

    # Whether a file has the rows of this process alone, where several share the cache.
    are_shards = False

    def __init__(
        self, file: TensorFile, saved: SavedLayers, device: torch.device | str | None = None, mmap: bool = False
    ):
        self._file, self._saved, self._device, self._mmap = file, saved, device, mmap
        self.targets: Targets = {}

    def place(self, index: int, layer: Any) -> Callable[[], None]:
        """
        Make memory for the states of a layer, as targets; return what gives them to the layer once they are filled.

        `ValueError` if they do not fit the layer, or each other.
        """
        saved, section = self._saved.layers[index], f"layers.{index}"
        target, layer = layer, stock_form(layer)
        if saved.type != type(layer).__name__:
            raise ValueError(f"layer {index} is a {saved.type} there and a {type(layer).__name__} here")
        if not isinstance(layer, HybridLayer):
            tensors = empty_tensors(self._file, section)
            self.targets.update(targets_of(section, tensors))

            def restore() -> None:
                self._restore(index, layer, saved.attributes or {}, tensors)
                if isinstance(target, WindowLayer):
                    target.take_stock(layer)

            return restore
        if saved.states is not None:
            return self._place_states(index, layer, saved.states)
        if self._file.tensors(section):
            raise ValueError(f"there are tensors of layer {index}, which is empty")
        return lambda: None

    def shares(self, index: int, part: str, name: str, form: TensorForm) -> list[tuple[Targets, slice]]:
        """Return by which targets which rows of a tensor are filled; `ValueError` if they have another form."""
        placed = self._file.tensors(f"layers.{index}").get(name)
        if placed is None or placed.form != form:
            raise ValueError(f"the tensor {name} is not {form.dtype} {list(form.shape)}")
        return [(self.targets, slice(None))]

    def _place_states(self, index: int, layer: HybridLayer, states: States) -> Callable[[], None]:
        """Make runs for the states of a layer of ours; return what puts them into its store."""
        entries, store = states.entries, layer.start(states.shape_on(self._device_of(states.device)))
        is_mappable = layer.is_attended_on_cpu and isinstance(store, Store) and not isinstance(store, ShardedStore)
        if self._mmap and not is_mappable:
            raise ValueError(
                "mmap=True is for layers that one process attends to on the CPU, all in host memory, and layer "
                f"{index} is not. Pass placement=Placement(cpu_decode=True) without device_tokens, or mmap=False"
            )
        packed = entries.get("packed", 0)
        store.layout.require_entries(entries.get("full", 0), packed)
        if packed and store.wants_queries:
            raise ValueError(f"layer {index} has {packed:,} quantized blocks, and no codec was chosen for them")
        if entries.keys() != (parts := store.entries()).keys():
            raise ValueError(f"layer {index} has {', '.join(entries)} instead of {', '.join(parts)}")
        if isinstance(store, ShardedStore):
            store.expect(entries)
        runs = [self._place_part(index, store, part, number) for part, number in entries.items()]
        if isinstance(store, ShardedStore):
            return lambda: None
        return lambda: store.take([Segment(run, 0, run.num_entries) for run in runs])

    def _place_part(self, index: int, store: OneSequence, part: str, num_entries: int) -> HostBlocks:
        """Make the run of a part of a store, and let its rows be targets."""
        names, are_kept = role_names(index, part), None
        host, is_made = store.run_for(part, num_entries), isinstance(store, ShardedStore)
        if isinstance(store, ShardedStore) and not self.are_shards:
            are_kept = store.own_rows(part)
        # Shapes are compared before memory is taken.
        forms = forms_of(host, host.num_entries if is_made and self.are_shards else num_entries)
        shares = [self.shares(index, part, *each) for each in zip(names, forms, strict=True)]
        if self._mmap:
            placed = self._file.tensors(f"layers.{index}")
            keys, values = (self._file.place_of(placed[each]) for each in names)
            if host.map_rows(self._file.fileno(), (keys, values), num_entries):
                return host
        if not is_made:
            host.make_rows(num_entries)
        for tensor, rows, of_targets in zip(names, host.rows(), shares, strict=True):
            for targets, used in of_targets:
                targets[tensor] = bytes_of(rows[used]) if are_kept is None else _rows(rows, are_kept)
        return host

    def _restore(
        self, index: int, layer: Any, attributes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Give a new layer of transformers' own what a saved one had; what it knows by its config stays as it is."""
        own, kind = dict(vars(layer)), type(layer)
        if missing := own.keys() - attributes.keys():
            raise ValueError(f"layer {index} lacks {', '.join(sorted(missing))}, which {kind.__name__} has here")
        for name, value in own.items():
            given = attributes[name]
            is_other = type(given) is not type(value) or (value and given != value)
            if type(value) in (bool, int, float, str) and is_other:
                raise ValueError(f"layer {index} has {name} {given!r} there and {value!r} here")
        try:
            for name, tree in attributes.items():
                # Some attributes come with the first states; none of them takes the place of a method, or of all.
                of_type = getattr(kind, name, None)
                if name not in own and (name[:2] == "__" or callable(of_type) or isinstance(of_type, property)):
                    raise ValueError(f"layer {index} has {name}, which is not an attribute of {kind.__name__} here")
                setattr(layer, name, self._from_json(tree, tensors))
        except torch.OutOfMemoryError:
            raise
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"layer {index} cannot be restored ({type(error).__name__}: {error})") from error

    def _from_json(self, tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "tensor" in tree:
            return tensors[tree["tensor"]].to(self._device_of(tree["device"]))
        if "dtype" in tree:
            return DTYPES[tree["dtype"]]
        if "device" in tree:
            return self._device_of(tree["device"])
        return {key: self._from_json(each, tensors) for key, each in tree["dict"]}

    def _device_of(self, saved: str) -> torch.device:
        """Return the device for what was on a device."""
        return _device(str(self._device or saved))


def _rows(kept: torch.Tensor, are_kept: Iterable[bool]) -> list[Row]:
    """Return memory for all rows of a file, of which some are kept; the others share theirs."""
    own, others = iter(kept), memoryview(bytearray(kept.shape[1:].numel() * kept.itemsize))
    return [Row(bytes_of(next(own)) if is_kept else others, is_kept) for is_kept in are_kept]


@cache
def _device(name: str) -> torch.device:
    """Return a device with its index, as the states of a model have it."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"there is no device {name} here; pass device='cpu', or the one of the model") from error
    if device.type == "meta":
        raise ValueError("a meta device holds no keys and values")
    return device
