"""The implementations of the LSTM agree with torch's in outputs, gradients, states and dropout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from speechtrain.compute_policy import STATIC, ComputePolicy, apply_policy
from speechtrain.nn.lstm import LSTM

LOOP = ComputePolicy(lstm="loop")
LAYERS = ComputePolicy(lstm="layers")
LOOPS = pytest.mark.parametrize("policy", [LOOP, STATIC], ids=["ragged", "static"])
BOUNDS = pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])


def pair(
    policy: ComputePolicy, dtype: torch.dtype = torch.float64, layers: int = 3, **keys: float
) -> tuple[LSTM, LSTM]:
    """Return the same stack twice, the second one with ``policy``."""
    torch.manual_seed(0)
    one = LSTM(5, 7, layers, layer_norm=True, **keys).to(dtype)
    other = LSTM(5, 7, layers, layer_norm=True, **keys).to(dtype)
    other.load_state_dict(one.state_dict())
    apply_policy(other, policy)
    return one, other


def gradients(model: LSTM, x: Tensor, state: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """Return the outputs, the state after them, and the gradients of a scalar that depends on both."""
    leaves = [t.clone().requires_grad_() for t in (x, *(state or ()))]
    y, after = model(leaves[0], (leaves[1], leaves[2]) if state else None)
    total = sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in (y, *after))
    return [y, *after, *torch.autograd.grad(total, [*leaves, *model.parameters()])]  # type: ignore[list-item]


@LOOPS
@BOUNDS
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize(("rows", "frames"), [(4, 9), (1, 1), (3, 2), (2, 81), (2, 160)])
def test_the_loop_computes_what_torch_does(
    policy: ComputePolicy, dtype: torch.dtype, bound: float, has_state: bool, rows: int, frames: int
) -> None:
    one, other = pair(policy, dtype)
    x = torch.randn(rows, frames, 5, dtype=dtype)
    states = tuple(torch.randn(3, rows, 7, dtype=dtype) for _ in range(2)) if has_state else None
    for expected, result in zip(gradients(one, x, states), gradients(other, x, states), strict=True):  # type: ignore[arg-type]
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        # A gradient sums over rows and frames, so its rounding error grows with the largest element.
        largest = expected.abs().max().item()
        torch.testing.assert_close(result, expected, rtol=bound, atol=bound * max(1.0, largest))


@LOOPS
def test_its_gradients_are_the_difference_quotients(policy: ComputePolicy) -> None:
    model = pair(policy, layers=2)[1]
    x, state = torch.randn(2, 4, 5, dtype=torch.float64), torch.randn(2, 2, 2, 7, dtype=torch.float64)
    arguments = (x.requires_grad_(), state.requires_grad_(), *model.lstm.parameters())

    def outputs(x: Tensor, state: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (hidden, cell) = model(x, (state[0], state[1]))
        return y, hidden, cell

    assert torch.autograd.gradcheck(outputs, arguments)


@LOOPS
def test_dropout_draws_what_torch_draws(policy: ComputePolicy) -> None:
    one, other = pair(policy, dropout=0.4)
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    outputs = []
    for model in (one, other):
        torch.manual_seed(5)
        outputs.append(model(x)[0])
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    torch.manual_seed(6)
    assert not torch.equal(other(x)[0], outputs[1])
    other.eval()
    torch.testing.assert_close(other(x)[0], one.eval()(x)[0], rtol=1e-9, atol=1e-9)


@LOOPS
def test_a_gradient_may_be_asked_for_twice(policy: ComputePolicy) -> None:
    model = pair(policy)[1]
    total = model(torch.randn(2, 5, 5, dtype=torch.float64))[0].square().sum()
    first = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(total, list(model.parameters()))
    assert all(map(torch.equal, first, again))


def test_what_records_no_gradient_is_torchs_own() -> None:
    one, other = pair(LOOP, torch.float32)
    x = torch.randn(2, 1, 5)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        (expected, before), (result, after) = one(x), other(x)
    assert torch.equal(expected, result)
    assert all(map(torch.equal, before, after))


def products(model: LSTM) -> set[torch.dtype]:
    """Return the dtypes of the matmuls of a forward and a backward."""
    seen: set[torch.dtype] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "mm" in str(function):
                seen.add(args[1].dtype)
            return function(*args, **(kwargs or {}))

    x = torch.randn(2, 3, 5, requires_grad=True)
    with Watch():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = model(x)
        assert y.dtype == torch.float32
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    return seen


@LOOPS
def test_products_have_the_policys_dtype_under_any_autocast(policy: ComputePolicy) -> None:
    model = pair(policy, torch.float32)[1]
    assert products(model) == {torch.float32}
    model.apply_policy(replace(policy, product_dtype=torch.bfloat16))
    assert products(model) == {torch.bfloat16}


@LOOPS
def test_bfloat16_is_close_to_fp32(policy: ComputePolicy) -> None:
    one, other = pair(policy, torch.float32)
    x = torch.randn(4, 20, 5)
    expected = gradients(one, x, None)
    other.apply_policy(replace(policy, product_dtype=torch.bfloat16))
    result = gradients(other, x, None)
    for a, b in zip(result, expected, strict=True):
        assert float(((a - b).norm() / b.norm()).detach()) < 0.02
    assert any(not torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_the_reference_initialisation() -> None:
    model = LSTM(5, 7, 2, forget_gate_bias=1.0, init_scale=0.5)
    for name, parameter in model.lstm.named_parameters():
        forget = parameter[7:14]
        if name.startswith("bias"):
            assert torch.all(forget == (0.5 if "ih" in name else 0.0))
        assert parameter.abs().max() <= 0.5 * max(1.0, 7**-0.5)
    assert isinstance(model.norm, nn.Identity)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_layer_by_layer_is_torchs_stack(
    has_state: bool, is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair(LAYERS, torch.float32, dropout=0.0 if is_training else 0.5)
    one.train(is_training)
    other.train(is_training)
    x = torch.randn(4, 9, 5)
    state = (torch.randn(3, 4, 7), torch.randn(3, 4, 7)) if has_state else None
    # Without dropout, torch's own stack would run.
    monkeypatch.setattr(other.lstm, "forward", other._run_layers)
    for expected, result in zip(gradients(one, x, state), gradients(other, x, state), strict=True):
        assert result.shape == expected.shape
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_layer_by_layer_draws_the_dropout_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed determines the masks that torch draws between two layers. Torch's own stack is not called."""
    _, other = pair(LAYERS, torch.float64, dropout=0.5)
    monkeypatch.setattr(other.lstm, "forward", lambda *inputs: pytest.fail("torch's stack draws by itself"))
    x = torch.randn(4, 9, 5, dtype=torch.float64)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(gradients(other, x, None))
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not torch.equal(runs[0][0], runs[2][0])
    assert all(torch.isfinite(value).all() and value.abs().sum() > 0 for value in runs[2])
