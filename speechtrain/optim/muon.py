"""Muon for the matrices of a network, and AdamW for its other parameters.

Legend: N matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from speechtrain.errors import require_least, require_shares
from speechtrain.optim.adamw import AdamW

# An iteration of Newton-Schulz maps a singular value s to a·s + b·s³ + c·s⁵. Five iterations with these
# factors (Jordan, 2024) bring values from 0.01 to 1 into the range from 0.68 to 1.14.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon(AdamW):
    """Muon (Jordan, 2024), in the form of Moonlight (Liu et al., 2025, arXiv:2502.16982).

    For a matrix p (R, C) with gradient g, the momentum is ``m = b m + (1 − b) g``, and its look-ahead is
    ``d = b m + (1 − b) g``. The update is ``p −= lr · (rms √max(R, C) · O + weight_decay · p)``. O has the
    singular vectors of d, and singular values near 1. So all directions of a matrix learn at a similar rate.
    The update has the root mean square ``rms · lr``. AdamW's updates have about 0.2 · lr.

    Matrices are parameters (R, C) or (R, C, 1) whose sides are at least ``min_side``. AdamW updates all other
    parameters, such as biases, norms, convolutions, and the embeddings and output layers of small alphabets.

    ``bf16`` computes O in bf16, which is accurate enough. All ranks must have chips that round alike.
    """

    can_shard = False  # O depends on all elements of a matrix.

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 1e-3,
        momentum: float = 0.95,
        rms: float = 0.2,
        min_side: int = 100,
        bf16: bool = True,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        require_shares(momentum=momentum)
        require_least(0, rms=rms)
        super().__init__(params, lr, betas, eps, weight_decay, fused=fused, foreach=foreach)
        self.momentum, self.rms, self.min_side, self.bf16 = momentum, rms, min_side, bf16

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # AdamW skips parameters without gradients, so the gradients of matrices are hidden from it.
        gradients: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and self._is_matrix(p):
                    gradients[p], p.grad = p.grad, None
        try:
            super().step()
        finally:
            for p, gradient in gradients.items():
                p.grad = gradient
        for group in self.param_groups:
            matrices_by_shape = defaultdict(list)
            for p in group["params"]:
                if p in gradients:
                    matrices_by_shape[p.shape].append(p)
            for matrices in matrices_by_shape.values():
                self._update_matrices(matrices, [gradients[p] for p in matrices], group)
        return loss

    def _is_matrix(self, p: Tensor) -> bool:
        is_matrix = p.dim() == 2 or (p.dim() == 3 and p.shape[2] == 1)
        return is_matrix and min(p.shape[:2]) >= self.min_side

    def _update_matrices(
        self, matrices: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
    ) -> None:
        """Update matrices of one shape together, so that few kernels run."""
        rows, columns = matrices[0].shape[:2]
        momenta = []
        for p, gradient in zip(matrices, gradients, strict=True):
            state = self.state[p]
            if not state:
                # AdamW refuses a loaded state without ``step``.
                state.update(step=torch.tensor(0.0), momentum_buffer=torch.zeros_like(p))
            state["step"] += 1
            momenta.append(state["momentum_buffer"].lerp_(gradient, 1 - self.momentum))
        directions = torch.stack(gradients).lerp(torch.stack(momenta), self.momentum)
        directions = directions.view(-1, rows, columns)
        dtype = directions.dtype
        if self.bf16:
            dtype = torch.bfloat16
        updates = orthogonalise(directions, dtype)
        factor = group["lr"] * self.rms * math.sqrt(max(rows, columns))
        decay = 1 - group["lr"] * group["weight_decay"]
        for index, p in enumerate(matrices):
            p.mul_(decay).add_(updates[index].view_as(p), alpha=-factor)


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices (N, R, C) with the same singular vectors, and singular values near 1.

    Newton-Schulz iterations in ``dtype`` compute them. A matrix of zeros stays zero.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    norms = x.flatten(1).norm(dim=1).clamp(min=1e-30)
    x = (x / norms[:, None, None]).to(dtype)
    for _ in range(_ITERATIONS):
        square = torch.bmm(x, x.mT)
        factor = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, factor, x, beta=_A)
    return x.mT if is_tall else x
