from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.nn.dropout import Dropout
from speechtrain.nn.transformer import Attention, PositionalConv, Transformer

LENGTHS = torch.tensor([11, 7, 1])


def make(seed: int = 0, attention: str = "sdpa", **values: object) -> Transformer:
    torch.manual_seed(seed)
    sizes: dict[str, object] = {"width": 16, "layers": 3, "feed_forward": 24, "heads": 4}
    sizes |= {"position_kernel": 6, "position_groups": 2}
    model = Transformer(**(sizes | values))  # type: ignore[arg-type]
    apply_policy(model, ComputePolicy(attention=attention))
    for parameter in model.parameters():  # the published initialisation is too small to tell terms apart
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def frames(rows: int = 3, length: int = 11) -> Tensor:
    return torch.randn(rows, length, 16, dtype=torch.float64)


@pytest.mark.parametrize("kernel", [5, 6])
def test_positional_convolution_is_torchs_weight_norm(kernel: int) -> None:
    ours = PositionalConv(16, kernel, 4).double()
    torch.nn.init.normal_(ours.weight_g)
    theirs = torch.nn.Conv1d(16, 16, kernel, padding=kernel // 2, groups=4).double()
    theirs = torch.nn.utils.parametrizations.weight_norm(theirs, dim=2)
    parametrised = theirs.parametrizations.weight
    with torch.no_grad():
        parametrised.original0.copy_(ours.weight_g)
        parametrised.original1.copy_(ours.weight_v)
        theirs.bias.copy_(ours.bias)
    assert parametrised.original0.shape == ours.weight_g.shape == (1, 1, kernel)
    x = frames()
    plain = torch.nn.functional.gelu(theirs(x.transpose(1, 2))[:, :, : x.shape[1]]).transpose(1, 2)
    y = ours(x)
    torch.testing.assert_close(y, plain)
    cotangent = torch.randn_like(y)
    gradients = torch.autograd.grad(y, (ours.weight_g, ours.weight_v), cotangent)
    expected = torch.autograd.grad(plain, (parametrised.original0, parametrised.original1), cotangent)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = Transformer(64, 2, 128, 4, position_kernel=32, position_groups=4)
    deviation = math.sqrt(4 / (32 * 64))
    assert float(model.position.weight_v.detach().std()) == pytest.approx(deviation, rel=0.05)
    torch.testing.assert_close(model.position.weight(), model.position.weight_v)
    assert not model.position.bias.any()
    for name, value in model.named_parameters():
        if "norm" in name or "position" in name:
            continue
        if name.endswith("bias"):
            assert not value.any(), name
        else:
            assert float(value.detach().std()) == pytest.approx(0.02, rel=0.05), name


@pytest.mark.parametrize("pre_norm", [False, True])
def test_fused_attention_is_the_written_one(pre_norm: bool) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        fused, written = (make(pre_norm=pre_norm, attention=form).to(dtype) for form in ("sdpa", "slices"))
        x = frames().to(dtype)
        results = []
        for model in (fused.eval(), written.eval()):
            y = model(x, LENGTHS)
            valid = torch.arange(11) < LENGTHS[:, None]
            y = y * valid[:, :, None]
            gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()))
            results.append((y, gradients))
        scale = results[0][0].abs().max()
        assert float((results[0][0] - results[1][0]).detach().abs().max() / scale.detach()) < tolerance
        largest = max(float(g.abs().max()) for g in results[0][1])
        for a, b in zip(results[0][1], results[1][1], strict=True):
            assert float((a - b).abs().max()) / largest < tolerance * 10


@pytest.mark.parametrize("attention", ["sdpa", "slices"])
def test_a_row_without_frames_stays_finite(attention: str) -> None:
    model = make(attention=attention)
    y = model(frames(), torch.tensor([11, 0, 3]))
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("pre_norm", [False, True])
def test_layer_drop_factors(pre_norm: bool) -> None:
    model = make(pre_norm=pre_norm).eval()
    x = frames()
    ones = torch.ones(3)
    assert torch.equal(model(x, LENGTHS, ones), model(x, LENGTHS))
    without = make(pre_norm=pre_norm).eval()
    del without.layers[1]
    keep = torch.tensor([1.0, 0.0, 1.0])
    y = model(x, LENGTHS, keep)
    assert torch.equal(y, without(x, LENGTHS))
    valid = (torch.arange(11) < LENGTHS[:, None])[:, :, None]
    (y * valid).square().sum().backward()
    (without(x, LENGTHS) * valid).square().sum().backward()
    gradients = {name: p.grad for name, p in without.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith("layers.1."):
            assert not parameter.grad.any(), name
        else:
            expected = gradients[name.replace("layers.2.", "layers.1.")]
            torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "slices"])
def test_length_multiple_changes_nothing(attention: str, pre_norm: bool) -> None:
    plain = make(pre_norm=pre_norm, attention=attention).eval()
    padded = make(pre_norm=pre_norm, attention=attention, length_multiple=8).eval()
    x = frames()
    for lengths in (LENGTHS, torch.tensor([11, 11, 11])):
        y = padded(x, lengths)
        assert y.shape == x.shape
        valid = torch.arange(11) < lengths[:, None]
        torch.testing.assert_close(y[valid], plain(x, lengths)[valid])


def test_dropouts_act_in_training_only() -> None:
    x = frames()
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, name: 0.5}
        for attention in ("sdpa", "slices"):
            model = make(attention=attention, **rates)
            assert not torch.equal(model(x, LENGTHS), model(x, LENGTHS)), name
            model.eval()
            assert torch.equal(model(x, LENGTHS), model(x, LENGTHS)), name


def test_attention_by_matmuls_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, training with dropout computes attention by matmuls, and evaluation by torch's operation."""
    attention = Attention(16, 4, dropout=0.5)
    x, is_key = torch.randn(2, 7, 16), torch.arange(7) < torch.tensor([[7], [4]])
    expected = attention.eval()(x, is_key)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    monkeypatch.setattr(Dropout, "forward", lambda self, weights: weights)
    torch.testing.assert_close(attention.train()(x, is_key), expected)
