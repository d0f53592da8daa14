"""Models of Parakeet, read from and written for transformers, keep their losses and texts.

``published`` makes a model of transformers.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from speechtrain.batch import Batch
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError, DataError
from speechtrain.interop import parakeet_hf
from speechtrain.interop.weights import read_nodes
from speechtrain.start.build import build_encoder, build_model
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from tests.support.published import BLANK, LETTERS, letters_tokenizer, task_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

DURATIONS = [0, 1, 2, 3, 4]
DURATION_CLASSES = [BLANK + 1 + duration for duration in DURATIONS]  # in the joint's output, after the blank
KINDS: dict[str, dict[str, Any]] = {
    "CTC": {"pad_token_id": BLANK},
    "RNNT": {"decoder_hidden_size": 24, "blank_token_id": BLANK, "num_decoder_layers": 1},
    "TDT": {
        "pad_token_id": BLANK,
        "decoder_hidden_size": 24,
        "blank_token_id": BLANK,
        "durations": DURATIONS,
    },
}
MAX_NEW_TOKENS = 2000  # The default of ``generate`` would cut the texts of a transducer.
NEEDS_TORCH_2_8 = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.8",
    reason="the TDT loss of transformers gathers by int32 indices, which torch 2.7 refuses",
)
ENCODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4,
    "num_mel_bins": 16, "subsampling_factor": 4, "subsampling_conv_channels": 16, "layerdrop": 0.0,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip


def published(kind: str, folder: Path, seed: int = 0) -> Any:
    """Return a random tiny model of transformers. ``folder`` gets the model and its processor."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"Parakeet{kind}Config")(
        encoder_config=ENCODER, vocab_size=BLANK + 1, **KINDS[kind]
    )
    model = getattr(transformers, f"ParakeetFor{kind}")(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5 if "head" in name or "projector" in name else 0.2)
    head = model.ctc_head if kind == "CTC" else model.joint.head
    # Without this bias, the random model would seldom emit the blank, and its texts would be too long.
    head.bias.data[BLANK] = 4.0
    if kind != "CTC":
        model.generation_config.decoder_start_token_id = BLANK
    if kind == "TDT":
        # Without this, ``generate`` of transformers would emit the classes of durations as tokens.
        model.generation_config.suppress_tokens = DURATION_CLASSES
        # ``generate`` of transformers has no limit of labels in a frame, so the duration 0 must be unlikely.
        head.bias.data[DURATION_CLASSES[0]] = -3.0
    model.save_pretrained(folder)
    extractor = transformers.ParakeetFeatureExtractor(feature_size=16)
    processor = transformers.ParakeetProcessor(
        extractor, letters_tokenizer(), decoder_type=kind.lower(), blank_token="<blank>"
    )
    processor.save_pretrained(folder)
    return model.eval()


def batch(*samples: int) -> Batch:
    """Return a batch of noise with rows of these numbers of samples, and of 6, 4 and 2 random labels."""
    generator = torch.Generator().manual_seed(1)
    rows, most_samples = len(samples), max(samples)
    audio_lengths, label_lengths = torch.tensor(samples), torch.tensor([6, 4, 2][:rows])
    audio = 0.1 * torch.randn(rows, most_samples, generator=generator)
    audio *= torch.arange(most_samples) < audio_lengths[:, None]
    labels = torch.randint(0, len(LETTERS), (rows, 6), generator=generator)
    labels *= torch.arange(6) < label_lengths[:, None]
    return Batch(
        audio=audio,
        audio_lengths=audio_lengths,
        labels=labels,
        label_lengths=label_lengths,
        weight=torch.ones(rows),
        keys=torch.ones(rows, dtype=torch.int64),
        ids=("a",) * rows,
        texts=("a",) * rows,
    )


def inputs(speech: Batch, folder: Path, kind: str) -> dict[str, Tensor]:
    """Return the arguments of the published model in ``folder`` for a batch."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    rows = []
    for audio, samples in zip(speech.audio, speech.audio_lengths.tolist(), strict=True):
        rows.append(audio[:samples].numpy())
    arguments = dict(extractor(rows, sampling_rate=16000, return_tensors="pt"))
    is_padding = torch.arange(speech.labels.shape[1]) >= speech.label_lengths[:, None]
    arguments["labels"] = speech.labels.masked_fill(is_padding, BLANK)
    if kind != "CTC":
        arguments["decoder_input_ids"] = nn.functional.pad(speech.labels, (1, 0), value=BLANK)
    return arguments


def oracle(logits: Tensor, labels: Tensor, frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return the transducer loss (B,) in float64, cell by cell. The blank is the last class."""
    rows = zip(logits.double(), labels, frame_counts.tolist(), label_counts.tolist(), strict=True)
    return torch.stack([row_loss(*row) for row in rows])


def row_loss(logits: Tensor, labels: Tensor, frames: int, label_count: int) -> Tensor:
    """Return the transducer loss of one row with the ``logits`` (T, U + 1, V)."""
    log_p = logits.log_softmax(-1)
    alpha: dict[tuple[int, int], Tensor] = {(0, 0): torch.zeros((), dtype=torch.float64)}
    for t, u in itertools.product(range(frames), range(label_count + 1)):
        paths = []
        if t:
            paths.append(alpha[t - 1, u] + log_p[t - 1, u, -1])
        if u:
            paths.append(alpha[t, u - 1] + log_p[t, u - 1, labels[u - 1]])
        if paths:
            alpha[t, u] = torch.logsumexp(torch.stack(paths), 0)
    return -(alpha[frames - 1, label_count] + log_p[frames - 1, label_count, -1])


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the parameters by name."""
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["CTC", "RNNT", pytest.param("TDT", marks=NEEDS_TORCH_2_8)])
@pytest.mark.parametrize("samples", [(8000, 8000), (8000, 6543, 3210)])
def test_losses_and_gradients_are_equal(kind: str, samples: tuple[int, ...], tmp_path: Path) -> None:
    model = published(kind, tmp_path)
    task, speech = task_of(tmp_path), batch(*samples)
    arguments = inputs(speech, tmp_path, kind)
    encoded, lengths = task.encoder.encode(speech)  # type: ignore[union-attr, operator]
    if kind == "RNNT":
        # With labels, transformers would call torchaudio's loss, which is not installed. So the expected loss
        # is computed here from the logits.
        labels = arguments.pop("labels")
        expected = oracle(model(**arguments).logits, labels, lengths, speech.label_lengths).mean()
        sums = task(speech)
        loss = sums.total / sums.weight
    else:
        # The loss of transformers is the mean of the rows' losses divided by their numbers of labels.
        expected = model(**arguments).loss
        row_losses, _ = task.losses(encoded, lengths, speech)  # type: ignore[operator]
        loss = (row_losses / speech.label_lengths).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    task_gradients, model_gradients = gradients(loss, task), gradients(expected, model)
    assert {parakeet_hf.huggingface_name(name) for name in task_gradients} == set(model_gradients)
    for name, gradient in task_gradients.items():
        reference = model_gradients[parakeet_hf.huggingface_name(name)].reshape(gradient.shape)
        scale = max(1e-2, float(reference.abs().max()))
        assert (gradient - reference).abs().max() <= 1e-4 * scale, name


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_texts_are_equal(kind: str, tmp_path: Path) -> None:
    """Transformers gets one row at a time. In a batch, it would emit labels after the end of short rows."""
    published(kind, tmp_path, seed=5)
    task, speech = task_of(tmp_path), batch(16000, 12345, 3210)
    labels_per_frame = 10 if kind == "RNNT" else 1000  # Transformers has a limit for RNN-T only, which is 10.
    task.decoder = Greedy(labels_per_frame, max_symbols=10**6)
    expected = []
    for audio, samples in zip(speech.audio, speech.audio_lengths.tolist(), strict=True):
        expected.append(text_of_transformers(tmp_path, kind, audio[:samples]))
    with torch.no_grad():
        texts = [hypothesis.text for hypothesis in task.transcribe(speech, task.decoder)]
    assert texts == expected
    assert len(set(texts)) == 3
    assert len(set("".join(texts))) >= 3


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_read_is_written_again(kind: str, tmp_path: Path) -> None:
    model = published(kind, tmp_path / "in")
    task = task_of(tmp_path / "in")
    assert parakeet_hf.write(task, task.state_dict(), tmp_path / "out") <= 1e-4
    written_model = getattr(transformers, f"ParakeetFor{kind}").from_pretrained(tmp_path / "out")
    written_tensors = written_model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, written_tensors[name]), name
    for name in ("decoder_start_token_id", "suppress_tokens"):
        assert getattr(written_model.generation_config, name) == getattr(model.generation_config, name)
    assert transformers.AutoProcessor.from_pretrained(tmp_path / "out").tokenizer.decode([1, 2]) == "ab"
    assert read_nodes(tmp_path / "out")["encoder"] == read_nodes(tmp_path / "in")["encoder"]


@pytest.mark.parametrize("tokenizer", ["characters", "sentencepiece"])
def test_a_model_of_this_project_is_written(tokenizer: str, tmp_path: Path) -> None:
    """The prediction network here starts from zeros. The written model has a blank whose embedding is 0."""
    overrides = ["model=rnnt", "encoder=fastconformer_tiny", "data=digits", "model.ctc_weight=0"]
    overrides += ["model.prediction.embedding=256", "model.prediction.layer_norm=false"]
    if tokenizer == "sentencepiece":
        from speechtrain.text.vocabulary import train_sentencepiece

        texts = ["one two three", "four five six", "seven eight nine zero"]
        train_sentencepiece(texts, tmp_path / "p", size=20)
        overrides += ["tokenizer=sentencepiece", f"tokenizer.model={tmp_path / 'p'}"]
    config = compose(overrides)
    task = build_model(
        run_config(config), part_of(config, "tokenizer").build(), build_encoder(run_config(config))
    )
    assert parakeet_hf.write(task, task.state_dict(), tmp_path / "out") <= 1e-4
    ids = part_of(config, "tokenizer").build().encode("five nine")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    assert processor.tokenizer.decode(ids, group_tokens=False) == "five nine"


SCRATCH = (
    *("recipe=scratch", "data.train=x", "tokenizer=characters", "model.ctc_weight=1"),
    *("encoder.layers=1", "encoder.width=64", "encoder.feed_forward=64", "encoder.features.dither=0"),
)


def scratch_task(*overrides: str) -> Any:
    """Return a random model of recipe=scratch. Its texts depend on the audio."""
    config = compose([*SCRATCH, *overrides])
    torch.manual_seed(3)
    task = build_model(
        run_config(config), part_of(config, "tokenizer").build(), build_encoder(run_config(config))
    )
    for parameter in task.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        blank_bias = task.joint.output.bias[-1:]  # type: ignore[union-attr, index]
        blank_bias += 12.0
    task.decoder = Greedy(max_symbols_per_step=10, max_symbols=10**6)
    return task.eval()


def text_of_transformers(folder: Path, kind: str, samples: Tensor) -> str:
    """Return the text of audio ``samples`` (S,) by the model of transformers in ``folder``."""
    model = getattr(transformers, f"ParakeetFor{kind}").from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    features = processor.feature_extractor(samples.numpy(), sampling_rate=16000, return_tensors="pt")
    options = {} if kind == "CTC" else {"max_new_tokens": MAX_NEW_TOKENS}
    with torch.no_grad():
        output = model.generate(**features, **options)
    labels = getattr(output, "sequences", output)  # The output is a tensor, or an object with the tensor.
    (text,) = processor.batch_decode(labels, skip_special_tokens=True)
    return str(text).strip()


@pytest.mark.parametrize(
    ("layer_norm", "kind", "line"),
    [
        (
            "true",
            "CTC",
            "the encoder with its auxiliary CTC, since Parakeet has no model.prediction.layer_norm",
        ),
        ("false", "RNNT", "the transducer without its auxiliary CTC"),
    ],
)
def test_a_run_of_the_recipe_scratch_has_the_same_texts_in_transformers(
    layer_norm: str, kind: str, line: str, tmp_path: Path
) -> None:
    task = scratch_task(f"model.prediction.layer_norm={layer_norm}")
    part, description = parakeet_hf.exportable_part(task)
    assert description.startswith(line)
    assert parakeet_hf.write(part, part.state_dict(), tmp_path) <= 1e-4
    texts = set[str]()
    for samples in (16000, 12345, 6543):
        recording = batch(samples)
        with torch.no_grad():
            (hypothesis,) = part.transcribe(recording, part.decoder)
        assert hypothesis.text == text_of_transformers(tmp_path, kind, recording.audio[0])
        texts.add(hypothesis.text)
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["encoder=lstm_small"], "is not a FastConformer"),
        (["encoder=fastconformer_tiny", "prediction=stateless"], "without prediction=lstm"),
        (["encoder=fastconformer_tiny", "model.prediction.embedding=256"], "layer_norm=true"),
        (["encoder=fastconformer_tiny", "encoder.features.form=torch"], "encoder.features"),
        (["encoder=fastconformer_tiny", "encoder.context=[8,1,8]"], "context"),
    ],
)
def test_a_model_that_the_format_cannot_store_is_refused(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    config = compose(["model=rnnt", "data=digits", "model.ctc_weight=0", *overrides])
    task = build_model(
        run_config(config), part_of(config, "tokenizer").build(), build_encoder(run_config(config))
    )
    with pytest.raises(
        ConfigError, match=f"{message}.* cannot be exported whole. These can: model=wav2vec2, "
    ):
        parakeet_hf.write(task, task.state_dict(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blank_token_id": 0}, "the blank's id is 0"),
        ({"encoder_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        ({"encoder_config": None}, "does not describe"),
        ({"vocab_size": "many"}, "does not describe"),
        ({"encoder_config": {"num_hidden_layers": 10**9}}, "more than"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    published("RNNT", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message) as raised:
        read_nodes(tmp_path)
    assert str(raised.value).isprintable()
