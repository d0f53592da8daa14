"""On a device that wants static shapes, three epochs bring no tensor shape that was not announced."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from speechtrain.batch import Batch
from speechtrain.compute_policy import STATIC, apply_policy
from speechtrain.config.build import build
from speechtrain.runs.compose import compose

SMALL = [
    *("model=wav2vec2_small", "data=digits", "augment=small", "data.train.utterances=90", "data.workers=0"),
    *("data.train.min_words=1", "data.valid.unheard.utterances=10", "encoder.layers=1", "data.shapes=3"),
]
CHOICES = {
    "padded": ["data.batch.count=4"],
    "cropped": ["data.crop_seconds=1.5", "data.min_seconds=0.6", "data.batch.count=4"],
    "by-seconds": ["data.batch.count=null", "data.batch.seconds=8", "data.batch.multiple=2"],
}


def shapes_of(batch: Batch) -> dict[str, tuple[Any, ...]]:
    """Shape and type of every tensor that moves to the device."""
    fields = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return {name: (tuple(value.shape), value.dtype) for name, value in (fields | batch.extra).items()}


@pytest.mark.parametrize("choice", CHOICES)
def test_no_shape_is_new_after_the_first_epoch(choice: str) -> None:
    config = compose([*SMALL, *CHOICES[choice]])
    encoder = build(config, "encoder", augment=build(config, "augment"))
    task = build(config, "model", encoder=encoder).train()
    apply_policy(task, STATIC)
    data = build(config, "data", tokenizer=build(config, "tokenizer"), footprint=task.footprint())
    announced = data.shapes()
    assert 1 <= len(announced) <= 3

    batches, seen = data.train(), []
    for _epoch in range(3):
        epoch = len(seen)
        found = set()
        for batch in islice(batches, data.sampler.length(epoch)):
            assert batch.epoch == epoch
            assert (*batch.audio.shape, batch.labels.shape[1]) in announced, "batch size included"
            prepared = task.prepare(batch, seed=batch.index)
            found.add(tuple(sorted(shapes_of(prepared).items(), key=str)))
        seen.append(found)
    first, *later = seen
    print(f"{choice}: announced {announced}, met {len(first)}, waste {data.sampler.waste(0)}")
    assert len(first) <= len(announced), "one set of shapes for each that was announced"
    assert all(found <= first for found in later)
    index = {dict(shapes)["index"] for shapes in first}
    assert len(index) == len({dict(shapes)["audio"] for shapes in first}), "they follow from the audio's"

    announced = data.evaluation_shapes()
    task.eval()
    met = {tuple(sorted(shapes_of(task.prepare(b, 1)).items(), key=str)) for b in data.valid()["unheard"]}
    assert 1 <= len(met) <= len(announced) <= 3
