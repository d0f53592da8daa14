"""Transcribe recordings with an export of speechtrain. It needs onnxruntime, numpy and soundfile.

python recognise.py [--folder EXPORT] [--precision int8] RECORDING...
"""

import argparse
import hashlib
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import onnxruntime
import soundfile

GRAPHS = {"ctc": ["encoder", "ctc"], "rnnt": ["encoder", "prediction", "joint"]}
GRAPHS["tdt"] = GRAPHS["rnnt"]


class Recogniser:
    """Greedy search with the graphs of an export. Raises ValueError for a folder that is not an intact export."""

    def __init__(self, folder, precision="fp32", threads=0):
        settings_file = Path(folder) / "model.json"
        try:
            self.settings = json.loads(settings_file.read_bytes()[: 2**24])
            digests = self.settings["sha256"][precision]
            names = GRAPHS[self.settings["kind"]] + ["features"] * ("features" in digests)
            self.rate, self.labels = int(self.settings["sample_rate"]), list(self.settings["labels"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{settings_file} is not of an export with {precision} ({error!r:.80})") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.sessions = {}
        for name in names:
            path = Path(folder) / f"{name}.{precision}.onnx"
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != digests.get(name):
                raise ValueError(f"{path} is missing or damaged. Copy the whole export again")
            self.sessions[name] = onnxruntime.InferenceSession(content, options)

    def run(self, name, values):
        """Add the outputs of a graph to ``values``, its inputs by name."""
        session = self.sessions[name]
        inputs = {entry.name: values[entry.name] for entry in session.get_inputs()}
        values.update(zip([entry.name for entry in session.get_outputs()], session.run(None, inputs)))
        return values

    def transcribe(self, samples):
        """Return the text of mono fp32 samples (S,), and the smallest difference of two best scores."""
        offset = zlib.crc32(samples[: 2**14].tobytes()) % 2**18  # of the noise that the features contain
        audio = np.pad(samples, (0, max(0, self.rate // 10 - len(samples))))
        values = {"audio": audio[None], "offset": np.array([offset])}
        for name in ("features", "encoder"):
            if name in self.sessions:
                self.run(name, values)
        search = self.best_path if self.settings["kind"] == "ctc" else self.best_symbols
        self.margin, blank = np.inf, len(self.labels)
        text = "".join(self.labels[label] for label in search(values, blank) if label != blank)
        return text.strip() if self.settings["strip"] else text, self.margin

    def best(self, scores):
        second, first = np.partition(scores, -2)[-2:] if len(scores) > 1 else (-np.inf, 0.0)
        self.margin = min(self.margin, first - second)
        return int(scores.argmax())

    def best_path(self, values, blank):
        path = [self.best(scores) for scores in self.run("ctc", values)["scores"][0]]
        return [label for label, last in zip(path, [blank, *path]) if label != last]

    def best_symbols(self, values, blank):
        frames, settings, labels, frame, symbols = values["frames"], self.settings, [], 0, 0
        limit = settings["max_symbols"] or np.ceil(len(frames[0]) * 50 * settings["frame_seconds"])
        values |= {name: np.zeros(shape, np.float32) for name, shape in settings["states"].items()}
        self.predict(values, blank)
        while frame < len(frames[0]) and (symbols or len(labels) <= limit):
            values["frame"] = frames[:, frame]
            scores = self.run("joint", values)["scores"][0]
            label, advance = self.best(scores[: blank + 1]), 0
            if settings["durations"]:
                advance = settings["durations"][self.best(scores[blank + 1 :])]
            if label == blank:
                advance = max(advance, 1)
            else:
                labels.append(label)
                self.predict(values, label)
                symbols += 1
                advance = max(advance, int(symbols >= settings["max_symbols_per_step"]))
            frame, symbols = frame + advance, 0 if advance else symbols
        return labels

    def predict(self, values, label):
        values["label"] = np.array([label])
        self.run("prediction", values)
        values |= {name: values[f"next_{name}"] for name in self.settings["states"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=Path(__file__).parent)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("recordings", nargs="+")
    arguments = parser.parse_args()
    try:
        recogniser = Recogniser(arguments.folder, arguments.precision, arguments.threads)
        for path in arguments.recordings:
            samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
            if rate != recogniser.rate:
                raise ValueError(f"{path} has {rate} Hz. Convert it to {recogniser.rate} Hz")
            print(path, recogniser.transcribe(samples.mean(1))[0], sep="\t", flush=True)
    except Exception as error:
        sys.exit(f"recognise.py: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":
    main()
