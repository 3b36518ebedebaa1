"""A search looks at an index that is read once, and at the files of the nodes on its way."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache.prefix_folder import NodeNotFoundError, files, folder, index_file, node_file, node_folder
from hf_hybrid_cache.prefix_folder.index_file import IndexFile
from hf_hybrid_cache.prefix_folder.node_file import NO_PARENT, NodeHead, write_node
from hf_hybrid_cache.prefix_folder.tokens import as_bytes, block_digests, node_id
from hf_hybrid_cache.prefix_folder.tree import Node

from prefix_folder.stored import BLOCK, IDENTITY, keep, num_found, open_folder


class Opened(list[Path]):
    """The files that the store opens, as they are opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()

        def open_file(path: Path, *mode: str) -> Any:
            self.append(path)
            return files.open_file(path, *mode)

        for module in (folder, index_file, node_file, node_folder):
            monkeypatch.setattr(module, "open_file", open_file)


def synthetic_nodes(number: int) -> list[Node]:
    """Nodes without files, which all begin with the same 30 tokens."""
    blocks = [as_bytes([*range(30), each, *range(33)]) for each in range(1000, 1000 + number)]
    digests = [block_digests(IDENTITY, block) for block in blocks]
    return [
        Node(node_id(NO_PARENT, 0, end, b""), NO_PARENT, prefix, end, 0, BLOCK, 4096, block)
        for (prefix, end), block in zip(digests, blocks, strict=True)
    ]


def test_long_prompt_among_many_nodes_when_found_then_few_files_are_opened(path: Path, monkeypatch: pytest.MonkeyPatch):
    prompt = tuple(each % 1000 for each in range(131_072))
    keep(open_folder(path), prompt[:100_000])
    keep(open_folder(path), prompt)
    index = IndexFile(path / "index")
    index.read()
    index.replace([*synthetic_nodes(10_000), *index.tree.nodes.values()], path / "unfinished" / "0")
    user = open_folder(path)
    opened = Opened(monkeypatch)
    for whole_nodes in (False, True):
        with user.find(IDENTITY, prompt, whole_nodes) as match:
            assert match.num_tokens == 131_072
        # The index, the two nodes, and the last one once more to hold it.
        assert len(opened) == 4
        opened.clear()
    # Beside the prompt there are 10,000 nodes with 30 common tokens, whose files are missing; the prompt has 100,000.
    with user.find(IDENTITY, (*prompt[:40], 7)) as match:
        assert match.num_tokens == 40
    assert len(opened) == 3


def test_nodes_that_leave_a_prompt_before_its_end_are_not_read(path: Path, monkeypatch: pytest.MonkeyPatch):
    user, prompt = open_folder(path), tuple(range(100))
    keep(user, prompt)
    for number in range(20):
        keep(user, (*prompt[:74], 1000 + number))
    opened = Opened(monkeypatch)
    with user.find(IDENTITY, prompt) as match:
        assert match.num_tokens == 100
    assert len(opened) == 3


def test_index_when_another_user_adds_then_only_what_is_new_is_read(path: Path, monkeypatch: pytest.MonkeyPatch):
    one, other = open_folder(path), open_folder(path)
    for number in range(50):
        keep(one, (number,) * 10)
    num_found(other, (1,))
    lengths: list[int] = []

    def read_all(file: Any, num_bytes: int) -> bytes:
        lengths.append(num_bytes)
        return files.read_all(file, num_bytes)

    monkeypatch.setattr(index_file, "read_all", read_all)
    keep(one, (1000,) * 10)
    lengths.clear()
    assert num_found(other, (1000,)) == 1
    assert sum(lengths) < 500


def test_index_when_most_of_it_went_then_is_written_anew(path: Path):
    one, other = open_folder(path), open_folder(path)
    index = path / "index"
    keep(one, (0,))
    keep(one, (5,) * 70)
    num_found(other, (0,))
    largest = 0
    for _ in range(300):
        keep(one, (1,))
        one.remove(next(entry.id for entry in one.entries() if entry.num_tokens == 1 and num_is(one, entry.id, 1)))
        largest = max(largest, index.stat().st_size)
    assert index.stat().st_size < largest < 300 * 2 * 381
    assert num_found(other, (0,)) == 1
    assert num_found(other, (1,)) == 0
    assert num_found(other, (5,) * 70) == 70


def num_is(user: Any, own_id: bytes, token: int) -> bool:
    with user.find(IDENTITY, (token,)) as match:
        return bool(match.parts and match.parts[-1].file.head.id == own_id)


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def altered(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


@pytest.mark.parametrize("harm", [cut, altered, lambda content: b"", lambda content: b"x" * 1000, None])
def test_index_when_damaged_or_lost_then_is_made_again(harm: Callable[[bytes], bytes] | None, path: Path):
    known = open_folder(path)
    prompts = [(*range(number, number + 200), *range(number)) for number in range(5)]
    for tokens in prompts:
        keep(known, tokens)
    index = path / "index"
    if harm is None:
        index.unlink()
    else:
        index.write_bytes(harm(index.read_bytes()))
    for user in (open_folder(path), known):
        assert [num_found(user, tokens) for tokens in prompts] == [len(tokens) for tokens in prompts]
    assert known.damages() == {}


@pytest.mark.parametrize("harm", [cut, lambda content: b"", lambda content: b"x" * 1000])
def test_index_when_damaged_then_who_knew_it_makes_it_again(harm: Callable[[bytes], bytes], path: Path):
    known, index = open_folder(path), path / "index"
    for number in range(2):
        keep(known, (number,) * 100)
    index.write_bytes(harm(index.read_bytes()))
    assert num_found(known, (1,) * 100) == 100
    again = IndexFile(index)
    again.read()
    assert len(again.tree.nodes) == 2


@pytest.mark.parametrize(
    ("at", "has_checksum"), [(0, False), (16, False), (20, False), (36, False), (0, True), (16, True)]
)
def test_index_when_its_header_is_another_then_is_made_again(at: int, has_checksum: bool, path: Path):
    keep(open_folder(path), (1,) * 100)
    content = bytearray((path / "index").read_bytes())
    content[at] ^= 1
    if has_checksum:
        content[36:40] = zlib.crc32(content[:36]).to_bytes(4, "little")
    (path / "index").write_bytes(content)
    assert num_found(open_folder(path), (1,) * 100) == 100
    assert (path / "index").read_bytes() != content


def test_index_when_written_anew_then_is_gone_on_with(path: Path):
    open_folder(path)
    index, nodes = IndexFile(path / "index"), synthetic_nodes(3)
    index.read()
    index.replace(nodes[:2], path / "unfinished" / "0")
    index.add(nodes[2])
    late = IndexFile(path / "index")
    late.read()
    assert list(late.tree.nodes.values()) == list(index.tree.nodes.values()) == nodes


def test_node_when_the_index_lacks_the_one_before_it_then_is_not_found(path: Path):
    user, prompt = open_folder(path), tuple(range(200))
    for end in (100, 200):
        keep(user, prompt[:end])
    index = IndexFile(path / "index")
    index.read()
    index.replace([node for node in index.tree.nodes.values() if node.start], path / "unfinished" / "0")
    assert num_found(user, prompt) == 0
    assert num_found(open_folder(path), prompt) == 200


def test_index_when_made_again_then_has_what_can_be_reached(path: Path):
    user, prompt = open_folder(path), tuple(range(600))
    for end in range(100, 601, 100):
        keep(user, prompt[:end])
    (path / "index").unlink()
    assert len(open_folder(path).entries()) == 6
    with user.find(IDENTITY, prompt) as match:
        match.parts[2].file.path.unlink()
    (path / "index").unlink()
    with pytest.warns(UserWarning, match="continues a prompt that is gone. It was removed from the store"):
        late = open_folder(path)
    assert len(late.entries()) == len(list((path / "nodes").iterdir())) == 2
    assert num_found(late, prompt) == 200


def test_index_when_a_process_ended_in_the_middle_of_a_record_then_goes_on(path: Path):
    user = open_folder(path)
    keep(user, (1,) * 100)
    index = path / "index"
    index.write_bytes(index.read_bytes() + b"\1" * 100)
    assert num_found(user, (1,) * 100) == 100
    keep(user, (2,) * 100)
    for each in (user, open_folder(path)):
        assert [num_found(each, (number,) * 100) for number in (1, 2)] == [100, 100]


def test_index_of_another_folder_when_put_here_then_nothing_wrong_is_found(path: Path, tmp_path: Path):
    user, other = open_folder(path), open_folder(tmp_path / "other")
    keep(user, (1,) * 100)
    keep(other, (2,) * 100)
    (path / "index").write_bytes((tmp_path / "other" / "index").read_bytes())
    late = open_folder(path)
    assert num_found(late, (2,) * 100) == 0
    # The next change finds what the index lacks.
    keep(late, (3,) * 100)
    assert [num_found(late, (number,) * 100) for number in (1, 2, 3)] == [100, 0, 100]


def forged(path: Path, parents: dict[int, tuple[int, int]]) -> list[bytes]:
    """Add nodes of one block to an index, each with the number of its parent and its start; return their ids."""
    ids = [bytes([number + 1]) * 16 for number in parents]
    nodes = [
        Node(own_id, ids[parent] if parent >= 0 else NO_PARENT, bytes(32), bytes(32), start, BLOCK, 4096, bytes(256))
        for own_id, (parent, start) in zip(ids, parents.values(), strict=True)
    ]
    content = (path / "index").read_bytes()
    for node in nodes:
        record = struct.pack("<B16s16s32s32sQQQ256s", 1, *node)
        content += record + zlib.crc32(record).to_bytes(4, "little")
    (path / "index").write_bytes(content)
    return ids


@pytest.mark.parametrize(
    "parents",
    [
        {0: (0, 64)},
        {0: (1, 64), 1: (0, 64)},
        {0: (1, 64), 1: (2, 128), 2: (0, 192)},
        {0: (-1, 64)},
        {0: (-1, 0), 1: (0, 0)},
        {0: (-1, 0), 1: (0, 128)},
    ],
    ids=["itself", "two", "three", "a start without tokens", "no start", "a hole"],
)
def test_index_when_parents_are_in_no_order_then_is_made_again(parents: dict[int, tuple[int, int]], path: Path):
    known = open_folder(path)
    keep(known, (1,) * 100)
    ids = forged(path, parents)
    for user in (known, open_folder(path)):
        assert num_found(user, (1,) * 100) == 100
        for own_id in ids:
            with pytest.raises(NodeNotFoundError):
                user.token_ids(own_id)
            with pytest.raises(NodeNotFoundError):
                user.remove(own_id)
        assert len(user.entries()) == 1


def test_index_when_its_size_is_larger_than_memory_then_is_made_again(path: Path):
    user = open_folder(path)
    keep(user, (1,) * 100)
    os.truncate(path / "index", 2**42)
    assert num_found(user, (1,) * 100) == 100
    assert (path / "index").stat().st_size < 1000


def test_node_when_its_file_contradicts_its_parent_then_goes(path: Path):
    keep(open_folder(path), (1,) * 100)
    tokens = as_bytes([2] * 64)
    head = NodeHead(b"begins with hers", b"begins with hers", bytes(32), bytes(32), 64, tokens, b"", 0)
    with (path / "nodes" / f"{head.id.hex()}.node").open("xb+") as file:
        write_node(file, head, lambda payload: None)
    (path / "index").unlink()
    with pytest.warns(UserWarning, match="It was removed from the store"):
        user = open_folder(path)
    assert num_found(user, (1,) * 100) == 100
    assert len(user.entries()) == 1


def test_prompts_when_removed_then_files_of_others_are_not_opened(path: Path, monkeypatch: pytest.MonkeyPatch):
    user = open_folder(path)
    for number in range(20):
        keep(user, (*range(64), number))
    opened = Opened(monkeypatch)
    for entry in [entry for entry in user.entries() if entry.start]:
        opened.clear()
        user.remove_unshared(entry.id)
        assert len([each for each in opened if each.suffix == ".node"]) <= 6
    # The one that they shared went with the last of them.
    assert user.entries() == []
