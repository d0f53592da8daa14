"""Nemotron, transformers' cache-aware FastConformer with RNN-T, has the same features, frames and texts here.

``published`` makes a random model of transformers, which ``task_of`` reads as ``init_from=hf:FOLDER`` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError, DataError
from speechtrain.interop import parakeet_hf
from speechtrain.interop.weights import read_nodes
from speechtrain.nn.conformer import Convolution
from tests.support.noise import batch
from tests.support.published import BLANK, letters_tokenizer, task_of

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "NemotronAsrStreamingForRNNT"):
    pytest.skip("this transformers has no streaming FastConformer", allow_module_level=True)

ENCODER = {
    "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 4,
    "num_mel_bins": 16, "subsampling_factor": 8, "subsampling_conv_channels": 8, "layerdrop": 0.0,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "sliding_window": 17, "default_num_lookahead_tokens": 3,
}  # fmt: skip
LOOKAHEADS = [
    3,
    7,
    1,
    0,
    2,
]  # The chunk of the last one, 3 frames, does not divide the 16 frames on the left.
MAX_NEW_TOKENS = 5000
BLANK_BIAS = 6.0  # Without it, the random model would seldom emit the blank.
HOP, FACTOR, WIDTH = 160, 8, 12


def published(folder: Path, seed: int = 0) -> Any:
    """Return a random tiny model of transformers. ``folder`` gets the model and its processor."""
    torch.manual_seed(seed)
    config = transformers.NemotronAsrStreamingConfig(
        encoder_config=ENCODER,
        vocab_size=BLANK + 1,
        blank_token_id=BLANK,
        decoder_hidden_size=WIDTH,
        num_decoder_layers=2,
        max_symbols_per_step=4,
    )
    model = transformers.NemotronAsrStreamingForRNNT(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.25 if name.startswith("encoder.") else 1.0)
        else:
            nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.1)
    spread_frames(model)
    model.joint.head.bias.data[BLANK] = BLANK_BIAS
    model.generation_config.decoder_start_token_id = BLANK
    model.save_pretrained(folder)
    processor = transformers.NemotronAsrStreamingProcessor(
        transformers.NemotronAsrStreamingFeatureExtractor(feature_size=16),
        letters_tokenizer(),
        supported_num_lookahead_tokens=LOOKAHEADS,
    )
    processor.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def spread_frames(model: Any) -> None:
    """Project frames on their principal components, each with the mean 0 and the deviation 2 on some audio.

    The frames of a random encoder are nearly equal, and all texts would be alike.
    """
    extractor = transformers.NemotronAsrStreamingFeatureExtractor(feature_size=16)
    inputs = extractor(tones(320_000, 99)[0].numpy(), sampling_rate=16000, return_tensors="pt")
    frames = model.eval().encoder(**inputs).last_hidden_state[0]
    mean = frames.mean(0)
    _, deviations, components = torch.linalg.svd((frames - mean) / len(frames) ** 0.5, full_matrices=False)
    weight = 2 * components[:WIDTH] / deviations[:WIDTH, None]
    model.encoder_projector.weight.copy_(weight)
    model.encoder_projector.bias.copy_(-weight @ mean)


def processor_of(folder: Path, lookahead: int) -> Any:
    processor = transformers.NemotronAsrStreamingProcessor.from_pretrained(folder)
    processor.set_num_lookahead_tokens(lookahead)
    return processor


def task_with(folder: Path, lookahead: int) -> Any:
    """Return the task of this project with the context of a lookahead, as the file names it."""
    task: Any = task_of(folder)
    task.encoder.context = task.encoder.contexts[LOOKAHEADS.index(lookahead)]
    task.decoder = Greedy(max_symbols_per_step=4, max_symbols=10**6)
    return task


def tones(samples: int, seed: int) -> Tensor:
    """Return audio (1, S) with another tone in each tenth of a second, and noise."""
    generator = torch.Generator().manual_seed(seed)
    hertz, loudness = torch.rand(2, samples // 1600 + 1, generator=generator)
    phase = torch.cumsum((4000 * hertz).repeat_interleave(1600) / 16000, 0)
    audio = loudness.repeat_interleave(1600) * torch.sin(2 * torch.pi * phase)
    return 0.3 * audio[None, :samples] + 0.01 * torch.randn(1, samples, generator=generator)


def row(audio: Tensor) -> Any:
    return replace(batch(audio.shape[1]), audio=audio)


def streamed(task: Any, audio: Tensor) -> Tensor:
    """Return the frames (1, T, D) of a stream whose samples arrive in pieces of 100 ms."""
    stream = task.encoder.stream()
    frames = [stream.step(piece) for piece in torch.split(audio, 1600, dim=1)]
    return torch.cat([*frames, stream.finish()], dim=1)


def chunks(processor: Any, audio: Tensor) -> Iterator[Tensor]:
    """Yield the features (1, C, M) of each chunk, with the sizes and calls that transformers documents.

    Samples after the last complete chunk are left out.
    """
    half_window = processor.feature_extractor.n_fft // 2
    # With lookahead 0, the second chunk reads before the first sample. Its first chunk is one column.
    extended = nn.functional.pad(audio, (half_window, 0))[0]
    columns = processor.num_mel_frames_first_audio_chunk
    samples = extended[half_window:][: processor.num_samples_first_audio_chunk]
    is_first = True
    while True:
        arguments = {"is_streaming": True, "is_first_audio_chunk": is_first, "sampling_rate": 16000}
        inputs = processor(samples.numpy(), return_tensors="pt", **arguments)
        yield inputs.input_features[:, : inputs.attention_mask.sum()]
        is_first = False
        start = columns * HOP  # of ``extended``, which is half a window before the column
        end = start + processor.num_samples_per_audio_chunk
        if end > len(extended):
            return
        samples = extended[start:end]
        columns += processor.num_mel_frames_per_audio_chunk


def frames_of_chunks(model: Any, processor: Any, audio: Tensor) -> Tensor:
    """Return the frames (1, T, D) of transformers' encoder, chunk by chunk with its caches."""
    caches: dict[str, Any] = {"cache": None, "padding_cache": None}
    frames = []
    for chunk in chunks(processor, audio):
        lookahead = processor.default_num_lookahead_tokens
        output = model.encoder(chunk, use_cache=True, num_lookahead_tokens=lookahead, **caches)
        caches = {"cache": output.cache, "padding_cache": output.padding_cache}
        frames.append(output.last_hidden_state)
    return torch.cat(frames, dim=1)


def text_of(processor: Any, output: Any) -> str:
    (text,) = processor.batch_decode(output.sequences, skip_special_tokens=True)
    return str(text).strip()


def test_the_settings_of_the_files_are_kept(tmp_path: Path) -> None:
    published(tmp_path)
    nodes = read_nodes(tmp_path)
    assert nodes["encoder"]["causal"] is True
    assert nodes["encoder"]["context"] == [16, 4, 0]
    assert nodes["encoder"]["contexts"] == [[16, 4, 0], [16, 8, 0], [16, 2, 0], [16, 1, 0], [15, 3, 0]]
    assert nodes["encoder"]["features"]["normalise"] == "none"
    assert nodes["decoder"]["max_symbols_per_step"] == 4


def test_features_are_equal(tmp_path: Path) -> None:
    published(tmp_path)
    features = task_with(tmp_path, 3).encoder.features
    given = batch(16000, 12345, 3210)
    rows = zip(given.audio, given.audio_lengths.tolist(), strict=True)
    audio = [values[:samples].numpy() for values, samples in rows]
    expected = processor_of(tmp_path, 3)(audio, sampling_rate=16000)
    with torch.no_grad():
        x, counts = features(given.audio, given.audio_lengths)
    assert torch.equal(counts, expected.attention_mask.sum(1))
    torch.testing.assert_close(x, expected.input_features[:, : x.shape[1]], rtol=0, atol=1e-4)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_offline_frames_and_texts_are_equal(lookahead: int, tmp_path: Path) -> None:
    model, task = published(tmp_path), task_with(tmp_path, lookahead)
    processor = processor_of(tmp_path, lookahead)
    texts = set()
    for seed, samples in enumerate([32000, 28345, 9999, 1700]):
        audio = tones(samples, seed)
        inputs = processor(audio[0].numpy(), sampling_rate=16000)
        with torch.no_grad():
            frames, lengths = task.encoder(row(audio))
            output = model.encoder(**inputs)
            (hypothesis,) = task.transcribe(row(audio), task.decoder)
            text = text_of(processor, model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS))
        count = int(lengths[0])
        assert count == int(output.attention_mask.sum())
        torch.testing.assert_close(frames[:, :count], output.last_hidden_state[:, :count], rtol=0, atol=1e-4)
        assert hypothesis.text == text
        texts.add(text)
    assert len(texts) == 4
    assert len(set("".join(texts))) >= 3


def test_frames_of_a_batch_are_equal(tmp_path: Path) -> None:
    model, task, given = published(tmp_path), task_with(tmp_path, 3), batch(32000, 28345, 9999)
    audio = [
        values[:samples].numpy() for values, samples in zip(given.audio, given.audio_lengths, strict=True)
    ]
    inputs = processor_of(tmp_path, 3)(audio, sampling_rate=16000)
    with torch.no_grad():
        frames, lengths = task.encoder(given)
        output = model.encoder(**inputs)
    assert torch.equal(lengths, output.attention_mask.sum(1))
    for number, count in enumerate(lengths.tolist()):
        expected = output.last_hidden_state[number, :count]
        torch.testing.assert_close(frames[number, :count], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_streamed_frames_and_texts_are_equal(lookahead: int, tmp_path: Path) -> None:
    """The samples end with a chunk of transformers, so both streams have the same number of frames."""
    model, task = published(tmp_path), task_with(tmp_path, lookahead)
    processor = processor_of(tmp_path, lookahead)
    chunk = lookahead + 1
    texts = set()
    for seed, chunk_count in enumerate([2, 24 // chunk, 50 // chunk]):
        columns = FACTOR * (chunk_count * chunk - 1) + 1
        samples = HOP * columns + 144  # as many as transformers' chunks of this number of columns
        audio = tones(samples, seed)
        with torch.no_grad():
            frames = streamed(task, audio)
            expected = frames_of_chunks(model, processor, audio)
            (hypothesis,) = task.hypotheses(frames, torch.tensor([frames.shape[1]]), task.decoder)
            output = model.generate(
                input_features=chunks(processor, audio),
                num_lookahead_tokens=lookahead,
                max_new_tokens=MAX_NEW_TOKENS,
            )
        assert frames.shape[1] == chunk_count * chunk
        torch.testing.assert_close(frames, expected, rtol=0, atol=1e-4)
        assert hypothesis.text == text_of(processor, output)
        texts.add(hypothesis.text)
    assert len(texts) == 3
    assert len(set("".join(texts))) >= 3


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_stream_of_transformers_leaves_out_the_end_of_a_recording(lookahead: int, tmp_path: Path) -> None:
    """It has the frames of complete chunks only. This project's has all frames of one pass."""
    model, task = published(tmp_path), task_with(tmp_path, lookahead)
    for samples in (20000, 31234, 40321):
        audio = tones(samples, samples)
        with torch.no_grad():
            frames = streamed(task, audio)
            one_pass, lengths = task.encoder(row(audio))
            expected = frames_of_chunks(model, processor_of(tmp_path, lookahead), audio)
        assert frames.shape[1] == int(lengths[0])
        torch.testing.assert_close(frames, one_pass[:, : frames.shape[1]], rtol=0, atol=1e-4)
        missing = frames.shape[1] - expected.shape[1]
        assert 0 <= missing <= lookahead + 1
        common = frames[:, : expected.shape[1]]
        torch.testing.assert_close(common, expected, rtol=0, atol=1e-4)


def test_what_is_read_is_written_again(tmp_path: Path) -> None:
    model, task = published(tmp_path / "in"), task_of(tmp_path / "in")
    assert parakeet_hf.write(task, task.state_dict(), tmp_path / "out") <= 1e-4
    written = transformers.NemotronAsrStreamingForRNNT.from_pretrained(tmp_path / "out")
    tensors = written.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    assert written.config.encoder_config.sliding_window == 17
    assert written.generation_config.decoder_start_token_id == BLANK
    nodes = read_nodes(tmp_path / "out")
    assert nodes == read_nodes(tmp_path / "in") | {"tokenizer": nodes["tokenizer"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": None}, r"encoder\.causal=true with context None"),
        ({"context": [16, 3, 0]}, r"encoder\.causal=true with context \[16, 3, 0\]"),
        ({"context": [16, 4, 1]}, r"encoder\.causal=true with context \[16, 4, 1\]"),
        ({"contexts": [[16, 4, 0], [8, 4, 0]]}, r"context \[8, 4, 0\]"),
    ],
)
def test_a_context_that_the_format_cannot_store_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    published(tmp_path / "in")
    task: Any = task_of(tmp_path / "in")
    vars(task.encoder).update(changes)
    with pytest.raises(ConfigError, match=f"{message}.* cannot be exported whole"):
        parakeet_hf.write(task, task.state_dict(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_convolutions_that_read_their_chunk_are_refused(tmp_path: Path) -> None:
    published(tmp_path / "in")
    task: Any = task_of(tmp_path / "in")
    task.encoder.layers[0].conv = Convolution(task.encoder.width, 9, True)
    with pytest.raises(ConfigError, match=r"encoder\.causal_convolution=chunk cannot be exported whole"):
        parakeet_hf.write(task, task.state_dict(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"encoder_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        ({"blank_token_id": 0}, "the blank's id is 0"),
        ({"encoder_config": {"sliding_window": "wide"}}, "does not describe"),
        ({"model_type": "nemotron3_5_asr"}, "the model type 'nemotron3_5_asr'"),
    ],
)
def test_a_setting_that_is_not_supported_is_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    published(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message) as raised:
        read_nodes(tmp_path)
    assert str(raised.value).isprintable()


def test_filters_of_less_precision_are_refused(tmp_path: Path) -> None:
    published(tmp_path)
    path = tmp_path / "processor_config.json"
    content = json.loads(path.read_text())
    content["feature_extractor"]["mel_filters_dtype"] = "bfloat16"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="mel_filters_dtype is 'bfloat16'"):
        read_nodes(tmp_path)
