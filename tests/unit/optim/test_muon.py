"""Muon against singular values, torch's Muon and AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from speechtrain.optim.adamw import AdamW
from speechtrain.optim.muon import Muon, orthogonalise

RATES = [0.1, 0.05, 0.01]


def newton_schulz(matrix: Tensor) -> Tensor:
    """The result of the iterations by the singular value decomposition."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ v


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    torch.manual_seed(1)
    for rate in RATES:
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3)])
def test_the_iterations_change_only_the_singular_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(4, *shape, dtype=torch.float64)
    results = orthogonalise(matrices, torch.float64)
    for matrix, result in zip(matrices, results, strict=True):
        torch.testing.assert_close(result, newton_schulz(matrix), rtol=1e-9, atol=1e-9)
        values = torch.linalg.svdvals(result)
        assert 0.6 < values.min() <= values.max() < 1.3


def test_a_zero_gradient_only_decays_a_matrix() -> None:
    (matrix,) = parameters_of((4, 4))
    start = matrix.detach().clone()
    matrix.grad = torch.zeros_like(matrix)
    Muon([matrix], lr=0.1, weight_decay=0.5, min_side=4).step()
    torch.testing.assert_close(matrix.detach(), start * 0.95)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon. It is in torch 2.9")
def test_it_equals_the_muon_of_torch() -> None:
    shapes = (128, 256), (256, 128), (128, 128), (128, 128)
    matrices, torch_matrices = (parameters_of(*shapes, dtype=torch.float32) for _ in range(2))
    train(Muon(matrices, weight_decay=0.1, min_side=100), matrices)
    torch_muon = torch.optim.Muon(torch_matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    train(torch_muon, torch_matrices)
    for matrix, torch_matrix in zip(matrices, torch_matrices, strict=True):
        # Both round to bf16, but not at the same places. The difference is below 2 % of the path.
        path = sum(RATES) * 0.2 * max(matrix.shape) ** 0.5 * min(matrix.shape) ** 0.5
        assert (matrix - torch_matrix).norm() < 0.02 * path


def test_adamw_updates_the_other_parameters() -> None:
    shapes = (6,), (6, 3), (6, 6, 3), (3, 6)
    parameters, copies = parameters_of(*shapes), parameters_of(*shapes)
    train(Muon(parameters, betas=(0.8, 0.9), weight_decay=0.1, min_side=4, fused=True), parameters)
    train(AdamW(copies, betas=(0.8, 0.9), weight_decay=0.1, fused=True), copies)
    for parameter, parameter_copy in zip(parameters, copies, strict=True):
        assert torch.equal(parameter, parameter_copy)


def test_a_convolution_of_one_frame_is_a_matrix() -> None:
    (kernel,), (matrix,) = parameters_of((5, 4, 1)), parameters_of((5, 4))
    for parameter in (kernel, matrix):
        train(Muon([parameter], min_side=4, bf16=False), [parameter])
    torch.testing.assert_close(kernel[..., 0], matrix)
