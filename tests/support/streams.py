"""Encoders of streams, and the frames of a recording in one pass and in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.encoders.base import LogMelEncoder
from speechtrain.encoders.fastconformer import FastConformer
from speechtrain.encoders.lstm import LSTMEncoder
from speechtrain.encoders.stream import FrameStream
from speechtrain.features.logmel import LogMel
from tests.support.noise import batch

KEY = torch.tensor([123])


def log_mel(**settings: Any) -> LogMel:
    front_end = {"window_seconds": 0.025, "form": "parakeet", "padding": "constant", "log_floor": 2**-24}
    return LogMel(mels=16, splice=1, **{"normalise": "none", **front_end, **settings})


def conformer(**settings: Any) -> FastConformer:
    torch.manual_seed(3)
    sizes = {"width": 32, "layers": 3, "feed_forward": 48, "heads": 4, "subsampling": 4, "channels": 8}
    encoder = FastConformer(log_mel(), causal=True, **{**sizes, **settings})
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.2)
    return encoder.eval()


def lstm(**settings: Any) -> LSTMEncoder:
    torch.manual_seed(3)
    return LSTMEncoder(log_mel(), hidden=16, **{"stack_time": 2, **settings}).eval()


def row(audio: Tensor) -> Batch:
    given = batch(audio.shape[1])
    return replace(given, audio=audio, audio_lengths=torch.tensor([audio.shape[1]]), keys=KEY)


@torch.no_grad()
def one_pass(encoder: LogMelEncoder, audio: Tensor) -> Tensor:
    frames, lengths = encoder(row(audio))
    return frames[:, : int(lengths[0])]


def pieces(samples: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    sizes: list[int] = []
    while sum(sizes) < samples:
        longest = (3, 700, 9000)[seed % 3]
        size = int(torch.randint(longest + 1, (), generator=generator))
        sizes.append(min(size, samples - sum(sizes)))
    return sizes


def streamed(stream: FrameStream, audio: Tensor, sizes: list[int]) -> Tensor:
    frames = [stream.step(piece) for piece in torch.split(audio, sizes, dim=1)]
    return torch.cat([*frames, stream.finish()], dim=1)
