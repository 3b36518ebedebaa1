"""
Pages say what is so, docstrings open as sentences that stand alone, and names of tests are short.

Examples on pages, and commands, are run by `test_documentation.py`; links and anchors are checked by `make docs`.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hf_hybrid_cache
from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    OffloadedHybridCache,
    QuantizedHybridCache,
    models,
    planning,
)

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
# The log tells of files as they were.
GUIDE = [path for path in (REPOSITORY / "docs").glob("*.md") if path.stem != "log"]
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *GUIDE]
CACHES = (HybridCache, DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache)
FOLDERS = ("docs", "experiments", "hf_hybrid_cache", "hub", "notebooks", "tests")
OPENINGS = re.compile(r"(What|Of|That of|Those|Likewise|How|Whether it|As|By|For|In|On|To|Which|Where|Why|With)\b")
LONGEST_NAME = 70
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 95


def strings_of_the_package() -> Iterator[str]:
    """Messages and other strings, with `…` in the place of what is only known when they are made."""
    for path in (REPOSITORY / "hf_hybrid_cache").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_that_are_explained_are_those_of_the_package():
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^```text\n(.*?)\n```$", page, flags=re.DOTALL | re.MULTILINE)
    assert len(messages) > 8
    known = list(strings_of_the_package())
    assert [message for message in messages if not any(message in string for string in known)] == []


def test_files_that_a_page_names_are_there():
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text)) | set(re.findall(r"`(results/[\w/]+)`", text))
        places = (REPOSITORY, REPOSITORY / "hf_hybrid_cache")
        assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_the_reference_has_every_public_name_and_no_other():
    pages = {path.stem: path.read_text() for path in (REPOSITORY / "docs" / "api").glob("*.rst")}
    text = "".join(pages.values())
    listed = set(re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)(?:\(\))?$", text, flags=re.MULTILINE))
    assert set(hf_hybrid_cache.__all__) - {"__version__"} == listed
    for room in (planning, models):
        assert f".. automodule:: {room.__name__}\n   :members:" in text


def test_the_caches_have_few_options_and_describe_each():
    """An option more is added on purpose: it raises the number."""
    count = 0
    for each in CACHES:
        said = re.findall(r"^    (\w+): .+$", inspect.cleandoc(each.__doc__ or ""), re.MULTILINE)
        given = [name for name in inspect.signature(each.__init__).parameters if name not in ("self", "config")]
        assert set(given) <= set(said), each
        count += len(given)
    assert count <= 21


@cache
def nodes() -> tuple[tuple[str, Documented], ...]:
    """Return all modules, classes and functions with the paths of their files."""
    paths = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    return tuple(
        (path.relative_to(REPOSITORY).as_posix(), node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Documented)
    )


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
    assert len(tests) > 500
    assert [each for each in tests if len(each[1]) > LONGEST_NAME] == []
