from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.nn.conv_extractor import CONVOLUTIONS, ConvExtractor, InstanceNorm, matmul

PUBLISHED = [[512, 10, 5], *[[512, 3, 2]] * 4, *[[512, 2, 2]] * 2]
THIN = [[8, 10, 5], *[[8, 3, 2]] * 4, *[[8, 2, 2]] * 2]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.parametrize(
    ("samples", "frames"),
    [(400, 1), (16000, 49), (32000, 99), (160000, 499), (250000, 781), (320000, 999), (399, 0), (0, 0)],
)
def test_golden_lengths(samples: int, frames: int) -> None:
    extractor = ConvExtractor([[4, k, s] for _, k, s in PUBLISHED])
    assert extractor.frames(samples) == frames
    assert extractor.lengths(torch.tensor([samples, 400])).tolist() == [frames, 1]
    if frames and samples <= 32000:
        assert extractor(torch.randn(1, samples)).shape == (1, frames, 4)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_a_form_is_the_convolution_and_so_are_its_gradients(
    form: str, bias: bool, kernel: int, stride: int, channels: int
) -> None:
    for dtype, tolerance in TOLERANCE.items():
        x = torch.randn(2, 23, channels, dtype=dtype, requires_grad=True)
        weight = torch.randn(5, channels, kernel, dtype=dtype, requires_grad=True)
        shift = torch.randn(5, dtype=dtype, requires_grad=True) if bias else None
        inputs = [t for t in (x, weight, shift) if t is not None]
        plain = F.conv1d(x.transpose(1, 2), weight, shift, stride).transpose(1, 2)
        y = CONVOLUTIONS[form](x, weight, shift, stride)
        assert y.shape == plain.shape
        assert worst(y, plain) < tolerance
        cotangent = torch.randn_like(plain)
        gradients = torch.autograd.grad(y, inputs, cotangent)
        for ours, theirs in zip(gradients, torch.autograd.grad(plain, inputs, cotangent), strict=True):
            assert worst(ours, theirs) < tolerance


def test_matmul_passes_gradients_only_where_asked_for() -> None:
    x, weight = torch.randn(1, 9, 2), torch.randn(3, 2, 3)
    for a, b in ((x.clone().requires_grad_(), weight), (x, weight.clone().requires_grad_())):
        matmul(a, b, None, 2).sum().backward()
        assert (a.grad is None) != (b.grad is None)
    a = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(matmul(a, weight, None, 2).square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("bias", [False, True])
def test_all_forms_share_parameters_and_results(norm: str, bias: bool) -> None:
    audio = torch.randn(2, 4000)
    for dtype, tolerance in TOLERANCE.items():
        results = []
        for form in CONVOLUTIONS:
            torch.manual_seed(0)
            extractor = ConvExtractor(THIN, bias, norm).to(dtype)
            apply_policy(extractor, ComputePolicy(conv=form))
            y = extractor(audio.to(dtype))
            loss = (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum()
            gradients = torch.autograd.grad(loss, list(extractor.parameters()))
            results.append((extractor.state_dict(), y, gradients))
        for state, y, gradients in results[1:]:
            assert state.keys() == results[0][0].keys()
            assert worst(y, results[0][1]) < tolerance * 4  # seven layers of them
            # of the largest: the bias in front of instance norm has a gradient of rounding errors only
            largest = max(float(g.abs().max()) for g in gradients)
            for ours, theirs in zip(gradients, results[0][2], strict=True):
                assert float((ours - theirs).abs().max()) < tolerance * 4 * largest


@pytest.mark.parametrize("conv", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_instance_norm_is_group_norm_with_a_group_a_channel(dtype: torch.dtype, conv: str) -> None:
    torch.manual_seed(0)
    norm = InstanceNorm(6).to(dtype)
    apply_policy(norm, ComputePolicy(conv=conv))
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = (torch.randn(3, 50, 6, dtype=dtype) * 3 + 1).requires_grad_()
    plain = F.group_norm(x.transpose(1, 2), 6, norm.weight, norm.bias).transpose(1, 2)
    y = norm(x)
    assert worst(y, plain) < TOLERANCE[dtype]
    cotangent = torch.randn_like(x)
    inputs = (x, norm.weight, norm.bias)
    gradients = torch.autograd.grad(y, inputs, cotangent)
    for ours, theirs in zip(gradients, torch.autograd.grad(plain, inputs, cotangent), strict=True):
        assert worst(ours, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_bf16_autocast_keeps_norms_in_fp32(norm: str) -> None:
    torch.manual_seed(0)
    for form in CONVOLUTIONS:
        extractor = ConvExtractor(THIN, False, norm)
        apply_policy(extractor, ComputePolicy(conv=form, autocast_dtype=torch.bfloat16))
        audio = torch.randn(1, 4000) * 0.1
        seen: list[torch.Tensor] = []
        extractor.layers[0].norm.register_forward_hook(lambda m, i, o, s=seen: s.extend((*i, o)))
        with torch.autocast("cpu", torch.bfloat16):
            y = extractor(audio)
        assert y.dtype == torch.bfloat16
        given, normed = seen[0], seen[1]
        module = extractor.layers[0].norm
        exact = module(given.float())
        assert normed.dtype == torch.bfloat16
        torch.testing.assert_close(normed, exact.to(torch.bfloat16))
        apply_policy(extractor, ComputePolicy(conv=form))
        assert worst(y.float(), extractor(audio)) < 0.1
        y.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in extractor.parameters())


def test_gradient_scale() -> None:
    audio = torch.randn(2, 3000, dtype=torch.float64)
    gradients = {}
    for scale in (1.0, 0.1):
        torch.manual_seed(0)
        extractor = ConvExtractor(THIN, gradient_scale=scale).double()
        y = extractor(audio)
        y.square().sum().backward()
        gradients[scale] = [p.grad for p in extractor.parameters()], y.detach()
    assert torch.equal(gradients[1.0][1], gradients[0.1][1])
    for whole, scaled in zip(gradients[1.0][0], gradients[0.1][0], strict=True):
        torch.testing.assert_close(scaled, whole * 0.1)
    frozen = ConvExtractor(THIN, gradient_scale=0.0)
    assert not frozen(audio.float()).requires_grad
    assert not any(p.requires_grad for p in frozen.parameters())


def test_kaiming_normal_weights() -> None:
    torch.manual_seed(0)
    extractor = ConvExtractor([[64, 10, 5], [64, 3, 2]])
    for layer, fan in zip(extractor.layers, (10, 192), strict=True):
        assert float(layer.conv.weight.detach().std()) == pytest.approx((2 / fan) ** 0.5, rel=0.1)
