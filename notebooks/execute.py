"""
Run the notebooks and keep what they print and draw: `python -m notebooks.execute`.

With `HF_HYBRID_CACHE_SMALL_NOTEBOOKS=1` in the environment they read and measure less. What is
written has no times of execution and nothing of this machine: two runs differ in what was
measured only.
"""

import argparse
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_TIMEOUT_SECONDS = 600


def execute(source: Path, target: Path) -> None:
    """
    Run the notebook `source` where it is, and write it with its outputs to `target`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; nothing is written.
    """
    notebook = nbformat.read(source, as_version=4)
    # Without encryption the kernel warns that its messages can be read.
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(source.parent)}},
    ).execute(transport_encryption="auto")
    notebook.metadata = nbformat.from_dict(METADATA)
    nbformat.write(notebook, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks and keep what they print and draw.")
    parser.add_argument("notebooks", nargs="*", help="names, such as 01_quickstart (default: all)")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder to write to (default: in place)"
    )
    arguments = parser.parse_args()
    # On a busy machine threads that wait by spinning take most of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sources = [FOLDER / f"{name}.ipynb" for name in arguments.notebooks] or sorted(
        FOLDER.glob("*.ipynb")
    )
    for source in sources:
        execute(source, arguments.out / source.name)
        print(f"run: {source.stem}")


if __name__ == "__main__":
    main()
