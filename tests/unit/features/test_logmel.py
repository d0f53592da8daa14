from __future__ import annotations

from typing import Any

import kaldi_native_fbank
import numpy as np
import pytest
import scipy.signal
import scipy.stats
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechtrain.compute_policy import ComputePolicy
from speechtrain.counter_rng import key_of
from speechtrain.errors import ConfigError
from speechtrain.features.logmel import LogMel
from speechtrain.features.silence import trim_silence

Array = NDArray[np.float64]


def speech(samples: int, seed: int = 0) -> Array:
    """A tone that glides through harmonics, in noise, with a swell: no bin is silent, none constant."""
    t = np.arange(samples) / 16000
    rng = np.random.default_rng(seed)
    pitch = 2 * np.pi * (120 + 20 * seed) * (t + 0.1 * np.sin(3 * t))
    voice = sum(np.sin(k * pitch) / k for k in range(1, 30))
    return (
        (0.1 * voice * (0.6 + 0.4 * np.sin(9 * t)) + 0.01 * rng.standard_normal(samples))
        .astype("f4")
        .astype(float)
    )


def run(model: LogMel, *waves: Array, padding: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """The module on a batch of ragged waveforms, with rubbish beyond each row's end."""
    lengths = [len(wave) for wave in waves]
    audio = torch.full((len(waves), max(lengths) + padding), 0.7)
    for row, wave in zip(audio, waves, strict=True):
        row[: len(wave)] = torch.from_numpy(wave)
    features, frames = model.eval()(audio, torch.tensor(lengths), **options)
    return features, frames


# An independent float64 oracle, after the reference's description.


def oracle_bank(mels: int, low: float, high: float, rate: int, n_fft: int, warp: float = 1.0) -> Array:
    def to_mel(f: float) -> float:
        return f / (200 / 3) if f < 1000 else 15 + np.log(f / 1000) / (np.log(6.4) / 27)

    def to_hertz(m: float) -> float:
        return m * 200 / 3 if m < 15 else 1000 * np.exp(np.log(6.4) / 27 * (m - 15))

    def warped(f: float) -> float:
        nyquist, top = rate / 2, 0.6 * rate / 2
        if f <= top * min(warp, 1) / warp:
            return f * warp
        return nyquist - (nyquist - top * min(warp, 1)) / (nyquist - top * min(warp, 1) / warp) * (
            nyquist - f
        )

    corners = [warped(to_hertz(m)) for m in np.linspace(to_mel(low), to_mel(high), mels + 2)]
    bins = np.arange(n_fft // 2 + 1) * rate / n_fft
    filters = [
        2 / (c - a) * np.interp(bins, [a, b, c], [0, 1, 0])
        for a, b, c in zip(corners, corners[1:], corners[2:], strict=False)
    ]
    return np.stack(filters, axis=1)


def oracle(
    wave: Array,
    form: str,
    *,
    rate: int = 16000,
    width: int = 320,
    hop: int = 160,
    n_fft: int = 512,
    mels: int = 80,
    low: float = 0.0,
    high: float = 8000.0,
    coefficient: float = 0.97,
    padding: str = "reflect",
    floor: float = 1e-20,
    normalise: str = "all",
    splice: int = 3,
    splice_first: bool = False,
    warp: float = 1.0,
) -> Array:
    dali, n = form == "dali", len(wave)
    x = scipy.signal.lfilter([1.0, -coefficient], [1.0], wave)
    if dali:
        x[0] = wave[0] - coefficient * wave[0]
        window = np.sin(np.pi * (np.arange(width) + 0.5) / width) ** 2
        total, before = n // hop + 1, width // 2
    else:
        window = scipy.signal.windows.hann(width, sym=True)
        total, before = int(np.ceil(n / hop)), n_fft // 2 - (n_fft - width) // 2
    x = np.pad(x, (before, n_fft), mode=padding)  # type: ignore[call-overload]
    frames = np.stack([x[t * hop : t * hop + width] * window for t in range(total)])
    mel = np.abs(np.fft.rfft(frames, n_fft)) ** 2 @ oracle_bank(mels, low, high, rate, n_fft, warp)
    y = np.log(np.maximum(mel, floor)) if dali else np.log(mel + floor)

    def normalised(column: Array) -> Array:
        if normalise == "none":
            return column
        spread = column.std() if dali else (column.std(ddof=1) if len(column) > 1 else 0.0) + 1e-5
        return (column - column.mean()) / (spread if np.ptp(column) else 1.0)

    groups = -(-total // splice)
    out = np.zeros((groups, splice, mels))
    if splice_first:
        for part in range(min(splice, total)):
            for m in range(mels):
                column = normalised(y[part::splice, m])
                out[: len(column), part, m] = column
    else:
        flat = out.reshape(groups * splice, mels)
        for m in range(mels):
            flat[:total, m] = normalised(y[:, m])
    return out.reshape(groups, splice * mels)


def close(ours: Tensor, theirs: Array, tolerance: float = 2e-4) -> None:
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours.double().numpy(), theirs, rtol=0, atol=tolerance)


FORMS = ("dali", "torch")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding", ["reflect", "constant"])
@pytest.mark.parametrize("splice_first", [False, True])
def test_equals_the_float64_oracle(form: str, padding: str, splice_first: bool) -> None:
    lengths = (16000, 15999, 12345, 9761, 4000)
    waves = [speech(n, i) for i, n in enumerate(lengths)]
    model = LogMel(form=form, padding=padding, splice_first=splice_first)
    features, frames = run(model, *waves, padding=777)
    for row, count, wave in zip(features, frames, waves, strict=True):
        expected = oracle(wave, form, padding=padding, splice_first=splice_first)
        close(row[:count], expected)
        assert row[count:].abs().max() == 0


@pytest.mark.parametrize("form", FORMS)
def test_equals_the_oracle_with_other_settings(form: str) -> None:
    wave = speech(9000, 3)
    shared: dict[str, Any] = {"form": form, "splice": 1}
    small = LogMel(window_seconds=0.025, mels=40, log_floor=1e-8, **shared)
    close(run(small, wave)[0][0], oracle(wave, form, width=400, mels=40, floor=1e-8, splice=1))
    odd = LogMel(sample_rate=11025, window_seconds=0.025, f_min=60.0, f_max=4000.0, mels=23,
                 preemphasis=0.9, normalise="none", **shared)  # fmt: skip
    assert odd.width == 276
    odd = LogMel(sample_rate=11025, window_seconds=275 / 11025, f_min=60.0, f_max=4000.0, mels=23,
                 preemphasis=0.9, normalise="none", **shared)  # fmt: skip
    expected = oracle(wave, form, rate=11025, width=275, hop=110, low=60, high=4000, mels=23,
                      coefficient=0.9, normalise="none", splice=1)  # fmt: skip
    close(run(odd, wave)[0][0], expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("samples", [1, 2, 3, 100, 159, 160, 161, 320, 321, 500])
def test_waveforms_shorter_than_a_window_reflect_again_and_again(form: str, samples: int) -> None:
    wave = speech(samples + 7, 1)[7:]
    # Above a floor: a bin that holds nothing but leakage has few digits in fp32.
    model = LogMel(form=form, normalise="none", log_floor=1e-7)
    features, frames = run(model, wave, speech(700))
    close(features[0, : frames[0]], oracle(wave, form, normalise="none", floor=1e-7))
    assert frames[0] == model.frames(samples)


def test_nemo_front_end_of_kaldi_native_fbank_coincides() -> None:
    wave = speech(33217, 2)
    theirs = kaldi_native_fbank.OnlineNemoFbank(kaldi_native_fbank.NemoFbankOptions())
    theirs.accept_waveform(16000, wave.tolist())
    theirs.input_finished()
    frames, _ = theirs.get_frames(0, theirs.num_frames_ready, True)
    model = LogMel(
        window_seconds=0.025,
        form="torch",
        padding="constant",
        log_floor=2.0**-24,
        normalise="none",
        splice=1,
    )
    expected = np.asarray(frames).reshape(theirs.num_frames_ready, 80)
    ours, count = run(model, wave)
    assert abs(int(count) - len(expected)) <= 1  # newer NeMo counts floor(n/hop)
    close(ours[0, : len(expected)], expected[: int(count)], 1e-3)


def sherpa_energies(wave: Array, rate: int, window: str, high: float, *, log: bool = False) -> Array:
    """Energies as sherpa-onnx 2.0.1 computes them by kaldi-native-fbank for models of NeMo."""
    options = kaldi_native_fbank.FbankOptions()
    frames, mel = options.frame_opts, options.mel_opts
    frames.dither, frames.samp_freq, frames.snip_edges = 0.0, rate, False
    frames.remove_dc_offset, frames.window_type = False, window
    mel.num_bins, mel.low_freq, mel.high_freq, mel.is_librosa = 40, 0.0, high, True
    options.use_log_fbank = log
    fbank = kaldi_native_fbank.OnlineFbank(options)
    fbank.accept_waveform(rate, wave.tolist())
    fbank.input_finished()
    return np.stack([fbank.get_frame(index) for index in range(fbank.num_frames_ready)])


def sherpa_features(*arguments: Any) -> Array:
    """Features of whole recordings, as sherpa-onnx 2.0.1 computes them for models of NeMo."""
    features: Array = np.log(sherpa_energies(*arguments) + 2.0**-24)
    return (features - features.mean(0)) / (features.std(0) + 1e-5)


@pytest.mark.parametrize(("form", "window", "high"), [("kaldi", "povey", -400), ("kaldi_hann", "hann", 0)])
@pytest.mark.parametrize("rate", [8000, 16000])
def test_kaldi_forms_coincide_with_kaldi_native_fbank(form: str, window: str, high: int, rate: int) -> None:
    settings = {"window_seconds": 0.025, "n_fft": rate * 4 // 125, "mels": 40, "f_max": rate / 2 + high}
    model = LogMel(rate, form=form, log_floor=2.0**-24, splice=1, **settings)
    waves = [speech(samples, samples % 7) for samples in (100, 1000, 1039, 1040, 15999)]
    features, frames = run(model, *waves, padding=99)
    for row, count, wave in zip(features, frames, waves, strict=True):
        assert count == model.frames(len(wave))
        close(row[:count], sherpa_features(wave, rate, window, high), 2e-3)
        assert row[count:].abs().max() == 0


def test_the_online_form_coincides_with_kaldi_native_fbank() -> None:
    settings = {"window_seconds": 0.025, "mels": 40, "splice": 1, "normalise": "none"}
    model = LogMel(form="kaldi_online", log_floor=2.0**-23, **settings)
    for loudness in (1.0, 1e-4):
        wave = loudness * speech(15999, 3)
        features, _ = run(model, np.concatenate([wave, np.zeros(3000, np.float32)]))
        expected = sherpa_energies(
            np.concatenate([wave, np.zeros(3000, np.float32)]), 16000, "hann", 0, log=True
        )
        close(features[0], expected, 2e-3)


def test_frame_counts_of_the_references() -> None:
    for form, columns in (("torch", 1670), ("dali", 1671)):
        assert LogMel(form=form, splice=1).frames(267200) == columns
        model = LogMel(form=form)
        assert model.frames(267200) == 557
        assert model.frame_seconds == pytest.approx(0.03)
        _, frames = model(torch.zeros(1, 267200), torch.tensor([267200]))
        assert frames.tolist() == [557]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("splice_first", [False, True])
def test_frames_is_the_shape_and_the_length(form: str, splice_first: bool) -> None:
    model = LogMel(form=form, splice_first=splice_first)
    lengths = [1, 159, 160, 161, 479, 480, 481, 960, 4801]
    features, frames = model(torch.randn(9, 4801), torch.tensor(lengths))
    assert features.shape == (9, model.frames(4801), 240)
    assert frames.tolist() == [model.frames(n) for n in lengths]
    assert frames.dtype == torch.int64


def test_features_are_padded_to_a_multiple() -> None:
    model = LogMel(pad_features_to=32)
    assert model.features == 256
    features, _ = run(model, speech(8000))
    assert features.shape[2] == 256
    assert features[..., 240:].abs().max() == 0
    assert torch.equal(features[..., :240], run(LogMel(), speech(8000))[0])
    assert (LogMel().features, LogMel(splice=1, mels=40).features) == (240, 40)
    with pytest.raises(ConfigError, match=r"pad_features_to is -7\. It must be 0 or more"):
        LogMel(pad_features_to=-7)  # It would crop the features to 238.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("splice_first", [False, True])
def test_a_constant_bin_normalises_to_zero(form: str, splice_first: bool) -> None:
    model = LogMel(form=form, splice_first=splice_first, dither=0.0)
    features, _ = run(model, np.zeros(16000), np.zeros(7001), speech(5000))
    assert features[:2].abs().max() == 0
    assert features[2].abs().max() > 1
    # So is what never rises above the floor, though its spectrum varies.
    if form == "dali":
        loud_floor = LogMel(form=form, splice_first=splice_first, log_floor=1e6)
        assert run(loud_floor, speech(16000))[0].abs().max() == 0
    # A single frame is constant too.
    features, _ = run(LogMel(form=form, splice_first=splice_first), speech(100))
    assert features.abs().max() == 0


@pytest.mark.parametrize("form", FORMS)
def test_silence_does_not_change_the_features_of_speech(form: str) -> None:
    wave = speech(16000)
    padded = np.concatenate([np.zeros(32000), wave, np.zeros(48000)])
    model = LogMel(form=form, normalise="loud", splice=1, dither=0.0, log_floor=1e-8)
    alone, padded_features = run(model, wave)[0][0], run(model, padded)[0][0]
    inner = slice(3, 97)  # The windows at the ends reach into the silence.
    difference = (alone[inner] - padded_features[200:][inner]).abs().max()
    assert difference < 0.4  # The windows at the ends are columns more, of which the first are loud.
    every = LogMel(form=form, normalise="all", splice=1, dither=0.0, log_floor=1e-8)
    difference = (run(every, wave)[0][0][inner] - run(every, padded)[0][0][200:][inner]).abs().max()
    assert difference > 1.0


def test_dither_in_evaluation_belongs_to_the_utterance() -> None:
    quiet = np.zeros(8000)
    model = LogMel(normalise="none")
    a, b, c = 7, 5_000, 200_000
    one, _ = run(model, quiet, quiet, keys=torch.tensor([a, b]))
    two, _ = run(
        model,
        quiet,
        quiet,
        quiet,
        padding=500,
        keys=torch.tensor([b, c, a]),
    )
    assert torch.equal(one, run(model, quiet, quiet, keys=torch.tensor([a, b]))[0])
    frames = model.frames(8000)
    torch.testing.assert_close(two[2, :frames], one[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(two[0, :frames], one[1], rtol=0, atol=1e-5)
    assert (one[0] - one[1]).abs().mean() > 0.5
    assert one.min() > -35  # the dither, and not the floor of -46
    assert run(model, quiet)[0][:, :-1].max() < -46  # without keys there is none


def test_dither_is_gaussian_and_independent_between_keys() -> None:
    model = LogMel(dither=0.5).eval()
    keys = torch.tensor([1, 2, 3, *(key_of(name) for name in ("a-1", "a-2", "b-1"))])
    noise = model._dithered(torch.zeros(6, 80000), keys).double().numpy()
    assert abs(noise.mean()) < 0.005
    assert noise.std() == pytest.approx(0.5, rel=0.01)
    assert scipy.stats.kurtosis(noise[0]) == pytest.approx(0.0, abs=0.1)
    correlation = np.corrcoef(noise) - np.eye(6)
    assert np.abs(correlation).max() < 0.03
    spectrum = np.abs(np.fft.rfft(noise[0].reshape(80, 1000), axis=1)) ** 2
    halves = spectrum.mean(0)[1:].reshape(2, -1).mean(1)
    assert halves[0] == pytest.approx(halves[1], rel=0.05)


def test_dither_in_training_comes_from_the_global_generator() -> None:
    model = LogMel(normalise="none")
    audio, lengths = torch.zeros(1, 4000), torch.tensor([4000])
    keys = torch.tensor([5])
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model.train()(audio, lengths, keys=keys)[0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def under(policy: ComputePolicy, form: str) -> LogMel:
    model = LogMel(form=form)
    model.apply_policy(policy)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_blocks_and_transforms_agree(form: str) -> None:
    waves = [speech(n, i) for i, n in enumerate((4000, 1000, 3999))]
    warp = torch.tensor([0.9, 1.0, 1.1])
    for options in ({}, {"warp": warp}):
        reference, _ = run(LogMel(form=form), *waves, **options)
        for block in (0, 1, 7, 25, 26, 60, 10**6):
            features, _ = run(under(ComputePolicy(feature_frames=block), form), *waves, **options)
            torch.testing.assert_close(features, reference, rtol=0, atol=1e-5)
        for fourier in ("matmul", "conv"):
            features, _ = run(under(ComputePolicy(spectrum=fourier), form), *waves, **options)
            torch.testing.assert_close(features, reference, rtol=0, atol=2e-4)


def test_reduced_precision_does_not_reach_the_features() -> None:
    waves = [speech(8000), speech(5000, 1)]
    reference, _ = run(LogMel(pad_features_to=32), *waves, keys=torch.tensor([1, 2]))
    with torch.autocast("cpu", torch.bfloat16):
        features, _ = run(LogMel(pad_features_to=32), *waves, keys=torch.tensor([1, 2]))
    assert features.dtype == torch.float32
    assert torch.equal(features, reference)
    cast = LogMel(pad_features_to=32).to(torch.bfloat16)
    assert torch.equal(run(cast, *waves, keys=torch.tensor([1, 2]))[0], reference)
    assert torch.equal(
        run(LogMel(pad_features_to=32).half().float(), *waves, keys=torch.tensor([1, 2]))[0], reference
    )


@pytest.mark.parametrize("form", FORMS)
def test_warp_equals_the_oracle_row_by_row(form: str) -> None:
    waves = [speech(n, i) for i, n in enumerate((9000, 4000, 9000, 6000))]
    factors = [0.9, 1.0, 1.1, 0.83]
    model = LogMel(form=form, normalise="none", f_max=7600.0)
    features, frames = run(model, *waves, warp=torch.tensor(factors))
    for row, count, wave, warp in zip(features, frames, waves, factors, strict=True):
        close(row[:count], oracle(wave, form, normalise="none", high=7600.0, warp=warp), 1e-3)
    plain, _ = run(model, *waves)
    torch.testing.assert_close(features[1], plain[1], rtol=0, atol=1e-4)
    assert (features[0] - plain[0]).abs().mean() > 0.05


def test_the_mask_sees_what_the_references_mask() -> None:
    seen = []

    def mask(frames: Tensor, lengths: Tensor) -> Tensor:
        seen.append((tuple(frames.shape), lengths.tolist()))
        return frames * 0 + 7

    features, _ = run(LogMel(pad_features_to=32), speech(8000), speech(4000), mask=mask)
    run(LogMel(splice_first=True), speech(8000), speech(4000), mask=mask)
    assert seen == [((2, 51, 80), [51, 26]), ((2, 17, 240), [17, 9])]
    assert (features[0, :, :240] == 7).all()
    assert (features[..., 240:] == 0).all()


def oracle_trim(wave: Array, decibels: float = -60.0, window: int = 2048) -> Array:
    squares = np.concatenate([np.zeros(window - 1), wave**2])
    power = np.array([squares[i : i + window].mean() for i in range(len(wave))])
    loud = np.flatnonzero(power >= power.max() * 10 ** (decibels / 10))
    return wave[max(loud[0] - window + 1, 0) : loud[-1] + 1]


@pytest.mark.parametrize(("decibels", "window"), [(-60.0, 2048), (-30.0, 100), (-20.0, 7)])
def test_silence_is_trimmed_as_the_oracle_trims_it(decibels: float, window: int) -> None:
    waves = []
    for seed, (lead, middle, trail) in enumerate(
        [(5000, 4000, 3000), (0, 3000, 6000), (100, 9000, 10), (1, 1, 1)]
    ):
        inner = speech(middle, seed)
        inner[middle // 3 : middle // 2] = 0  # a pause inside stays
        noise = 1e-6 * np.random.default_rng(seed).standard_normal(lead + middle + trail)
        waves.append(
            (np.concatenate([np.zeros(lead), inner, np.zeros(trail)]) + noise).astype("f4").astype(float)
        )
    longest = max(map(len, waves))
    audio = torch.full((4, longest + 99), 0.9)
    for row, wave in zip(audio, waves, strict=True):
        row[: len(wave)] = torch.from_numpy(wave)
    trimmed, lengths = trim_silence(audio, torch.tensor([len(w) for w in waves]), decibels, window)
    for row, length, wave in zip(trimmed, lengths, waves, strict=True):
        expected = oracle_trim(wave, decibels, window)
        assert length == len(expected)
        np.testing.assert_array_equal(row[:length].numpy(), expected.astype("f4"))
        assert row[length:].abs().max() == 0


def test_silent_and_empty_rows_survive_trimming() -> None:
    audio = torch.zeros(3, 5000)
    audio[2, :10] = 1.0
    trimmed, lengths = trim_silence(audio, torch.tensor([5000, 4000, 0]))
    assert lengths.tolist() == [5000, 4000, 0]
    assert trimmed.abs().max() == 0


def test_trimming_inside_equals_trimming_before() -> None:
    wave = np.concatenate([np.zeros(6000), speech(9000), np.zeros(7000)])
    model = LogMel(trim_silence_db=-60.0)
    features, frames = run(model, wave, speech(4000))
    expected, count = run(LogMel(), oracle_trim(wave))
    assert frames[0] == count[0] < model.frames(len(wave))
    torch.testing.assert_close(features[0, : count[0]], expected[0], rtol=0, atol=5e-6)
