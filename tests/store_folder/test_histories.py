"""Random histories of a folder, with a dictionary of token tuples beside it."""

import tempfile
from pathlib import Path
from random import Random
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from hf_hybrid_cache.prefix_store.errors import NodeInUseError, NodeNotFoundError, PrefixStoreFullError
from hf_hybrid_cache.prefix_store.folder import Match

from common.soak import count, search_at_random
from store_folder.stored import (
    IDENTITY,
    MEMORY,
    Tokens,
    add,
    bytes_of_nodes,
    check,
    check_whole,
    found,
    keys_of,
    nodes_of,
    num_found,
    open_folder,
    tokens_of,
)


class Kept(NamedTuple):
    """All tokens up to the end of a node, and where it starts."""

    tokens: Tokens
    start: int


class Users(RuleBasedStateMachine):
    """Two users of one folder, one at a time; `kept` is what is there, by the names of nodes."""

    prompts, matches = Bundle("prompts"), Bundle("matches")

    @initialize(max_bytes=st.sampled_from([None, 60_000, 150_000]))
    def begin(self, max_bytes: int | None) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.path, self.max_bytes = Path(self.folder.name, "store"), max_bytes
        self.user, self.other = (open_folder(self.path, max_bytes) for _ in range(2))
        self.kept: dict[str, Kept] = {}
        self.held: dict[Match, Tokens] = {}

    def listed(self) -> dict[str, Kept]:
        nodes, kept = nodes_of(self.path), dict[str, Kept]()
        for node in nodes:
            *before, last = (tokens_of(head.keys) for _, head in nodes.way_to(node))
            kept[node.name] = Kept(sum((*before, last), ()), len(sum(before, ())))
        return kept

    def ends(self, tokens: Tokens) -> list[int]:
        """Return after how many of its first tokens nodes end."""
        return [0, *(len(each.tokens) for each in self.kept.values() if each.tokens == tokens[: len(each.tokens)])]

    @rule(target=prompts, before=st.just(()) | prompts, end=st.integers(0, 400), length=st.integers(1, 400))
    def prompt(self, before: Tokens, end: int, length: int) -> Tokens:
        """Begin as another prompt, up to somewhere, and go on."""
        return before[:end] + tuple(Random(length).choices(range(3), k=length))

    @rule(tokens=prompts, at=st.integers(0, 2), number=st.integers(0, 400))
    def add(self, tokens: Tokens, at: int, number: int) -> None:
        ends = sorted(self.ends(tokens), reverse=True)
        is_new, start = ends[0] < len(tokens), (*ends, number % len(tokens))[min(at, len(ends))]
        if is_new and start not in ends:
            with pytest.raises(NodeNotFoundError):
                add(self.user, tokens, start)
            return
        with found(self.user, tokens):
            try:
                name = add(self.user, tokens, start)
            except PrefixStoreFullError:
                assert self.max_bytes is not None
                return
        assert num_found(self.user, tokens) == len(tokens)
        if is_new:
            assert name not in self.kept
            self.kept[name] = Kept(tokens, start)
        now = self.listed()
        # Only a limit makes others go.
        assert now.keys() == self.kept.keys() or (is_new and self.max_bytes is not None)
        self.kept = {each: self.kept[each] for each in now}

    @rule(tokens=prompts)
    def find(self, tokens: Tokens) -> None:
        with found(self.user, tokens) as match:
            assert match.num_tokens == max(self.ends(tokens))
            after = tokens_of(self.user.nearest(IDENTITY, keys_of(tokens), match))
        done, rest = tokens[: match.num_tokens], tokens[match.num_tokens :]
        nexts = [each.tokens[each.start :] for each in self.kept.values() if each.tokens[: each.start] == done]
        assert (after in nexts) == bool(nexts)
        assert num_common(after, rest) == max((num_common(each, rest) for each in nexts), default=0)
        assert num_found(self.user, tokens, b"another model") == 0

    @rule(target=matches, tokens=prompts)
    def hold(self, tokens: Tokens) -> Match:
        match = self.user.find(IDENTITY, keys_of(tokens))
        self.held[match] = tokens
        return match

    @rule(match=consumes(matches))
    def let_go(self, match: Match) -> None:
        match.close()
        del self.held[match]

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kept) or [f"{'0' * 32}-{'0' * 32}"]))
        going = {name} & self.kept.keys()
        for each, kept in sorted(self.kept.items(), key=lambda item: item[1].start):
            before = self.before(kept)
            going |= {each} if before and before <= going else set()
        if self.is_held(going) or not going:
            with pytest.raises(NodeInUseError if going else NodeNotFoundError):
                self.user.remove(name)
        else:
            self.user.remove(name)
            self.forget(going)

    @rule(data=st.data())
    def remove_unshared(self, data: st.DataObject) -> None:
        name, going = data.draw(st.sampled_from(sorted(self.kept) or [""])), set[str]()
        left = {name} & self.kept.keys()
        while len(left) == 1 and all(self.before(kept).isdisjoint(left) for kept in self.but(going).values()):
            going |= left
            left = self.before(self.kept[left.pop()])
        if len(left) < 2 and not self.is_held(going):  # of two ways to a node it goes back either
            self.user.remove_unshared(name)
            self.forget(going)

    def before(self, kept: Kept) -> set[str]:
        """Return the nodes that one continues."""
        before = kept.tokens[: kept.start]
        return {name for name, each in self.kept.items() if each.tokens == before}

    def is_held(self, names: set[str]) -> bool:
        return any(match.nodes and match.nodes[-1].name in names for match in self.held)

    def but(self, names: set[str]) -> dict[str, Kept]:
        return {name: kept for name, kept in self.kept.items() if name not in names}

    def forget(self, names: set[str]) -> None:
        self.kept = self.but(names)

    @rule()
    def reopen(self) -> None:
        self.user = open_folder(self.path, self.max_bytes)

    @invariant()
    def folder_has_what_is_kept(self) -> None:
        self.user, self.other = self.other, self.user
        assert self.listed() == self.kept
        assert self.max_bytes is None or bytes_of_nodes(self.path) <= self.max_bytes
        for match, tokens in self.held.items():
            check(match, tokens)

    def teardown(self) -> None:
        for match in self.held:
            match.close()
        check_whole(self.path)
        assert all(each.stat().st_mode & 0o077 == 0 for each in (self.path, *self.path.rglob("*")))
        self.folder.cleanup()
        count("histories of a prefix store")


def num_common(one: Tokens, other: Tokens) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.soak
def test_folder_when_used_at_random_then_finds_what_a_dictionary_does():
    run_state_machine_as_test(Users, settings=search_at_random(120, stateful_step_count=12))
