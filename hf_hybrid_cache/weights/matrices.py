"""Matrices in host memory, and products with them: the base class, and those in full precision."""

from abc import ABC, abstractmethod

import torch
from torch.nn import functional

from ..kernels import ExpertCall, Products, add_up_experts, compile_plain_weights_in_background

# The other dtypes of kernels are converted to float32.
OF_KERNEL = (torch.float32, torch.bfloat16)


class Matrices(ABC):
    """
    One matrix, or several of one shape such as a layer's experts, in host memory.

    Attributes:
        count: number of matrices.
        most_tokens: the most tokens of a matrix with which `multiply_chosen` is faster than `multiply`.
        token_sizes: `(columns,)`.
        out_sizes: `(rows,)`.
    """

    most_tokens: int
    # Products by kernels; `None` if no kernel reads such matrices.
    products: Products | None

    def __init__(self, count: int, rows: int, columns: int):
        self.count = count
        # Tuples, because products compare them with sizes of tensors and concatenate them.
        self.token_sizes, self.out_sizes = (columns,), (rows,)

    @abstractmethod
    def multiply(self, tokens: torch.Tensor, index: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
        """
        Compute `tokens @ matrix.T + bias`.

        Args:
            tokens: `[..., columns]`, float32, bfloat16 or float16.
            index: of the matrix.
            bias: `[rows]`, of the same dtype.

        Returns:
            `[..., rows]`, of the same dtype.
        """

    def multiply_chosen(
        self, tokens: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Multiply each token with the matrices that it has chosen; other matrices are not read.

        Args:
            tokens: few, `[tokens, columns]`, or one for each chosen matrix, `[tokens * choices, columns]`.
            chosen: int64 `[tokens, choices]`, indices of matrices; `count` stands for no matrix.
            bias: `[count, rows]`, of the dtype of the tokens.

        Returns:
            `[tokens * choices, rows]`, of the dtype of the tokens; zeros for no matrix.

        Raises:
            IndexError: an index is out of range.
        """
        if self.products is None:
            return self._multiply_one_by_one(tokens, chosen, bias)
        dtype, num_pairs = tokens.dtype, chosen.numel()
        if dtype not in OF_KERNEL:
            return self.multiply_chosen(tokens.float(), chosen, None if bias is None else bias.float()).to(dtype)
        out = tokens.new_empty((num_pairs, *self.out_sizes))
        if num_pairs:
            kept = [None if each is None else each.contiguous() for each in (tokens, chosen, bias)]
            tokens_at, chosen_at, bias_at = map(address, kept)
            wrong = self.products.multiply(
                0,
                tokens_at,
                num_pairs,
                dtype == torch.bfloat16,
                bias_at,
                out.data_ptr(),
                chosen_at,
                num_pairs // len(tokens),
            )
            self._require_found(wrong, num_pairs)
        return out

    def add_up_experts(
        self,
        down: "Matrices",
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        router_weights: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """
        Sum up the outputs of experts with a SiLU gate, times their router weights, by one call of a kernel.

        These matrices are the experts' gate and up projections.

        Args:
            down: the experts' down projections.
            tokens: `[tokens, columns]`, few.
            chosen: int64 `[tokens, choices]`, indices of experts; `count` stands for no expert.
            router_weights: `[tokens, choices]`.
            up_bias: `[count, rows]`, of the dtype of the tokens.
            down_bias: `[count, down's rows]`, of the dtype of the tokens.

        Returns:
            float32 `[tokens, down's rows]`; `None` if no kernel reads such matrices.

        Raises:
            IndexError: an index is out of range.
        """
        if self.products is None or down.products is None:
            return None
        if tokens.dtype not in OF_KERNEL:
            biases = [None if each is None else each.float() for each in (up_bias, down_bias)]
            return self.add_up_experts(down, tokens.float(), chosen, router_weights, *biases)
        out = torch.empty(len(tokens), *down.out_sizes)
        if not chosen.numel():
            return out.zero_()
        if router_weights.dtype not in OF_KERNEL:
            router_weights = router_weights.float()
        given = tokens, chosen, router_weights, up_bias, down_bias
        kept = [None if each is None else each.contiguous() for each in given]
        tokens_at, chosen_at, router_weights_at, up_bias_at, down_bias_at = map(address, kept)
        call = ExpertCall(
            chosen=chosen_at,
            num_pairs=chosen.numel(),
            tokens=tokens_at,
            choices=chosen.shape[1],
            is_bfloat16=tokens.dtype == torch.bfloat16,
            router_weights=router_weights_at,
            has_bfloat16_router_weights=router_weights.dtype == torch.bfloat16,
            up_bias=up_bias_at,
            down_bias=down_bias_at,
            out=out.data_ptr(),
        )
        self._require_found(add_up_experts(self.products, down.products, call), chosen.numel())
        return out

    @abstractmethod
    def write(self, index: int, out: torch.Tensor) -> None:
        """Write a matrix, dequantized, to `out`, `[rows, columns]` in host memory, of a floating-point dtype."""

    def _multiply_one_by_one(
        self, tokens: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute `multiply_chosen` by `multiply`."""
        pairs_of_token = chosen.numel() // len(tokens)
        out = tokens.new_zeros((chosen.numel(), *self.out_sizes))
        flat = chosen.flatten()
        for index in flat.unique().tolist():
            if index == self.count:
                continue
            pairs = (flat == index).nonzero()[:, 0]
            inputs = tokens[pairs // pairs_of_token]
            out[pairs] = self.multiply(inputs, index, None if bias is None else bias[index])
        return out

    def _require_found(self, wrong: int, num_pairs: int) -> None:
        if wrong:
            raise IndexError(f"{wrong} of {num_pairs} indices are of no matrix: there are {self.count}.")


class PlainMatrices(Matrices):
    """
    Several matrices of one shape, such as a layer's experts, in full precision.

    Args:
        weights: `[matrices, rows, columns]`, in host memory, of a floating-point dtype; not copied.
    """

    # With more tokens, arithmetic limits the products, and torch is faster.
    most_tokens = 4

    def __init__(self, weights: torch.Tensor):
        count, rows, columns = weights.shape
        super().__init__(count, rows, columns)
        self._weights, self.products = weights, None
        if weights.dtype in OF_KERNEL and weights.is_contiguous():
            compile_plain_weights_in_background()
            is_bfloat16 = weights.dtype == torch.bfloat16
            self.products = Products.of_numbers(weights.data_ptr(), count, rows, columns, is_bfloat16)

    def multiply(self, tokens: torch.Tensor, index: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(tokens, self._weights[index], bias)

    def write(self, index: int, out: torch.Tensor) -> None:
        out.copy_(self._weights[index])


def address(tensor: torch.Tensor | None) -> int:
    """The address of a tensor; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
