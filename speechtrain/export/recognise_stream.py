"""Print the text of speech as it arrives: arecord -t raw -f S16_LE -r 16000 | python recognise.py [WAV]"""

import argparse
import itertools
import sys
import wave
from pathlib import Path

try:
    import numpy as np

    if __package__:
        from speechtrain.export.greedy_search import labels_of, open_sessions, run, spelled
    else:  # An export has a copy of the module.
        from greedy_search import labels_of, open_sessions, run, spelled
except ImportError as error:
    sys.exit(f"recognise.py: {error}. Install it: pip install numpy onnxruntime")


def texts_of(model, sessions, pieces):
    """Yield the text so far and whether it is final, after each chunk of mono fp32 samples in pieces (S,)."""
    endpoint_seconds = model["stream"]["endpoint_seconds"] or float("inf")
    labels, blanks, state = [], 0, {}
    for frames in frames_of(model, sessions, pieces):
        for frame in frames:
            new_labels = labels_of(model, sessions, state, frame)
            blanks = 0 if new_labels else blanks + 1
            if model["max_symbols"] is None or len(labels) <= model["max_symbols"]:
                labels += new_labels
        is_final = bool(labels) and blanks * model["frame_seconds"] >= endpoint_seconds
        yield spelled(model, labels), is_final
        if is_final:
            labels, state = [], {}
    yield spelled(model, labels), True


def frames_of(model, sessions, pieces):
    """Yield the frames (T, W) of the encoder for each chunk."""
    chunk = model["stream"]["chunk_features"]
    values = {name: np.zeros(shape, np.float32) for name, shape in model["stream"]["states"].items()}
    values["cache_last_channel_len"] = np.zeros(1, np.int64)
    for audio, start, before in windows_of(model, pieces):
        values |= {"audio": audio[None], "offset": np.array([start])}
        run(sessions["features"], values)
        features = np.pad(values["features"], ((0, 0), (0, before + chunk), (0, 0)))
        values["features"] = features[:, before : before + chunk]
        values["length"] = values["feature_lengths"] - before
        run(sessions["encoder"], values)
        count = int(values["frame_count"][0])
        yield values["frames"][0, :count]
        if count < values["frames"].shape[1]:
            return  # The recording has ended.


def windows_of(model, pieces):
    """Yield samples (S,) around each chunk, their position, and the number of features before the chunk."""
    stream, audio, start, before = model["stream"], np.zeros(0, np.float32), 0, 0
    for piece in itertools.chain(pieces, [None]):
        missing = model["sample_rate"] // 10 - start - len(audio)  # The features need a tenth of a second.
        audio = np.append(audio, np.zeros(max(0, missing), np.float32) if piece is None else piece)
        while True:
            after = before + stream["chunk_features"]
            end = after * stream["hop_samples"] + stream["look_ahead_samples"]
            if piece is not None and len(audio) < end:
                break
            yield audio[:end], start, before  # at last without end
            before = after if piece is None else min(after, stream["look_back_features"])
            passed = (after - before) * stream["hop_samples"]
            audio, start = audio[passed:], start + passed


def pieces_of(path, rate):
    """Yield samples (S,) of a WAV file, or of 16-bit PCM on standard input without ``path``."""
    read = sys.stdin.buffer.read
    if path is not None:
        file = wave.open(path)  # noqa: SIM115 - It is read until the program ends.
        if file.getparams()[:3] != (1, 2, rate):
            raise ValueError(f"{path} must have one channel, 16 bits and {rate} Hz")
        read = file.readframes
    while data := read(rate // 50 * 2):
        yield np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.float32) / 32768


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="recognise.py", description="Print the text of speech as it arrives."
    )
    parser.add_argument("--int8", action="store_true", help="use weights of 8 bits")
    parser.add_argument("wav", nargs="?", metavar="WAV", help="instead of 16-bit PCM on standard input")
    options = parser.parse_args()
    try:
        model, sessions = open_sessions(Path(__file__).parent, "int8" if options.int8 else "fp32")
        samples = pieces_of(options.wav, model["sample_rate"])
        for text, is_final in texts_of(model, sessions, samples):
            if sys.stdout.isatty() or (is_final and text):
                print(text, end="\n" if is_final else "\r", flush=True)
    except KeyboardInterrupt:
        print()
    except Exception as error:  # A damaged file can raise errors of many types.
        sys.exit(f"recognise.py: {type(error).__name__}: {error}".partition("\n")[0])
