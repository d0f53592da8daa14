"""Prediction networks: one label at a time gives what all labels at once give."""

from __future__ import annotations

import pytest
import torch

from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction, Prediction, StatelessPrediction

LABELS = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 7, 0]])
KINDS = [
    lambda: LSTMPrediction(6, 8, 2, dropout=0.0),
    lambda: LSTMPrediction(6, 8, 1, layer_norm=True),
    lambda: StatelessPrediction(6, 8, context=1),
    lambda: StatelessPrediction(6, 8, context=3),
]


def connected(network: Prediction) -> Prediction:
    torch.manual_seed(0)
    network.connect(8)
    return network.eval()


@pytest.mark.parametrize("make", KINDS)
def test_steps_equal_the_whole_sequence(make: object) -> None:
    network = connected(make())  # type: ignore[operator]
    whole = network(LABELS)
    assert whole.shape == (2, 6, network.width)
    output, state = network.start(2)
    outputs = [output]
    for position in range(LABELS.shape[1]):
        output, state = network.step(LABELS[:, position], state)
        outputs.append(output)
    torch.testing.assert_close(torch.stack(outputs, 1), whole)


@pytest.mark.parametrize("make", KINDS)
def test_a_state_is_selected_row_by_row(make: object) -> None:
    network = connected(make())  # type: ignore[operator]
    _, old = network.start(2)
    _, new = network.step(LABELS[:, 0], old)
    mixed = network.select(torch.tensor([True, False]), new, old)
    after, _ = network.step(LABELS[:, 1], mixed)
    torch.testing.assert_close(after[0], network.step(LABELS[:, 1], new)[0][0])
    torch.testing.assert_close(after[1], network.step(LABELS[:, 1], old)[0][1])


@pytest.mark.parametrize("start", ["zero", "blank"])
def test_label_dropout_hides_whole_labels_in_training_only(start: str) -> None:
    network = connected(StatelessPrediction(6, 8, context=1, dropout=0.0, start=start, label_dropout=0.5))
    labels = torch.randint(8, (50, 40))
    whole = network(labels)
    network.train()
    outputs = network(labels)
    hidden = network.projection.bias  # the output for a zero vector
    is_hidden = (outputs[:, 1:] == hidden).all(2)
    assert 0.45 < float(is_hidden.float().mean()) < 0.55
    with torch.no_grad():
        shown = whole[:, 1:][~is_hidden] - hidden
    torch.testing.assert_close((outputs[:, 1:][~is_hidden] - hidden) / 2, shown)


def test_a_stateless_network_forgets_what_is_beyond_its_context() -> None:
    network = connected(StatelessPrediction(6, 8, context=2))

    def last_output(labels: list[int]) -> torch.Tensor:
        outputs: torch.Tensor = network(torch.tensor([labels]))
        return outputs[0, -1]

    output = last_output([3, 1, 4, 1, 5])
    assert torch.equal(output, last_output([0, 0, 0, 1, 5])), "a label before the last two has an effect"
    assert not torch.equal(output, last_output([3, 1, 4, 2, 5])), "the last label but one has no effect"


@pytest.mark.parametrize("bias", ["both", "single"])
def test_a_joint_is_one_linear_layer_over_the_concatenation(bias: str) -> None:
    torch.manual_seed(0)
    joint = Joint(5, bias=bias)
    joint.connect(4, 3, 7)
    frames, predicted = torch.randn(2, 4), torch.randn(2, 3)
    weight = torch.cat((joint.encoder.weight, joint.prediction.weight), 1)
    shift = joint.encoder.bias if bias == "single" else joint.encoder.bias + joint.prediction.bias
    hidden = torch.nn.functional.linear(torch.cat((frames, predicted), 1), weight, shift).relu()
    expected = joint.output(hidden)
    torch.testing.assert_close(joint(joint.encoder(frames), joint.prediction(predicted)), expected)
    assert (joint.prediction.bias is None) == (bias == "single")
