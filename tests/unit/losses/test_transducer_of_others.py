"""``speechtrain.transducer_loss`` against joints and losses of other toolkits, where these are installed.

    pip install torch torchaudio && pip install speechbrain && pip install --no-deps espnet

SpeechBrain's own loss is a CUDA kernel. The joints of both are compared through the loss of torchaudio.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speechtrain import transducer_loss

pytestmark = pytest.mark.filterwarnings("ignore")  # The other toolkits warn.
B, T, U, H, V = 3, 9, 4, 8, 6
BLANK = 0
NAMES = ("encoder", "prediction", "weight", "bias")


@pytest.fixture(autouse=True)
def _level(monkeypatch: pytest.MonkeyPatch) -> None:
    # SpeechBrain sets this variable at its import, and monkeypatch restores it.
    monkeypatch.setenv("SB_LOG_LEVEL", "ERROR")


@pytest.fixture
def parts() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(B, T, H), (B, U + 1, H), (V, H), (V,)]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


LABELS = torch.tensor([[1, 2, 3, 4], [5, 5, 1, 0], [2, 0, 0, 0]])
FRAMES, LABEL_COUNTS = torch.tensor([9, 7, 8]), torch.tensor([4, 3, 1])


def ours(parts: list[Tensor], activation: str = "relu", frames: Tensor = FRAMES) -> Tensor:
    return transducer_loss(
        *parts, LABELS, frames, LABEL_COUNTS, blank=BLANK, activation=activation, skip_below=0.0
    )


def with_relu(parts: list[Tensor], slope: float) -> list[Tensor]:
    """Convert the parts of a joint with LeakyReLU into the parts of an equal joint with ReLU.

    LeakyReLU(x) is relu(x) - slope * relu(-x), so the joint with ReLU has twice the units.
    """
    encoder, prediction, weight, bias = parts
    encoder = torch.cat((encoder, -encoder), -1)
    prediction = torch.cat((prediction, -prediction), -1)
    weight = torch.cat((weight, -slope * weight), 1)
    return [encoder, prediction, weight, bias]


def assert_equal(mine: Tensor, theirs: Tensor, parts: list[Tensor], relative: float = 1e-5) -> None:
    """Check that the losses are equal, and the gradients of their sums."""
    torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=relative, atol=0)
    gradients = torch.autograd.grad(mine.sum(), parts)
    their_gradients = torch.autograd.grad(theirs.sum(), parts)
    for name, gradient, their_gradient in zip(NAMES, gradients, their_gradients, strict=True):
        error = relative_error(gradient, their_gradient)
        assert error <= 10 * relative, f"gradient of {name}: {error:.1e}"


def relative_error(gradient: Tensor, expected: Tensor) -> float:
    return float((gradient - expected).norm() / expected.norm())


def torchaudio_loss(logits: Tensor) -> Tensor:
    functional = pytest.importorskip("torchaudio.functional", exc_type=Exception)
    integers = (x.int() for x in (LABELS, FRAMES, LABEL_COUNTS))
    losses: Tensor = functional.rnnt_loss(logits, *integers, blank=BLANK, reduction="none")
    return losses


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_losses_of_a_lattice(parts: list[Tensor], activation: str) -> None:
    encoder, prediction, weight, bias = parts
    hidden = getattr(torch, activation)(encoder[:, :, None] + prediction[:, None])
    theirs = torchaudio_loss(nn.functional.linear(hidden, weight, bias))
    assert_equal(ours(parts, activation), theirs, parts)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_espnet_joint(activation: str) -> None:
    module = pytest.importorskip("espnet2.asr_transducer.joint_network")
    torch.manual_seed(0)
    joint = module.JointNetwork(V, 5, 7, joint_space_size=H, joint_activation_type=activation)
    encoded, predicted = torch.randn(B, T, 5), torch.randn(B, U + 1, 7)
    theirs = torchaudio_loss(joint(encoded.unsqueeze(2), predicted.unsqueeze(1)))
    projections = [joint.lin_enc(encoded), joint.lin_dec(predicted)]
    mine = ours([*projections, joint.lin_out.weight, joint.lin_out.bias], activation)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
    weights = [*joint.parameters()]
    gradients = torch.autograd.grad(mine.sum(), weights)
    their_gradients = torch.autograd.grad(theirs.sum(), weights)
    for gradient, their_gradient in zip(gradients, their_gradients, strict=True):
        assert relative_error(gradient, their_gradient) < 1e-4


SPEECHBRAIN: list[tuple[type[nn.Module], str, float]] = [
    (nn.ReLU, "relu", 0.0),
    (nn.Tanh, "tanh", 0.0),
    (nn.LeakyReLU, "relu", 0.01),
]


@pytest.mark.parametrize(("nonlinearity", "activation", "slope"), SPEECHBRAIN)
def test_speechbrain_joint(parts: list[Tensor], nonlinearity: Any, activation: str, slope: float) -> None:
    """SpeechBrain's default LeakyReLU is tested, too. The output layer has no bias."""
    module = pytest.importorskip("speechbrain.nnet.transducer.transducer_joint")
    linear = pytest.importorskip("speechbrain.nnet.linear").Linear(input_size=H, n_neurons=V, bias=False)
    joint = module.Transducer_joint(joint="sum", nonlinearity=nonlinearity)
    parts = [*parts[:2], linear.w.weight, torch.zeros(V, requires_grad=True)]
    theirs = torchaudio_loss(linear(joint(parts[0].unsqueeze(2), parts[1].unsqueeze(1))))
    relu_parts = with_relu(parts, slope) if slope else parts
    mine = ours(relu_parts, activation)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
    gradients = torch.autograd.grad(mine.sum(), parts[:3])
    their_gradients = torch.autograd.grad(theirs.sum(), parts[:3])
    for name, gradient, their_gradient in zip(NAMES, gradients, their_gradients, strict=False):
        assert relative_error(gradient, their_gradient) < 1e-4, name
