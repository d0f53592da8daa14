"""Rehearse the shipped models, encoders and optimizers at small widths for CUDA and Gaudi.

``python tests/rehearsal/shipped_updates.py`` prints a line for each recipe and device: the error, or ``ok``.
"""

from __future__ import annotations

import sys

from planted_faults import ROOT, run_program

_LSTM = ["encoder.hidden=8", "model.prediction.hidden=8", "model.joint.hidden=8", "encoder.features.mels=8"]
_WAV2VEC2 = [
    *("encoder.layers=1", "encoder.width=16", "encoder.heads=2", "encoder.feed_forward=16"),
    *("encoder.position_groups=2", "optimizer=wav2vec2"),
]
RECIPES = {
    "demo": ["recipe=demo"],
    "contextnet_dummy": ["recipe=contextnet_dummy", "data.train.utterances=64", "optimizer=adamw"],
    "mlperf": ["model=rnnt_mlperf", *_LSTM, "augment=specaugment", "optimizer=lamb", "schedule=mlperf"],
    "aidk": ["model=rnnt_aidk", *_LSTM[:2], "augment=specaugment", "optimizer=lamb", "schedule=mlperf"],
    "intel": ["model=rnnt_intel", *_LSTM[:2], "augment=none", "optimizer=adamw", "schedule=intel"],
    "split": ["model=rnnt_small", *_LSTM, "encoder.split_segments=true", "optimizer.form=intel"],
    "quartznet": ["model=ctc", "encoder=quartznet_tiny", "optimizer=novograd", "schedule=cosine"],
    "fastconformer": ["model=rnnt_small", "encoder=fastconformer_tiny", "model.joint.durations=[0,1,2,3,4]"],
    "muon": ["model=ctc", "encoder=fastconformer_tiny", "encoder.layers=1", "optimizer=muon"],
    "sgd": ["model=ctc", "encoder=lstm_small", "encoder.hidden=8", "optimizer=sgd"],
    "wav2vec2": ["model=wav2vec2", *_WAV2VEC2],
    "wav2vec2_large": ["model=wav2vec2_large", *_WAV2VEC2],
}
_DATA = ["data.workers=0", "data.valid.unheard.utterances=2"]


def main(names: list[str]) -> int:
    """Print the lines. Return the number of errors."""
    reds = 0
    for name in names or RECIPES:
        recipe = RECIPES[name]
        if not recipe[0].startswith("recipe="):
            recipe = ["data=digits", "data.train.utterances=32", *recipe]
        for device in ("cuda", "hpu"):
            process = run_program(ROOT, "tools/rehearsal/run.py", *recipe, *_DATA, f"device={device}")
            reds += bool(process.returncode)
            print(name, device, process.stderr.strip() if process.returncode else "ok", flush=True)
    return reds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
