"""Docstrings open as sentences that stand alone, and names of tests are short."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("docs", "experiments", "hf_hybrid_cache", "hub", "notebooks", "tests")
OPENINGS = re.compile(r"(What|Of|That of|Those|Likewise|How|Whether it|As|By|For|In|On|To|Which|Where|Why|With)\b")
LONGEST_NAME = 70
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes() -> tuple[tuple[str, Documented], ...]:
    """Return all modules, classes and functions with the paths of their files."""
    paths = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*"))]
    return tuple(
        (path.relative_to(REPOSITORY).as_posix(), node)
        for path in paths
        if path.suffix in (".py", ".ipynb") and "_build" not in path.parts
        for node in ast.walk(ast.parse(source_of(path)))
        if isinstance(node, Documented)
    )


def source_of(path: Path) -> str:
    """Return the source of a module, or of all code cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


def fragments() -> Iterator[str]:
    """Yield the place and the first line of each docstring that opens as no sentence does."""
    for path, node in nodes():
        text = ast.get_docstring(node) or ""
        if OPENINGS.match(text):
            yield f"{path}:{node.body[0].lineno}: {text.splitlines()[0]}"


def test_docstrings_when_opening_then_stand_alone():
    assert list(fragments()) == []


def test_names_of_tests_when_written_then_have_at_most_70_characters():
    names = [(path, node.name) for path, node in nodes() if not isinstance(node, ast.Module)]
    tests = [(path, name) for path, name in names if path.startswith("tests/") and name.startswith("test_")]
    assert len(tests) > 1000
    assert [each for each in tests if len(each[1]) > LONGEST_NAME] == []
