"""Stand-in until the room is merged."""
from dataclasses import dataclass
from pathlib import Path
from ..errors import HybridCacheError
class DocumentError(HybridCacheError, ValueError): pass
@dataclass(frozen=True)
class Document:
    name: str
    text: str
@dataclass(frozen=True)
class Documents:
    files: tuple
    skipped: tuple = ()
    @property
    def sections(self):
        if len(self.files) == 1: return [self.files[0].text]
        return [f"Document: {d.name}\n\n{d.text.strip()}\n\n" for d in self.files]
    @property
    def text(self): return "".join(self.sections)
    @property
    def title(self): return Path(self.files[0].name).name + (f" and {len(self.files) - 1} more" if len(self.files) > 1 else "")
    @property
    def counted(self): return "document" if len(self.files) == 1 else f"{len(self.files):,} documents"
def read_documents(names, remark, folder=None):
    return Documents(tuple(Document(n, __import__("sys").stdin.read() if n == "-" else Path(n).read_text()) for n in names))
def require_documents(names, folder=None):
    for n in names:
        if n != "-" and not Path(n).exists(): raise DocumentError(f"Cannot read {n}: No such file or folder.")
def read_text(path):
    try: return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error: raise DocumentError(f"Cannot read {path}: {error}") from error
