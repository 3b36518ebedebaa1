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
    def title(self): return Path(self.files[0].name).name
def read_documents(names, remark, folder=None):
    return Documents(tuple(Document(n, Path(n).read_text()) for n in names))
