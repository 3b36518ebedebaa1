"""Random histories of a folder, with a dictionary of token tuples beside it."""

import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from hf_hybrid_cache.prefix_folder import (
    Entry,
    Match,
    NodeInUseError,
    NodeNotFoundError,
    PrefixFolder,
    PrefixFolderFullError,
)

from common.soak import budget, count
from prefix_folder.stored import (
    BLOCK,
    IDENTITY,
    Tokens,
    add,
    bytes_of_nodes,
    check,
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
        self.max_bytes = random.choice((None, 20_000, 60_000))
        self.whole_share = random.choice((0, 0.5, 0.5, 1))
        self.users = [self.opened(), self.opened()]
        # All tokens up to the end of a node, by its id; and its parent and start.
        self.stored: dict[bytes, Tokens] = {}
        self.places: dict[bytes, tuple[bytes | None, int]] = {}
        self.prompts: list[Tokens] = []
        self.held: list[tuple[Match, Tokens, bool]] = []

    def opened(self) -> PrefixFolder:
        return open_folder(self.path, self.max_bytes)

    def step(self) -> None:
        once = (self.hold, self.let_go, self.remove, self.harm, self.reopen)
        step = self.random.choice((self.add, self.add, self.add, self.find, self.find, *once))
        step(self.random.choice(self.users))
        self.check()

    def is_whole(self, own_id: bytes | None, tokens: Tokens) -> bool:
        """Whether a prompt has all tokens of a node and of those before it, each ending where the next begins."""
        if own_id is None or self.stored[own_id] != tokens[: len(self.stored[own_id])]:
            return False
        parent, start = self.places[own_id]
        return not start or (self.is_whole(parent, tokens) and self.last_border(parent) == start)

    def last_border(self, own_id: bytes | None) -> int:
        return 0 if own_id is None else len(self.stored[own_id]) // BLOCK * BLOCK

    def expected(self, tokens: Tokens, whole_nodes: bool) -> int:
        """Return how many tokens are to be found."""
        if whole_nodes:
            found = [len(each) for own_id, each in self.stored.items() if self.is_whole(own_id, tokens)]
        else:
            found = [num_common(tokens, each) for each in self.stored.values()]
        return max(found, default=0)

    def may_begin(self, tokens: Tokens, start: int, whole_nodes: bool) -> bool:
        """Whether a node may begin there."""
        if not whole_nodes:
            return start <= self.expected(tokens, False)
        return not start or any(
            self.last_border(own_id) == start > self.places[own_id][1] and self.is_whole(own_id, tokens)
            for own_id in self.stored
        )

    def any_mode(self) -> bool:
        return self.random.random() < self.whole_share

    def add(self, user: PrefixFolder) -> None:
        tokens, whole_nodes = random_prompt(self.random, self.prompts), self.any_mode()
        if self.random.random() < 0.3:
            # The beginning of one that may be there.
            tokens = tokens[: self.random.randint(1, len(tokens))]
        before = {entry.id for entry in user.entries()}
        is_new = self.expected(tokens, whole_nodes) < len(tokens)
        with user.find(IDENTITY, tokens, whole_nodes) as match:
            check(match, tokens, whole_nodes=whole_nodes)
            again = self.random.choice((0, 0, 0, BLOCK, 3 * BLOCK, -BLOCK))
            start = min(max(0, match.num_tokens // BLOCK * BLOCK - again), (len(tokens) - 1) // BLOCK * BLOCK)
            if is_new and not self.may_begin(tokens, start, whole_nodes):
                with pytest.raises(NodeNotFoundError):
                    add(user, tokens, start, whole_nodes=whole_nodes)
                return
            try:
                own_id = add(user, tokens, start, whole_nodes=whole_nodes)
            except PrefixFolderFullError:
                assert self.max_bytes is not None
                assert {entry.id for entry in user.entries()} == before
                return
        self.prompts.append(tokens)
        entries = user.entries()
        new = {entry.id: entry for entry in entries if entry.id not in before}
        assert list(new) == [own_id] * is_new
        with user.find(IDENTITY, tokens, whole_nodes) as match:
            assert match.parts[-1].file.head.id == own_id
        # Only a limit makes others go.
        gone = self.stored.keys() - {entry.id for entry in entries}
        assert not gone or (is_new and self.max_bytes is not None)
        self.forget(gone)
        self.stored.update(dict.fromkeys(new, tokens))
        self.places.update({own_id: (entry.parent, entry.start) for own_id, entry in new.items()})
        assert all(start == entry.start for entry in new.values())
        assert num_found(user, tokens, whole_nodes=whole_nodes) == num_found(user, tokens) == len(tokens)

    def find(self, user: PrefixFolder) -> None:
        tokens = random_prompt(self.random, self.prompts)
        for whole_nodes in (False, True):
            assert num_found(user, tokens, whole_nodes=whole_nodes) == self.expected(tokens, whole_nodes)
            assert num_found(user, tokens, b"another model", whole_nodes) == 0
        for own_id, tokens in self.random.sample(sorted(self.stored.items()), min(2, len(self.stored))):
            assert tuple(user.token_ids(own_id)) == tokens

    def hold(self, user: PrefixFolder) -> None:
        if self.prompts and len(self.held) < 2:
            tokens, whole_nodes = self.random.choice(self.prompts), self.any_mode()
            self.held.append((user.find(IDENTITY, tokens, whole_nodes), tokens, whole_nodes))

    def let_go(self, user: PrefixFolder) -> None:
        if self.held:
            self.held.pop()[0].close()

    def remove(self, user: PrefixFolder) -> None:
        if not self.stored:
            with pytest.raises(NodeNotFoundError):
                user.remove(bytes(16))
            return
        own_id = self.random.choice(sorted(self.stored))
        going = descendants(user.entries(), own_id)
        if self.is_held(going):
            with pytest.raises(NodeInUseError):
                user.remove(own_id)
        else:
            user.remove(own_id)
            self.forget(going)

    def harm(self, user: PrefixFolder) -> None:
        if not self.stored:
            return
        own_id = self.random.choice(sorted(self.stored))
        tokens, going = self.stored[own_id], descendants(user.entries(), own_id)
        if self.is_held(going):
            return
        harm = self.random.choice((cut, alter_head, alter_payload, Path.unlink))
        harm(self.path / "nodes" / f"{own_id.hex()}.node")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if harm is alter_payload:
                assert user.damages().keys() == {own_id}
                assert user.remove_damaged(own_id)
            self.forget(going)
            for whole_nodes in self.random.sample((False, True), 2):
                assert num_found(user, tokens, whole_nodes=whole_nodes) == self.expected(tokens, whole_nodes)
            for each in user.damages():
                assert each == own_id
                assert user.remove_damaged(each)

    def is_held(self, ids: set[bytes]) -> bool:
        return any(match.parts and match.parts[-1].file.head.id in ids for match, *_ in self.held)

    def forget(self, ids: Iterable[bytes]) -> None:
        for each in ids:
            del self.stored[each], self.places[each]

    def reopen(self, user: PrefixFolder) -> None:
        self.users[self.users.index(user)] = self.opened()

    def check(self) -> None:
        for user in self.users:
            entries = {entry.id: entry for entry in user.entries()}
            assert entries.keys() == self.stored.keys()
            for entry in entries.values():
                assert (entry.parent, entry.start) == self.places[entry.id]
                assert entry.parent is None or entries[entry.parent].start < entry.start
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


def alter_payload(file: Path) -> None:
    alter(file, -1)


def alter(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def descendants(entries: list[Entry], own_id: bytes) -> set[bytes]:
    found = {own_id}
    for entry in sorted(entries, key=lambda each: each.start):
        if entry.parent in found:
            found.add(entry.id)
    return found


@pytest.mark.soak
def test_folder_when_used_at_random_then_finds_what_a_dictionary_does(path: Path):
    for seed in range(budget(1500, 30_000)):
        history = History(path, Random(seed))
        for _ in range(12):
            history.step()
        history.end()
        count("histories of a store of prompts")
        shutil.rmtree(path)
