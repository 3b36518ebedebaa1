"""Random histories of a folder, with a dictionary of token tuples beside it."""

import shutil
from collections.abc import Set
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from hf_hybrid_cache.prefix_store.errors import NodeInUseError, NodeNotFoundError, PrefixStoreFullError
from hf_hybrid_cache.prefix_store.folder import Folder, Match

from common.soak import budget, count
from store_folder.stored import (
    BLOCK,
    IDENTITY,
    Tokens,
    add,
    bytes_of_nodes,
    check,
    found,
    keys_of,
    num_found,
    open_folder,
    random_prompt,
    tokens_of,
)


class Kept(NamedTuple):
    """All tokens up to the end of a node, the name of the one before it, and where it starts."""

    tokens: Tokens
    parent: str | None
    start: int


def listed(user: Folder) -> dict[str, Kept]:
    """Return what a folder says of its nodes, by their names."""
    nodes = sorted((entry.node for entry in user.entries()), key=lambda node: node.start)
    names, kept = {node.id: node.name for node in nodes}, dict[str, Kept]()
    for node in nodes:
        parent = names.get(node.parent or 0)
        before = kept[parent].tokens[: node.start] if parent else ()
        kept[node.name] = Kept(before + tokens_of(node.keys), parent, node.start)
    return kept


class History:
    """Steps on one folder by two of its users, one at a time; `random` says what is done, `kept` what is there."""

    def __init__(self, path: Path, random: Random):
        self.path, self.random = path, random
        self.max_bytes = random.choice((None, 60_000, 150_000))
        self.whole_share = random.choice((0, 0.5, 0.5, 1))
        self.users = [self.opened(), self.opened()]
        self.kept: dict[str, Kept] = {}
        self.prompts: list[Tokens] = []
        self.held: list[tuple[Match, Tokens, bool]] = []

    def opened(self) -> Folder:
        return open_folder(self.path, self.max_bytes)

    def step(self) -> None:
        once = (self.hold, self.let_go, self.remove, self.reopen)
        step = self.random.choice((self.add, self.add, self.add, self.find, self.find, *once))
        step(self.random.choice(self.users))
        assert all(listed(user) == self.kept for user in self.users)
        assert self.max_bytes is None or bytes_of_nodes(self.path) <= self.max_bytes
        for match, tokens, whole_nodes in self.held:
            check(match, tokens, whole_nodes=whole_nodes)

    def is_whole(self, name: str | None, tokens: Tokens) -> bool:
        """Whether a prompt has all tokens of a node and of those before it, each ending where the next begins."""
        if name is None or self.kept[name].tokens != tokens[: len(self.kept[name].tokens)]:
            return False
        _, parent, start = self.kept[name]
        return not start or (self.is_whole(parent, tokens) and self.last_border(parent) == start)

    def last_border(self, name: str | None) -> int:
        return 0 if name is None else len(self.kept[name].tokens) // BLOCK * BLOCK

    def expected(self, tokens: Tokens, whole_nodes: bool) -> int:
        """Return how many tokens are to be found."""
        if whole_nodes:
            lengths = [len(each.tokens) for name, each in self.kept.items() if self.is_whole(name, tokens)]
        else:
            lengths = [num_common(tokens, each.tokens) for each in self.kept.values()]
        return max(lengths, default=0)

    def may_begin(self, tokens: Tokens, start: int, whole_nodes: bool) -> bool:
        """Whether a node may begin there."""
        if not whole_nodes:
            return start <= self.expected(tokens, False)
        return not start or any(
            self.last_border(name) == start > each.start and self.is_whole(name, tokens)
            for name, each in self.kept.items()
        )

    def any_mode(self) -> bool:
        return self.random.random() < self.whole_share

    def add(self, user: Folder) -> None:
        tokens, whole_nodes = random_prompt(self.random, self.prompts), self.any_mode()
        if self.random.random() < 0.3:
            # The beginning of one that may be there.
            tokens = tokens[: self.random.randint(1, len(tokens))]
        is_new = self.expected(tokens, whole_nodes) < len(tokens)
        with found(user, tokens, whole_nodes=whole_nodes) as match:
            again = self.random.choice((0, 0, 0, BLOCK, 3 * BLOCK, -BLOCK))
            start = min(max(0, match.num_tokens // BLOCK * BLOCK - again), (len(tokens) - 1) // BLOCK * BLOCK)
            if is_new and not self.may_begin(tokens, start, whole_nodes):
                with pytest.raises(NodeNotFoundError):
                    add(user, tokens, start, whole_nodes=whole_nodes)
                return
            try:
                name = add(user, tokens, start, whole_nodes=whole_nodes)
            except PrefixStoreFullError:
                assert self.max_bytes is not None
                return
        self.prompts.append(tokens)
        with found(user, tokens, whole_nodes=whole_nodes) as match:
            assert match.num_tokens == num_found(user, tokens) == len(tokens)
            assert is_new or match.parts[-1].node.name == name
        now = listed(user)
        if is_new:
            assert name not in self.kept
            assert (now[name].tokens, now[name].start) == (tokens, start)
            self.kept[name] = now[name]
        # Only a limit makes others go.
        gone = self.kept.keys() - now.keys()
        assert not gone or (is_new and self.max_bytes is not None)
        self.forget(gone)

    def find(self, user: Folder) -> None:
        tokens = random_prompt(self.random, self.prompts)
        for whole_nodes in (False, True):
            assert num_found(user, tokens, whole_nodes=whole_nodes) == self.expected(tokens, whole_nodes)
            assert num_found(user, tokens, b"another model", whole_nodes) == 0
        for name, kept in self.random.sample(sorted(self.kept.items()), min(2, len(self.kept))):
            assert tuple(user.keys(name)) == kept.tokens

    def hold(self, user: Folder) -> None:
        if self.prompts and len(self.held) < 2:
            tokens, whole_nodes = self.random.choice(self.prompts), self.any_mode()
            self.held.append((user.find(IDENTITY, keys_of(tokens), whole_nodes), tokens, whole_nodes))

    def let_go(self, user: Folder) -> None:
        if self.held:
            self.held.pop()[0].close()

    def remove(self, user: Folder) -> None:
        name = self.random.choice(sorted(self.kept) or ["0" * 32])
        going = {name} & self.kept.keys()
        for each in sorted(self.kept, key=lambda each: self.kept[each].start):
            going |= {each} if self.kept[each].parent in going else set()
        is_held = any(match.parts and match.parts[-1].node.name in going for match, *_ in self.held)
        if is_held or not going:
            with pytest.raises(NodeInUseError if is_held else NodeNotFoundError):
                user.remove(name)
        else:
            user.remove(name)
            self.forget(going)

    def forget(self, names: Set[str]) -> None:
        self.kept = {name: each for name, each in self.kept.items() if name not in names}

    def reopen(self, user: Folder) -> None:
        self.users[self.users.index(user)] = self.opened()

    def end(self) -> None:
        for match, *_ in self.held:
            match.close()
        assert self.opened().damages() == {}
        assert not list((self.path / "unfinished").iterdir())
        assert all(each.stat().st_mode & 0o077 == 0 for each in (self.path, *self.path.rglob("*")))


def num_common(one: Tokens, other: Tokens) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.soak
def test_folder_when_used_at_random_then_finds_what_a_dictionary_does(path: Path):
    for seed in range(budget(600, 30_000)):
        history = History(path, Random(seed))
        for _ in range(12):
            history.step()
        history.end()
        count("histories of a prefix store")
        shutil.rmtree(path)
