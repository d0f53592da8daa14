"""``speechtrain.transducer_loss`` as others call it: what it refuses, and how models are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from speechtrain import transducer_loss

B, T, U, H, V = 2, 5, 3, 6, 7
BLANK = 2
FORMS = pytest.mark.parametrize("static", [False, True], ids=["rows", "static"])


def arguments(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(0, V - 1, (B, U), generator=generator)
    return {
        "encoder": normal(B, T, H),
        "prediction": normal(B, U + 1, H),
        "weight": normal(V, H),
        "bias": normal(V),
        "labels": labels + (labels >= BLANK),
        "encoder_lengths": torch.tensor([T, T - 1]),
        "label_lengths": torch.tensor([U, U - 1]),
    }


def inputs(given: dict[str, Any]) -> list[Tensor]:
    return [given[name] for name in ("encoder", "prediction", "weight", "bias")]


def plain(given: dict[str, Any], activation: str = "relu", blank: int = BLANK) -> Tensor:
    """The losses (B,) by the whole lattice and autograd alone."""
    encoder, prediction, weight, bias = inputs(given)
    hidden = getattr(torch, activation)(encoder[:, :, None] + prediction[:, None])
    log_p = F.linear(hidden, weight, bias).log_softmax(-1)
    losses = []
    for row in range(len(log_p)):
        frames, symbols = int(given["encoder_lengths"][row]), int(given["label_lengths"][row])
        label = [int(symbol) for symbol in given["labels"][row, :symbols]]
        alpha = {(0, 0): log_p.new_zeros(())}
        for t in range(frames):
            for u in range(symbols + 1):
                into = [alpha[t - 1, u] + log_p[row, t - 1, u, blank]] if t else []
                into += [alpha[t, u - 1] + log_p[row, t, u - 1, label[u - 1]]] if u else []
                alpha[t, u] = torch.stack(into).logsumexp(0) if into else alpha[0, 0]
        losses.append(-alpha[frames - 1, symbols] - log_p[row, frames - 1, symbols, blank])
    return torch.stack(losses)


WRONG = {
    # what others' losses take
    "a lattice": ({"encoder": torch.zeros(B, T, U + 1, V)}, r"encoder .*\(2, 5, 4, 7\).*\(B T H\)"),
    "axes to broadcast": ({"prediction": torch.zeros(B, 1, U + 1, H)}, r"prediction .*\(B U\+1 H\)"),
    "lengths as shares": (
        {"encoder_lengths": torch.tensor([1.0, 0.8])},
        "encoder_lengths .*float32.*integer",
    ),
    "blank counted from the end": ({"blank": -1}, r"blank is -1\. .*0 to 6"),
    "blank beyond the classes": ({"blank": V}, "blank is 7"),
    "labels in a row": ({"labels": torch.tensor([1, 3, 0, 1, 3])}, r"labels .*\(B U\)"),
    # other types
    "labels of fractions": ({"labels": torch.ones(B, U)}, "labels .*float32.*integer"),
    "lengths of truth values": (
        {"label_lengths": torch.tensor([True, True])},
        "label_lengths .*bool.*integer",
    ),
    "integers to multiply": ({"encoder": torch.ones(B, T, H, dtype=torch.int64)}, "encoder .*int64.*float"),
    "complex numbers": ({"weight": torch.ones(V, H, dtype=torch.complex64)}, "weight .*complex64.*float"),
    "a list": ({"label_lengths": [3, 2]}, "label_lengths .*list"),
    "no bias": ({"bias": None}, "bias .*NoneType"),
    # other places
    "labels elsewhere": (
        {"labels": torch.ones(B, U, dtype=torch.int64, device="meta")},
        "labels .*meta.*cpu",
    ),
    "lengths elsewhere": ({"encoder_lengths": torch.tensor([5, 4], device="meta")}, "encoder_lengths .*meta"),
    "a weight elsewhere": ({"weight": torch.zeros(V, H, device="meta")}, "weight .*meta.*cpu"),
    # other shapes
    "a bias of no axis": ({"bias": torch.tensor(0.0)}, r"bias .*\(V\)"),
    "a weight on its side": ({"weight": torch.zeros(H, V)}, "weight"),
    "no position for the end": ({"prediction": torch.zeros(B, U, H)}, r"labels .*\(2, 3\).*'U': 2"),
    # numbers
    "a negative keep": ({"keep": -1}, "keep"),
    "no FastEmit": ({"fastemit": float("nan")}, "fastemit is nan"),
}


@FORMS
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_one_line(case: str, static: bool) -> None:
    change, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as caught:
        transducer_loss(**{**arguments(), "blank": BLANK, "static": static, **change})
    assert "\n" not in str(caught.value)


@FORMS
def test_checks_of_types_and_shapes_read_nothing(static: bool) -> None:
    """Tensors of no storage pass them all, and stop where the numbers are wanted."""
    given = {name: x.to("meta") for name, x in arguments().items()}
    if static:
        assert transducer_loss(**given, blank=BLANK, static=True).shape == (B,)
    else:
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            transducer_loss(**given, blank=BLANK)


@FORMS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers_of_any_width(static: bool, dtype: torch.dtype) -> None:
    """Products of lengths and an id beyond the type's range included."""
    generator = torch.Generator().manual_seed(0)
    frames, symbols, classes = 100, 90, 300
    given: dict[str, Any] = {
        "encoder": torch.randn(1, frames, 4, generator=generator),
        "prediction": torch.randn(1, symbols + 1, 4, generator=generator),
        "weight": torch.randn(classes, 4, generator=generator),
        "bias": torch.zeros(classes),
        "labels": torch.randint(0, 120, (1, symbols), generator=generator),
        "encoder_lengths": torch.tensor([frames]),
        "label_lengths": torch.tensor([symbols - 1]),
    }
    options: dict[str, Any] = {"blank": classes - 1, "static": static}
    narrow = {name: x if x.is_floating_point() else x.to(dtype) for name, x in given.items()}
    assert torch.equal(transducer_loss(**narrow, **options), transducer_loss(**given, **options))


@FORMS
def test_float64_stays_float64(static: bool) -> None:
    given = arguments(torch.float64)
    loss = transducer_loss(**given, blank=BLANK, static=static)
    torch.testing.assert_close(loss, plain(given), rtol=1e-13, atol=1e-13)

    def of(*changed: Tensor) -> Tensor:
        names = ("encoder", "prediction", "weight", "bias")
        return transducer_loss(
            **{**given, **dict(zip(names, changed, strict=True))}, blank=BLANK, static=static
        )

    assert torch.autograd.gradcheck(of, inputs(given))


@FORMS
@pytest.mark.parametrize("name", ["encoder", "prediction", "weight", "bias"])
def test_a_gradient_of_one_input_alone(static: bool, name: str) -> None:
    given = arguments()
    frozen = {other: x.detach() if other != name else x for other, x in given.items()}
    loss = transducer_loss(**frozen, blank=BLANK, static=static).mean()
    (alone,) = torch.autograd.grad(loss, given[name])
    (true,) = torch.autograd.grad(plain(given).mean(), given[name])
    torch.testing.assert_close(alone, true, rtol=1e-4, atol=1e-5)


@FORMS
@pytest.mark.parametrize("rows", [1, 2])
def test_no_label_at_all(static: bool, rows: int) -> None:
    given = {name: x if name in ("weight", "bias") else x[:rows] for name, x in arguments().items()}
    given |= {"prediction": given["prediction"][:, :1], "labels": given["labels"][:, :0]}
    given["label_lengths"] = torch.zeros(rows, dtype=torch.int64)
    loss = transducer_loss(**given, blank=BLANK, static=static)
    torch.testing.assert_close(loss, plain(given))
    torch.autograd.backward(loss.sum())


# before the loss and after it; older compilers do not trace torch.amp.is_autocast_available either
_MOST_GRAPHS = 2 if TorchVersion(torch.__version__) >= "2.13" else 4


class Model(nn.Module):
    """The smallest transducer: a frame is a projection, a prediction an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.prediction, self.output = nn.Linear(4, H), nn.Embedding(V, H), nn.Linear(H, V)

    def forward(self, frames: Tensor, given: dict[str, Tensor], static: bool = False) -> Tensor:
        before = F.pad(given["labels"], (1, 0), value=BLANK)
        projections = self.encoder(frames), self.prediction(before)
        output, loss = self.output, type(self).loss
        lengths = given["encoder_lengths"], given["label_lengths"]
        options: dict[str, Any] = {"blank": BLANK, "static": static}
        result: Tensor = loss(*projections, output.weight, output.bias, given["labels"], *lengths, **options)
        return result.mean()

    loss = staticmethod(transducer_loss)


class Apart(Model):
    """It keeps the loss out of the graph, as the documentation says."""

    loss = staticmethod(torch.compiler.disable(transducer_loss))


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize("kind", [Model, Apart])
@pytest.mark.filterwarnings("ignore")  # of dynamo, about what it breaks at
def test_a_compiled_caller(kind: type[Model], static: bool) -> None:
    """The compiler's own back end is left out: what it is given is what can go wrong here."""
    torch.manual_seed(0)
    model, given = kind(), arguments()
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    frames = torch.randn(B, T, 4)
    compiled = torch.compile(model, backend=backend)
    losses = [caller(frames, given, static) for caller in (compiled, model)]
    torch.testing.assert_close(*losses)
    for ours, true in zip(*(torch.autograd.grad(x, [*model.parameters()]) for x in losses), strict=True):
        torch.testing.assert_close(ours, true)
    if static or kind is Apart:
        assert len(graphs) <= _MOST_GRAPHS
    torch._dynamo.reset()


@FORMS
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_model_under_autocast(static: bool, low: torch.dtype) -> None:
    """Projections in low precision meet an output layer in fp32, where the gradients arrive."""
    torch.manual_seed(0)
    model, given, frames = Model(), arguments(), torch.randn(B, T, 4)
    true = model(frames, given)
    expected = torch.autograd.grad(true, [*model.parameters()])
    with torch.autocast("cpu", dtype=low):
        loss = model(frames, given, static)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, true, rtol=1e-2, atol=0)
    for ours, exact in zip(torch.autograd.grad(loss, [*model.parameters()]), expected, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - exact).norm() / exact.norm()) < 2e-2


@FORMS
def test_inference_mode(static: bool) -> None:
    with torch.inference_mode():
        loss = transducer_loss(**arguments(), blank=BLANK, static=static)
    torch.testing.assert_close(loss, plain(arguments()).detach())


@FORMS
def test_expanded_inputs(static: bool) -> None:
    """One prediction for all rows, one bias for all classes: no element is written to, and none is lost."""
    given = arguments()
    one, same = given["prediction"][:1].detach().requires_grad_(), torch.zeros(1, requires_grad=True)
    given |= {"prediction": one.expand(B, -1, -1), "bias": same.expand(V)}
    ours = torch.autograd.grad(transducer_loss(**given, blank=BLANK, static=static).sum(), [one, same])
    true = torch.autograd.grad(plain(given).sum(), [one, same])
    for mine, exact in zip(ours, true, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)
