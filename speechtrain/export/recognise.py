"""Transcribe recordings with the export in this folder: python recognise.py fp32|int8 RECORDING..."""

import hashlib
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import onnxruntime
import soundfile


def open_export(folder, precision):
    """Return model.json and the sessions of its graphs. Raises an error for a damaged or foreign folder."""
    model, options = json.loads((folder / "model.json").read_bytes()[: 2**24]), onnxruntime.SessionOptions()
    options.intra_op_num_threads, sessions = 1, {}
    for name, digest in model["sha256"][precision].items():
        content = (folder / f"{Path(name).name}.{precision}.onnx").read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, f"{name}.{precision}.onnx is damaged"
        sessions[name] = onnxruntime.InferenceSession(content, options)
    return model, sessions


def run(session, inputs, values):
    """Add the outputs of a graph to ``values``. Return the first row of the last output."""
    outputs = session.run(None, {entry.name: inputs[entry.name] for entry in session.get_inputs()})
    names = [entry.name.removeprefix("next_") for entry in session.get_outputs()]
    values.update(zip(names, outputs, strict=True))
    return outputs[-1][0]


def transcribe(model, sessions, samples):
    """Return the text of mono fp32 samples (S,)."""
    values = {name: np.zeros(shape, np.float32) for name, shape in model["states"].items()}
    padding = max(0, model["sample_rate"] // 10 - len(samples))
    values["audio"] = np.pad(samples, (0, padding))[None]
    offset = zlib.crc32(samples[:16384].tobytes()) % 262144  # of the noise that the features add
    values["offset"] = np.array([offset])
    for name in sorted({"features", "encoder"} & sessions.keys(), reverse=True):
        run(sessions[name], values, values)
    labels = (best_path if model["kind"] == "ctc" else best_symbols)(model, sessions, values)
    text = "".join([model["labels"][label] for label in labels if label != model["blank"]])
    return text.strip() if model["strip"] else text


def best_path(model, sessions, values):
    path = run(sessions["ctc"], values, values).argmax(1)
    return path[np.diff(path, prepend=-1) != 0]


def best_symbols(model, sessions, values):
    labels, blank, durations, largest = [], model["blank"], model["durations"], model["max_symbols_per_step"]
    count = values["frames"].shape[1]
    limit = model["max_symbols"] or np.ceil(count * 50 * model["frame_seconds"])
    frame, symbols_in_frame, label, is_new = 0, 0, blank, True  # The blank stands before the first label.
    while frame < count and (symbols_in_frame or len(labels) <= limit):
        if is_new:
            run(sessions["prediction"], values | {"label": np.array([label])}, values)
        values["frame"] = values["frames"][:, frame]
        scores = run(sessions["joint"], values, values)
        label = int(scores[: blank + 1].argmax())
        advance = durations[scores[blank + 1 :].argmax()] if durations else 0
        is_new = label != blank
        labels += [label] * is_new
        symbols_in_frame += is_new
        advance = max(advance, int(not is_new or symbols_in_frame >= largest))
        frame, symbols_in_frame = frame + advance, symbols_in_frame * (advance == 0)
    return labels


if __name__ == "__main__":
    try:
        model, sessions = open_export(Path(__file__).parent, sys.argv[1])
        for file in sys.argv[2:]:
            audio, rate = soundfile.read(file, dtype="float32", always_2d=True)
            assert rate == model["sample_rate"], f"{file} has {rate} Hz. Convert it"
            print(file, transcribe(model, sessions, audio.mean(1)), sep="\t", flush=True)
    except Exception as error:
        sys.exit(f"recognise.py: {Path(__file__).parent} cannot be used: {error!r:.300}")
