"""Prompts with payloads that tell what they belong to; without torch, so that processes of their own begin quickly."""

from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from random import Random

from hf_hybrid_cache.prefix_folder import Match, NodeFile, PrefixFolder

IDENTITY = b"a model"
BLOCK = 64
Tokens = tuple[int, ...]


def open_folder(path: Path, max_bytes: int | None = None, lock_seconds: float = 30.0) -> PrefixFolder:
    return PrefixFolder(path, max_bytes=max_bytes, min_free_bytes=0, lock_seconds=lock_seconds)


def payload_of(tokens: Tokens, start: int, identity: bytes = IDENTITY) -> bytes:
    """Return what is written for the tokens from `start` on: it depends on all of them, and so does its size."""
    digest = blake2b(repr((identity, tokens, start)).encode()).digest()
    return digest * ((len(tokens) - start) // 8) + digest[: len(tokens) % 64]


def keep(
    folder: PrefixFolder,
    tokens: Tokens,
    blocks_again: int = 0,
    identity: bytes = IDENTITY,
    whole_nodes: bool = False,
) -> bool:
    """
    Add what is not stored of a prompt yet; return whether there was any.

    Args:
        folder: to add to.
        tokens: of the prompt.
        blocks_again: how many blocks before that are stored again.
        identity: of the model.
        whole_nodes: as for `add`.
    """
    with folder.find(identity, tokens, whole_nodes) as match:
        check(match, tokens, identity, whole_nodes)
        if match.num_tokens == len(tokens):
            return False
        add(folder, tokens, max(0, match.num_tokens // BLOCK * BLOCK - BLOCK * blocks_again), identity, whole_nodes)
        return True


def add(
    folder: PrefixFolder, tokens: Tokens, start: int, identity: bytes = IDENTITY, whole_nodes: bool = False
) -> bytes:
    """Add a node with a payload that belongs to its tokens; return its id."""
    payload = payload_of(tokens, start, identity)
    return folder.add(
        identity,
        tokens,
        start,
        len(payload),
        lambda file: file.write(payload),
        repr(start).encode(),
        whole_nodes,
    )


def check(match: Match, tokens: Tokens, identity: bytes = IDENTITY, whole_nodes: bool = False) -> None:
    """
    Check that a match is right, with all payloads.

    Parts begin with the first token, have no holes and the prompt's tokens; whole nodes have no others.
    """
    assert (not match.parts) == (match.num_tokens == 0)
    if not match.parts:
        return
    assert match.parts[0].file.head.start == 0
    assert match.parts[-1].end == match.num_tokens <= len(tokens)
    assert all(one.end == next_one.file.head.start for one, next_one in pairwise(match.parts))
    whole: Tokens = ()
    for part in match.parts:
        whole = whole[: part.file.head.start] + tokens_of(part.file)
        assert whole[: part.end] == tokens[: part.end]
        assert read(part.file) == payload_of(whole, part.file.head.start, identity)
        if whole_nodes:
            assert whole == tokens[: len(whole)]
            assert part.end in (len(whole), len(whole) // BLOCK * BLOCK)
    assert not whole_nodes or match.num_tokens == len(whole)


def tokens_of(file: NodeFile) -> Tokens:
    tokens = file.head.tokens
    return tuple(int.from_bytes(tokens[at : at + 4], "big") for at in range(0, len(tokens), 4))


def read(file: NodeFile) -> bytes:
    with file.open() as opened:
        return opened.read()


def num_found(folder: PrefixFolder, tokens: Tokens, identity: bytes = IDENTITY, whole_nodes: bool = False) -> int:
    with folder.find(identity, tokens, whole_nodes) as match:
        check(match, tokens, identity, whole_nodes)
        return match.num_tokens


def num_common(one: Tokens, other: Tokens) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def random_prompt(random: Random, others: list[Tokens], longest: int = 400) -> Tokens:
    """A prompt that begins as one of the others, up to somewhere, and goes on."""
    before = random.choice(others) if others and random.random() < 0.8 else ()
    # At a border half of the time, where most can go wrong.
    cut = random.choice((random.randint(0, len(before)), random.randint(0, len(before)) // BLOCK * BLOCK))
    length = random.choice((1, 2, BLOCK, random.randint(1, longest)))
    return before[:cut] + tuple(random.randrange(3) for _ in range(length))


def bytes_of_nodes(path: Path) -> int:
    return sum(each.stat().st_size for folder in ("nodes", "unfinished") for each in (path / folder).iterdir())
