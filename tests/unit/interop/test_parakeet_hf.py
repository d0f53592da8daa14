"""Parakeet's models of transformers: the same losses, gradients and texts, read and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from speechtrain.batch import Batch
from speechtrain.config.build import build_encoder, build_model, build_tokenizer
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError, DataError
from speechtrain.interop import parakeet_hf
from speechtrain.interop.weights import initialise, read_nodes, read_weights
from speechtrain.runs.compose import compose
from speechtrain.task import Task

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LETTERS = " abcdefg"
VOCABULARY = {symbol: label for label, symbol in enumerate(LETTERS)}
DURATIONS = [*range(len(LETTERS) + 1, len(LETTERS) + 6)]  # their classes
KINDS = {
    "CTC": {"pad_token_id": len(LETTERS)},
    "RNNT": {"decoder_hidden_size": 24, "blank_token_id": len(LETTERS), "num_decoder_layers": 1},
    "TDT": {
        "pad_token_id": len(LETTERS),
        "decoder_hidden_size": 24,
        "blank_token_id": len(LETTERS),
        "durations": [0, 1, 2, 3, 4],
    },
}
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
    """A random tiny model of transformers, saved with its processor as publishers do."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"Parakeet{kind}Config")(
        encoder_config=ENCODER, vocab_size=len(LETTERS) + 1, **KINDS[kind]
    )
    model = getattr(transformers, f"ParakeetFor{kind}")(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5 if "head" in name or "projector" in name else 0.2)
    with torch.no_grad():
        (model.ctc_head if kind == "CTC" else model.joint.head).bias[len(LETTERS)] = 4.0
    if kind != "CTC":
        model.generation_config.decoder_start_token_id = len(LETTERS)
    if kind == "TDT":
        model.generation_config.suppress_tokens = DURATIONS  # theirs would take them for tokens
        model.joint.head.bias.data[DURATIONS[0]] = -3.0  # nor has it a limit of labels in a frame
    model.save_pretrained(folder)
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=VOCABULARY, merges=[]))
    library.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.ParakeetTokenizer(tokenizer_object=library, pad_token="<blank>")
    extractor = transformers.ParakeetFeatureExtractor(feature_size=16)
    spelling = {"decoder_type": kind.lower(), "blank_token": "<blank>"}
    transformers.ParakeetProcessor(extractor, tokenizer, **spelling).save_pretrained(folder)
    return model.eval()


def config_at(folder: Path) -> DictConfig:
    config = compose(["model=rnnt", "data=digits"])
    for group, node in read_nodes(folder).items():
        config[group] = OmegaConf.create(node)
    return config


def ours_of(folder: Path) -> Task:
    config = config_at(folder)
    task = build_model(config, build_tokenizer(config), build_encoder(config))
    found = initialise(task, read_weights(f"hf:{folder}"), str(folder))
    assert not found.fresh
    return task.eval()


def batch(*samples: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    longest, lengths = max(samples), torch.tensor(samples)
    audio = 0.1 * torch.randn(len(samples), longest, generator=generator)
    audio *= torch.arange(longest) < lengths[:, None]
    counts = torch.tensor([6, 4, 2][: len(samples)])
    labels = torch.randint(0, len(LETTERS), (len(samples), 6), generator=generator)
    labels *= torch.arange(6) < counts[:, None]
    names = ("a",) * len(samples)
    one = torch.ones(len(samples))
    return Batch(audio, lengths, labels, counts, one, one.long(), names, names)


def inputs(given: Batch, folder: Path, kind: str) -> dict[str, Tensor]:
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    rows = [row[:n].numpy() for row, n in zip(given.audio, given.audio_lengths.tolist(), strict=True)]
    found = dict(extractor(rows, sampling_rate=16000, return_tensors="pt"))
    blank = len(LETTERS)
    inside = torch.arange(given.labels.shape[1]) < given.label_lengths[:, None]
    found["labels"] = given.labels.masked_fill(~inside, blank)
    if kind != "CTC":
        found["decoder_input_ids"] = nn.functional.pad(given.labels, (1, 0), value=blank)
    return found


def oracle(logits: Tensor, labels: Tensor, frames: Tensor, counts: Tensor) -> Tensor:
    """The transducer loss in float64 by the recursion over cells, blank last."""
    rows = []
    for lattice, spelt, t_count, u_count in zip(logits.double(), labels, frames, counts, strict=True):
        log_p = lattice.log_softmax(-1)
        alpha: dict[tuple[int, int], Tensor] = {(0, 0): torch.zeros((), dtype=torch.float64)}
        for t in range(int(t_count)):
            for u in range(int(u_count) + 1):
                into = [alpha[t - 1, u] + log_p[t - 1, u, -1]] if t else []
                into += [alpha[t, u - 1] + log_p[t, u - 1, spelt[u - 1]]] if u else []
                if into:
                    alpha[t, u] = torch.logsumexp(torch.stack(into), 0)
        last = int(t_count) - 1, int(u_count)
        rows.append(-(alpha[last] + log_p[*last, -1]))
    return torch.stack(rows)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["CTC", "RNNT", pytest.param("TDT", marks=NEEDS_TORCH_2_8)])
@pytest.mark.parametrize("samples", [(8000, 8000), (8000, 6543, 3210)])
def test_losses_and_gradients_are_theirs(kind: str, samples: tuple[int, ...], tmp_path: Path) -> None:
    theirs = published(kind, tmp_path)
    ours, given = ours_of(tmp_path), batch(*samples)
    found = inputs(given, tmp_path, kind)
    if kind != "RNNT":  # its loss is torchaudio's
        output = theirs(**found)
        # their mean divides each row by its labels
        encoded, lengths = ours.encoder.encode(given)  # type: ignore[union-attr, operator]
        per_row, _ = ours.losses(encoded, lengths, given)  # type: ignore[operator]
        mine = (per_row / given.label_lengths).mean()
        expected = output.loss
    else:
        labels = found.pop("labels")
        output = theirs(**found)
        lengths = ours.encoder.encode(given)[1]  # type: ignore[union-attr, operator]
        whole = ours(given)
        expected = oracle(output.logits, labels, lengths, given.label_lengths).mean()
        mine = whole.total / whole.weight
    assert mine.item() == pytest.approx(expected.item(), rel=1e-5)
    of_ours, of_theirs = gradients(mine, ours), gradients(expected, theirs)
    assert {parakeet_hf.huggingface_name(name) for name in of_ours} == set(of_theirs)
    for name, value in of_ours.items():
        other = of_theirs[parakeet_hf.huggingface_name(name)].reshape(value.shape)
        scale = max(1e-2, float(other.abs().max()))
        assert (value - other).abs().max() <= 1e-4 * scale, name


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_texts_are_theirs(kind: str, tmp_path: Path) -> None:
    """Row by row: in a batch without an id for its end, theirs writes on until the longest row has ended."""
    theirs = published(kind, tmp_path, seed=5)
    ours, whole = ours_of(tmp_path), batch(16000, 12345, 3210)
    ours.decoder = Greedy(10 if kind == "RNNT" else 1000, 10**6)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    expected = []
    for row, samples in enumerate(whole.audio_lengths.tolist()):
        one = slice(row, row + 1)
        alone = replace(whole.to(lambda value, one=one: value[one]), audio=whole.audio[one, :samples])
        found = inputs(alone, tmp_path, kind)
        given = {name: found[name] for name in ("input_features", "attention_mask")}
        with torch.no_grad():
            written = theirs.generate(**given, **({} if kind == "CTC" else {"max_new_tokens": 2000}))
        written = getattr(written, "sequences", written)
        expected += processor.batch_decode(written, skip_special_tokens=True)
    with torch.no_grad():
        texts = [hypothesis.text for hypothesis in ours.transcribe(whole)]  # type: ignore[operator]
    assert texts == [text.strip() for text in expected]
    assert len(set(texts)) == 3
    assert len(set("".join(texts))) >= 3


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_read_is_written_again(kind: str, tmp_path: Path) -> None:
    theirs = published(kind, tmp_path / "in")
    ours = ours_of(tmp_path / "in")
    assert parakeet_hf.write(ours, ours.state_dict(), tmp_path / "out") <= 1e-4
    again = getattr(transformers, f"ParakeetFor{kind}").from_pretrained(tmp_path / "out")
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    for name in ("decoder_start_token_id", "suppress_tokens"):
        assert getattr(again.generation_config, name) == getattr(theirs.generation_config, name)
    assert transformers.AutoProcessor.from_pretrained(tmp_path / "out").tokenizer.decode([1, 2]) == "ab"
    assert read_nodes(tmp_path / "out")["encoder"] == read_nodes(tmp_path / "in")["encoder"]


@pytest.mark.parametrize("tokenizer", ["characters", "sentencepiece"])
def test_a_model_of_ours_is_theirs(tokenizer: str, tmp_path: Path) -> None:
    """A start from zeros is the embedding of a blank whose row is 0."""
    overrides = ["model=rnnt", "encoder=fastconformer_tiny", "data=digits", "model.ctc_weight=0"]
    overrides += ["model.prediction.embedding=256", "model.prediction.layer_norm=false"]
    if tokenizer == "sentencepiece":
        from speechtrain.text.vocabulary import train_sentencepiece

        texts = ["one two three", "four five six", "seven eight nine zero"]
        train_sentencepiece(texts, tmp_path / "p", size=20)
        overrides += ["tokenizer=sentencepiece", f"tokenizer.model={tmp_path / 'p'}"]
    config = compose(overrides)
    task = build_model(config, build_tokenizer(config), build_encoder(config))
    assert parakeet_hf.write(task, task.state_dict(), tmp_path / "out") <= 1e-4
    ids = build_tokenizer(config).encode("five nine")
    assert (
        transformers.AutoProcessor.from_pretrained(tmp_path / "out").tokenizer.decode(ids, group_tokens=False)
        == "five nine"
    )


SCRATCH = (
    *("recipe=scratch", "data.train=x", "tokenizer=characters", "model.ctc_weight=1"),
    *("encoder.layers=1", "encoder.width=64", "encoder.feed_forward=64", "encoder.features.dither=0"),
)


def scratch_task(*overrides: str) -> Any:
    """A random model of recipe=scratch that writes texts which depend on the audio."""
    config = compose([*SCRATCH, *overrides])
    torch.manual_seed(3)
    task = build_model(config, build_tokenizer(config), build_encoder(config))
    for parameter in task.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        task.joint.output.bias[-1] += 12.0  # type: ignore[union-attr, operator, index]
    task.decoder = Greedy(10, 10**6)
    return task.eval()


def text_there(folder: Path, kind: str, samples: Tensor) -> str:
    """The text of samples (S,) by the model of transformers in ``folder``."""
    model = getattr(transformers, f"ParakeetFor{kind}").from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    features = processor.feature_extractor(samples.numpy(), sampling_rate=16000, return_tensors="pt")
    options = {} if kind == "CTC" else {"max_new_tokens": 2000}
    with torch.no_grad():
        labels = model.generate(**features, **options)
    (text,) = processor.batch_decode(getattr(labels, "sequences", labels), skip_special_tokens=True)
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
def test_a_run_of_the_recipe_scratch_has_the_same_texts_there(
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
            (hypothesis,) = part.transcribe(recording)
        assert hypothesis.text == text_there(tmp_path, kind, recording.audio[0])
        texts.add(hypothesis.text)
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["encoder=lstm_small"], "is not a FastConformer"),
        (["encoder=fastconformer_tiny", "prediction=stateless"], "without prediction=lstm"),
        (["encoder=fastconformer_tiny", "model.prediction.embedding=256"], "layer_norm=true"),
        (["encoder=fastconformer_tiny", "encoder.features.form=torch"], "encoder.features"),
        (["encoder=fastconformer_tiny", "encoder.context=[8,8]"], "context"),
    ],
)
def test_what_their_format_does_not_hold_is_refused(overrides: list[str], named: str, tmp_path: Path) -> None:
    config = compose(["model=rnnt", "data=digits", "model.ctc_weight=0", *overrides])
    task = build_model(config, build_tokenizer(config), build_encoder(config))
    with pytest.raises(ConfigError, match=f"{named}.* cannot be exported whole. These can: model=wav2vec2, "):
        parakeet_hf.write(task, task.state_dict(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"blank_token_id": 0}, "the blank's id is 0"),
        ({"encoder_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        ({"encoder_config": None}, "does not describe"),
        ({"vocab_size": "many"}, "does not describe"),
        ({"encoder_config": {"num_hidden_layers": 10**9}}, "more than"),
    ],
)
def test_a_config_that_we_cannot_build_is_one_line(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    published("RNNT", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=named) as raised:
        read_nodes(tmp_path)
    assert str(raised.value).isprintable()
