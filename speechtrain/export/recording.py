"""Reads recordings and finds their speech. Each export has a copy of this file for its program."""

import argparse
import math
import sys

import numpy as np
import soundfile

if __package__:
    from speechtrain.data.voice_activity import speech_spans
else:  # An export has a copy of this module, too.
    from voice_activity import speech_spans


def main(folder, open_export, transcribe):
    """Print the name and the text of each recording. Return 1 if one of them cannot be read, otherwise 0.

    ``open_export`` and ``transcribe`` are functions of the program, whose export is in ``folder``.
    """
    parser = argparse.ArgumentParser(prog="recognise.py", description="Print the text of each recording.")
    parser.add_argument("--int8", action="store_true", help="use weights of 8 bits")
    parser.add_argument("recordings", nargs="+", metavar="RECORDING")
    arguments = parser.parse_args()
    try:
        model, recogniser = open_export(folder, "int8" if arguments.int8 else "fp32")
    except Exception as error:  # A damaged file can raise errors of many types.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        sys.exit(f"recognise.py: the export in {folder} is damaged: {reason:.300}")
    exit_code = 0
    for path in arguments.recordings:
        try:
            samples = read_recording(path, model["sample_rate"])
            print(path, transcribe(model, recogniser, samples), sep="\t", flush=True)
        except Exception as error:
            print(f"recognise.py: {path}: {error}".partition("\n")[0], file=sys.stderr)
            exit_code = 1
    return exit_code


def text_of(samples, model, decode):
    """Return the texts of the parts of mono fp32 samples (S,) in which somebody speaks. Silence has no text.

    ``model`` is the content of model.json. ``decode`` returns the text of such a part.
    """
    spans = speech_spans(samples, model["sample_rate"], model["longest_pause"])
    texts = [decode(samples[start:end]) for start, end in spans]
    return " ".join([text for text in texts if text])


def read_recording(path, new_rate):
    """Return mono fp32 samples (S,) at ``new_rate``. Raises an error for a file without usable samples."""
    with open(path, "rb") as file:
        audio, rate = soundfile.read(file, dtype="float32", always_2d=True)  # (S, channels)
    if len(audio) == 0:
        raise ValueError("it has no samples")
    if not np.isfinite(audio).all():
        raise ValueError("some of its samples are not finite numbers")
    if not 1_000 <= rate <= 400_000:
        raise ValueError(f"its sample rate is {rate} Hz")
    return change_rate(audio.mean(1), rate, new_rate)


def change_rate(samples, rate, new_rate):
    """Return samples (S,) at ``new_rate``, interpolated by a sinc in a Kaiser window, as in training."""
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    step, phases = rate // divisor, new_rate // divisor  # ``step`` samples become ``phases`` new ones.
    cutoff = 0.94 * min(1, new_rate / rate)  # of the highest frequency of the samples
    width = math.ceil(32 / cutoff)  # samples on each side, as many as reach to 32 zeros of the sinc
    neighbours = np.lib.stride_tricks.sliding_window_view(np.pad(samples, width), 2 * width + 1)
    new_samples = np.empty(math.ceil(len(samples) * new_rate / rate), np.float32)
    for phase in range(min(phases, len(new_samples))):
        first, remainder = divmod(phase * step, phases)
        zeros = np.clip((np.arange(-width, width + 1) - remainder / phases) * cutoff, -32, 32)
        window = np.i0(6.5 * np.sqrt(1 - (zeros / 32) ** 2)) / np.i0(6.5)
        weights = (cutoff * np.sinc(zeros) * window).astype(np.float32)
        new_samples[phase::phases] = np.einsum("sn,n->s", neighbours[first::step], weights)
    return new_samples
