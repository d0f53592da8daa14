"""Streams of encoders: their frames are those of one forward pass with the same context."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speechtrain.encoders.base import LogMelEncoder
from speechtrain.encoders.fastconformer import FastConformer
from speechtrain.encoders.lstm import LSTMEncoder
from speechtrain.encoders.stream import FrameStream
from speechtrain.errors import ConfigError
from speechtrain.nn.conformer import Context, Convolution, in_context
from tests.support.dependence import dependence, last_blocks
from tests.support.noise import batch
from tests.support.streams import KEY, conformer, log_mel, lstm, one_pass, pieces, row, streamed

CONTEXTS = ([16, 4, 0], [8, 1, 0], [10, 3, 2], [5, 1, 1], [64, 8, 0], [0, 2, 1])


def check(encoder: LogMelEncoder, context: Context | None, samples: int, seed: int) -> None:
    audio = 0.1 * torch.randn(1, samples)
    frames = streamed(encoder.stream(context, keys=KEY), audio, pieces(samples, seed))
    torch.testing.assert_close(frames, one_pass(encoder, audio), rtol=0, atol=1e-5)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    ("subsampling", "convolution"), [(2, "past"), (4, "past"), (4, "chunk"), (8, "chunk")]
)
def test_streamed_frames_of_a_fastconformer_are_those_of_one_pass(
    context: Context, subsampling: int, convolution: str
) -> None:
    encoder = conformer(subsampling=subsampling, context=context, causal_convolution=convolution)
    for seed, samples in enumerate([1, 159, 160, 161, 401, 3000, 16001, 40000]):
        check(encoder, context, samples, 2 if samples > 10_000 else seed)


def test_a_stream_of_single_samples_has_the_frames_of_one_pass() -> None:
    encoder, audio = conformer(context=[8, 2, 0]), 0.1 * torch.randn(1, 3000)
    frames = streamed(encoder.stream(keys=KEY), audio, [1] * 3000)
    torch.testing.assert_close(frames, one_pass(encoder, audio), rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"feature_norm": True, "layer_norm": True}, {"stack_time": 3}])
def test_streamed_frames_of_an_lstm_are_those_of_one_pass(settings: dict[str, Any]) -> None:
    for seed, samples in enumerate([160, 161, 401, 3000, 16001, 40000]):
        check(lstm(**settings), None, samples, seed)


def test_several_recordings_stream_together() -> None:
    encoder, audio = conformer(context=[8, 4, 0]), 0.1 * torch.randn(3, 20_000)
    keys = torch.tensor([123, 123, 123])
    frames = streamed(encoder.stream(rows=3, keys=keys), audio, pieces(20_000, 1))
    for number in range(3):
        alone = one_pass(encoder, audio[number : number + 1])
        torch.testing.assert_close(frames[number : number + 1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("convolution", ["past", "chunk"])
@pytest.mark.parametrize("context", [[8, 4, 0], [6, 1, 2]])
def test_a_frame_depends_on_its_context_and_on_no_later_sample(context: Context, convolution: str) -> None:
    """A frame is 640 samples. The look-ahead is the chunk, and ``right`` frames for each layer."""
    encoder = conformer(context=context, layers=2, causal_convolution=convolution)
    audio = 0.1 * torch.randn(1, 640 * 30)
    last = last_blocks(dependence(lambda given: one_pass(encoder, given), audio, 640))
    _, chunk, right = context
    for frame, block in enumerate(last):
        end_of_look_ahead = (frame // chunk + 1) * chunk + 2 * right
        # The window of the last column ends half a block after its frame.
        assert block <= end_of_look_ahead
    assert last[10] >= (10 // chunk + 1) * chunk - 2 + 2 * right


def test_a_stream_emits_a_frame_as_soon_as_its_context_is_complete() -> None:
    encoder = conformer(context=[8, 4, 0])
    stream, audio = encoder.stream(), torch.zeros(1, 16_000)
    counts = [stream.step(piece).shape[1] for piece in torch.split(audio, 640, dim=1)]
    # A chunk of 4 frames needs 4 · 640 samples, less what subsampling reads before a frame.
    assert counts == [0, 0, 0, 4] * 6 + [0]


def _stored_values(stream: FrameStream) -> int:
    tensors = {id(value): value for value in gc.get_objects() if isinstance(value, Tensor)}
    reachable, seen, found = [stream], set[int](), 0
    while reachable:
        value = reachable.pop()
        if id(value) in seen or isinstance(value, nn.Module | type):
            continue
        seen.add(id(value))
        if id(value) in tensors:
            found += tensors[id(value)].untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            reachable += list(value)
        elif hasattr(value, "__dict__"):
            reachable += list(vars(value).values())
    return found


@pytest.mark.parametrize("made", [lambda: conformer(context=[16, 4, 1]), lstm])
def test_the_stored_state_does_not_grow(made: Any) -> None:
    stream = made().stream()
    sizes = []
    for _ in range(6):
        for piece in torch.split(torch.randn(1, 32_000), 1600, dim=1):
            stream.step(piece)
        sizes.append(_stored_values(stream))
    assert sizes[-1] == sizes[1]
    assert sizes[-1] > 1000


def test_the_context_of_a_stream_is_the_encoders_then_the_largest_of_training() -> None:
    contexts = [[8, 1, 0], [8, 4, 0], None, [8, 2, 0]]
    assert conformer(contexts=contexts).stream().stages[2].context == [8, 4, 0]  # type: ignore[attr-defined]
    assert conformer(contexts=contexts, context=[8, 2, 0]).stream().stages[2].context == [8, 2, 0]  # type: ignore[attr-defined]


def test_what_cannot_stream_says_why() -> None:
    with pytest.raises(ConfigError, match=r"encoder\.causal=true"):
        FastConformer(log_mel(), width=32, layers=1, heads=4, feed_forward=32, subsampling=4).stream()
    with pytest.raises(ConfigError, match=r"encoder\.context=null"):
        conformer().stream()
    with pytest.raises(ConfigError, match="no attention"):
        lstm().stream([8, 4, 0])
    with pytest.raises(ConfigError, match="normalise=all"):
        LSTMEncoder(log_mel(normalise="all"), hidden=8).stream()


@pytest.mark.parametrize("context", [[8, 4], [8, 0, 0], [-1, 4, 0]])
def test_a_wrong_context_is_named(context: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"\[left, chunk, right\]"):
        conformer(context=context)
    with pytest.raises(ConfigError, match=r"\[left, chunk, right\]"):
        conformer(contexts=[None, context])


def test_a_wrong_convolution_is_named() -> None:
    with pytest.raises(ValueError, match="causal_convolution is future: it must be past or chunk"):
        conformer(causal_convolution="future")


def test_training_draws_a_context_for_each_micro_batch() -> None:
    contexts = [[16, 4, 0], [16, 2, 0], None]
    encoder, given = conformer(contexts=contexts).train(), batch(16_000)
    drawn = [tuple(encoder.prepare(given, seed).extra["context"].tolist()) for seed in range(300)]
    assert drawn == [tuple(encoder.prepare(given, seed).extra["context"].tolist()) for seed in range(300)]
    counts = {context: drawn.count(context) for context in set(drawn)}
    assert len(counts) == 3
    assert min(counts.values()) > 70
    for seed in range(8):
        prepared = encoder.prepare(given, seed)
        frames, _ = encoder(prepared)
        left, chunk, _ = prepared.extra["context"].tolist()
        limited = conformer(context=None if chunk > 100 else [left, chunk, 0]).train()
        limited.load_state_dict(encoder.state_dict())
        torch.manual_seed(seed)
        expected, _ = limited(limited.prepare(given, seed))
        torch.manual_seed(seed)
        frames, _ = encoder(prepared)
        assert torch.equal(frames, expected)
    assert "context" not in encoder.eval().prepare(given, 1).extra


def test_a_context_is_nemo_s_chunked_mask() -> None:
    """Chunks of ``chunk`` frames, each with all keys of the chunks within ``left`` frames before it."""
    frames = torch.arange(40)
    for left, chunk in ((8, 4), (6, 3), (0, 5)):
        mask = in_context(frames, frames, [left, chunk, 0])
        for query in range(40):
            for key in range(40):
                distance = query // chunk - key // chunk
                assert bool(mask[query, key]) == (0 <= distance <= left // chunk)


def test_a_convolution_in_chunks_reads_recordings_that_end_with_the_chunk() -> None:
    torch.manual_seed(1)
    convolution = Convolution(6, 9, bias=True).double().eval()
    x = torch.randn(2, 23, 6, dtype=torch.float64)
    lengths = torch.tensor([23, 17])
    for chunk in (1, 3, 4, 8, 23, 2**30):
        frames = convolution(x, lengths, torch.tensor(chunk))
        for start in range(0, 23, chunk):
            end = min(start + chunk, 23)
            cut = convolution(x[:, :end], lengths.clamp(max=end))
            torch.testing.assert_close(frames[:, start:end], cut[:, start:], rtol=0, atol=1e-12)


def published_names(name: str) -> str:
    """Return the name of a parameter in transformers' streaming FastConformer."""
    prefix, number, rest = (*name.split(".", 2), "")[:3]
    if prefix != "subsampling" or number != "layers":
        return name
    index, parameter = rest.split(".")
    if index == "0":
        return f"subsampling.conv_in.{parameter}"
    layer, part = divmod(int(index) - 2, 3)
    kind = ("depthwise_conv", "pointwise_conv")[part]
    return f"subsampling.layers.{layer}.{kind}.{parameter}"


@pytest.mark.parametrize("lookahead", [0, 3, 7])
def test_a_causal_encoder_is_transformers_streaming_fastconformer(lookahead: int) -> None:
    library = pytest.importorskip(
        "transformers.models.nemotron_asr_streaming.modeling_nemotron_asr_streaming"
    )
    context = [16, lookahead + 1, 0]
    mine = conformer(subsampling=8, context=context, dropout=0.0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"num_mel_bins": 16, "subsampling_factor": 8, "subsampling_conv_channels": 8}
    config = library.NemotronAsrStreamingEncoderConfig(**sizes, sliding_window=17)
    theirs = library.NemotronAsrStreamingEncoder(config).eval().double()
    mine = mine.double()
    theirs.load_state_dict({published_names(name): value for name, value in mine.state_dict().items()})
    lengths = torch.tensor([199, 150])
    mask = torch.arange(199) < lengths[:, None]
    features = torch.randn(2, 199, 16, dtype=torch.float64) * mask[..., None]
    with torch.no_grad():
        frames, counts = mine.contextualise(features, lengths)
        expected = theirs(features, attention_mask=mask, num_lookahead_tokens=lookahead).last_hidden_state
    for number, count in enumerate(counts.tolist()):
        torch.testing.assert_close(frames[number, :count], expected[number, :count], rtol=0, atol=1e-5)


class WrongStream(FastConformer):
    """A stream that begins anew with each piece, as an engineer could write it first."""

    def stream(
        self, context: Context | None = None, rows: int = 1, keys: Tensor | None = None
    ) -> FrameStream:
        encoder = super()

        class Forgetful(FrameStream):
            def step(self, samples: Tensor) -> Tensor:
                stream = encoder.stream(context, rows, keys)
                return torch.cat([stream.step(samples), stream.finish()], dim=1)

            def finish(self) -> Tensor:
                return torch.zeros(1, 0, 32)

        return Forgetful()


def test_a_stream_of_a_plug_in_is_compared_with_its_forward_pass() -> None:
    given = row(0.1 * torch.randn(1, 20_000))
    conformer(contexts=[[8, 4, 0], None]).check(given)
    lstm().check(given)
    lstm(feature_norm=True).check(given)
    settings = {"width": 32, "layers": 1, "feed_forward": 48, "heads": 4, "subsampling": 4, "channels": 8}
    wrong = WrongStream(log_mel(), causal=True, contexts=[[8, 4, 0]], **settings).eval()
    with pytest.raises(ConfigError, match=r"WrongStream.* stream gives \d+ frames"):
        wrong.check(given)
    early = conformer(context=[8, 4, 0])
    early.stream = lambda *arguments, **options: conformer(context=[8, 1, 0]).stream([8, 1, 0])  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="the frames of stream are not those of forward"):
        early.check(given)
