from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from speechtrain.compute_policy import ComputePolicy
from speechtrain.errors import ConfigError
from speechtrain.features.front_ends import FRONT_ENDS
from speechtrain.features.logmel import LogMel
from speechtrain.features.logmel_stream import LogMelStream

LENGTHS = [1, 2, 100, 161, 479, 1000, 1039, 1040, 5000]


def log_mel(**settings: Any) -> LogMel:
    return LogMel(**{"normalise": "none", "window_seconds": 0.025, "log_floor": 1e-6, **settings}).eval()


def streamed(model: LogMel, audio: Tensor, sizes: list[int], keys: Tensor | None = None) -> Tensor:
    stream = LogMelStream(model, len(audio), keys)
    frames = [stream.step(piece) for piece in audio.split(sizes, dim=1)]
    return torch.cat([*frames, stream.finish()], dim=1)


def random_sizes(samples: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    sizes: list[int] = []
    while sum(sizes) < samples:
        longest = (1, 50, 700, 3000)[len(sizes) % 4]
        size = int(torch.randint(longest + 1, (), generator=generator))
        sizes.append(min(size, samples - sum(sizes)))
    return sizes


def check(model: LogMel, audio: Tensor, sizes: list[int]) -> None:
    """A stream gives the frames of one pass."""
    keys = torch.arange(len(audio)) + 12345
    lengths = torch.full((len(audio),), audio.shape[1])
    frames, counts = model(audio, lengths, keys=keys)
    stream_frames = streamed(model, audio, sizes, keys)
    assert stream_frames.shape[1] == int(counts[0])
    difference = (stream_frames - frames[:, : stream_frames.shape[1]]).abs()
    assert not difference.numel() or difference.max() <= 1e-5 * frames.abs().max()


@pytest.mark.parametrize("form", FRONT_ENDS)
@pytest.mark.parametrize("padding", ["reflect", "constant"])
def test_frames_of_random_pieces_are_those_of_one_pass(form: str, padding: str) -> None:
    for seed, samples in enumerate([*LENGTHS, 16000, 40001]):
        audio = 0.1 * torch.randn(2, samples)
        for splice in (1, 3):
            model = log_mel(form=form, padding=padding, splice=splice)
            check(model, audio, random_sizes(samples, seed))


@pytest.mark.parametrize("form", FRONT_ENDS)
@pytest.mark.parametrize("padding", ["reflect", "constant"])
def test_frames_of_single_samples_are_those_of_one_pass(form: str, padding: str) -> None:
    for samples in LENGTHS[:-1]:
        check(log_mel(form=form, padding=padding), 0.1 * torch.randn(1, samples), [1] * samples)


@pytest.mark.parametrize(
    "settings",
    [
        {"form": "dali", "window_seconds": 0.007},  # Some samples are in no window.
        {"form": "torch", "window_seconds": 0.007},
        {"form": "parakeet", "window_seconds": 0.007},  # The first window ends before there is a column.
        {"form": "kaldi", "window_seconds": 0.01},
        {"form": "kaldi_hann", "window_seconds": 161 / 16000, "hop_seconds": 159 / 16000},
        {"splice_first": True, "pad_features_to": 32},
        {"dither": 0.0},
    ],
)
def test_frames_with_other_settings_are_those_of_one_pass(settings: dict[str, Any]) -> None:
    for samples in range(900, 1300, 7):
        check(log_mel(**settings), 0.1 * torch.randn(1, samples), random_sizes(samples, samples))


@pytest.mark.parametrize("form", FRONT_ENDS)
def test_frames_of_short_windows_are_those_of_one_pass(form: str) -> None:
    for width, hop in ((1, 1), (2, 1), (3, 2), (8, 3), (8, 7), (2, 5), (3, 8)):
        if form.startswith("kaldi") and width < hop:
            continue
        model = LogMel(
            sample_rate=1000,
            window_seconds=width / 1000,
            hop_seconds=hop / 1000,
            n_fft=16,
            mels=2,
            form=form,
            normalise="none",
            log_floor=1e-6,
        ).eval()
        for samples in range(1, 60):
            check(model, torch.randn(1, samples), random_sizes(samples, samples))


@pytest.mark.parametrize("spectrum", ["matmul", "conv"])
def test_frames_of_other_transforms_are_those_of_one_pass(spectrum: str) -> None:
    model = log_mel(form="torch")
    model.apply_policy(ComputePolicy(spectrum=spectrum, feature_frames=7))
    check(model, 0.1 * torch.randn(1, 16000), random_sizes(16000, 1))


def test_the_state_is_bounded() -> None:
    stream = LogMelStream(log_mel())
    for size in (50_000, 1, 3, 160, 100_000, 7):
        stream.step(torch.randn(1, size))
        # Two windows and two frames of 480 samples.
        assert stream.audio.shape[1] <= 2 * 400 + 2 * 480
        assert stream.audio.untyped_storage().nbytes() <= 4 * (2 * 400 + 2 * 480)


def test_a_stream_without_samples_has_no_frames() -> None:
    stream = LogMelStream(log_mel(), rows=2)
    assert stream.step(torch.zeros(2, 0)).shape == (2, 0, 240)
    assert stream.finish().shape == (2, 0, 240)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"normalise": "all"}, r"encoder\.features\.normalise=all"),
        ({"normalise": "loud"}, r"encoder\.features\.normalise=loud"),
        ({"trim_silence_db": -60.0}, r"encoder\.features\.trim_silence_db=-60\.0"),
    ],
)
def test_a_setting_that_needs_the_whole_recording_is_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        LogMelStream(log_mel(**settings))
