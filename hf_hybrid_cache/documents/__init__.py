"""The documents of a prompt: text, PDF, Word files, HTML and mails, from files, folders and standard input."""

from .formats import DocumentError
from .reading import Document, Documents, files_in, read_bytes, read_documents, read_text, require_documents

__all__ = [
    "Document",
    "DocumentError",
    "Documents",
    "files_in",
    "read_bytes",
    "read_documents",
    "read_text",
    "require_documents",
]
