"""The documents of a prompt, as the rest of the command line imports them."""

from ...documents import Document, Documents, read_documents

__all__ = ["Document", "Documents", "read_documents"]
