"""The error of a step that runs out of the device's memory: the batch's size and the keys to change."""

from __future__ import annotations

import re

import torch

from speechtrain.batch import Batch, Footprint
from speechtrain.devices.base import Device
from speechtrain.errors import OutOfMemory


def out_of_memory_error(
    device: Device, error: BaseException, batch: Batch | None, footprint: Footprint, classes: int = 0
) -> OutOfMemory | None:
    """Return the error to show if a step ran out of memory, or None for another failure.

    ``batch`` is the step's batch on the host, None before the first step. ``classes`` is the width of the
    output layer, or 0.
    """
    is_out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if isinstance(error, RuntimeError) and re.search(device.facts.out_of_memory, str(error), re.I):
        is_out_of_memory = True
    if not is_out_of_memory:
        return None
    problem = f"device={device.name} is out of memory"
    if batch is None:
        return OutOfMemory(f"{problem} before the first batch: the model is too large")
    rows, samples = batch.audio.shape
    labels = batch.labels.shape[1]
    # The memory depends on the length of a row with its padding, which is ``samples``. The batch does not
    # contain the sample rate, which is ``valid_samples / batch.seconds``.
    valid_samples = float(batch.audio_lengths[batch.weight > 0].sum())
    padded_seconds = 0.0
    if valid_samples:
        padded_seconds = samples * batch.seconds / valid_samples
    sizes = f"B={rows} rows, T={padded_seconds:.1f} s, U={labels} labels"
    if classes:
        sizes += f", V={classes} classes"
    predicted = footprint.bytes(rows, padded_seconds, labels)
    return OutOfMemory(
        f"{problem} at a micro-batch of {sizes}, predicted {predicted:,.0f} bytes beyond the weights. "
        "Lower data.batch.memory_gib or data.batch.count and raise trainer.accumulate"
    )
