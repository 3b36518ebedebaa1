"""Writing the file of a saved cache, completely or not at all, each layer from its place."""

import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers

from .._version import __version__
from ..durable_files import file_status, replaced_when_whole
from ..layers import LayerStores
from ..processes import Peers
from .container import ALIGNMENT, CHECKSUM_BYTES, Header
from .description import FORMAT, VERSION, CacheDescription
from .errors import CacheFileError
from .round_robin import RoundRobin
from .sections import (
    Section,
    codec_section,
    described_layer,
    index_section,
    queries_section,
    section_of,
    token_section,
)

PIECE_BYTES = 4 * 2**20
_NO_CHECKSUM = f"{0:08x}"


def save_layers(
    path: str | os.PathLike[str],
    layers: Sequence[Any],
    stores: LayerStores,
    model: dict[str, Any],
    token_ids: torch.Tensor | None,
    document_tokens: int | None,
) -> None:
    """
    Write a cache's layers to `path`.

    Args:
        path: what is there is replaced once the new file is complete.
        layers: all of the cache.
        stores: that the cache's layers are made with.
        model: traits of the model.
        token_ids: whose states these are, `[batch, tokens]`, if they are to be kept.
        document_tokens: how many of them are those of a document at the start, if that is to be kept.

    Raises:
        CacheFileError: it cannot be written, or a layer holds what cannot be saved; what was there is there still.
        HostMemoryError: the copy of one layer, which one on a device needs, does not fit the host.
    """
    try:
        described = tuple(described_layer(layer) for layer in layers)
        description = CacheDescription(
            __version__,
            transformers.__version__,
            model,
            stores.placement,
            stores.capacity.device_tokens,
            stores.codecs,
            described,
            document_tokens,
            stores.sees_as_alone,
        )
        indices = [index_section(index, layer) for index, layer in enumerate(layers)]
        found = [section for section in indices if section is not None]
        metadata = {"format": FORMAT, "format_version": VERSION, "cache": description.to_json()}
        sections = [codec_section(index, codec) for index, codec in stores.codecs.items()]
        seen_queries = stores.seen_queries.items()
        sections += [queries_section(index, seen) for index, seen in seen_queries if described[index].states]
        sections += [section_of(index, layer) for index, layer in enumerate(layers)] + found
    except ValueError as error:
        raise CacheFileError(path, f"was not written: {error}") from error
    if token_ids is not None:
        sections.insert(0, token_section(token_ids))
    sections = [section for section in sections if section.forms]
    if stores.peers is None:
        write(Path(path), metadata, sections)
    else:
        write_together(stores.peers, Path(path), metadata, sections)


def write_together(peers: Peers, path: Path, metadata: dict[str, str], sections: Sequence[Section]) -> None:
    """
    Write the layers of all processes of a group: the first one writes, and the others make the pieces with it.

    Raises:
        CacheFileError: it cannot be written, in all processes; what was there is there still.
        OutOfStepError: the processes hold different caches.
    """
    turns = RoundRobin(peers, path)
    turns.require_same(sections)
    in_turns = [replace(section, pieces=turns.before_each(section.pieces)) for section in sections]
    if peers.rank == 0:
        try:
            write(path, metadata, in_turns)
        except BaseException:
            if not turns.is_taking_one:
                turns.take(is_good=False)
            raise
    else:
        for section in in_turns:
            for tensor in section.pieces():
                for _ in tensor:
                    pass
    turns.take()


def write(path: Path, metadata: dict[str, str], sections: Sequence[Section]) -> None:
    """Write a file of these sections, with their checksums in the metadata, and the header's at the end."""
    checksums = dict.fromkeys((section.name for section in sections), _NO_CHECKSUM)
    forms = {name: form for section in sections for name, form in section.forms.items()}
    header = Header.of(with_checksums(metadata, checksums), forms)
    start = header.to_bytes()
    with _opened_with_room(path, len(start) + header.num_data_bytes) as file:
        file.write(start)
        for section in sections:
            checksums[section.name] = _write_section(file, section)
        # The new header is as long as the old one, because all checksums are.
        start = Header(with_checksums(metadata, checksums), header.tensors).to_bytes()
        file.write(checksum_of_header(start))
        file.seek(0)
        file.write(start)


def with_checksums(metadata: dict[str, str], checksums: dict[str, str]) -> dict[str, str]:
    return {**metadata, **{f"checksum {section}": checksum for section, checksum in checksums.items()}}


def checksum_of_header(start: bytes) -> bytes:
    """Compute the checksum of everything before the tensors."""
    return zlib.crc32(start).to_bytes(CHECKSUM_BYTES, "little")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor in host memory, or of a copy if it is not contiguous."""
    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def pieces(data: memoryview) -> Iterator[memoryview]:
    """Yield pieces of a few MiB, which stay in the processor's cache while they are summed up and copied."""
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


def _write_section(file: BinaryIO, section: Section) -> str:
    """
    Write the tensors and their padding; return their checksum.

    CRC-32 finds every change of up to 32 bits in a row, and of others all but one in four billions. It is no help
    against forgery, and two to three times as fast as SHA-256 and BLAKE2.
    """
    checksum = 0
    for tensor in section.pieces():
        num_bytes = 0
        for part in tensor:
            data = bytes_of(part)
            num_bytes += len(data)
            for piece in pieces(data):
                checksum = zlib.crc32(piece, checksum)
                file.write(piece)
        filling = bytes(-num_bytes % ALIGNMENT)
        checksum = zlib.crc32(filling, checksum)
        file.write(filling)
    return f"{checksum:08x}"


def require_place(path: Path) -> Path:
    """
    Check the path before any data is made.

    Returns:
        The path of the file that is written, to which links lead.

    Raises:
        CacheFileError: there is no such folder, or nothing can be written there, or no file can have that name.
    """
    try:
        file_status(path)
        file = Path(os.path.realpath(path))
        has_folder = file.parent.is_dir()
    except IsADirectoryError as error:
        raise CacheFileError(path, "was not written: it is a folder. Give the name of a file.") from error
    except NotADirectoryError:
        file, has_folder = path, False
    except (OSError, ValueError) as error:  # a name too long, a zero in it, a device
        raise CacheFileError(path, f"was not written: {getattr(error, 'strerror', None) or error}.") from error
    folder = file.parent if path.is_symlink() else path.parent  # as it was given, where that names it
    if not has_folder:
        raise CacheFileError(path, f"was not written: there is no folder {folder}. Make it first.")
    if not os.access(folder, os.W_OK):
        raise CacheFileError(path, f"was not written: you may not write to the folder {folder}.")
    return file


@contextmanager
def _opened_with_room(path: Path, num_bytes: int) -> Iterator[BinaryIO]:
    """Open a file of this size for writing, which replaces `path` when it is complete and on the disk."""
    folder = require_place(path).parent
    try:
        free = shutil.disk_usage(folder).free
        if num_bytes > free:
            raise CacheFileError(
                path,
                f"was not written: it needs {num_bytes / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free there. "
                "Free some, use another disk, or a QuantizedHybridCache.",
            )
        with replaced_when_whole(path) as file:
            yield file
    except OSError as error:
        raise CacheFileError(path, f"was not written: {error.strerror or error}.") from error
