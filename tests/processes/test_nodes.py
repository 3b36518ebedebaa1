"""NUMA nodes as the system tells them, and a process that is bound to one."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache import NodeError, bind_to_node, numa_nodes

from common.programs import command, environment

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="binds processes as only some systems do"
)
ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nodes of 1, 2, ... GiB, beside the other things that the system has there."""
    for number, listed in enumerate(["0-1,4-5", "2-3,6", "9-15", ""]):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(f"{listed}\n")
        total = f"Node {number} MemTotal:       {(number + 1) * 2**20} kB\nNode {number} MemFree:  5 kB\n"
        (node / "meminfo").write_text(total)
    (tmp_path / "possible").write_text("0-7\n")
    (tmp_path / "nodes").mkdir()
    (tmp_path / "node12").mkdir()  # hidden from this process
    monkeypatch.setattr(numa_nodes, "NODES", tmp_path)
    return tmp_path


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Record the processors that this process would be bound to; its memory stays as it is."""
    seen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, processors: seen.append(set(processors)), False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 8}, False)
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    return seen


@pytest.mark.filterwarnings("ignore:torch was imported before")
@pytest.mark.parametrize(
    ("node", "processors", "message"),
    [
        (0, [{0, 1}], "processors of node 0 are used, its memory is not preferred: how to ask for it on abacus is not"),
        ("all", [], r"not spread over nodes 0-3: how to ask for it on abacus is not known\."),
    ],
)
def test_process_when_bound_then_keeps_its_processors_of_the_node(
    node: Any, processors: list[set[int]], message: str, nodes: Path, bound: list[set[int]]
):
    with pytest.warns(UserWarning, match=message):
        bind_to_node(node)
    assert bound == processors


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (4, r"no node 4: this system has node 0 \(processors 0-1,4-5, 1.0 GiB\), node 1 \(processors 2-3,6, 2.0 GiB\)"),
        (2, r"may use processors 0-3,8, .* none of them is in node 2: this system has node 0 \(processors 0-1,4-5"),
        (3, r"none of them is in node 3: .* node 3 \(no processors, 4.0 GiB\)"),
        ("both", "node must be the number of a NUMA node, or \"all\", got 'both'"),
        (True, "got True"),
    ],
)
def test_node_that_cannot_be_had_is_refused_with_those_there_are(
    node: Any, message: str, nodes: Path, bound: list[set[int]]
):
    with pytest.raises(NodeError, match=message):
        bind_to_node(node)
    assert bound == []


def test_system_that_has_no_nodes_or_binds_nothing_says_so(
    nodes: Path, bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
):
    def refuse(process: int, processors: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(NodeError, match=r"does not let this process be bound to a node \(Operation not permitted\)"):
        bind_to_node(0)
    monkeypatch.setattr(numa_nodes, "NODES", nodes / "missing")
    with pytest.raises(NodeError, match=r"There is no node 0: .* tells of none"):
        bind_to_node(0)
    with pytest.raises(NodeError, match=r"no nodes to take memory of in turn: .* tells of none"):
        bind_to_node("all")
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(NodeError, match="on Linux only, and this is"):
        bind_to_node(0)


def run(program: str) -> None:
    """Run a program with the default number of threads."""
    unset = ("OMP_NUM_THREADS", "HF_HYBRID_CACHE_NUM_THREADS")
    given = {name: value for name, value in environment().items() if name not in unset}
    subprocess.run(command(program), env=given, check=True, timeout=600)


@needs_affinity
def test_threads_when_bound_before_torch_is_imported_then_fit_the_node(nodes: Path):
    (nodes / "node1" / "cpulist").write_text(f"{ALLOWED[-1]}\n")
    run(f"""
import os, sys, warnings
from pathlib import Path
from hf_hybrid_cache import bind_to_node, numa_nodes
numa_nodes.NODES = Path({str(nodes)!r})
warnings.simplefilter("ignore")  # this machine may have no second node
bind_to_node(1)
assert sys.modules.keys().isdisjoint(["torch", "numpy"])
import torch
from hf_hybrid_cache import get_num_threads
torch.ones(1 << 22).sum()
threads = [int(name) for name in os.listdir("/proc/self/task")] if sys.platform == "linux" else [0]
assert all(os.sched_getaffinity(thread) == {{{ALLOWED[-1]}}} for thread in threads)
assert (torch.get_num_threads(), get_num_threads()) == (1, 1)
torch.set_num_threads(2)
with warnings.catch_warnings(record=True, action="always") as warned:
    bind_to_node(1)
assert "torch was imported before and has 2 threads for 1 processors" in str(warned[0].message)
""")


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="asks Linux where memory is taken")
@pytest.mark.parametrize(("node", "policy"), [(0, "prefer:0"), ("all", "interleave")])
def test_memory_is_taken_where_asked_if_the_system_lets_it(node: Any, policy: str):
    run(f"""
import warnings
from pathlib import Path
from hf_hybrid_cache import NodeError, bind_to_node
with warnings.catch_warnings(record=True, action="always") as warned:
    try:
        bind_to_node({node!r})
    except NodeError:
        raise SystemExit  # this machine tells of no nodes, or lets this process use none of its processors
assert warned or {policy!r} in Path("/proc/self/numa_maps").read_text()
""")
