"""Numba frees an array after its last use, though its address may still be in use."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_hybrid_cache

KERNELS = Path(hf_hybrid_cache.__file__).parent / "kernels"
MAKERS = {"empty", "zeros", "ones", "full", "arange", "array", "empty_like", "zeros_like"}


def compiled_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            decorated = isinstance(node, ast.FunctionDef) and [ast.unparse(each) for each in node.decorator_list]
            if decorated and any(each.startswith("jit") for each in decorated):
                yield f"{path.stem}.{node.name}", node


FUNCTIONS = dict(compiled_functions())


def pairs_of(statement: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """Names that a statement assigns to, with what they get."""
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        targets, values = target.elts, value.elts
    else:
        targets, values = [target], [value]
    for each, given in zip(targets, values, strict=True):
        if isinstance(each, ast.Name):
            yield each.id, given


def makes_array(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in MAKERS


def last_mention(names: set[str], function: ast.FunctionDef) -> int:
    return max(node.lineno for node in ast.walk(function) if isinstance(node, ast.Name) and node.id in names)


def freed_too_early(function: ast.FunctionDef) -> set[str]:
    """The arrays that a compiled function makes and does not mention after the last use of their address."""
    assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    made = {name: node for node in assignments for name, value in pairs_of(node) if makes_array(value)}
    loops = [node for node in ast.walk(function) if isinstance(node, (ast.For, ast.While))]
    found = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Attribute) or not ast.unparse(node).endswith(".ctypes.data"):
            continue
        array = ast.unparse(node).partition(".")[0].partition("[")[0]
        if array not in made:
            continue
        within = [loop for loop in loops if loop.lineno <= node.lineno <= (loop.end_lineno or 0)]
        if any(made[array].lineno < loop.lineno for loop in within):
            continue  # the next round may use it
        holders = {
            name
            for each in assignments
            for name, value in pairs_of(each)
            if node in ast.walk(value) and not isinstance(value, ast.Call)
        }
        if last_mention({array}, function) <= max(node.lineno, last_mention(holders, function) if holders else 0):
            found.add(array)
    return found


def test_check_when_array_is_freed_too_early_then_finds_it():
    lines = "row = np.zeros(8)", "first = row[1].ctypes.data", "row[0] = 1", "use(first)", "return at"
    wrong = "\n    ".join(("def f(at):", *lines))
    (function,) = ast.parse(wrong).body
    assert isinstance(function, ast.FunctionDef)
    assert freed_too_early(function) == {"row"}
    (function,) = ast.parse(wrong.replace("return at", "return row[0]")).body
    assert isinstance(function, ast.FunctionDef)
    assert freed_too_early(function) == set()


@pytest.mark.parametrize("name", [name for name, node in FUNCTIONS.items() if ".ctypes.data" in ast.unparse(node)])
def test_array_whose_address_a_kernel_uses_then_is_used_after_it(name: str):
    assert not freed_too_early(FUNCTIONS[name])
