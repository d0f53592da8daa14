"""LAMB and NovoGrad against their formulas in plain Python floats, and what a resume needs of them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from speechtrain.optim.lamb import LAMB
from speechtrain.optim.muon import Muon
from speechtrain.optim.novograd import NovoGrad

Vector = list[float]


def length(values: Vector) -> float:
    return math.sqrt(math.fsum(x * x for x in values))


def lamb_oracle(
    p: Vector, gradients: list[Vector], rates: Vector, b1: float, b2: float, eps: float, decay: float
) -> Vector:
    m, v = [0.0] * len(p), [0.0] * len(p)
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        m = [b1 * a + (1 - b1) * x for a, x in zip(m, g, strict=True)]
        v = [b2 * a + (1 - b2) * x * x for a, x in zip(v, g, strict=True)]
        u = [
            (a / (1 - b1**t)) / (math.sqrt(b / (1 - b2**t)) + eps) + decay * w
            for a, b, w in zip(m, v, p, strict=True)
        ]
        ratio = length(p) / length(u) if length(p) > 0 and length(u) > 0 else 1.0
        p = [w - lr * ratio * x for w, x in zip(p, u, strict=True)]
    return p


def novograd_oracle(
    p: Vector,
    gradients: list[Vector],
    rates: Vector,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    scale: float,
) -> Vector:
    m, v = [0.0] * len(p), 0.0
    for g, lr in zip(gradients, rates, strict=True):
        square = length(g) ** 2
        v = square if v == 0 else b2 * v + (1 - b2) * square
        m = [b1 * a + scale * (x / (math.sqrt(v) + eps) + decay * w) for a, x, w in zip(m, g, p, strict=True)]
        p = [w - lr * a for w, a in zip(p, m, strict=True)]
    return p


def run(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: list[Vector], rates: Vector
) -> Vector:
    for gradient, lr in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
        optimizer.step()
    return parameter.tolist()


numbers = st.floats(-4, 4).map(lambda x: round(x, 3))
vectors = st.lists(numbers, min_size=3, max_size=3)
problems = st.tuples(
    vectors,
    st.lists(vectors, min_size=1, max_size=6),
    st.sampled_from([(0.9, 0.999), (0.95, 0.25), (0.9, 0.0), (0.0, 0.5)]),
    st.sampled_from([0.0, 1e-3, 0.1]),
)


@settings(max_examples=200, deadline=None)
@given(problems)
def test_lamb_follows_its_formula(problem: Any) -> None:
    start, gradients, (b1, b2), decay = problem
    rates = [1e-2 / (1 + t) for t in range(len(gradients))]
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = LAMB([parameter], betas=(b1, b2), eps=1e-6, weight_decay=decay)
    expected = lamb_oracle(start, gradients, rates, b1, b2, 1e-6, decay)
    assert run(optimizer, parameter, gradients, rates) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(problems, st.booleans())
def test_novograd_follows_its_formula(problem: Any, averaging: bool) -> None:
    start, gradients, (b1, b2), decay = problem
    rates = [1e-2 / (1 + t) for t in range(len(gradients))]
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = NovoGrad([parameter], betas=(b1, b2), eps=1e-6, weight_decay=decay, grad_averaging=averaging)
    scale = 1 - b1 if averaging else 1.0
    expected = novograd_oracle(start, gradients, rates, b1, b2, 1e-6, decay, scale)
    assert run(optimizer, parameter, gradients, rates) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("decay", [0.0, 1e-3])
def test_biases_that_start_at_zero_train_with_lamb(decay: float) -> None:
    """Without the guard the ratio of a zero tensor is 0, and a norm's bias never moves."""
    layer = nn.LayerNorm(4)
    optimizer = LAMB(layer.parameters(), lr=1e-2, weight_decay=decay)
    layer(torch.randn(8, 4)).square().mul(torch.arange(4.0)).sum().backward()
    layer.bias.grad = torch.tensor([1.0, -1.0, 2.0, 0.5])
    optimizer.step()
    torch.testing.assert_close(layer.bias.data, torch.tensor([-1e-2, 1e-2, -1e-2, -1e-2]))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 2))


@pytest.mark.parametrize("cls", [LAMB, NovoGrad])
def test_groups_have_their_own_rates_and_frozen_parameters_stay(cls: type[torch.optim.Optimizer]) -> None:
    fast, slow, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    groups = [{"params": [fast, frozen]}, {"params": [slow], "lr": 1e-4, "lr_scale": 0.1}]
    optimizer = cls(groups, lr=1e-2)  # type: ignore[call-arg]
    fast.grad = slow.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    assert torch.equal(frozen.data, torch.ones(2))
    assert frozen not in optimizer.state
    torch.testing.assert_close((1 - fast.data) / (1 - slow.data), torch.full((2,), 100.0), rtol=1e-2, atol=0)
    assert optimizer.param_groups[1]["lr_scale"] == 0.1
    clone = copy.deepcopy(optimizer.state_dict())
    assert clone["param_groups"][1]["lr_scale"] == 0.1


@pytest.mark.parametrize("cls", [LAMB, NovoGrad])
def test_no_value_is_read_by_the_host(cls: type[torch.optim.Optimizer]) -> None:
    """A step on the meta device, whose tensors hold no values, would fail at the first read."""
    parameter = nn.Parameter(torch.ones(3, 2, device="meta"))
    optimizer = cls([parameter])  # type: ignore[call-arg]
    for _ in range(2):
        parameter.grad = torch.ones(3, 2, device="meta")
        optimizer.step()


@pytest.mark.parametrize("cls", [LAMB, NovoGrad])
def test_sparse_gradients_are_refused(cls: type[torch.optim.Optimizer]) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        cls(table.parameters()).step()


@pytest.mark.parametrize("cls", [LAMB, NovoGrad, Muon])
def test_a_closure_is_evaluated_with_gradients(cls: type[torch.optim.Optimizer]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = cls([parameter])  # type: ignore[call-arg]

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 2.0
    assert not torch.equal(parameter.data, torch.ones(2))


@pytest.mark.parametrize("cls", [LAMB, NovoGrad])
def test_tensors_together_are_those_one_by_one(
    cls: type[torch.optim.Optimizer],
) -> None:
    """A whole group is updated with operations on lists: bit for bit what each tensor gets alone."""
    one, other = network(), network()
    other.load_state_dict(one.state_dict())
    together = cls(one.parameters(), lr=0.1)  # type: ignore[call-arg]
    alone = {parameter: cls([parameter], lr=0.1) for parameter in other.parameters()}  # type: ignore[call-arg]
    for step in range(4):
        for model in (one, other):
            torch.manual_seed(step)
            for index, parameter in enumerate(model.parameters()):
                # a parameter that begins to train later has another number of steps
                parameter.grad = torch.randn_like(parameter) if index or step else None
        for optimizer in (together, *alone.values()):
            optimizer.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for name, value in together.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(alone[b].state[b][name]))
