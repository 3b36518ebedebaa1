"""Nodes whose payload can only be used to its end are found in chains, each beginning where the one before it ends."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_hybrid_cache.prefix_folder import Match, NodeFile, NodeFileError, NodeNotFoundError, PrefixFolder

from prefix_folder.stored import BLOCK, IDENTITY, Tokens, add, check, keep, num_found, open_folder

PROMPT = tuple(range(5000))


def keep_whole(folder: PrefixFolder, tokens: Tokens) -> bool:
    return keep(folder, tokens, whole_nodes=True)


def whole(folder: PrefixFolder, tokens: Tokens) -> int:
    return num_found(folder, tokens, whole_nodes=True)


def runs(match: Match) -> list[tuple[int, int, int]]:
    """Return of each part where its node begins, where that ends, and where the part ends."""
    heads = [part.file.head for part in match.parts]
    return [(head.start, head.start + head.num_tokens, part.end) for head, part in zip(heads, match.parts, strict=True)]


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files of nodes whose heads are read, as they are."""
    reads: list[Path] = []
    read = NodeFile.read

    def counted(file: Path) -> NodeFile | None:
        reads.append(file)
        return read(file)

    monkeypatch.setattr(NodeFile, "read", counted)
    return reads


@pytest.mark.parametrize("end", [1, 63, 64, 65, 100, 127, 128, 2048])
def test_node_when_whole_is_found_only_by_prompts_with_all_of_it(end: int, path: Path):
    folder = open_folder(path)
    assert keep_whole(folder, PROMPT[:end])
    assert [whole(folder, PROMPT[:length]) for length in (end - 1, end, end + 1, 5000)] == [0, end, end, end]
    assert whole(folder, (*PROMPT[: end - 1], 9, *PROMPT[end:])) == 0
    assert num_found(folder, PROMPT[: end - 1]) == end - 1


@pytest.mark.parametrize("end", [64, 65, 100, 127, 128])
def test_node_when_continued_then_the_partial_block_is_of_the_next_part(end: int, path: Path):
    folder = open_folder(path)
    border = end // BLOCK * BLOCK
    for length in (end, 1000):
        assert keep_whole(folder, PROMPT[:length])
    with folder.find(IDENTITY, PROMPT, whole_nodes=True) as match:
        check(match, PROMPT, whole_nodes=True)
        assert runs(match) == [(0, end, border), (border, 1000, 1000)]
    # One that leaves the prompt between the border and the end cannot use the first node, nor what continues it.
    if border < end:
        assert whole(folder, (*PROMPT[:border], 9, *PROMPT[border + 1 :])) == 0


def test_checkpoint_when_its_tokens_are_in_a_longer_node_then_is_added(path: Path):
    folder = open_folder(path)
    for end in (2048, 4096):
        assert keep_whole(folder, PROMPT[:end])
    assert not keep(folder, PROMPT[:3008])
    assert keep_whole(folder, PROMPT[:3008])
    assert not keep_whole(folder, PROMPT[:3008])
    assert len(folder.entries()) == 3
    other = (*PROMPT[:3008], *range(9000, 9100))
    assert keep_whole(folder, other)
    for tokens, expected in (
        (PROMPT, [(0, 2048, 2048), (2048, 4096, 4096)]),
        (PROMPT[:4095], [(0, 2048, 2048), (2048, 3008, 3008)]),
        (other, [(0, 2048, 2048), (2048, 3008, 3008), (3008, 3108, 3108)]),
        (PROMPT[:3007], [(0, 2048, 2048)]),
    ):
        with folder.find(IDENTITY, tokens, whole_nodes=True) as match:
            assert runs(match) == expected


def test_node_when_a_longer_sibling_begins_alike_then_is_found(path: Path):
    folder = open_folder(path)
    assert add(folder, PROMPT[:4096], 0, whole_nodes=True)
    assert add(folder, PROMPT[:2048], 0, whole_nodes=True)
    assert [whole(folder, PROMPT[:length]) for length in (2047, 2048, 4095, 4096)] == [0, 2048, 2048, 4096]
    # Where the longest chain has no node that ends there, a shorter one has.
    assert add(folder, PROMPT, 2048, whole_nodes=True)
    with folder.find(IDENTITY, PROMPT, whole_nodes=True) as match:
        assert runs(match) == [(0, 2048, 2048), (2048, 5000, 5000)]


def test_node_when_shorter_than_a_block_then_the_next_one_has_all_of_it(path: Path):
    folder = open_folder(path)
    for end in (128, 140, 1000):
        assert keep_whole(folder, PROMPT[:end])
    with folder.find(IDENTITY, PROMPT, whole_nodes=True) as match:
        assert runs(match) == [(0, 128, 128), (128, 1000, 1000)]
    assert whole(folder, PROMPT[:999]) == 140


@pytest.mark.parametrize(("end", "cut"), [(1000, 500), (100, 80), (128, 127)])
def test_chain_when_it_goes_through_a_part_of_a_node_then_is_not_whole(end: int, cut: int, path: Path):
    folder = open_folder(path)
    keep(folder, PROMPT[:end])
    second = (*PROMPT[:cut], *range(6000, 6100))
    keep(folder, second)
    assert num_found(folder, second) == cut + 100
    assert whole(folder, second) == 0
    # Nodes of the same tokens, but after a whole node, are others.
    assert keep_whole(folder, second[: cut // BLOCK * BLOCK])
    assert keep_whole(folder, second)
    assert whole(folder, second) == cut + 100
    assert len({entry.id for entry in folder.entries()}) == 4


@pytest.mark.parametrize(("end", "blocks_again"), [(1000, 2), (1000, 1), (1024, 1)])
def test_node_when_it_begins_before_the_last_border_then_is_in_no_chain(end: int, blocks_again: int, path: Path):
    folder = open_folder(path)
    keep(folder, PROMPT[:end])
    keep(folder, PROMPT[:2000], blocks_again=blocks_again)
    assert num_found(folder, PROMPT) == 2000
    assert whole(folder, PROMPT) == end
    assert keep_whole(folder, PROMPT[:2000])
    assert whole(folder, PROMPT) == 2000


@pytest.mark.parametrize("start", [64, 1984, 2112, 4992])
def test_node_when_no_whole_node_ends_before_it_then_is_refused(start: int, path: Path):
    folder = open_folder(path)
    keep_whole(folder, PROMPT[:2050])
    with pytest.raises(NodeNotFoundError, match=f"of the prompt in whole nodes; new ones cannot begin after {start:,}"):
        add(folder, PROMPT, start, whole_nodes=True)
    assert add(folder, PROMPT, 2048, whole_nodes=True)


def test_nodes_with_the_same_blocks_when_found_then_few_are_read(path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = open_folder(path)
    for number in range(40):
        keep_whole(folder, (*PROMPT[:200], number))
    reads = reads_of(monkeypatch)
    assert whole(folder, (*PROMPT[:200], 7, 8)) == 201
    assert whole(folder, (*PROMPT[:200], 100)) == 0
    assert len(reads) == 1


def test_nodes_in_a_longer_one_when_it_is_found_then_are_not_read(path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = open_folder(path)
    for end in range(100, 2000, 100):
        add(folder, PROMPT[:end], 0, whole_nodes=True)
    reads = reads_of(monkeypatch)
    for whole_nodes in (False, True):
        assert num_found(folder, PROMPT, whole_nodes=whole_nodes) == 1900
        assert len(reads) == 1
        reads.clear()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.filterwarnings("ignore:.*removed from the store")
@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_chain_when_one_of_its_files_is_harmed_then_another_is_found(harm: Callable[[Path], object], path: Path):
    folder = open_folder(path)
    for end in (1000, 2000):
        keep_whole(folder, PROMPT[:end])
    add(folder, PROMPT[:1500], 0, whole_nodes=True)
    with folder.find(IDENTITY, PROMPT, whole_nodes=True) as match:
        assert runs(match) == [(0, 1000, 960), (960, 2000, 2000)]
        harm(match.parts[0].file.path)
        assert num_found(folder, PROMPT) == whole(folder, PROMPT) == 1500
        with pytest.raises(NodeFileError):
            match.parts[0].file.open()
