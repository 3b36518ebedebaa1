"""A kernel's call: a named tuple whose fields are declared once, each with its Numba type."""

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numba import types

# A Numba type, the class of a nested call, or a function from the element type of the blocks to a Numba type.
FieldType = types.Type | type | Callable[[np.dtype], types.Type]


def kernel_call(name: str, module: str, fields: Mapping[str, FieldType]) -> Any:
    """
    Make the class of a kernel's calls. Construct them by keyword: a swap of two numbers would be silent.

    Args:
        name: of the class.
        module: `__name__` of the module that holds the class; compiled kernels on disk refer to it.
        fields: type of each field, in order.

    Returns:
        A named tuple with the attribute `field_types`, which is `fields`.
    """
    call = cast(Any, namedtuple(name, fields, module=module))
    call.field_types = fields
    return call


def call_type(call: Any, element: np.dtype) -> types.NamedTuple:
    """The Numba type of a class from `kernel_call`, for blocks of `element`."""
    return types.NamedTuple([_type_of(field, element) for field in call.field_types.values()], call)


def taking(call: Any, element: np.dtype) -> tuple[types.Type, ...]:
    """The types of a kernel's arguments: `parallel`, `team`, `threads` and a call."""
    return types.int64, types.int64, types.int64, call_type(call, element)


def _type_of(field: Any, element: np.dtype) -> types.Type:
    if isinstance(field, types.Type):
        return field
    return call_type(field, element) if hasattr(field, "field_types") else field(element)
