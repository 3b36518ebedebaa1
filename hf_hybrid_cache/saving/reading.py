"""Reading the file of a saved cache, with all of it checked against checksums, the model and the layers."""

import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from transformers import PreTrainedConfig

from ..codecs import describe, described_codec
from ..layers import HybridLayer
from ..storage import BlockSegment, KVCodec, LayerStore, Layout, SeenQueries, Segment, ShardedStore
from .container import CHECKSUM_BYTES, HEADER_CHECKSUM, LENGTH_BYTES, Header, PlacedTensor, TensorForm, header_length
from .description import FORMAT, FULL, PACKED, TAILS, VERSION, CacheDescription, LayerDescription, States, named_dtype
from .devices import Devices
from .errors import CacheFileError
from .model_traits import differences, traits_of
from .plain_layers import restore
from .sections import (
    ROLES,
    TOKEN_IDS,
    codec_name,
    forms_of,
    forms_of_queries,
    index_name,
    layer_name,
    part_names,
    queries_name,
    queries_of,
)
from .token_prefix import first_difference
from .writing import bytes_of, checksum_of_header, pieces

# Room for the weights of hundreds of KV heads of 512.
_LARGEST_WEIGHTS = 2**30


class CacheFile:
    """
    The open file of a saved cache, whose header is whole and whose size is right. A context manager.

    Args:
        path: of the file.

    Attributes:
        description: of the cache.

    Raises:
        CacheFileError: it is not such a file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = path
        try:
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode):
                raise CacheFileError(path, "is a folder." if stat.S_ISDIR(mode) else "is not a regular file.")
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise CacheFileError(path, f"cannot be read: {error.strerror or error}.") from error
        try:
            self._num_bytes = os.fstat(self._file.fileno()).st_size
            self._read_header()
        except BaseException as error:
            self._file.close()
            if type(error) is ValueError:
                raise CacheFileError(path, str(error)) from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def require_model(self, config: PreTrainedConfig) -> None:
        """
        Check that the cache is of a model with this config, whose layers hold the same tokens.

        Raises:
            CacheFileError: it is not.
        """
        if different := differences(self.description.model, traits_of(config)):
            raise CacheFileError(self.path, f"is of another model: {'; '.join(different)}.")
        of_images = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
        self._require_same_tokens({index: each for index, each in self._states.items() if index not in of_images})

    @property
    def _states(self) -> dict[int, States]:
        """The states of our layers that hold any, by index."""
        layers = enumerate(self.description.layers)
        return {index: layer.states for index, layer in layers if layer.states is not None}

    def _require_same_tokens(self, states: Mapping[int, States]) -> None:
        """Check that layers, and the token ids, are of as many tokens: attention gets one mask for all layers."""
        if not states:
            return
        first, expected = next(iter(states.items()))
        for index, each in states.items():
            if (each.batch, each.num_tokens) != (expected.batch, expected.num_tokens):
                raise CacheFileError(
                    self.path,
                    f"does not describe a cache (layer {first} has {expected.num_tokens:,} tokens of "
                    f"{expected.batch:,} sequences, layer {index} has {each.num_tokens:,} of {each.batch:,}).",
                )
        placed = self._placed_token_ids()
        if placed is not None and placed.form.shape[-1:] != (expected.num_tokens,):
            raise CacheFileError(
                self.path,
                f"does not describe a cache (layer {first} has {expected.num_tokens:,} tokens, and there are ids of "
                f"{sum(placed.form.shape[-1:]):,}).",
            )

    def token_ids(self) -> torch.Tensor | None:
        """
        The token ids that were saved with the cache, `[batch, tokens]`, or `None`.

        Raises:
            CacheFileError: they were altered.
        """
        placed = self._placed_token_ids()
        if placed is None:
            return None
        if placed.form.dtype != torch.int32 or len(placed.form.shape) != 2:
            raise CacheFileError(self.path, "is not the file of a saved cache: its token ids are no rows of integers.")
        ids = _empty(placed.form)
        self._read_section(TOKEN_IDS, {TOKEN_IDS: ids})
        return ids.long()

    def require_prefix(self, token_ids: torch.Tensor) -> None:
        """
        Check that `token_ids`, `[batch, tokens]`, begin with those that were saved.

        Raises:
            CacheFileError: they do not, or none were saved.
        """
        saved = self.token_ids()
        if saved is None:
            raise CacheFileError(self.path, "has no token ids to compare with: save it with token_ids.")
        given = token_ids.to("cpu", torch.long)
        if given.dim() != 2 or given.shape[0] != saved.shape[0] or given.shape[1] < saved.shape[1]:
            raise CacheFileError(
                self.path, f"holds {list(saved.shape)} tokens, with which token_ids {list(given.shape)} cannot begin."
            )
        different = first_difference(saved, given[:, : saved.shape[1]])
        if different is not None:
            sequence, position = different
            raise CacheFileError(
                self.path,
                f"is of another text: token {position:,} of sequence {sequence} is {int(saved[sequence, position])} in "
                f"the file and {int(given[sequence, position])} in token_ids (counted from 0).",
            )

    def codecs(self) -> dict[int, KVCodec]:
        """
        Return the codecs of the saved layers, by index.

        Raises:
            CacheFileError: what was chosen of them was altered.
        """
        return {index: self._chosen(index, codec) for index, codec in self.description.codecs.items()}

    def _chosen(self, index: int, codec: KVCodec) -> KVCodec:
        name = codec_name(index)
        placed = [tensor for tensor in self._header.section(name) if not tensor.is_padding]
        if not placed:
            return codec
        try:
            names = {f"{name}/{role}" for role in ROLES}
            if not codec.is_fitted or any(
                each.name not in names or each.form.dtype != torch.float32 or each.form.num_bytes > _LARGEST_WEIGHTS
                for each in placed
            ):
                raise ValueError("these are no weights of a codec")
            tensors = {tensor.name: _empty(tensor.form) for tensor in placed}
            self._read_section(name, tensors)
            weights = {key.partition("/")[2]: tensor for key, tensor in tensors.items()}
            return described_codec(describe(codec), weights)
        except CacheFileError:
            raise
        except (ValueError, TypeError) as error:
            raise CacheFileError(self.path, f"does not describe a cache ({name}: {error}).") from error

    def seen_queries(self) -> dict[int, SeenQueries]:
        """
        Return the queries by which codecs are still to be chosen, by layer; older files have none.

        Raises:
            CacheFileError: they were altered, or are none.
        """
        indices = self.description.codecs
        return {index: self._seen(index) for index in indices if self._header.section(queries_name(index))}

    def _seen(self, index: int) -> SeenQueries:
        name, states = queries_name(index), self.description.layers[index].states
        try:
            if states is None or self.description.codecs[index].is_fitted:
                raise ValueError("no codec is to be chosen by them")
            forms = forms_of_queries(index, states.num_kv_heads, states.key_dim)
            placed = self._placed(list(forms), list(forms.values()))
            tensors = {tensor.name: _empty(tensor.form) for tensor in placed}
            self._read_section(name, tensors)
            return queries_of(index, tensors)
        except CacheFileError:
            raise
        except ValueError as error:
            raise CacheFileError(self.path, f"does not describe a cache ({name}: {error}).") from error

    def conversion(self, asked_for: torch.dtype | None, expected: torch.dtype | None, mmap: bool) -> torch.dtype | None:
        """
        Return the dtype to convert the saved states to; `None` to leave them as they are.

        Args:
            asked_for: that type, if it was.
            expected: of the model, if it is known.
            mmap: whether keys and values are to be those of the file.

        Raises:
            CacheFileError: the model is of a type that would lose some of what was saved, or conversion and `mmap` are
                both needed.
        """
        wanted = asked_for or expected
        saved = next((layer.states for layer in self.description.layers if layer.states), None)
        if saved is None or wanted is None or named_dtype(saved.key_dtype) == wanted:
            return None
        held, name = named_dtype(saved.key_dtype), str(wanted).removeprefix("torch.")
        what = f"holds keys and values in {saved.key_dtype}, and the model is in {name}"
        if asked_for is None and torch.promote_types(held, wanted) != wanted:
            raise CacheFileError(
                self.path,
                f"{what}: load the model with dtype=torch.{saved.key_dtype}, or pass dtype=torch.{name} to convert "
                f"them, which loses some of what they hold. If the model is in {saved.key_dtype} after all, pass that.",
            )
        if mmap:
            raise CacheFileError(self.path, f"{what}, so it has to be converted and cannot be mapped. Pass mmap=False.")
        return wanted

    def fill(self, layers: Sequence[Any], device: torch.device | str | None, mmap: bool, verify: bool) -> None:
        """
        Put the saved states into the new layers of a cache for the same model.

        Args:
            layers: all of them, empty.
            device: where the model computes; `None` for where it did.
            mmap: let keys and values be those of the file, not read.
            verify: compare layers with their checksums.

        Raises:
            CacheFileError: the layers are others, a checksum is wrong, or `mmap` with layers that are not attended to
                on the CPU.
            HostMemoryError: the host has no room.
        """
        devices = Devices(device)
        try:
            self._require_layers([type(layer).__name__ for layer in layers])
            for index, (layer, saved) in enumerate(zip(layers, self.description.layers, strict=True)):
                if not isinstance(layer, HybridLayer):
                    self._fill_plain(index, layer, saved, devices, verify)
                elif saved.states is not None:
                    self._fill_ours(index, layer, saved, devices, mmap, verify)
                elif self._header.section(layer_name(index)):
                    raise ValueError(f"there are tensors of layer {index}, which is empty")
            self.token_ids()
        except CacheFileError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise CacheFileError(self.path, f"cannot be loaded: {error}.") from error

    def _fill_plain(self, index: int, layer: Any, saved: LayerDescription, devices: Devices, verify: bool) -> None:
        name = layer_name(index)
        placed = [tensor for tensor in self._header.section(name) if not tensor.is_padding]
        tensors = {tensor.name: _empty(tensor.form) for tensor in placed}
        self._read_section(name, tensors, verify=verify)
        by_name = {key.partition("/")[2]: tensor for key, tensor in tensors.items()}
        try:
            restore(layer, saved.attributes or {}, by_name, devices)
        except ValueError as error:
            raise ValueError(
                f"layer {index} {error}; it was saved with transformers {self.description.transformers_version}"
            ) from error

    def _fill_ours(
        self, index: int, layer: HybridLayer, saved: LayerDescription, devices: Devices, mmap: bool, verify: bool
    ) -> None:
        assert saved.states is not None
        store = layer.start(saved.states.shape_on(devices))
        if isinstance(store, ShardedStore):
            self._fill_share(index, store, saved.states.entries, mmap, verify)
            return
        if mmap and not layer.is_attended_on_cpu:
            raise ValueError(
                f"mmap=True is for layers that are attended to on the CPU, and layer {index} is not. Pass "
                "placement=Placement(cpu_decode=True), or mmap=False"
            )
        if mmap and store.layout.device_tokens:
            raise ValueError(
                f"mmap=True leaves a layer where it is in the file, and of layer {index} some tokens are to be on the "
                "device. Pass a placement without device_tokens, or mmap=False"
            )
        stores = {"": store}
        if saved.states.is_shared:
            stores[TAILS] = layer.make_tails(saved.states.batch)
        name, entries = layer_name(index), saved.states.entries
        parts = {f"{prefix}{name}": part for prefix, each in stores.items() for name, part in each.parts().items()}
        if parts.keys() != entries.keys():
            raise ValueError(f"layer {index} has {', '.join(entries)} instead of {', '.join(parts)}")
        in_part = layer.always_chooses and len(self._header.section(index_name(index))) > 0
        rows: dict[str, torch.Tensor] = {}
        mapped: set[str] = set()
        filled: dict[str, Segment] = {}
        for part, empty in parts.items():
            names = part_names(name, part)
            host = empty.own_segment or BlockSegment.like(empty.form, entries[part])
            filled[part] = host
            placed = self._placed(names, forms_of(host, entries[part]))
            offsets = placed[0].start + self._data_start, placed[1].start + self._data_start
            if mmap and host.map_rows(self._file.fileno(), offsets, entries[part], in_part):
                mapped.update(names)
            else:
                host.make_rows(entries[part])
            rows |= dict(zip(names, host.rows(), strict=True))
        self._read_section(name, rows, mapped, verify)
        for prefix, each in stores.items():
            each.take_parts({name: filled[f"{prefix}{name}"] for name in each.parts()})
        self._fill_index(index, layer, store, mmap, verify)
        if saved.states.is_shared:
            layer.continue_with(stores[TAILS])

    def _fill_index(self, index: int, layer: HybridLayer, store: LayerStore, mmap: bool, verify: bool) -> None:
        """Fill a layer's key index, if the file has one and it is needed; the keys give it otherwise."""
        name, of_keys = index_name(index), layer.index
        placed = [tensor for tensor in self._header.section(name) if not tensor.is_padding]
        if of_keys is None or not placed or store.on_device is not None:
            if verify:  # every byte of a file is looked at
                self._read_section(name, {tensor.name: _empty(tensor.form) for tensor in placed})
            return
        placed = self._placed([name], [TensorForm(torch.uint8, tuple(of_keys.form(store)))])
        is_mapped = mmap and of_keys.map_rows(store, self._file.fileno(), placed[0].start + self._data_start)
        rows = of_keys.rows(store) if is_mapped else of_keys.make_rows(store)
        self._read_section(name, {name: rows}, {name} if is_mapped else set(), verify)

    def _fill_share(
        self, index: int, store: ShardedStore, entries: Mapping[str, int], mmap: bool, verify: bool
    ) -> None:
        if mmap:
            raise ValueError("mmap=True lets the cache be a whole file, and group= keeps a share. Pass mmap=False")
        if any(part.startswith(TAILS) for part in entries):
            raise ValueError(
                "several sequences continue one prompt there, which processes cannot share out. Load it without group="
            )
        store.expect(entries)
        name = layer_name(index)
        rows: dict[str, OwnRows] = {}
        for part, of_part in store.shared_parts().items():
            names = part_names(name, part)
            self._placed(names, forms_of(of_part.segment, of_part.entries))
            own = store.own_rows(of_part)
            rows |= {each: OwnRows(states, own) for each, states in zip(names, of_part.segment.rows(), strict=True)}
        self._read_section(name, rows, verify=verify)

    def _read_header(self) -> None:
        start = self._read(0, min(LENGTH_BYTES, self._num_bytes))
        length = header_length(start, self._num_bytes)
        self._data_start = LENGTH_BYTES + length
        text = self._read(LENGTH_BYTES, length)
        self._header = header = Header.from_bytes(text)
        metadata = header.metadata
        if metadata.get("format") != FORMAT:
            raise ValueError("is a safetensors file, but not of a saved cache.")
        if metadata.get("format_version") != VERSION:
            raise ValueError(
                f"has format version {metadata.get('format_version')!r}, and this version of hf_hybrid_cache reads "
                f"{VERSION}. Use the version that wrote it, or save the cache again."
            )
        missing = self._data_start + header.num_data_bytes - self._num_bytes
        if missing:
            what = "is cut off: {:,} bytes are missing." if missing > 0 else "has {:,} bytes more than its header says."
            raise ValueError(what.format(abs(missing)))
        checksum = self._read(max(0, self._num_bytes - CHECKSUM_BYTES), CHECKSUM_BYTES)
        names = [tensor.name for tensor in header.tensors]
        if names[-1:] != [HEADER_CHECKSUM] or checksum != checksum_of_header(start + text):
            raise ValueError("was altered: its header does not fit its checksum.")
        try:
            self.description = CacheDescription.from_json(metadata.get("cache", ""))
        except ValueError as error:
            raise ValueError(f"does not describe a cache ({error}).") from error
        self._require_sections()
        self._require_entries()
        self._require_document()

    def _require_sections(self) -> None:
        known = {layer_name(index) for index in range(len(self.description.layers))} | {TOKEN_IDS, HEADER_CHECKSUM}
        known |= {name(index) for index in self.description.codecs for name in (codec_name, queries_name)}
        known |= {index_name(index) for index in range(len(self.description.layers))}
        if unknown := {tensor.section for tensor in self._header.tensors} - known:
            raise ValueError(f"does not describe a cache (it has tensors of {', '.join(map(repr, sorted(unknown)))}).")

    def _require_entries(self) -> None:
        for index, states in self._states.items():
            codec, entries = self.description.codecs.get(index), states.entries
            sinks = Layout(0 if codec is None else codec.sink_tokens)
            try:
                sinks.require_entries(entries.get(FULL, 0), entries.get(PACKED, 0))
            except ValueError as error:
                raise ValueError(f"does not describe a cache (layer {index}: {error}).") from error

    def _placed_token_ids(self) -> PlacedTensor | None:
        return next((tensor for tensor in self._header.tensors if tensor.name == TOKEN_IDS), None)

    def _require_document(self) -> None:
        document_tokens, placed = self.description.document_tokens, self._placed_token_ids()
        shape = () if placed is None else placed.form.shape
        num_tokens = shape[-1] if shape else 0
        if document_tokens is not None and not 0 < document_tokens <= num_tokens:
            raise ValueError(
                f"does not describe a cache (its document has {document_tokens:,} tokens, the file {num_tokens:,})."
            )

    def _require_layers(self, types: list[str]) -> None:
        saved = [layer.type for layer in self.description.layers]
        if len(saved) != len(types):
            raise ValueError(f"it has {len(saved)} layers and the model {len(types)}")
        for index, pair in enumerate(zip(saved, types, strict=True)):
            if pair[0] != pair[1]:
                raise ValueError(f"layer {index} is a {pair[0]} there and a {pair[1]} here")

    def _placed(self, names: Sequence[str], forms: Sequence[TensorForm]) -> list[PlacedTensor]:
        """Return the tensors of these names, which must have these dtypes and shapes."""
        by_name = {tensor.name: tensor for tensor in self._header.tensors}
        for name, form in zip(names, forms, strict=True):
            if name not in by_name or by_name[name].form != form:
                raise ValueError(f"the tensor {name} is not {form.dtype} {list(form.shape)}")
        return [by_name[name] for name in names]

    def _read_section(
        self,
        section: str,
        tensors: "Mapping[str, torch.Tensor | OwnRows]",
        mapped: set[str] | frozenset[str] = frozenset(),
        verify: bool = True,
    ) -> None:
        """Read the tensors of a section, except for those that are mapped, and compare them with its checksum."""
        checksum = 0
        for placed in self._header.section(section):
            target = tensors.get(placed.name)
            self._file.seek(self._data_start + placed.start)
            if isinstance(target, OwnRows):
                for row in target.in_order():
                    if row.is_own or verify:
                        self._read_into(row.data)
                        checksum = zlib.crc32(row.data, checksum) if verify else 0
                    else:
                        self._file.seek(len(row.data), os.SEEK_CUR)
                continue
            if placed.is_padding:
                data = memoryview(bytearray(placed.form.num_bytes))
            elif target is not None:
                data = bytes_of(target)
            else:
                raise ValueError(f"nothing is known of the tensor {placed.name!r}")
            for piece in pieces(data):
                if placed.name not in mapped:
                    self._read_into(piece)
                if verify:
                    checksum = zlib.crc32(piece, checksum)
        if verify and self._header.metadata.get(f"checksum {section}", f"{0:08x}") != f"{checksum:08x}":
            raise CacheFileError(self.path, f"was altered: {section} does not fit its checksum.")

    def _read(self, start: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._file.seek(start)
        self._read_into(memoryview(data))
        return bytes(data)

    def _read_into(self, data: memoryview) -> None:
        while len(data):
            try:
                count = self._file.readinto(data)
            except OSError as error:
                raise CacheFileError(self.path, f"cannot be read: {error.strerror or error}.") from error
            if not count:
                raise CacheFileError(self.path, "is cut off: it became shorter while it was read.")
            data = data[count:]


def saved_token_ids(path: str | os.PathLike[str]) -> torch.Tensor | None:
    """
    The token ids that were saved with a cache, `[batch, tokens]`; `None` if there are none.

    Raises:
        CacheFileError: `path` is not the whole and unaltered file of a cache.
    """
    with CacheFile(path) as file:
        return file.token_ids()


class Row(NamedTuple):
    """A row of a tensor in a file, and whether it is kept."""

    data: memoryview
    is_own: bool


@dataclass(frozen=True)
class OwnRows:
    """
    The rows of a tensor in a file that are kept.

    Attributes:
        kept: in memory, in the order of the file.
        is_own: of all rows of the file, whether it is kept.
    """

    kept: torch.Tensor
    is_own: Sequence[bool]

    def in_order(self) -> Iterator[Row]:
        """Yield memory for each row of the file; rows that are not kept share theirs."""
        kept = iter(self.kept)
        others = memoryview(bytearray(self.kept.shape[1:].numel() * self.kept.itemsize))
        for is_own in self.is_own:
            yield Row(bytes_of(next(kept)) if is_own else others, is_own)


def _empty(form: TensorForm) -> torch.Tensor:
    # Inference tensors could not be written to outside inference mode later on.
    with torch.inference_mode(False):
        return torch.empty(form.shape, dtype=form.dtype)
