"""The LSTM encoder in segments of a few frames: the same results, and one graph for all segments."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import STATIC, apply_policy
from speechtrain.devices.recorder import Recorder
from speechtrain.encoders.lstm import LSTMEncoder
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel


def encoder(stack_time: int = 2, norm: bool = False) -> LSTMEncoder:
    torch.manual_seed(3)
    features = LogMel(mels=20, splice=3, dither=0.0)
    return LSTMEncoder(
        features, Augment(), 8, stack_time=stack_time, dropout=0.0, layer_norm=norm, feature_norm=norm
    )


def batch(samples: int) -> Batch:
    lengths = torch.tensor([samples, samples // 2])
    audio = 0.1 * torch.randn(2, samples, generator=torch.Generator().manual_seed(samples))
    one = torch.ones(2, dtype=torch.int64)
    return Batch(audio, lengths, one[:, None], one, torch.ones(2), one, ("a", "b"), ("a", "b"))


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
    for one, other in zip(*(trained(model, batch(16000)) for model in (whole, cut)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_segments_share_their_graphs_across_lengths() -> None:
    model, recorder = encoder(), Recorder()
    apply_policy(model, replace(STATIC, lstm_segment=8, mark_step=recorder.mark_step))
    distinct = []
    for samples in (16000, 32000, 64000):
        given = recorder.move(batch(samples))
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


_LAZY = """
import torch
import torch._lazy.metrics as metrics
from dataclasses import replace
from speechtrain.compute_policy import STATIC, apply_policy
from speechtrain.devices.lazy import Lazy
device = Lazy()
device.open(0)
from tests.unit.encoders.test_lstm import batch, encoder
whole, cut = encoder(), encoder()
apply_policy(cut, replace(STATIC, lstm_segment=8, mark_step=device.mark_step))
cut.to("lazy")
for model, move in ((whole, lambda b: b), (cut, device.move)):
    for samples in (8000, 16000, 16000):
        before = device.graphs()
        model.zero_grad()
        frames, lengths = model.train()(move(batch(samples)))
        device.mark_step()
        frames[:, :3].square().sum().backward()
        device.mark_step()
for one, other in zip(whole.parameters(), cut.parameters()):
    torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-3, atol=1e-5)
print(device.graphs() - before, sum(device.fallbacks().values()))
"""


def test_lazy_tensors_compile_no_segment_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LAZY], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0"]
