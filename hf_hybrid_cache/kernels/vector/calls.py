"""A kernel's call: a named tuple whose fields are declared once, as numbers in memory or each with its Numba type."""

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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
    """The types of a kernel's arguments: the address of a team and a call."""
    return types.int64, call_type(call, element)


def _type_of(field: Any, element: np.dtype) -> types.Type:
    if isinstance(field, types.Type):
        return field
    return call_type(field, element) if hasattr(field, "field_types") else field(element)


@intrinsic
def call_at(typing_context: Any, address: Any, call: Any) -> Any:
    """
    The call that is in memory at an address, int64 for each field of the class `call`, a `NamedTuple` of integers.

    The kernel of a call in memory takes its address alone: Numba needs ten times as long for a tuple of many numbers,
    and a call that is in memory can be used again with other numbers in it.
    """
    made = types.NamedUniTuple(types.int64, len(call.instance_class._fields), call.instance_class)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.load(builder.inttoptr(arguments[0], context.get_value_type(made).as_pointer()), align=8)

    return made(types.int64, call), generate
