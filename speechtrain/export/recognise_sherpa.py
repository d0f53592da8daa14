"""Print the texts of recordings with the export in this folder: python recognise.py [--int8] RECORDING..."""

import hashlib
import json
import sys
from pathlib import Path

try:
    import numpy as np
    import sherpa_onnx

    if __package__:
        from speechtrain.export.recording import main, text_of
    else:  # An export has a copy of the module.
        from recording import main, text_of
except (ImportError, OSError) as error:  # soundfile raises OSError if its C library is missing.
    sys.exit(f"recognise.py: {error}. Install it: pip install numpy sherpa-onnx soundfile")


def open_recogniser(folder, precision):
    """Return model.json and the recogniser of sherpa-onnx. Raises an error for a damaged folder."""
    model = json.loads((folder / "model.json").read_bytes())
    digests = model["sha256"][precision]
    names = ("model",) if "model" in digests else ("encoder", "decoder", "joiner")
    files = {name: str(folder / f"{name}.{precision}.onnx") for name in names}
    files["tokens"] = str(folder / "tokens.txt")
    for name, path in files.items():
        if hashlib.sha256(Path(path).read_bytes()).hexdigest() != digests[name]:
            raise ValueError(f"{path} is not the exported file")
    sizes = {"sample_rate": model["sample_rate"], "feature_dim": model["mels"]}
    if "stream" in model:
        recogniser = sherpa_onnx.OnlineRecognizer.from_transducer(**files, **sizes)
    elif "model" in files:
        recogniser = sherpa_onnx.OfflineRecognizer.from_nemo_ctc(**files, **sizes)
    else:
        kind = "nemo_transducer"
        recogniser = sherpa_onnx.OfflineRecognizer.from_transducer(**files, **sizes, model_type=kind)
    decode(model, recogniser, np.zeros(0, np.float32))  # Files that do not fit together fail here.
    return model, recogniser


def transcribe(model, recogniser, samples):
    """Return the text of mono fp32 samples (S,) at the sample rate of the model. Silence has no text."""
    return text_of(samples, model, lambda part: decode(model, recogniser, part))


def decode(model, recogniser, samples):
    """Return the text of mono fp32 samples (S,) in which somebody speaks without long pauses."""
    missing = max(0, model["sample_rate"] // 10 - len(samples))  # The features need a tenth of a second.
    stream = recogniser.create_stream()
    stream.accept_waveform(model["sample_rate"], np.pad(samples, (0, missing)))
    if "stream" in model:  # Without silence at the end, the last samples would fill no chunk.
        stream.accept_waveform(model["sample_rate"], np.zeros(model["stream"]["silence_samples"], np.float32))
        stream.input_finished()
        while recogniser.is_ready(stream):
            recogniser.decode_stream(stream)
        return recogniser.get_result(stream).strip()
    recogniser.decode_stream(stream)
    return stream.result.text.strip()


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent, open_recogniser, transcribe))
