"""Print the texts of recordings with the export in this folder: python recognise.py [--int8] RECORDING..."""

import argparse
import math
import sys
import zlib
from pathlib import Path

try:
    import numpy as np

    if __package__:
        from speechtrain.export.greedy_search import labels_of, open_sessions, run, spelled
        from speechtrain.export.recording import read_recording, text_of
    else:  # An export has copies of the modules.
        from greedy_search import labels_of, open_sessions, run, spelled
        from recording import read_recording, text_of
except (ImportError, OSError) as error:  # soundfile raises OSError if its C library is missing.
    sys.exit(f"recognise.py: {error}. Install it: pip install numpy onnxruntime soundfile")


def open_export(folder, precision):
    """Return model.json and the sessions of the graphs. Raises an error for a damaged folder."""
    model, sessions = open_sessions(folder, precision)
    decode(model, sessions, np.zeros(0, np.float32))  # Graphs that do not fit together fail here.
    return model, sessions


def transcribe(model, sessions, samples):
    """Return the text of mono fp32 samples (S,) at the sample rate of the model. Silence has no text."""
    return text_of(samples, model, lambda part: decode(model, sessions, part))


def decode(model, sessions, samples):
    """Return the text of mono fp32 samples (S,) in which somebody speaks without long pauses."""
    missing = max(0, model["sample_rate"] // 10 - len(samples))  # The features need a tenth of a second.
    offset = zlib.crc32(samples[:16384].tobytes()) % 262144  # of the noise that the features add
    values = {"audio": np.pad(samples, (0, missing))[None], "offset": np.array([offset])}
    if "features" in sessions:
        run(sessions["features"], values)
    run(sessions["encoder"], values)
    (frames,) = values["frames"]
    most_labels = model["max_symbols"] or math.ceil(len(frames) * 50 * model["frame_seconds"])
    labels, state = [], {}
    for frame in frames:
        if len(labels) <= most_labels:
            labels += labels_of(model, sessions, state, frame)
    return spelled(model, labels)


def main():
    """Print the name and the text of each recording. Return 1 if one of them cannot be read, otherwise 0."""
    parser = argparse.ArgumentParser(prog="recognise.py", description="Print the text of each recording.")
    parser.add_argument("--int8", action="store_true", help="use weights of 8 bits")
    parser.add_argument("recordings", nargs="+", metavar="RECORDING")
    arguments = parser.parse_args()
    folder = Path(__file__).parent
    try:
        model, sessions = open_export(folder, "int8" if arguments.int8 else "fp32")
    except Exception as error:  # A damaged file can raise errors of many types.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        sys.exit(f"recognise.py: the export in {folder} is damaged: {reason:.300}")
    exit_code = 0
    for path in arguments.recordings:
        try:
            samples = read_recording(path, model["sample_rate"])
            print(path, transcribe(model, sessions, samples), sep="\t", flush=True)
        except Exception as error:
            print(f"recognise.py: {path}: {error}".partition("\n")[0], file=sys.stderr)
            exit_code = 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
