"""The step of a streaming encoder: a chain of steps has the frames of ``Encoder.stream`` and of one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from speechtrain.encoders.fastconformer import FastConformer
from speechtrain.errors import ConfigError
from speechtrain.export.streaming_graphs import CACHES, StreamingEncoder, stream_context
from speechtrain.nn.conformer import Context
from tests.support.streams import KEY, conformer, one_pass, pieces, streamed


@torch.no_grad()
def chained(encoder: FastConformer, context: Context, audio: Tensor) -> Tensor:
    """The frames of steps on the log-mel frames of ``audio`` (B, S), until the recording has ended."""
    step = StreamingEncoder(encoder, context)
    lengths = torch.full((len(audio),), audio.shape[1])
    features, _ = encoder.features(audio, lengths, keys=KEY.expand(len(audio)))
    size, start = step.chunk_features, 0
    frames, count = [], step.chunk
    inputs = step.first_inputs(rows=len(audio))
    while count == step.chunk:
        chunk = features[:, start : start + size]
        inputs["features"] = torch.nn.functional.pad(chunk, (0, 0, 0, size - chunk.shape[1]))
        inputs["length"] = torch.full((len(audio),), features.shape[1] - start)
        new_frames, counts, *caches = step(*inputs.values())
        inputs |= dict(zip(CACHES, caches, strict=True))
        count = int(counts[0])
        frames.append(new_frames[:, :count])
        start += size
    return torch.cat(frames, dim=1)


@pytest.mark.parametrize("context", [[16, 4, 0], [8, 1, 0], [3, 8, 0], [64, 8, 0]])
@pytest.mark.parametrize(("subsampling", "convolution"), [(2, "past"), (4, "chunk"), (8, "past")])
def test_steps_have_the_frames_of_one_pass(context: Context, subsampling: int, convolution: str) -> None:
    encoder = conformer(subsampling=subsampling, context=context, causal_convolution=convolution)
    for samples in (400, 5119, 5120, 5121, 16_001, 40_000):
        audio = 0.1 * torch.randn(1, samples)
        torch.testing.assert_close(
            chained(encoder, context, audio), one_pass(encoder, audio), rtol=0, atol=1e-5
        )


def test_steps_have_the_frames_of_a_stream() -> None:
    encoder, audio = conformer(context=[16, 4, 0]), 0.1 * torch.randn(1, 30_000)
    frames = streamed(encoder.stream(keys=KEY), audio, pieces(30_000, 1))
    torch.testing.assert_close(chained(encoder, [16, 4, 0], audio), frames, rtol=0, atol=1e-5)


def test_recordings_of_a_batch_do_not_change_each_other() -> None:
    encoder, audio = conformer(context=[16, 4, 0]), 0.1 * torch.randn(3, 20_000)
    frames = chained(encoder, [16, 4, 0], audio)
    for row in range(3):
        alone = chained(encoder, [16, 4, 0], audio[row : row + 1])
        torch.testing.assert_close(frames[row : row + 1], alone, rtol=0, atol=1e-5)


def test_frames_after_the_chunk_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Export --context 8,4,0$"):
        StreamingEncoder(conformer(), [8, 4, 1])


def test_the_context_of_an_export_is_that_of_the_stream() -> None:
    class Task:
        encoder: Any = conformer(context=[8, 4, 0])

    assert stream_context(Task(), None) == [8, 4, 0]
    assert stream_context(Task(), [4, 1, 0]) == [4, 1, 0]
    Task.encoder.causal = False
    assert stream_context(Task(), None) is None
    with pytest.raises(ConfigError, match=r"^encoder\.causal=false"):
        stream_context(Task(), [8, 4, 0])
