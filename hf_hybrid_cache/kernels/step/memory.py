"""A decode step as a list of operations, with the memory of what is between them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..attention.attention import ATTEND, merge_head
from ..attention.attention_call import CALL_BYTES, SCRATCH, AttentionCall
from ..attention.codes import attend_codes
from ..attention.stored_blocks import StoredBlocks
from ..attention.workspace import Shape, Strided, Workspace, aligned_zeros, laid_out
from ..vector.compiled import Kernel
from ..vector.numbers_at import bits_of_double
from ..vector.operations import Operations
from ..vector.parallel import team_of_kernels
from ..vector.vector_ir import LANES
from ..weights.products import PANELS, Product, Products, Weights, take_tokens
from .rows import PRODUCT_BYTES, ProductList, multiply
from .step import (
    Gate,
    Heads,
    Norm,
    take_gated,
    take_heads,
    take_norm,
)

# The projections of a layer, in the order of `LayerWeights`.
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
# Parts of a weight for each thread, unless they are smaller than the least or larger than the largest, in bytes: the
# first cache lines of a part come late.
_PARTS_OF_THREAD, _LEAST_PART, _LARGEST_PART = 2, 2**15, 2**19


class Projection(NamedTuple):
    """A product of a layer: with the weight `which` of `products`, and the address of its bias, 0 for none."""

    products: Products
    which: int
    bias: int


class LayerWeights(NamedTuple):
    """The weights of a layer; norms are addresses, 0 for none."""

    input_norm: int
    post_norm: int
    query_norm: int
    key_norm: int
    is_rotated: bool
    projections: Sequence[Projection]


class States(NamedTuple):
    """
    The input and output of a step: addresses of float32 or bfloat16.

    Attributes:
        given: hidden states, `[rows, columns]`, written.
        queries: of each layer, `[layers, rows, heads, head_dim]`, as attention takes them.
        out: what the last norm gives, `[rows, columns]`.
        cosines: of the rows' positions, `[rows, head_dim]`.
        sines: likewise.
    """

    given: int
    queries: int
    out: int
    cosines: int
    sines: int


class StepMemory:
    """
    A step of a model for a number of rows.

    Args:
        layers: the weights, whose memory the caller keeps alive. Layers may have gates of different widths.
        norm: address of the weight of the last norm.
        epsilon: of all norms.
        shape: of attention, one query of each sequence.
        scale: of the scores.
        is_bfloat16: whether the model's numbers are bfloat16, not float32.
        states: addresses.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        norm: int,
        epsilon: float,
        shape: Shape,
        scale: float,
        is_bfloat16: bool,
        states: States,
    ):
        rows, dim, item, num_heads = (
            shape.batch,
            shape.key_dim,
            2 if is_bfloat16 else 4,
            shape.num_kv_heads * shape.group,
        )
        all_weights = [each.products.weights for layer in layers for each in layer.projections]
        rows_of_layers = np.array([each.rows for each in all_weights]).reshape(len(layers), -1)
        widths = dict(zip(PROJECTIONS, rows_of_layers.max(0).tolist(), strict=True))
        columns, gated = all_weights[0].columns, rows_of_layers[:, PROJECTIONS.index("gate")]
        query_bytes = rows * widths.pop("q") * item
        widths |= {"normed": columns, "attended": num_heads * dim, "added": columns}
        sizes = {name: rows * width * item for name, width in widths.items()}
        sizes |= {"operand": 4 * rows * max(each.operand_columns for each in all_weights)}
        sizes |= {name: 4 * rows * max(each.groups for each in all_weights) for name in ("steps", "sums")}
        offsets, num_bytes = laid_out(sizes)
        self._memory = aligned_zeros(num_bytes)
        at = {name: self._memory.ctypes.data + offset for name, offset in offsets.items()}
        self._workspace, self._scale = Workspace(shape), scale
        of_heads = num_heads * dim * item, dim * item, dim * item, is_bfloat16
        self._query, self._attended = Strided(states.queries, *of_heads), Strided(at["attended"], *of_heads)
        self._queries = states.queries + query_bytes * np.arange(len(layers))

        # All rows are multiplied with one weight.
        self._weights = layers
        self._which = np.array([[each.which for each in layer.projections] for layer in layers])
        self._routing = np.arange(rows), np.array([0, rows])
        tokens, out = {"o": "attended", "down": "gate"}, {"o": "added", "down": "added"}
        threads = team_of_kernels().threads
        self._products = np.array([
            [
                Product(
                    weights=each.products.address, places=rows, pairs=self._routing[0].ctypes.data,
                    matrices=self._which[n, which:].ctypes.data, starts=self._routing[1].ctypes.data,
                    tokens=at[tokens.get(name, "normed")], tokens_are_bfloat16=is_bfloat16,
                    token_step=each.products.weights.columns, pairs_of_token=1,
                    is_gated=0, operand=at["operand"], steps=at["steps"], sums=at["sums"], operand_parts=rows,
                    bias=each.bias, bias_is_bfloat16=is_bfloat16, bias_step=0,
                    out=self._queries[n] if name == "q" else at[out.get(name, name)], out_is_bfloat16=is_bfloat16,
                    out_step=each.products.weights.rows, parts=_parts(each.products.weights, threads),
                )
                for which, (name, each) in enumerate(zip(PROJECTIONS, layer.projections, strict=True))
            ]
            for n, layer in enumerate(layers)
        ])  # fmt: skip
        index = np.arange(len(layers) * len(PROJECTIONS)).reshape(len(layers), -1)
        product: np.ndarray = self._products.ctypes.data + PRODUCT_BYTES * index
        together = ((0, 3), (3, 1), (4, 2), (6, 1))  # q, k and v; o; gate and up; down
        self._lists = np.array([[ProductList(each[first], count) for first, count in together] for each in product])

        epsilon_bits = bits_of_double(epsilon)

        def norm_of(added: int, weight: int, out: int, product: int) -> Norm:
            return Norm(states.given, added, weight, epsilon_bits, columns, is_bfloat16, out, product)

        norms = []
        for n, layer in enumerate(layers):
            added = at["added"] if n else 0
            norms.append(norm_of(added, layer.input_norm, at["normed"], product[n, 0]))
            norms.append(norm_of(at["added"], layer.post_norm, at["normed"], product[n, 4]))
        self._norms = np.array([*norms, norm_of(at["added"], norm, states.out, 0)])
        self._calls = np.zeros((len(layers), CALL_BYTES // 8), np.int64)
        self._heads = np.array([
            Heads(
                self._queries[n], at["k"], at["v"], shape.num_kv_heads, shape.group, dim, is_bfloat16,
                layer.query_norm, layer.key_norm, epsilon_bits, layer.is_rotated, states.cosines, states.sines,
                self._calls[n].ctypes.data,
            )
            for n, layer in enumerate(layers)
        ])  # fmt: skip
        downs = zip(gated, product[:, 6], strict=True)
        self._gates = np.array([Gate(at["gate"], at["up"], width, is_bfloat16, down) for width, down in downs])
        self._operations = self._listed(rows, rows * shape.num_kv_heads, is_bfloat16)

    def _listed(self, rows: int, heads: int, is_bfloat16: bool) -> Operations:
        """The list of operations; those of attention get their parts with the blocks of a cache."""
        attend = ATTEND[np.dtype(np.uint16 if is_bfloat16 else np.float32)]
        of_projections = self._products[:, :, Product._fields.index("parts")]
        operations: list[tuple[Kernel, np.ndarray]] = []
        parts: list[int] = []
        for n, (q, k, v, o, gate, up, down) in enumerate(of_projections.tolist()):
            operations += [
                (take_norm, self._norms[2 * n]),
                (multiply, self._lists[n, 0]),
                (take_heads, self._heads[n]),
                (attend_codes, self._calls[n]),
                (attend, self._calls[n]),
                (merge_head, self._calls[n]),
                (take_tokens, self._products[n, 3]),
                (multiply, self._lists[n, 1]),
                (take_norm, self._norms[2 * n + 1]),
                (multiply, self._lists[n, 2]),
                (take_gated, self._gates[n]),
                (multiply, self._lists[n, 3]),
            ]
            parts += [rows, q + k + v, heads, 0, 0, heads, rows, o, rows, gate + up, rows, down]
        operations.append((take_norm, self._norms[-1]))
        self._parts = np.array([*parts, rows])
        in_codes = [index for index, (kernel, _) in enumerate(operations) if kernel is attend_codes]
        self._in_codes = np.array(in_codes)
        return Operations([(kernel, call.ctypes.data) for kernel, call in operations], beside=self._in_codes + 1)

    def take(self, layers: Sequence[StoredBlocks]) -> None:
        """
        Take the records of a cache's layers, which count the token to come already.

        Further tokens of the same blocks are counted there.
        """
        for n, blocks in enumerate(layers):
            parts, in_codes = self._workspace.ask(self._query, self._attended, blocks, self._scale)
            self._calls[n] = self._workspace.asked
            at = self._in_codes[n]
            self._parts[at : at + 2] = in_codes, parts - in_codes
        self._calls[:, SCRATCH // 8 :] = self._calls[-1, SCRATCH // 8 :]  # a later call may have needed more memory
        self._calls[:, AttentionCall._fields.index("query")] = self._queries
        self._operations.set_parts(self._parts.tolist())

    def run(self) -> None:
        """Run the step with what is in `States`, and with the last token of each record."""
        self._operations.run()


def _parts(weights: Weights, threads: int) -> int:
    """Number of parts of a weight."""
    units = -(-weights.rows // LANES) if weights.kind == PANELS else weights.rows
    several = min(_PARTS_OF_THREAD * threads, weights.matrix_bytes // _LEAST_PART)
    return min(units, max(1, several, weights.matrix_bytes // _LARGEST_PART))
