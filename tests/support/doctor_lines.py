"""Print the red texts of the doctor's lines about an accelerator, for Gaudi and CUDA, as one line of JSON.

``python -m tests.support.doctor_lines MODEL`` checks a small recipe of ``rnnt`` or ``wav2vec2``.
"""

from __future__ import annotations

import json
import sys
import tempfile

from speechtrain.commands.doctor import RED, Recipe

_DATA = [
    *("data=digits", "data.workers=0", "data.train.utterances=64", "data.valid.unheard.utterances=2"),
    *("augment=specaugment", "augment.noise_db=[10,20]"),
]
_MODELS = {
    "rnnt": ["model=rnnt_small", "encoder.hidden=16", "model.prediction.hidden=16", "model.joint.hidden=16"],
    "wav2vec2": [
        *("model=wav2vec2_small", "encoder.layers=1", "encoder.width=16", "encoder.heads=2"),
        *("encoder.feed_forward=16", "encoder.position_groups=2"),
    ],
}


def red_texts(overrides: list[str]) -> list[str]:
    """Return the texts of red lines. The second check runs only if the first one is green."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(overrides, None, folder)
        for finding in recipe.findings():
            if finding.subject in ("recorder", "fake device") and finding.state == RED:
                return [finding.text]
            if finding.subject == "fake device":
                break
    return []


def main() -> None:
    recipe = [*_DATA, *_MODELS[sys.argv[1]]]
    print(json.dumps({device: red_texts([*recipe, f"device={device}"]) for device in ("hpu", "cuda")}))


if __name__ == "__main__":
    main()
