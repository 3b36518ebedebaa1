"""The sources that compute states, as they were when somebody last decided whether their results had changed."""

import ast
import hashlib
import io
import tokenize
from pathlib import Path

import hf_hybrid_cache
from hf_hybrid_cache.model_identity.fields import NUMBERS

PACKAGE = Path(hf_hybrid_cache.__file__).parent
ROOMS = ("attention", "codecs", "device_kernels", "kernels")
NOTES = Path(__file__).with_name("noted_sources.txt")


def current_notes() -> list[str]:
    """List the version of the numbers, and each file with the digest of its code."""
    paths = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))
    return [f"NUMBERS {NUMBERS}", *(f"{path.relative_to(PACKAGE).as_posix()} {_digest(path)}" for path in paths)]


def _digest(path: Path) -> str:
    return hashlib.blake2b(code_of(path.read_text(encoding="utf-8")).encode(), digest_size=8).hexdigest()


def code_of(source: str) -> str:
    """Return a source without comments, docstrings and empty lines, the same by any version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            assert text.end_lineno is not None
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


if __name__ == "__main__":
    NOTES.write_text("\n".join(current_notes()) + "\n", encoding="utf-8")
