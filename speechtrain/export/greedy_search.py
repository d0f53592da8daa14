"""Opens the graphs of an export, and finds the labels of frames. Each export for ONNX Runtime has a copy."""

import hashlib
import json
from pathlib import Path

import numpy as np
import onnxruntime


def open_sessions(folder, precision):
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
    return model, sessions


def run(session, values):
    """Run a graph on ``values``, and add its outputs to them. Return the first row of the last output."""
    outputs = session.run(None, {entry.name: values[entry.name] for entry in session.get_inputs()})
    for entry, output in zip(session.get_outputs(), outputs, strict=True):
        values[entry.name.removeprefix("next_")] = output
    return outputs[-1][0]


def labels_of(model, sessions, state, frame):
    """Return the labels of a frame (W,). ``state`` is changed, and it is empty before an utterance.

    A label of a transducer stays in its frame, and a blank leads to the next frame.
    """
    blank, durations = model["blank"], model["durations"]
    if model["kind"] == "ctc":
        symbol = int(run(sessions["ctc"], {"frames": frame[None, None]})[0].argmax())
        last, state["symbol"] = state.get("symbol"), symbol
        return [symbol] if symbol not in (last, blank) else []
    if not state:
        state |= {name: np.zeros(shape, np.float32) for name, shape in model["states"].items()}
        state |= {"label": np.array([blank]), "advance": 0}  # The blank stands before the first label.
        run(sessions["prediction"], state)
    state["frame"] = frame[None]
    state["advance"] -= 1  # the frames until the search reads the next one
    labels = []
    while state["advance"] < 1 and len(labels) < model["max_symbols_per_step"]:
        scores = run(sessions["joint"], state)
        symbol = int(scores[: blank + 1].argmax())
        state["advance"] = durations[scores[blank + 1 :].argmax()] if durations else 0
        if symbol == blank:
            break
        labels.append(symbol)
        state["label"] = np.array([symbol])
        run(sessions["prediction"], state)
    return labels


def spelled(model, labels):
    """Return the text of labels."""
    return "".join([model["labels"][label] for label in labels]).strip()
