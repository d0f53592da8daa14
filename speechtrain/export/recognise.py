"""Print the texts of recordings with the export in this folder: python recognise.py [--int8] RECORDING..."""

import argparse
import hashlib
import json
import math
import sys
import zlib
from pathlib import Path

try:
    import numpy as np
    import onnxruntime

    if __package__:
        from speechtrain.export.recording import read_recording, text_of
    else:  # An export has a copy of the module.
        from recording import read_recording, text_of
except (ImportError, OSError) as error:  # soundfile raises OSError if its C library is missing.
    sys.exit(f"recognise.py: {error}. Install it: pip install numpy onnxruntime soundfile")


def open_export(folder, precision):
    """Return model.json and the sessions of the graphs. Raises an error for a damaged folder."""
    model = json.loads((folder / "model.json").read_bytes())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = {}
    for name, digest in model["sha256"][precision].items():
        file = f"{Path(name).name}.{precision}.onnx"
        content = (folder / file).read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{file} is not the exported file")
        sessions[name] = onnxruntime.InferenceSession(content, options)
    decode(model, sessions, np.zeros(0, np.float32))  # Graphs that do not fit together fail here.
    return model, sessions


def transcribe(model, sessions, samples):
    """Return the text of mono fp32 samples (S,) at the sample rate of the model. Silence has no text."""
    return text_of(samples, model, lambda part: decode(model, sessions, part))


def decode(model, sessions, samples):
    """Return the text of mono fp32 samples (S,) in which somebody speaks without long pauses."""
    missing = max(0, model["sample_rate"] // 10 - len(samples))  # The features need a tenth of a second.
    offset = zlib.crc32(samples[:16384].tobytes()) % 262144  # of the noise that the features add
    values = {name: np.zeros(shape, np.float32) for name, shape in model["states"].items()}
    values["audio"] = np.pad(samples, (0, missing))[None]
    values["offset"] = np.array([offset])
    if "features" in sessions:
        run(sessions["features"], values)
    run(sessions["encoder"], values)
    search = best_path if model["kind"] == "ctc" else best_symbols
    labels = search(model, sessions, values)
    return "".join([model["labels"][label] for label in labels]).strip()


def run(session, values):
    """Run a graph on ``values``, and add its outputs to them. Return the first row of the last output."""
    outputs = session.run(None, {entry.name: values[entry.name] for entry in session.get_inputs()})
    for entry, output in zip(session.get_outputs(), outputs, strict=True):
        values[entry.name.removeprefix("next_")] = output
    return outputs[-1][0]


def best_path(model, sessions, values):
    """Return the labels of CTC: the best class of each frame, without repetitions and blanks."""
    path = run(sessions["ctc"], values).argmax(1)
    is_new = np.diff(path, prepend=-1) != 0
    return path[is_new & (path != model["blank"])]


def best_symbols(model, sessions, values):
    """Return the labels of a transducer. A label stays in its frame, and a blank leads to the next frame."""
    frames, blank, durations = values["frames"], model["blank"], model["durations"]
    count = frames.shape[1]
    most_labels = model["max_symbols"] or math.ceil(count * 50 * model["frame_seconds"])
    labels = []
    frame = 0
    values["label"] = np.array([blank])  # It stands before the first label.
    run(sessions["prediction"], values)
    while frame < count and len(labels) <= most_labels:
        values["frame"] = frames[:, frame]
        for _ in range(model["max_symbols_per_step"]):
            scores = run(sessions["joint"], values)
            symbol = int(scores[: blank + 1].argmax())
            advance = durations[scores[blank + 1 :].argmax()] if durations else 0
            if symbol == blank:
                break
            labels.append(symbol)
            values["label"] = np.array([symbol])
            run(sessions["prediction"], values)
            if advance > 0:
                break
        frame += max(advance, 1)
    return labels


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
