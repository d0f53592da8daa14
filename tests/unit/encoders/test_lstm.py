"""The LSTM encoder in segments of a few frames: the same results, and one graph for all segments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, STATIC, apply_policy
from speechtrain.encoders.lstm import LSTMEncoder
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.task import units_of
from speechtrain.training.recompute import checkpoint_layers
from tests.support.noise import batch
from tools.rehearsal.recorder import Recorder


def encoder(stack_time: int = 2, norm: bool = False) -> LSTMEncoder:
    torch.manual_seed(3)
    features = LogMel(mels=20, splice=3, dither=0.0)
    return LSTMEncoder(
        features, Augment(), 8, stack_time=stack_time, dropout=0.0, layer_norm=norm, feature_norm=norm
    )


def trained(model: LSTMEncoder, given: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
    frames, lengths = model.train()(given)
    inside = torch.arange(frames.shape[1]) < lengths[:, None]
    (frames.square() * inside[:, :, None]).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return frames * inside[:, :, None], lengths, gradients


@pytest.mark.parametrize("segment", [1, 4, 7, 1000])
@pytest.mark.parametrize(("stack_time", "norm"), [(2, False), (3, True), (1, True)])
def test_segments_change_no_result(segment: int, stack_time: int, norm: bool) -> None:
    whole, cut = encoder(stack_time, norm), encoder(stack_time, norm)
    apply_policy(cut, replace(STATIC, spectrum="fft", lstm_segment=segment))
    for one, other in zip(*(trained(model, batch(16000, 8000)) for model in (whole, cut)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "samples",
    [(9000, 60000, 8000, 40000, 12000), (60000, 1600), (16000,), (16000, 16000), (16000, 40001, 16000)],
    ids=str,
)
@pytest.mark.parametrize(
    ("stack_time", "norm", "lstm"), [(2, False, "fused"), (3, True, "loop"), (1, True, "layers")]
)
def test_halves_change_no_result(samples: tuple[int, ...], stack_time: int, norm: bool, lstm: str) -> None:
    whole, cut = encoder(stack_time, norm), encoder(stack_time, norm)
    cut.split_segments = True
    calls: list[tuple[int, ...]] = []
    cut.pre_rnn.register_forward_pre_hook(lambda module, given: calls.append(tuple(given[0].shape[:2])))
    for model in (whole, cut):
        apply_policy(model, replace(PLAIN, lstm=lstm))
    (frames, lengths, gradients), (others, theirs, found) = (
        trained(m, batch(*samples)) for m in (whole, cut)
    )
    assert torch.equal(lengths, theirs)
    torch.testing.assert_close(others, frames, rtol=1e-6, atol=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for one, other in zip(gradients, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6 * largest)
    saves = len(samples) > 1 and sorted(samples)[-1] > 2 * sorted(samples)[-1 - len(samples) // 2]
    assert [rows for rows, _ in calls] == [len(samples), len(samples) // 2][: 1 + saves]


def test_halves_with_dropout_train_and_static_shapes_ignore_them() -> None:
    config = {"features": LogMel(mels=20, splice=3), "augment": Augment(), "hidden": 8, "dropout": 0.5}
    model = LSTMEncoder(**config, split_segments=True)
    assert not units_of(model, is_even=True)
    assert len(units_of(model)) == 2
    checkpoint_layers(model)
    _, _, gradients = trained(model, batch(60000, 9000, 8000))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    calls: list[object] = []
    model.pre_rnn.register_forward_pre_hook(lambda module, given: calls.append(module))
    apply_policy(model, replace(STATIC, spectrum="fft"))
    model.eval()(batch(60000, 9000, 8000))
    assert len(calls) == 1


@pytest.mark.slow
def test_segments_share_their_graphs_across_lengths() -> None:
    model, recorder = encoder(), Recorder()
    apply_policy(model, replace(STATIC, lstm_segment=8, mark_step=recorder.mark_step))
    distinct = []
    for samples in (16000, 32000, 64000):
        given = recorder.move(batch(samples, samples // 2))
        model.zero_grad()
        with recorder.warm_up():
            frames, _ = model.train()(given)
            recorder.mark_step()
            frames.square().sum().backward()
            recorder.mark_step()
        distinct.append(recorder.distinct)
    segments = len(recorder.segments)
    assert segments > 3 * 2 * 3  # (34 + 67 + 134) frames, 8 in each segment, forward and backward
    assert distinct[1] - distinct[0] == distinct[2] - distinct[1] <= 3  # features, and both ends
    assert max(recorder.segments) < 400
