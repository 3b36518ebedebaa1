from ..files.layers import bytes_of

__all__ = ["bytes_of"]
