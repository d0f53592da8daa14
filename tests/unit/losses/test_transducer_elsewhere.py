"""Tests of ``speechtrain.transducer_loss`` in other programs.

They pass wrong arguments and unusual tensors, and use ``torch.compile``, autocast and inference mode.
"""

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
DIFFERENTIABLE = ("encoder", "prediction", "weight", "bias")
# ``static=False`` computes the cells within the lengths, and ``static=True`` all cells of the padded lattice.
BOTH_FORMS = pytest.mark.parametrize("static", [False, True], ids=["rows", "static"])


def loss_arguments(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Return random tensors for ``transducer_loss``. The second row is shorter than the first one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(0, V - 1, (B, U), generator=generator)
    return {
        "encoder": normal(B, T, H),
        "prediction": normal(B, U + 1, H),
        "weight": normal(V, H),
        "bias": normal(V),
        "labels": labels + (labels >= BLANK),  # No label is the blank.
        "encoder_lengths": torch.tensor([T, T - 1]),
        "label_lengths": torch.tensor([U, U - 1]),
    }


WRONG_ARGUMENTS = {
    # Arguments that transducer losses of other packages accept.
    "a lattice as encoder": (
        {"encoder": torch.zeros(B, T, U + 1, V)},
        r"encoder .*\(2, 5, 4, 7\).*\(B T H\)",
    ),
    "a prediction to broadcast": ({"prediction": torch.zeros(B, 1, U + 1, H)}, r"prediction .*\(B U\+1 H\)"),
    "lengths as fractions of the longest": (
        {"encoder_lengths": torch.tensor([1.0, 0.8])},
        "encoder_lengths .*float32.*integer",
    ),
    "a blank counted from the end": ({"blank": -1}, r"blank is -1\. .*0 to 6"),
    "a blank beyond the classes": ({"blank": V}, "blank is 7"),
    "labels of all rows concatenated": ({"labels": torch.tensor([1, 3, 0, 1, 3])}, r"labels .*\(B U\)"),
    # Wrong types.
    "labels of type float": ({"labels": torch.ones(B, U)}, "labels .*float32.*integer"),
    "lengths of type bool": (
        {"label_lengths": torch.tensor([True, True])},
        "label_lengths .*bool.*integer",
    ),
    "an encoder of type int": (
        {"encoder": torch.ones(B, T, H, dtype=torch.int64)},
        "encoder .*int64.*float",
    ),
    "a weight of type complex": (
        {"weight": torch.ones(V, H, dtype=torch.complex64)},
        "weight .*complex64.*float",
    ),
    "lengths in a list": ({"label_lengths": [3, 2]}, "label_lengths .*list"),
    "None as bias": ({"bias": None}, "bias .*NoneType"),
    # Tensors on different devices.
    "labels on another device": (
        {"labels": torch.ones(B, U, dtype=torch.int64, device="meta")},
        "labels .*meta.*cpu",
    ),
    "lengths on another device": (
        {"encoder_lengths": torch.tensor([5, 4], device="meta")},
        "encoder_lengths .*meta",
    ),
    "a weight on another device": ({"weight": torch.zeros(V, H, device="meta")}, "weight .*meta.*cpu"),
    # Wrong shapes.
    "a scalar bias": ({"bias": torch.tensor(0.0)}, r"bias .*\(V\)"),
    "a transposed weight": ({"weight": torch.zeros(H, V)}, "weight"),
    "a prediction of U instead of U + 1 states": (
        {"prediction": torch.zeros(B, U, H)},
        r"labels .*\(2, 3\).*'U': 2",
    ),
    # Wrong numbers.
    "a negative keep": ({"keep": -1}, "keep"),
    "fastemit of nan": ({"fastemit": float("nan")}, "fastemit is nan"),
}


@BOTH_FORMS
@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_transducer_loss_refuses_wrong_arguments_in_one_line(case: str, static: bool) -> None:
    wrong_arguments, message = WRONG_ARGUMENTS[case]
    arguments = {**loss_arguments(), "blank": BLANK, "static": static, **wrong_arguments}
    with pytest.raises(ValueError, match=message) as error:
        transducer_loss(**arguments)
    assert "\n" not in str(error.value)


@BOTH_FORMS
def test_transducer_loss_checks_arguments_without_reading_values(static: bool) -> None:
    """Tensors on the device ``meta`` have no values, and pass the checks.

    The static form reads no values later either. The other form then fails, because it reads the lengths.
    """
    arguments = {name: tensor.to("meta") for name, tensor in loss_arguments().items()}
    if static:
        assert transducer_loss(**arguments, blank=BLANK, static=True).shape == (B,)
    else:
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            transducer_loss(**arguments, blank=BLANK)


@BOTH_FORMS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_transducer_loss_accepts_integers_of_any_width(static: bool, dtype: torch.dtype) -> None:
    """Integers of 8 bits can store neither the number of cells (100 × 90) nor the blank's id (299)."""
    generator = torch.Generator().manual_seed(0)
    frames, symbols, classes = 100, 90, 300
    arguments: dict[str, Any] = {
        "encoder": torch.randn(1, frames, 4, generator=generator),
        "prediction": torch.randn(1, symbols + 1, 4, generator=generator),
        "weight": torch.randn(classes, 4, generator=generator),
        "bias": torch.zeros(classes),
        "labels": torch.randint(0, 120, (1, symbols), generator=generator),
        "encoder_lengths": torch.tensor([frames]),
        "label_lengths": torch.tensor([symbols - 1]),
    }
    narrow_arguments = dict(arguments)
    for name in ("labels", "encoder_lengths", "label_lengths"):
        narrow_arguments[name] = arguments[name].to(dtype)
    options: dict[str, Any] = {"blank": classes - 1, "static": static}
    assert torch.equal(
        transducer_loss(**narrow_arguments, **options), transducer_loss(**arguments, **options)
    )


@BOTH_FORMS
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_transducer_loss_has_the_gradient_of_one_input_alone(static: bool, name: str) -> None:
    arguments = loss_arguments()
    frozen_arguments = {key: tensor.detach() for key, tensor in arguments.items()}
    frozen_arguments[name] = arguments[name]
    losses = [transducer_loss(**these, blank=BLANK, static=static) for these in (frozen_arguments, arguments)]
    gradients = [torch.autograd.grad(loss.mean(), arguments[name])[0] for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


# torch.compile captures a graph before the loss and a graph after it. In torch older than 2.13, it cannot
# capture torch.amp.is_autocast_available either, so the model has more graphs.
_MOST_GRAPHS = 2 if TorchVersion(torch.__version__) >= "2.13" else 4


class Model(nn.Module):
    """A minimal transducer: the encoder is a linear layer, and the prediction network is an embedding."""

    loss_function = staticmethod(transducer_loss)

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.prediction, self.output = nn.Linear(4, H), nn.Embedding(V, H), nn.Linear(H, V)

    def forward(self, frames: Tensor, arguments: dict[str, Tensor], static: bool = False) -> Tensor:
        """Return the mean loss of ``frames`` (B, T, 4). ``arguments`` has the labels and the lengths."""
        labels = arguments["labels"]
        previous_labels = F.pad(labels, (1, 0), value=BLANK)
        loss_function = type(self).loss_function
        losses: Tensor = loss_function(
            self.encoder(frames),
            self.prediction(previous_labels),
            self.output.weight,
            self.output.bias,
            labels,
            arguments["encoder_lengths"],
            arguments["label_lengths"],
            blank=BLANK,
            static=static,
        )
        return losses.mean()


class ModelWithUncompiledLoss(Model):
    """Its loss is never compiled, as the documentation recommends."""

    loss_function = staticmethod(torch.compiler.disable(transducer_loss))


@pytest.mark.slow
@BOTH_FORMS
@pytest.mark.parametrize("model_class", [Model, ModelWithUncompiledLoss])
@pytest.mark.filterwarnings("ignore")  # torch.compile warns where it splits a graph.
def test_transducer_loss_has_equal_gradients_in_a_compiled_model(
    model_class: type[Model], static: bool
) -> None:
    """The backend runs the captured graphs unchanged, because the loss can break only their capture."""
    torch.manual_seed(0)
    model, arguments = model_class(), loss_arguments()
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    frames = torch.randn(B, T, 4)
    compiled_model = torch.compile(model, backend=backend)
    parameters = list(model.parameters())
    compiled_loss = compiled_model(frames, arguments, static)
    eager_loss = model(frames, arguments, static)
    torch.testing.assert_close(compiled_loss, eager_loss)
    compiled_gradients = torch.autograd.grad(compiled_loss, parameters)
    eager_gradients = torch.autograd.grad(eager_loss, parameters)
    for compiled_gradient, eager_gradient in zip(compiled_gradients, eager_gradients, strict=True):
        torch.testing.assert_close(compiled_gradient, eager_gradient)
    if static or model_class is ModelWithUncompiledLoss:
        assert len(graphs) <= _MOST_GRAPHS
    torch._dynamo.reset()


@BOTH_FORMS
def test_transducer_loss_accepts_expanded_inputs(static: bool) -> None:
    """All rows share one prediction, and all classes share one bias.

    The loss must not write into these tensors, and their gradients must be summed over all rows and classes.
    """
    arguments = loss_arguments()
    prediction = arguments["prediction"][:1].detach().requires_grad_()
    bias = torch.zeros(1, requires_grad=True)
    arguments |= {"prediction": prediction.expand(B, -1, -1), "bias": bias.expand(V)}
    gradients = []
    for copied in (arguments, {name: tensor.contiguous() for name, tensor in arguments.items()}):
        loss = transducer_loss(**copied, blank=BLANK, static=static).sum()
        gradients.append(torch.autograd.grad(loss, [prediction, bias]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
