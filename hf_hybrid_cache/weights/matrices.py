"""What matrices in host memory, of any precision, are asked for."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ..kernels import ExpertCall


class Matrices(ABC):
    """
    One weight, or several of one shape such as a layer's experts, in host memory.

    Attributes:
        count: how many there are.
        most_tokens: of a matrix, up to which `multiply_chosen` is the faster way.
        token_sizes: `(columns,)`.
        out_sizes: `(rows,)`.
    """

    most_tokens: int

    def __init__(self, count: int, rows: int, columns: int):
        self.count = count
        # Tuples, because products compare and join them.
        self.token_sizes, self.out_sizes = (columns,), (rows,)

    @abstractmethod
    def multiply(self, tokens: torch.Tensor, index: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
        """
        `tokens @ matrix.T + bias`.

        Args:
            tokens: `[..., columns]`, float32, bfloat16 or float16.
            index: of the matrix.
            bias: `[rows]`, of the same type.

        Returns:
            `[..., rows]`, likewise.
        """

    @abstractmethod
    def multiply_chosen(
        self, tokens: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        The products of each token with the matrices that it has chosen. Others are not read.

        Args:
            tokens: `[tokens, columns]`, or of each chosen matrix its own, `[tokens * choices, columns]`; few.
            chosen: int64 `[tokens, choices]`, indices of matrices; `count` for none.
            bias: `[count, rows]`, of the type of the tokens.

        Returns:
            `[tokens * choices, rows]`, likewise; zeros where no matrix was chosen.

        Raises:
            IndexError: there is no such matrix.
        """

    def add_up_experts(
        self,
        down: "Matrices",
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """
        The weighted sums of what experts give whose gate is a SiLU, by one call of a kernel.

        Args:
            down: the second weights of the experts whose first weights, gate and up projections, these are.
            tokens: `[tokens, columns]`, few.
            chosen: int64 `[tokens, choices]`, indices of experts; `count` for none.
            shares: `[tokens, choices]`, what each choice counts.
            up_bias: `[count, rows]`, of the type of the tokens.
            down_bias: likewise.

        Returns:
            float32 `[tokens, down's rows]`; `None` where there is no kernel that reads such matrices.

        Raises:
            IndexError: there is no such matrix.
        """
        kernel = self._kernel_of_experts(down, tokens.dtype)
        if kernel is None:
            return None
        if tokens.dtype == torch.float16:  # which the kernels do not read
            biases = [None if each is None else each.float() for each in (up_bias, down_bias)]
            return self.add_up_experts(down, tokens.float(), chosen, shares, *biases)
        out = torch.empty(len(tokens), *down.out_sizes)
        if not chosen.numel():
            return out.zero_()
        if shares.dtype not in (torch.float32, torch.bfloat16):
            shares = shares.float()
        tokens, chosen, shares = tokens.contiguous(), chosen.contiguous(), shares.contiguous()
        kept = [None if bias is None else bias.contiguous() for bias in (up_bias, down_bias)]
        up_bias_at, down_bias_at = (0 if bias is None else bias.data_ptr() for bias in kept)
        call = ExpertCall(
            chosen=chosen.data_ptr(),
            num_pairs=chosen.numel(),
            tokens=tokens.data_ptr(),
            choices=chosen.shape[1],
            is_bfloat16=tokens.dtype == torch.bfloat16,
            shares=shares.data_ptr(),
            has_bfloat16_shares=shares.dtype == torch.bfloat16,
            up_bias=up_bias_at,
            down_bias=down_bias_at,
            out=out.data_ptr(),
        )
        self._require_found(kernel(call), chosen.numel())
        return out

    @abstractmethod
    def _kernel_of_experts(self, down: "Matrices", dtype: torch.dtype) -> Callable[[ExpertCall], int] | None:
        """What computes experts with these first and those second weights, for tokens of a type; `None` for nothing."""

    @abstractmethod
    def write(self, index: int, out: torch.Tensor) -> None:
        """Write what a matrix stands for to `out`, `[rows, columns]` in host memory, of a floating type."""

    def _chosen_by(
        self,
        kernel: Callable[[int, int, int, int, bool, int, int], int],
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same by a kernel that is told addresses, for float32 and bfloat16."""
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
