"""Transcribe recordings with the export in this folder: python recognise.py fp32|int8 RECORDING..."""

import hashlib
import json
import sys
from pathlib import Path

import sherpa_onnx
import soundfile


def open_recogniser(folder, precision):
    """Return the recogniser of sherpa-onnx. Raises an error for a damaged or foreign folder."""
    model = json.loads((folder / "model.json").read_bytes()[: 2**24])
    digests, files = model["sha256"][precision], {"tokens": str(folder / "tokens.txt")}
    for name in ("model",) if "model" in digests else ("encoder", "decoder", "joiner"):
        files[name] = str(folder / f"{name}.{precision}.onnx")
    for name, path in files.items():
        assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == digests[name], f"{path} is damaged"
    sizes = {"sample_rate": model["sample_rate"], "feature_dim": model["mels"]}
    if "model" in files:
        return sherpa_onnx.OfflineRecognizer.from_nemo_ctc(**files, **sizes)
    return sherpa_onnx.OfflineRecognizer.from_transducer(**files, **sizes, model_type="nemo_transducer")


def transcribe(recogniser, samples, rate):
    """Return the text of mono fp32 samples (S,). sherpa-onnx converts them to the rate of the model."""
    stream = recogniser.create_stream()
    stream.accept_waveform(rate, samples)
    recogniser.decode_stream(stream)
    return stream.result.text.strip()


if __name__ == "__main__":
    try:
        recogniser = open_recogniser(Path(__file__).parent, sys.argv[1])
        for file in sys.argv[2:]:
            audio, rate = soundfile.read(file, dtype="float32", always_2d=True)
            print(file, transcribe(recogniser, audio.mean(1), rate), sep="\t", flush=True)
    except Exception as error:
        sys.exit(f"recognise.py: {Path(__file__).parent} cannot be used: {error!r:.300}")
