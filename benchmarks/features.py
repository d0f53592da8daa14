"""Time of the log-mel front end beside other libraries' and the plain torch.stft form.

    python benchmarks/features.py [--threads 1] [--rows 8] [--seconds 10] [--rounds 15]

Every contender runs once in each round, so that a busy machine slows all alike. The medians are printed as
seconds of audio per second and relative to LogMel without dither. Each library computes its own features:
lhotse and kaldi-native-fbank neither normalise nor splice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import kaldi_native_fbank
import torch
from lhotse.features.kaldi.layers import Wav2LogFilterBank

from speechtrain.compute_policy import ComputePolicy
from speechtrain.features.logmel import LogMel


def stft_form(audio: torch.Tensor, model: LogMel) -> torch.Tensor:
    """Return the features of LogMel by torch.stft, for rows of equal length."""
    emphasised = torch.cat([audio[:, :1], audio[:, 1:] - 0.97 * audio[:, :-1]], dim=1)
    window = model.window[: model.width]
    spectrum = torch.stft(emphasised, 512, 160, model.width, window, return_complex=True)
    power = spectrum.abs().square().transpose(1, 2)
    log_mel = (power @ model.bank + 1e-20).log()
    return (log_mel - log_mel.mean(1, keepdim=True)) / (log_mel.std(1, keepdim=True) + 1e-5)


def kaldi_native(audio: torch.Tensor) -> None:
    """Compute log-mel frames row by row, since the library has no batches."""
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = 80
    for row in audio:
        fbank = kaldi_native_fbank.OnlineFbank(options)
        fbank.accept_waveform(16000, row.numpy())
        fbank.input_finished()
        for i in range(fbank.num_frames_ready):
            fbank.get_frame(i)


def log_mel_forms(audio: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return a function for each form of LogMel. It computes the features of ``audio`` (rows, samples)."""
    rows, samples = audio.shape
    lengths, keys = torch.full((rows,), samples), torch.arange(rows)
    warp = torch.linspace(0.9, 1.1, rows)
    exact = LogMel(dither=0.0).eval()
    evaluating, training = LogMel().eval(), LogMel().train()
    trimming = LogMel(trim_silence_db=-60.0).eval()
    return {
        "LogMel, no dither": lambda: exact(audio, lengths),
        "LogMel, dither of evaluation": lambda: evaluating(audio, lengths, keys=keys),
        "LogMel, dither of training": lambda: training(audio, lengths),
        "LogMel, warped filters": lambda: exact(audio, lengths, warp=warp),
        "LogMel, silence trimmed, dither": lambda: trimming(audio, lengths, keys=keys),
    }


def log_mel_by_policy(audio: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return a function for LogMel by each compute policy that differs from the default."""
    rows, samples = audio.shape
    lengths = torch.full((rows,), samples)
    unchunked, matmul = LogMel(dither=0.0).eval(), LogMel(dither=0.0).eval()
    unchunked.apply_policy(ComputePolicy(feature_frames=0))
    matmul.apply_policy(ComputePolicy(spectrum="matmul"))
    return {
        "LogMel, all frames at once": lambda: unchunked(audio, lengths),
        "LogMel, spectrum: matmul": lambda: matmul(audio, lengths),
    }


def other_front_ends(audio: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return a function for torch.stft and for each front end of another library."""
    lhotse = Wav2LogFilterBank(num_filters=80)
    model = LogMel(dither=0.0).eval()
    return {
        "torch.stft": lambda: stft_form(audio, model),
        "lhotse, batch": lambda: lhotse(audio),
        "lhotse, one at a time": lambda: [lhotse(row[None]) for row in audio],
        "kaldi-native-fbank": lambda: kaldi_native(audio),
    }


@torch.no_grad()
def median_seconds(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each contender. The contenders take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            contender()  # The first call is not timed, since it fills the caches.
            start = time.perf_counter()
            contender()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    audio = torch.randn(options.rows, int(options.seconds * 16000)) * 0.1
    contenders = log_mel_forms(audio) | log_mel_by_policy(audio) | other_front_ends(audio)
    medians = median_seconds(contenders, options.rounds)
    baseline = medians["LogMel, no dither"]
    print("| front end | audio seconds per second | time, ours = 1 |\n|---|---|---|")
    for name, median in medians.items():
        speed = options.rows * options.seconds / median
        print(f"| {name} | {speed:.0f} | {median / baseline:.2f} |")


if __name__ == "__main__":
    main()
