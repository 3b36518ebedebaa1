"""Random histories of a folder, with a dictionary of token tuples beside it."""

import shutil
from collections.abc import Set
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from hf_hybrid_cache.prefix_store.errors import NodeInUseError, NodeNotFoundError, PrefixStoreFullError
from hf_hybrid_cache.prefix_store.folder import Folder, Match
from hf_hybrid_cache.prefix_store.keys import as_bytes

from common.soak import budget, count
from store_folder.stored import (
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
        before = kept[parent].tokens if parent else ()
        kept[node.name] = Kept(before + tokens_of(node.keys), parent, node.start)
    return kept


class History:
    """Steps on one folder by two of its users, one at a time; `random` says what is done, `kept` what is there."""

    def __init__(self, path: Path, random: Random):
        self.path, self.random = path, random
        self.max_bytes = random.choice((None, 60_000, 150_000))
        self.users = [self.opened(), self.opened()]
        self.kept: dict[str, Kept] = {}
        self.prompts: list[Tokens] = []
        self.held: list[tuple[Match, Tokens]] = []

    def opened(self) -> Folder:
        return open_folder(self.path, self.max_bytes)

    def step(self) -> None:
        once = (self.hold, self.let_go, self.remove, self.reopen)
        step = self.random.choice((self.add, self.add, self.add, self.find, self.find, *once))
        step(self.random.choice(self.users))
        assert all(listed(user) == self.kept for user in self.users)
        assert self.max_bytes is None or bytes_of_nodes(self.path) <= self.max_bytes
        for match, tokens in self.held:
            check(match, tokens)

    def expected(self, tokens: Tokens) -> list[int]:
        """Return after how many of its first tokens nodes end."""
        return [len(each.tokens) for each in self.kept.values() if each.tokens == tokens[: len(each.tokens)]]

    def add(self, user: Folder) -> None:
        tokens = random_prompt(self.random, self.prompts)
        if self.random.random() < 0.3:
            # The beginning of one that may be there.
            tokens = tokens[: self.random.randint(1, len(tokens))]
        ends = [0, *self.expected(tokens)]
        is_new = max(ends) < len(tokens)
        with found(user, tokens) as match:
            start = self.random.choice((match.num_tokens, *ends, self.random.randrange(len(tokens))))
            if is_new and start not in ends:
                with pytest.raises(NodeNotFoundError):
                    add(user, tokens, start)
                return
            try:
                name = add(user, tokens, start)
            except PrefixStoreFullError:
                assert self.max_bytes is not None
                return
        self.prompts.append(tokens)
        with found(user, tokens) as match:
            assert match.num_tokens == len(tokens)
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
        with found(user, tokens) as match:
            assert match.num_tokens == max(self.expected(tokens), default=0)
            after, rest = (
                tokens_of(as_bytes(user.nearest(IDENTITY, keys_of(tokens), match))),
                tokens[match.num_tokens :],
            )
        last = match.parts[-1].node.name if match.parts else None
        nexts = [each.tokens[each.start :] for each in self.kept.values() if each.parent == last]
        assert (after in nexts) == bool(nexts)
        assert num_common(after, rest) == max((num_common(each, rest) for each in nexts), default=0)
        assert num_found(user, tokens, b"another model") == 0
        for name, kept in self.random.sample(sorted(self.kept.items()), min(2, len(self.kept))):
            assert tokens_of(as_bytes(user.keys(name))) == kept.tokens

    def hold(self, user: Folder) -> None:
        if self.prompts and len(self.held) < 2:
            tokens = self.random.choice(self.prompts)
            self.held.append((user.find(IDENTITY, keys_of(tokens)), tokens))

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
    for seed in range(budget(120)):
        history = History(path, Random(seed))
        for _ in range(12):
            history.step()
        history.end()
        count("histories of a prefix store")
        shutil.rmtree(path)
