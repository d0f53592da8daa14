"""Time of the log-mel front end beside other libraries' and the plain torch.stft form.

    python benchmarks/features.py [--threads 1] [--rows 8] [--seconds 10] [--rounds 15]

Every contender runs once in each round, so that a busy machine slows all alike; the medians are
printed as seconds of audio per second and relative to ours. Each does the work its users would do:
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
    """The same features by torch.stft over whole rows of equal length."""
    emphasised = torch.cat([audio[:, :1], audio[:, 1:] - 0.97 * audio[:, :-1]], dim=1)
    window = model.window[: model.width]
    spectrum = torch.stft(emphasised, 512, 160, model.width, window, return_complex=True)
    x = (spectrum.abs().square().transpose(1, 2) @ model.bank + 1e-20).log()
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


def kaldi_native(audio: torch.Tensor) -> None:
    """Log-mel frames, row by row: it knows no batches."""
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = 80
    for row in audio:
        fbank = kaldi_native_fbank.OnlineFbank(options)
        fbank.accept_waveform(16000, row.numpy())
        fbank.input_finished()
        for i in range(fbank.num_frames_ready):
            fbank.get_frame(i)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    samples = int(given.seconds * 16000)
    audio = torch.randn(given.rows, samples) * 0.1
    lengths = torch.full((given.rows,), samples)
    keys = torch.arange(given.rows)
    warp = torch.linspace(0.9, 1.1, given.rows)
    plain, matmul, whole = (LogMel(dither=0.0).eval() for _ in range(3))
    matmul.apply_policy(ComputePolicy(spectrum="matmul"))
    whole.apply_policy(ComputePolicy(feature_frames=0))
    evaluating, training, trimming = LogMel().eval(), LogMel().train(), LogMel(trim_silence_db=-60.0).eval()
    lhotse = Wav2LogFilterBank(num_filters=80)
    contenders: dict[str, Callable[[], object]] = {
        "LogMel, no dither": lambda: plain(audio, lengths),
        "LogMel, dither of evaluation": lambda: evaluating(audio, lengths, keys=keys),
        "LogMel, dither of training": lambda: training(audio, lengths),
        "LogMel, warped filters": lambda: plain(audio, lengths, warp=warp),
        "LogMel, silence trimmed, dither": lambda: trimming(audio, lengths, keys=keys),
        "LogMel, all frames at once": lambda: whole(audio, lengths),
        "LogMel, spectrum: matmul": lambda: matmul(audio, lengths),
        "torch.stft": lambda: stft_form(audio, plain),
        "lhotse, batch": lambda: lhotse(audio),
        "lhotse, one at a time": lambda: [lhotse(row[None]) for row in audio],
        "kaldi-native-fbank": lambda: kaldi_native(audio),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for _ in range(given.rounds):
            for name, contender in contenders.items():
                contender()  # untimed: the one before left the caches to itself
                start = time.perf_counter()
                contender()
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = medians["LogMel, no dither"]
    print("| front end | audio seconds per second | time, ours = 1 |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {given.rows * given.seconds / median:.0f} | {median / ours:.2f} |")


if __name__ == "__main__":
    main()
