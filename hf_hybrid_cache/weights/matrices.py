"""Base class of matrices in host memory, quantized or not, and of products with them."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ..kernels import ExpertCall


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

    @abstractmethod
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
        kernel = self._kernel_of_experts(down, tokens.dtype)
        if kernel is None:
            return None
        if tokens.dtype == torch.float16:  # the kernels do not read float16
            biases = [None if each is None else each.float() for each in (up_bias, down_bias)]
            return self.add_up_experts(down, tokens.float(), chosen, router_weights, *biases)
        out = torch.empty(len(tokens), *down.out_sizes)
        if not chosen.numel():
            return out.zero_()
        if router_weights.dtype not in (torch.float32, torch.bfloat16):
            router_weights = router_weights.float()
        tokens, chosen, router_weights = tokens.contiguous(), chosen.contiguous(), router_weights.contiguous()
        kept = [None if bias is None else bias.contiguous() for bias in (up_bias, down_bias)]
        up_bias_at, down_bias_at = (0 if bias is None else bias.data_ptr() for bias in kept)
        call = ExpertCall(
            chosen=chosen.data_ptr(),
            num_pairs=chosen.numel(),
            tokens=tokens.data_ptr(),
            choices=chosen.shape[1],
            is_bfloat16=tokens.dtype == torch.bfloat16,
            router_weights=router_weights.data_ptr(),
            has_bfloat16_router_weights=router_weights.dtype == torch.bfloat16,
            up_bias=up_bias_at,
            down_bias=down_bias_at,
            out=out.data_ptr(),
        )
        self._require_found(kernel(call), chosen.numel())
        return out

    @abstractmethod
    def _kernel_of_experts(self, down: "Matrices", dtype: torch.dtype) -> Callable[[ExpertCall], int] | None:
        """The kernel for experts with these up and those down projections; `None` if there is none."""

    @abstractmethod
    def write(self, index: int, out: torch.Tensor) -> None:
        """Write a matrix, dequantized, to `out`, `[rows, columns]` in host memory, of a floating-point dtype."""

    def _chosen_by(
        self,
        kernel: Callable[[int, int, int, int, bool, int, int], int],
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute `multiply_chosen` by a kernel that takes addresses, in float32 or bfloat16."""
        num_pairs = chosen.numel()
        out = tokens.new_empty((num_pairs, *self.out_sizes))
        if not num_pairs:
            return out
        tokens, chosen = tokens.contiguous(), chosen.contiguous()
        bias_at = 0
        if bias is not None:
            bias = bias.contiguous()
            bias_at = bias.data_ptr()
        wrong = kernel(
            chosen.data_ptr(),
            num_pairs,
            tokens.data_ptr(),
            num_pairs // len(tokens),
            tokens.dtype == torch.bfloat16,
            bias_at,
            out.data_ptr(),
        )
        self._require_found(wrong, num_pairs)
        return out

    def _require_found(self, wrong: int, num_pairs: int) -> None:
        if wrong:
            raise IndexError(f"{wrong} of {num_pairs} indices are of no matrix: there are {self.count}.")
