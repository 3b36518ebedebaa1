"""NUMA nodes as the system tells them, and a process that is bound to one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from hf_hybrid_cache.cli import options
from hf_hybrid_cache.cli.distributed import nodes
from hf_hybrid_cache.cli.distributed.nodes import (
    Node,
    NodeError,
    bind_to_node,
    nodes_in,
    numbers_in,
    ranges,
    spread_over_nodes,
)

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="binds processes as only some systems do"
)
ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def write_nodes(folder: Path, *processors: str) -> Path:
    """Nodes with these processors, of 1, 2, ... GiB, beside the other things that the system has there."""
    for number, listed in enumerate(processors):
        node = folder / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(f"{listed}\n")
        total = f"Node {number} MemTotal:       {(number + 1) * 2**20} kB\nNode {number} MemFree:  5 kB\n"
        (node / "meminfo").write_text(total)
    (folder / "possible").write_text("0-7\n")
    (folder / "nodes").mkdir()
    return folder


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Record the processors that this process would be bound to; its memory policy stays as it is."""
    seen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, processors: seen.append(set(processors)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 8})
    monkeypatch.setattr(nodes, "_take_memory", lambda policy, numbers, failure: None)
    return seen


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("\n", set()),
        ("0", {0}),
        ("0-3", {0, 1, 2, 3}),
        ("0-1,8-9", {0, 1, 8, 9}),
        ("3,5,7", {3, 5, 7}),
        ("10-10", {10}),
    ],
)
def test_lists_of_processors_are_read_and_written(text: str, numbers: set[int]):
    assert numbers_in(text) == numbers
    assert numbers_in(ranges(numbers)) == numbers


def test_nodes_are_those_that_the_system_tells_in_order(tmp_path: Path):
    write_nodes(tmp_path, "0-3,16-19", "4-7", *[""] * 9)
    (tmp_path / "node12").mkdir()  # hidden from this process
    found = nodes_in(tmp_path)
    assert list(found) == list(range(11))
    assert found[0] == Node(0, frozenset({0, 1, 2, 3, 16, 17, 18, 19}), 2**30)
    assert str(found[1]) == "node 1 (processors 4-7, 2.0 GiB)"
    assert str(found[10]) == "node 10 (no processors, 11.0 GiB)"
    assert nodes_in(tmp_path / "missing") == {}


@pytest.mark.parametrize(("number", "processors"), [(0, {0, 1}), (1, {2, 3})])
def test_a_process_keeps_those_of_its_processors_that_are_in_the_node(
    number: int, processors: set[int], tmp_path: Path, bound: list[set[int]]
):
    assert bind_to_node(number, write_nodes(tmp_path, "0-1,4-5", "2-3,6")) is None
    assert bound == [processors]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (4, "There is no node 4: this system has node 0 .processors 0-7, 1.0 GiB., node 1 .processors 9-15, 2.0 GiB"),
        (1, "may use processors 0-3,8, .* none of them is in node 1: this system has node 0 .processors 0-7"),
        (2, "none of them is in node 2: .* node 2 .no processors, 3.0 GiB"),
    ],
)
def test_a_node_that_cannot_be_had_is_refused_with_those_there_are(
    number: int, message: str, tmp_path: Path, bound: list[set[int]]
):
    with pytest.raises(NodeError, match=message):
        bind_to_node(number, write_nodes(tmp_path, "0-7", "9-15", ""))
    assert bound == []


def test_a_system_without_nodes_or_that_binds_nothing_says_so(
    tmp_path: Path, bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(NodeError, match=r"There is no node 0: .* tells of none"):
        bind_to_node(0, tmp_path)

    def refuse(process: int, processors: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(NodeError, match=r"does not let this process be bound to a node \(Operation not permitted\)"):
        bind_to_node(0, write_nodes(tmp_path, "0"))
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(NodeError, match="on Linux only, and this is"):
        bind_to_node(0, tmp_path)


def test_memory_that_is_not_preferred_is_a_warning_of_one_line(
    tmp_path: Path, bound: list[set[int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.undo()
    monkeypatch.setattr(nodes.platform, "machine", lambda: "abacus")
    reason = spread_over_nodes(write_nodes(tmp_path, "0-1", "2", ""))
    assert reason == "Memory is not spread over nodes 0-2: how to ask for it on abacus is not known."
    monkeypatch.setattr(options, "spread_over_nodes", lambda: reason)
    options.run_on_node("all")
    assert capsys.readouterr().err == f"warning: {reason}\n"


def test_memory_cannot_be_spread_over_no_nodes(tmp_path: Path):
    with pytest.raises(NodeError, match=r"no nodes to spread memory over: .* tells of none"):
        spread_over_nodes(tmp_path)


@pytest.mark.parametrize("choice", ["-1", "both", "1.5", ""])
def test_what_is_no_node_is_refused(choice: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit):
        options.run_on_node(choice)
    assert f"--cpu-node must be the number of a node or all, got {choice!r}." in capsys.readouterr().err


@needs_affinity
def test_threads_when_bound_to_node_then_run_on_its_processors(tmp_path: Path):
    program = f"""
import os, sys
from pathlib import Path
from hf_hybrid_cache.cli.distributed.nodes import bind_to_node
warning = bind_to_node(1, Path({str(write_nodes(tmp_path, "", str(ALLOWED[-1])))!r}))
import torch
from hf_hybrid_cache import get_num_threads
torch.ones(1 << 22).sum()
threads = [int(name) for name in os.listdir("/proc/self/task")] if sys.platform == "linux" else [0]
assert all(os.sched_getaffinity(thread) == {{{ALLOWED[-1]}}} for thread in threads)
print(torch.get_num_threads(), get_num_threads(), warning)
"""
    unset = ("OMP_NUM_THREADS", "HF_HYBRID_CACHE_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={name: value for name, value in os.environ.items() if name not in unset},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ones, warning = done.stdout.strip().split(" ", 2)[:2], done.stdout.strip().split(" ", 2)[2]
    assert ones == ["1", "1"]
    # A machine may have a second node, and a container may refuse.
    assert warning == "None" or "Memory of node 1 is not preferred: the system refuses (" in warning


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="asks Linux where memory is taken")
def test_memory_of_the_node_is_preferred_where_the_system_lets_it():
    node = min(nodes_in(nodes.NODES), default=None)
    if node is None:
        pytest.skip("the system tells of no nodes")
    program = f"""
from hf_hybrid_cache.cli.distributed.nodes import bind_to_node
warning = bind_to_node({node})
assert warning is not None or "prefer:{node}" in open("/proc/self/numa_maps").read(), warning
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    if "none of them is in node" in done.stderr:
        pytest.skip("no processor of the first node may be used")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="asks Linux where memory is taken")
def test_memory_when_spread_over_nodes_then_is_interleaved():
    if not nodes_in(nodes.NODES):
        pytest.skip("the system tells of no nodes")
    program = """
from hf_hybrid_cache.cli.distributed.nodes import spread_over_nodes
warning = spread_over_nodes()
assert warning is not None or "interleave" in open("/proc/self/numa_maps").read(), warning
from hf_hybrid_cache.kernels.vector import threads
assert threads._is_memory_spread() == (warning is None)
assert threads.get_num_threads() == threads._physical_cores(of_all=warning is None)
"""
    unset = {name: value for name, value in os.environ.items() if name != "HF_HYBRID_CACHE_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", program], env=unset, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
