"""The file of a saved cache: written completely or not at all, and checked before and while it is read."""

import os
import shutil
import stat
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ..codecs import describe
from ..layers import HybridLayer, LayerStores, stock_form
from ..processes import Agreement
from ..system.durable_files import replaced_when_whole
from .description import CacheDescription
from .filling import Filling, empty_tensors, read_codecs, targets_of
from .layers import codec_section, described_layer, layer_section, tensor_section
from .tensor_file import CacheFileError, NewFile, Section, TensorFile

_FORMAT = "hf_hybrid_cache"
_VERSION = "8"


def save_layers(
    path: str | os.PathLike[str],
    layers: Sequence[Any],
    stores: LayerStores,
    model: dict[str, Any],
    token_ids: torch.Tensor | None,
    document_tokens: int | None,
) -> None:
    """Write a cache's layers to a file; processes that share them do so together. See `HybridCache.save` for errors."""
    ids = {} if token_ids is None else {"ids": token_ids.to("cpu", torch.int32)}
    layers = [stock_form(layer) for layer in layers]
    try:
        description = CacheDescription(
            layers=tuple(described_layer(layer) for layer in layers),
            codecs={index: describe(codec) for index, codec in stores.codecs.items()},
            transformers_version=transformers.__version__,
            model=model,
            placement=stores.placement,
            max_length=stores.capacity.device_tokens,
            document_tokens=document_tokens,
        )
        metadata = {"format": _FORMAT, "format_version": _VERSION, "cache": description.to_json()}
        sections = [tensor_section("token_ids", ids), *(codec_section(index, stores) for index in stores.codecs)]
        sections += [layer_section(index, layer) for index, layer in enumerate(layers)]
    except ValueError as error:
        raise CacheFileError(path, f"was not written: {error}") from error
    agreement = Agreement(
        stores.peers, lambda rank: CacheFileError(path, f"was not written: rank {rank} could not, and says why.")
    )
    if stores.peers is not None:
        agreement.same(lambda: sections, _checksum_of)
    sections = [_made_together(section, agreement) for section in sections if section.forms]
    is_writer = stores.peers is None or stores.peers.rank == 0
    agreement.together(lambda: _write(Path(path), NewFile(metadata, sections)) if is_writer else _make_all(sections))


def saved_token_ids(path: str | os.PathLike[str]) -> torch.Tensor | None:
    """
    The token ids that were saved with a cache, `[batch, tokens]`; `None` if there are none.

    Raises:
        CacheFileError: `path` is not the whole and unaltered file of a cache.
    """
    with CacheFile(path) as file:
        return file.token_ids


class CacheFile(TensorFile):
    """
    The open file of a saved cache, of which all but the layers is read; `CacheFileError` if it is none.

    Attributes:
        description: of the cache.
        codecs: of the saved layers, by index.
        seen_queries: those by which others are still to be chosen, by index.
        token_ids: that were saved with the cache, `[batch, tokens]`, or `None`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise CacheFileError(path, "is not a regular file.")
            super().__init__(path, open(path, "rb", buffering=0))  # noqa: SIM115
        except OSError as error:
            raise CacheFileError(path, f"cannot be read: {error.strerror or error}.") from error
        try:
            self._read_description()
        except BaseException as error:
            self.__exit__()
            if type(error) is ValueError:
                raise CacheFileError(path, f"does not describe a cache ({error}).") from error
            raise

    def fill(self, layers: Sequence[Any], device: torch.device | str | None, mmap: bool, verify: bool) -> None:
        """Put the saved states into the new layers of a cache for the same model; see `HybridCache.load` for errors."""
        num_saved = len(self.description.layers)
        if num_saved != len(layers):
            raise CacheFileError(self.path, f"cannot be loaded: it has {num_saved} layers, the model {len(layers)}.")
        for index, layer in enumerate(layers):
            try:
                # Memory that is not the layer's own is given back before the next one.
                filling = Filling(self, self.description, device, mmap)
                take = filling.place(index, layer)
                self.read(f"layers.{index}", filling.targets, verify)
                take()
                del filling, take
            except CacheFileError:
                raise
            except ValueError as error:
                version = self.description.transformers_version
                origin = "" if isinstance(layer, HybridLayer) else f"; it was saved with transformers {version}"
                raise CacheFileError(self.path, f"cannot be loaded: {error}{origin}.") from error

    def _read_description(self) -> None:
        """Read all but the layers; `ValueError` if it does not describe a cache."""
        version = self.metadata.get("format_version")
        if self.metadata.get("format") != _FORMAT:
            raise CacheFileError(self.path, "is a safetensors file, but not of a saved cache.")
        if version != _VERSION:
            raise CacheFileError(
                self.path,
                f"has format version {version!r}, and this version of hf_hybrid_cache reads {_VERSION}. Use the "
                "version that wrote it, or save the cache again.",
            )
        self.description = described = CacheDescription.from_json(self.metadata.get("cache", ""))
        known = {"token_ids", *(f"layers.{index}" for index in range(len(described.layers)))}
        known |= {f"codecs.{index}" for index in described.codecs}
        if unknown := self.sections.keys() - known:
            raise ValueError(f"it has tensors of {', '.join(map(repr, sorted(unknown)))}")
        self.codecs, self.seen_queries = read_codecs(self, described)
        tensors = empty_tensors(self, "token_ids")
        self.read("token_ids", targets_of("token_ids", tensors))
        ids = tensors.get("ids")
        if tensors and (ids is None or ids.dtype != torch.int32 or ids.dim() != 2):
            raise ValueError("its token ids are no rows of integers")
        self.token_ids = None if ids is None else ids.long()
        document, num_ids = described.document_tokens, 0 if ids is None else ids.shape[1]
        if document is not None and not 0 < document <= num_ids:
            raise ValueError(f"its document has {document:,} tokens, the file {num_ids:,}")


def _checksum_of(sections: Sequence[Section]) -> int:
    """Return a number that tells how much processes hold, and how it is quantized."""
    checksum = zlib.crc32(repr([(section.name, list(section.forms.items())) for section in sections]).encode())
    for section in sections:
        if section.name.startswith("codecs."):
            checksum = zlib.crc32(b"".join(piece for tensor in section.data() for piece in tensor), checksum)
    return checksum


def _made_together(section: Section, agreement: Agreement) -> Section:
    """Return a section whose pieces all processes make at once."""
    return replace(section, data=lambda: (agreement.in_turns(tensor) for tensor in section.data()))


def _make_all(sections: Sequence[Section]) -> None:
    """Make all pieces with the process that writes them."""
    for section in sections:
        for tensor in section.data():
            for _ in tensor:
                pass


def _write(path: Path, new: NewFile) -> None:
    """Write a file, which replaces `path` when it is complete and on the disk."""
    try:
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            raise CacheFileError(path, f"was not written: there is no folder {folder}. Make it first.")
        free = shutil.disk_usage(folder).free
        if new.num_bytes > free:
            raise CacheFileError(
                path,
                f"was not written: it needs {new.num_bytes / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free there. "
                "Free some, use another disk, or a QuantizedHybridCache.",
            )
        with replaced_when_whole(path) as file:
            new.write(file)
    except OSError as error:
        raise CacheFileError(path, f"was not written: {error.strerror or error}.") from error
