from __future__ import annotations

from typing import Any

import pytest
import torch

from speechtrain.features.augment import Augment
from speechtrain.start.compose import compose


def from_yaml(name: str) -> tuple[Augment, dict[str, Any]]:
    settings = dict(compose([f"augment={name}"]).augment)
    assert settings.pop("_target_") == "speechtrain.features.augment.Augment"
    return Augment(**settings), settings  # lists arrive as OmegaConf's own, as they do from Hydra


def test_choices_say_what_their_references_say() -> None:
    none, _ = from_yaml("none")
    assert none.speed == (1.0, 1.0)
    reference, _ = from_yaml("specaugment")
    masks = reference.specaugment
    assert reference.speed == (0.85, 1.15)
    assert (masks.freq_masks, masks.freq_width, masks.time_masks, masks.time_width) == (2, 20, 10, 0.03)
    assert (masks.freq_width_min, masks.time_width_min) == (0, 0)
    assert (reference.noise_probability, reference.warp_range) == (0.0, 0.0)
    small, _ = from_yaml("small")
    assert (small.speed, small.noise_db, small.warp_range) == ((0.9, 1.1), (5.0, 40.0), 0.1)


@pytest.mark.parametrize("tilt", [0.0, 0.9])
def test_noise_has_the_asked_ratio_to_each_row(tilt: float) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([64000, 32000, 64000, 0, 64000])
    loudness = torch.tensor([1.0, 0.1, 1e-3, 1.0, 0.0])
    valid = torch.arange(64000) < lengths[:, None]
    audio = torch.randn(5, 64000) * loudness[:, None] * valid
    noise = Augment(noise_db=[10.0, 10.0], noise_tilt=tilt).train().waveform(audio, lengths) - audio
    for row in range(3):
        n = int(lengths[row])
        ratio = audio[row, :n].square().mean() / noise[row, :n].square().mean()
        assert 10 * ratio.log10() == pytest.approx(10.0, abs=0.2)
    assert noise[~valid].abs().max() == 0
    assert noise[4].abs().max() == 0  # silence has no level to add noise to


def test_ratios_cover_their_range_evenly() -> None:
    torch.manual_seed(0)
    audio, lengths = torch.randn(2000, 2000), torch.full((2000,), 2000)
    noise = Augment(noise_db=[5.0, 40.0]).train().waveform(audio, lengths) - audio
    decibels = 10 * (audio.square().mean(1) / noise.square().mean(1)).log10()
    assert decibels.min() == pytest.approx(5.0, abs=0.6)
    assert decibels.max() == pytest.approx(40.0, abs=0.6)
    assert decibels.mean() == pytest.approx(22.5, abs=1.0)
    assert decibels.std() == pytest.approx(35 / 12**0.5, abs=0.6)


def test_noise_reaches_its_share_of_the_utterances() -> None:
    torch.manual_seed(0)
    audio, lengths = torch.randn(4000, 8), torch.full((4000,), 8)
    noisy = Augment(noise_db=[0.0, 9.0], noise_probability=0.3).train().waveform(audio, lengths)
    assert (noisy != audio).any(1).float().mean() == pytest.approx(0.3, abs=0.03)


def test_tilt_leans_the_spectrum_both_ways() -> None:
    torch.manual_seed(0)
    audio, lengths = torch.randn(300, 4096), torch.full((300,), 4096)
    for tilt, spread in ((0.0, 0.0), (1.0, 4.0)):
        noise = Augment(noise_db=[0.0, 0.0], noise_tilt=tilt).train().waveform(audio, lengths) - audio
        power = torch.fft.rfft(noise).abs().square()
        lean = 10 * (power[:, :400].mean(1) / power[:, -400:].mean(1)).log10()
        assert lean.std() == pytest.approx(0.4, abs=0.4) if tilt == 0 else lean.std() > spread
        assert lean.mean().abs() < 1.5


def test_warp_factors_are_uniform_about_one() -> None:
    torch.manual_seed(0)
    warp = Augment(warp=0.1).train().warp(20000, torch.device("cpu"))
    assert warp is not None
    assert warp.shape == (20000,)
    assert warp.min() == pytest.approx(0.9, abs=1e-3)
    assert warp.max() == pytest.approx(1.1, abs=1e-3)
    assert warp.std() == pytest.approx(0.2 / 12**0.5, rel=0.02)


def test_masks_are_those_of_its_settings() -> None:
    torch.manual_seed(0)
    augment = Augment(freq_masks=1, freq_width=5, freq_width_min=5).train()
    y = augment.spectrogram(torch.ones(8, 20, 40), torch.full((8,), 20))
    assert (y == 0).sum((1, 2)).tolist() == [100] * 8
    augment = Augment(time_masks=1, time_width=4, time_width_min=4).train()
    y = augment.spectrogram(torch.ones(8, 20, 40), torch.full((8,), 20))
    assert (y == 0).sum((1, 2)).tolist() == [160] * 8


def test_draws_follow_the_global_seed() -> None:
    augment = Augment(noise_db=[5.0, 40.0], warp=0.1).train()
    audio, lengths = torch.randn(2, 100), torch.tensor([100, 50])
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append((augment.waveform(audio, lengths), augment.warp(2, audio.device)))
    for a, b, c in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
