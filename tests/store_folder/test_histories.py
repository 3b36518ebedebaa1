"""Random histories of a folder, with a dictionary of token tuples beside it."""

import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from hf_hybrid_cache.prefix_store.errors import NodeInUseError, NodeNotFoundError, PrefixStoreFullError
from hf_hybrid_cache.prefix_store.folder import Entry, Folder, Match

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
    num_common,
    num_found,
    open_folder,
    random_prompt,
)


class History:
    """
    Steps on one folder by two of its users, one at a time.

    Args:
        path: of the folder.
        random: says what is done.
    """

    def __init__(self, path: Path, random: Random):
        self.path, self.random = path, random
        self.max_bytes = random.choice((None, 60_000, 150_000))
        self.whole_share = random.choice((0, 0.5, 0.5, 1))
        self.users = [self.opened(), self.opened()]
        # All tokens up to the end of a node, by its name; and its parent and start.
        self.stored: dict[str, Tokens] = {}
        self.places: dict[str, tuple[str | None, int]] = {}
        self.prompts: list[Tokens] = []
        self.held: list[tuple[Match, Tokens, bool]] = []

    def opened(self) -> Folder:
        return open_folder(self.path, self.max_bytes)

    def step(self) -> None:
        once = (self.hold, self.let_go, self.remove, self.harm, self.reopen)
        step = self.random.choice((self.add, self.add, self.add, self.find, self.find, *once))
        step(self.random.choice(self.users))
        self.check()

    def is_whole(self, name: str | None, tokens: Tokens) -> bool:
        """Whether a prompt has all tokens of a node and of those before it, each ending where the next begins."""
        if name is None or self.stored[name] != tokens[: len(self.stored[name])]:
            return False
        parent, start = self.places[name]
        return not start or (self.is_whole(parent, tokens) and self.last_border(parent) == start)

    def last_border(self, name: str | None) -> int:
        return 0 if name is None else len(self.stored[name]) // BLOCK * BLOCK

    def expected(self, tokens: Tokens, whole_nodes: bool) -> int:
        """Return how many tokens are to be found."""
        if whole_nodes:
            lengths = [len(each) for name, each in self.stored.items() if self.is_whole(name, tokens)]
        else:
            lengths = [num_common(tokens, each) for each in self.stored.values()]
        return max(lengths, default=0)

    def may_begin(self, tokens: Tokens, start: int, whole_nodes: bool) -> bool:
        """Whether a node may begin there."""
        if not whole_nodes:
            return start <= self.expected(tokens, False)
        return not start or any(
            self.last_border(name) == start > self.places[name][1] and self.is_whole(name, tokens)
            for name in self.stored
        )

    def any_mode(self) -> bool:
        return self.random.random() < self.whole_share

    def add(self, user: Folder) -> None:
        tokens, whole_nodes = random_prompt(self.random, self.prompts), self.any_mode()
        if self.random.random() < 0.3:
            # The beginning of one that may be there.
            tokens = tokens[: self.random.randint(1, len(tokens))]
        before = {entry.node.name for entry in user.entries()}
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
                assert {entry.node.name for entry in user.entries()} == before
                return
        self.prompts.append(tokens)
        entries = user.entries()
        new = {entry.node.name: entry for entry in entries if entry.node.name not in before}
        assert list(new) == [name] * is_new
        with found(user, tokens, whole_nodes=whole_nodes) as match:
            assert match.num_tokens == len(tokens)
            assert is_new or match.parts[-1].node.name == name
        # Only a limit makes others go.
        gone = self.stored.keys() - {entry.node.name for entry in entries}
        assert not gone or (is_new and self.max_bytes is not None)
        self.forget(gone)
        self.stored.update(dict.fromkeys(new, tokens))
        self.places.update({name: (parents(entries)[name], entry.node.start) for name, entry in new.items()})
        assert all(start == entry.node.start for entry in new.values())
        assert num_found(user, tokens) == len(tokens)

    def find(self, user: Folder) -> None:
        tokens = random_prompt(self.random, self.prompts)
        for whole_nodes in (False, True):
            assert num_found(user, tokens, whole_nodes=whole_nodes) == self.expected(tokens, whole_nodes)
            assert num_found(user, tokens, b"another model", whole_nodes) == 0
        for name, tokens in self.random.sample(sorted(self.stored.items()), min(2, len(self.stored))):
            assert tuple(user.keys(name)) == tokens

    def hold(self, user: Folder) -> None:
        if self.prompts and len(self.held) < 2:
            tokens, whole_nodes = self.random.choice(self.prompts), self.any_mode()
            self.held.append((user.find(IDENTITY, keys_of(tokens), whole_nodes), tokens, whole_nodes))

    def let_go(self, user: Folder) -> None:
        if self.held:
            self.held.pop()[0].close()

    def remove(self, user: Folder) -> None:
        if not self.stored:
            with pytest.raises(NodeNotFoundError):
                user.remove("0" * 32)
            return
        name = self.random.choice(sorted(self.stored))
        going = descendants(user.entries(), name)
        if self.is_held(going):
            with pytest.raises(NodeInUseError):
                user.remove(name)
        else:
            user.remove(name)
            self.forget(going)

    def harm(self, user: Folder) -> None:
        if not self.stored:
            return
        name = self.random.choice(sorted(self.stored))
        tokens, going = self.stored[name], descendants(user.entries(), name)
        if self.is_held(going):
            return
        harm = self.random.choice((cut, alter_head, alter_states, Path.unlink))
        harm(self.path / "nodes" / f"{name}.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if harm is alter_states:
                assert user.damages().keys() == {name}
                assert user.remove_damaged(name)
            self.forget(going)
            for whole_nodes in self.random.sample((False, True), 2):
                assert num_found(user, tokens, whole_nodes=whole_nodes) == self.expected(tokens, whole_nodes)
            for each in user.damages():
                assert each == name
                assert user.remove_damaged(each)

    def is_held(self, names: set[str]) -> bool:
        return any(match.parts and match.parts[-1].node.name in names for match, *_ in self.held)

    def forget(self, names: Iterable[str]) -> None:
        for each in names:
            del self.stored[each], self.places[each]

    def reopen(self, user: Folder) -> None:
        self.users[self.users.index(user)] = self.opened()

    def check(self) -> None:
        for user in self.users:
            entries = user.entries()
            named, of = {entry.node.name: entry for entry in entries}, parents(entries)
            assert named.keys() == self.stored.keys()
            for entry in entries:
                parent = of[entry.node.name]
                assert (parent, entry.node.start) == self.places[entry.node.name]
                assert parent is None or named[parent].node.start < entry.node.start
        assert self.max_bytes is None or bytes_of_nodes(self.path) <= self.max_bytes
        for match, tokens, whole_nodes in self.held:
            check(match, tokens, whole_nodes=whole_nodes)

    def end(self) -> None:
        for match, *_ in self.held:
            match.close()
        assert self.opened().damages() == {}
        assert not list((self.path / "unfinished").iterdir())
        assert all(each.stat().st_mode & 0o077 == 0 for each in (self.path, *self.path.rglob("*")))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def alter_head(file: Path) -> None:
    alter(file, 187)


def alter_states(file: Path) -> None:
    alter(file, -1)


def alter(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def parents(entries: list[Entry]) -> dict[str, str | None]:
    names = {entry.node.id: entry.node.name for entry in entries}
    return {entry.node.name: names.get(entry.node.parent or 0) for entry in entries}


def descendants(entries: list[Entry], name: str) -> set[str]:
    names, of = {name}, parents(entries)
    for entry in sorted(entries, key=lambda each: each.node.start):
        if of[entry.node.name] in names:
            names.add(entry.node.name)
    return names


@pytest.mark.soak
def test_folder_when_used_at_random_then_finds_what_a_dictionary_does(path: Path):
    for seed in range(budget(1500, 30_000)):
        history = History(path, Random(seed))
        for _ in range(12):
            history.step()
        history.end()
        count("histories of a prefix store")
        shutil.rmtree(path)
