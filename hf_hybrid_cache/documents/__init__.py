"""The documents of a prompt: text, PDF, Word files, HTML and mails, from files, folders, the web and standard input."""

from .formats import DocumentError
from .reading import (
    Document,
    Documents,
    files_in,
    is_on_the_web,
    piped_documents,
    read_bytes,
    read_documents,
    require_documents,
    require_nothing_piped,
)

__all__ = [
    "Document",
    "DocumentError",
    "Documents",
    "files_in",
    "is_on_the_web",
    "piped_documents",
    "read_bytes",
    "read_documents",
    "require_documents",
    "require_nothing_piped",
]
