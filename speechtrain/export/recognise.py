"""Transcribe recordings with an export: python recognise.py [--precision int8] RECORDING..."""

import argparse
import hashlib
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import onnxruntime
import soundfile


class Recogniser:
    """Greedy search with the graphs of an export. Raises ValueError unless the folder is an intact export."""

    def __init__(self, folder, precision="fp32", threads=1):
        try:
            self.model = json.loads((Path(folder) / "model.json").read_bytes()[: 2**24])
            digests, self.labels = self.model["sha256"][precision], [*self.model["labels"], ""]
            self.rate, self.kind, states = self.model["sample_rate"], self.model["kind"], self.model["states"]
            self.states = {name: np.zeros(shape, np.float32) for name, shape in states.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{folder} has no model.json of an export with {precision} ({error!r})"
            ) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, self.sessions = threads, {}
        for name in {"features", "encoder", "ctc", "prediction", "joint"} & digests.keys():
            path = Path(folder) / f"{name}.{precision}.onnx"
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != digests[name]:
                raise ValueError(f"{path} is missing or damaged. Copy the whole export again")
            self.sessions[name] = onnxruntime.InferenceSession(content, options)

    def run(self, name, values):
        """Add the outputs of a graph to ``values``, which has its inputs."""
        session = self.sessions[name]
        outputs = session.run(None, {entry.name: values[entry.name] for entry in session.get_inputs()})
        values.update(zip([entry.name for entry in session.get_outputs()], outputs, strict=True))

    def transcribe(self, samples):
        """Return the text of mono fp32 samples (S,)."""
        values = {"audio": np.pad(samples, (0, max(0, self.rate // 10 - len(samples))))[None]}
        values["offset"] = np.array([zlib.crc32(samples[: 2**14].tobytes()) % 2**18])  # in a table of noise
        for name in [name for name in ("features", "encoder") if name in self.sessions]:
            self.run(name, values)
        labels = self.best_path(values) if self.kind == "ctc" else self.best_symbols(values)
        text = "".join(self.labels[label] for label in labels)  # The last label, the blank, has no text.
        return text.strip() if self.model["strip"] else text

    def best(self, scores):
        return int(scores.argmax())

    def best_path(self, values):
        self.run("ctc", values)
        path = [self.best(scores) for scores in values["scores"][0]]
        return [label for label, before in zip(path, [-1, *path], strict=False) if label != before]

    def best_symbols(self, values):
        blank, durations, frame, in_frame, label = len(self.labels) - 1, self.model["durations"], 0, 0, None
        labels, frames, most = [], values["frames"], self.model["max_symbols_per_step"]
        limit = self.model["max_symbols"] or np.ceil(frames.shape[1] * 50 * self.model["frame_seconds"])
        values.update(self.states)
        while frame < frames.shape[1] and (in_frame or len(labels) <= limit):
            if label != blank:
                values["label"] = np.array([blank if label is None else label])
                self.run("prediction", values)
                values.update({name: values[f"next_{name}"] for name in self.states})
            values["frame"] = frames[:, frame]
            self.run("joint", values)
            scores = values["scores"][0]
            label, step = self.best(scores[: blank + 1]), 0
            if durations:
                step = durations[self.best(scores[blank + 1 :])]
            if label == blank:
                step = max(step, 1)
            else:
                labels.append(label)
                in_frame += 1
                step = max(step, int(in_frame >= most))
            frame, in_frame = frame + step, 0 if step else in_frame
        return labels


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=Path(__file__).parent)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("recordings", nargs="+")
    arguments = parser.parse_args()
    try:
        recogniser = Recogniser(arguments.folder, arguments.precision)
        for path in arguments.recordings:
            samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
            if rate != recogniser.rate:
                raise ValueError(f"{path} has {rate} Hz. Convert it to {recogniser.rate} Hz")
            print(path, recogniser.transcribe(samples.mean(1)), sep="\t", flush=True)
    except Exception as error:
        sys.exit(f"recognise.py: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":
    main()
