def byte_size(text: str) -> int:
    return int(text)
