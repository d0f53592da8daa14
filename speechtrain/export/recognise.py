"""Print the texts of recordings with the export in this folder: python recognise.py [--int8] RECORDING..."""

import math
import sys
import zlib
from pathlib import Path

try:
    import numpy as np

    if __package__:
        from speechtrain.export.greedy_search import labels_of, open_sessions, run, spelled
        from speechtrain.export.recording import main, text_of
    else:  # An export has copies of the modules.
        from greedy_search import labels_of, open_sessions, run, spelled
        from recording import main, text_of
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


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent, open_export, transcribe))
