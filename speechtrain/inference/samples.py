"""Samples of a program, in any type, as the model's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from speechtrain.data.formats.lhotse_cuts import Samples


def scale_to_one(audio: Any) -> Samples:
    """Return samples in fp32. Integers are scaled to [-1, 1] by the range of their type.

    The middle of an unsigned range becomes 0. Raises TypeError for other types. Integers of 64 bits are
    refused, because NumPy also uses this type for lists and sums of smaller integers, so the range is
    unknown.
    """
    if isinstance(audio, bytearray | memoryview):
        audio = bytes(audio)  # NumPy would take it for integers.
    if isinstance(audio, Tensor):
        audio = audio.detach().cpu()
        if audio.is_floating_point():
            audio = audio.float()  # NumPy lacks bfloat16.
    samples = np.asarray(audio)
    if samples.dtype.kind == "f":
        with np.errstate(over="ignore"):  # An infinite sample is refused later.
            return np.require(samples, np.float32, ["C", "W"])  # torch wants an array that may be written.
    is_unsigned = samples.dtype.kind == "u"
    is_integer = is_unsigned or samples.dtype.kind == "i"
    bits = 8 * samples.dtype.itemsize
    if not is_integer or bits == 64:
        kind = samples.dtype if samples.ndim else type(audio).__name__
        raise TypeError(f"samples of type {kind}")
    full_scale = 2.0 ** (bits - 1)
    middle = full_scale if is_unsigned else 0.0
    return ((samples - middle) / full_scale).astype(np.float32)
