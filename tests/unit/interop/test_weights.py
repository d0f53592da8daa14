"""Every form of weights that is promised, damaged ones, and what is said where transformers is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.commands import export
from speechtrain.errors import ConfigError, DataError, MachineError, RunError, SpeechtrainError
from speechtrain.interop import wav2vec2_fairseq, wav2vec2_hf
from speechtrain.interop.pretrained import Pretrained, describe, describe_encoder
from speechtrain.interop.weights import initialise, read_weights, write_imported
from speechtrain.models.ctc import CTC
from speechtrain.nn.masking import SpanMask
from speechtrain.start.compose import compose
from speechtrain.text.vocabulary import Characters
from tests.support.noise import batch

from .conftest import KINDS, make

needs_transformers = pytest.mark.skipif(not wav2vec2_hf.is_available(), reason="transformers is missing")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def hf_folder(pretrained: Pretrained, folder: Path) -> Path:
    wav2vec2_hf.write(pretrained, folder)
    return folder


def as_bin(folder: Path) -> None:
    """As older versions of transformers wrote it: a pickle, the weight-norm pair under its old names."""
    tensors = load_file(folder / "model.safetensors")
    names = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    for new, old in names.items():
        tensors = {name.replace(new, old): value for name, value in tensors.items()}
    state = OrderedDict(tensors)
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]  # as of a module's state
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_shards(folder: Path) -> None:
    """Two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    place = {name: f"model-{1 + number % 2:05d}-of-00002.safetensors" for number, name in enumerate(names)}
    for shard in set(place.values()):
        part = {name: tensors[name] for name in names if place[name] == shard}
        save_file(part, folder / shard, {"format": "pt"})
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


# --- the encoder that weights name ----------------------------------------------------------------


@pytest.mark.parametrize("form", ["fairseq", "huggingface", "file"])
def test_raw_weights_bring_the_size_of_their_encoder(
    form: str, pretrained: Pretrained, tmp_path: Path
) -> None:
    place = tmp_path / "w"
    if form == "fairseq":
        wav2vec2_fairseq.write(pretrained, wav2vec2_fairseq.checkpoint_of(pretrained), place)
    else:
        place.mkdir()
        (place / "config.json").write_text(
            json.dumps({"model_type": "wav2vec2", **wav2vec2_hf.config_of(pretrained)})
        )
        (place / "model.safetensors").write_bytes(b"0" * 8 + b"{")
    begun = compose(["recipe=finetune", f"init_from={place}{'/model.safetensors' * (form == 'file')}"])
    for key in ("width", "layers", "conv_norm", "pre_norm", "conv_layers"):
        assert begun.encoder[key] == pretrained.encoder[key], key
    assert begun.encoder.mask._target_.endswith("SpanMask")
    typed = compose(["recipe=finetune", f"init_from={place}", "encoder=wav2vec2"])
    assert typed.encoder.width == 768
    (place / "config.json" if place.is_dir() else place).write_text("{")
    with pytest.raises(DataError):
        compose(["recipe=finetune", f"init_from={place}"])


# --- what is read ---------------------------------------------------------------------------------


@needs_transformers
@pytest.mark.parametrize("form", [as_bin, as_shards])
def test_hugging_faces_older_and_larger_folders(form: Any, pretrained: Pretrained, tmp_path: Path) -> None:
    folder = hf_folder(pretrained, tmp_path / "hf")
    form(folder)
    assert_equal(read_weights(str(folder)), pretrained.weights)
    found, difference = wav2vec2_hf.read(folder)
    assert difference <= wav2vec2_hf.LIMIT
    assert found.encoder["conv_layers"] == pretrained.encoder["conv_layers"]


@needs_transformers
def test_a_fine_tuned_folder_of_hugging_face_begins_a_ctc(pretrained: Pretrained, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(3)
    config = transformers.Wav2Vec2Config(**wav2vec2_hf.config_of(pretrained), vocab_size=40)
    model = transformers.Wav2Vec2ForCTC(config).eval()
    model.save_pretrained(tmp_path / "ctc")
    weights = read_weights(str(tmp_path / "ctc"))
    assert set(weights) == set(pretrained.encoder_only().weights)

    task = CTC(Characters(), pretrained.encoder_only().build()[0])
    done = initialise(task, weights, "ctc")
    assert all(not name.startswith("encoder.") for name in done.fresh)
    assert done.fresh, "its own output layer"
    audio = torch.randn(1, 8000, generator=torch.Generator().manual_seed(0))
    task.eval()
    features, lengths, _ = task.encoder.extract(audio, torch.tensor([8000]))
    with torch.no_grad():
        ours, theirs = task.encoder.contextualise(features, lengths), model.wav2vec2(audio).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


class Weights:
    """The part of a run whose state are weights."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    def load_state_dict(self, state: Any) -> None:
        self.weights = state


def test_a_run_its_checkpoint_and_their_files(small: Pretrained, tmp_path: Path) -> None:
    other = {name: value + 1 for name, value in small.weights.items()}
    run = Checkpointer(tmp_path / "run")
    best = run.save(10, {"task": Weights(small.weights)}, small.weights)
    run.add_validation(10, 0.1, {})
    last = run.save(20, {"task": Weights(other)}, other)
    run.add_validation(20, 0.2, {})
    assert_equal(read_weights(str(tmp_path / "run")), small.weights)
    assert_equal(read_weights(str(best)), small.weights)
    assert_equal(read_weights(str(last)), other)
    assert_equal(read_weights(str(last / "model.safetensors")), other)

    write_imported(small, tmp_path / "imported")
    assert_equal(read_weights(str(tmp_path / "imported")), small.weights)
    assert_equal(read_weights(str(tmp_path / "imported" / "model.safetensors")), small.weights)


# --- what is written is what transformers reads -----------------------------------------------------


@needs_transformers
def test_exports_are_loaded_by_the_real_classes(pretrained: Pretrained, tmp_path: Path) -> None:
    import transformers

    whole, encoder = (
        hf_folder(pretrained, tmp_path / "w"),
        hf_folder(pretrained.encoder_only(), tmp_path / "e"),
    )
    reader = transformers.Wav2Vec2FeatureExtractor.from_pretrained(whole)
    assert (reader.sampling_rate, reader.do_normalize) == (16000, pretrained.encoder["normalise_audio"])
    for folder, kind in (
        (whole, transformers.Wav2Vec2ForPreTraining),
        (whole, transformers.Wav2Vec2Model),
        (whole, transformers.AutoModelForPreTraining),
        (encoder, transformers.AutoModel),
    ):
        model, told = kind.from_pretrained(folder, output_loading_info=True)
        assert not told["missing_keys"], kind
        assert not told["mismatched_keys"], kind
        base = getattr(model, "wav2vec2", model)
        assert torch.equal(base.masked_spec_embed, pretrained.weights["encoder.mask_embedding"])


MASKS = {"none": None, "never": SpanMask(probability=0.0), "uniform": SpanMask(kind="uniform", other=2.0)}


@needs_transformers
@pytest.mark.parametrize(
    ("frames", "channels"), [("none", "none"), ("never", "none"), ("none", "uniform"), ("uniform", "never")]
)
def test_a_model_of_any_mask_passes_through_every_format(frames: str, channels: str, tmp_path: Path) -> None:
    task = make(mask=MASKS[frames] or MASKS["never"], channel_mask=MASKS[channels])
    whole = describe(task, task.state_dict())
    mask = whole.encoder["mask"] if MASKS[frames] else None
    encoder = Pretrained({**whole.encoder, "mask": mask}, {}, whole.encoder_only().weights)
    found, _ = wav2vec2_hf.read(hf_folder(encoder, tmp_path / "encoder"))
    expected = dict(encoder.weights)
    if "uniform" not in (frames, channels):  # Hugging Face's model has none then
        expected["encoder.mask_embedding"] = torch.zeros(48)
    assert_equal(found.weights, expected)
    wav2vec2_fairseq.write(whole, wav2vec2_fairseq.checkpoint_of(whole), tmp_path / "c.pt")
    between = ["--to", "huggingface", "--out", str(tmp_path / "hf")]
    assert export.run([str(tmp_path / "c.pt"), "--from", "fairseq", *between]) == 0
    back = ["--to", "fairseq", "--out", str(tmp_path / "back.pt")]
    assert export.run([str(tmp_path / "hf"), "--from", "huggingface", *back]) == 0
    assert wav2vec2_fairseq.read(tmp_path / "back.pt").weights.keys() == whole.weights.keys()


# --- a CTC model with its head ----------------------------------------------------------------------

ALPHABET = " abcdefghijklmnopqrstuvwxyz'<"


def ctc_task(kind: str, alphabet: str = ALPHABET) -> CTC:
    torch.manual_seed(4)
    task = CTC(Characters(alphabet), make(kind).encoder).eval()
    with torch.no_grad():
        task.output.weight *= 20  # so that many symbols win
    return task


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_a_ctc_model_writes_the_same_text_in_hugging_face(kind: str, tmp_path: Path) -> None:
    import transformers

    task = ctc_task(kind)
    recogniser = describe(task, task.state_dict())
    assert wav2vec2_hf.write(recogniser, tmp_path / "ctc") <= wav2vec2_hf.LIMIT
    model, told = transformers.AutoModelForCTC.from_pretrained(tmp_path / "ctc", output_loading_info=True)
    assert type(model) is transformers.Wav2Vec2ForCTC
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "ctc")
    audio = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (16000, 9000, 24000)]
    for one in audio:
        heard = processor(one.numpy(), sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            theirs = processor.batch_decode(model.eval()(**heard).logits.argmax(-1))
            (ours,) = task.hypotheses(
                *task.encoder.encode(replace(batch(len(one)), audio=one[None])), task.decoder
            )
        assert theirs == [ours.text.strip()]  # their tokenizer strips its text
        assert len(set(ours.text)) > 4
    assert processor.tokenizer("abc's <b").input_ids == task.tokenizer.encode("abc's <b")
    encoder, _ = wav2vec2_hf.read(tmp_path / "ctc")
    assert encoder.is_encoder


def test_describe_refuses_a_recogniser_without_encoder(tmp_path: Path) -> None:
    task = ctc_task("group", "ab|")
    with pytest.raises(ConfigError, match=r"CTC with Characters cannot .*--encoder") as caught:
        describe(task, task.state_dict())
    assert "\n" not in str(caught.value)
    assert describe_encoder(task, task.state_dict()).is_encoder


# --- what is refused ------------------------------------------------------------------------------


def one_line(error: BaseException, path: Path) -> None:
    assert isinstance(error, SpeechtrainError)
    assert str(path) in str(error)
    assert "\n" not in str(error)


CUTS = (0, 9, -1)


@pytest.mark.parametrize("keep", CUTS)
def test_a_cut_safetensors_file(keep: int, small: Pretrained, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(small.weights, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError) as caught:
        read_weights(str(path))
    one_line(caught.value, path)


INDEX, CONFIG = "model.safetensors.index.json", "config.json"
DAMAGES: list[tuple[Any, str, Any]] = [
    *((form, "", keep) for form in (None, as_bin, as_shards) for keep in CUTS),
    *((as_shards, INDEX, index) for index in ("", "[]", "{}", '{"weight_map": 3}')),
    (as_shards, INDEX, '{"weight_map": {"a": "no.safetensors"}}'),
    *((None, CONFIG, config) for config in ("", "[]", "{}", '{"model_type": "hubert"}')),
    (None, CONFIG, '{"model_type": "wav2vec2", "hidden_size": "x"}'),
    (None, CONFIG, '{"model_type": "wav2vec2", "conv_dim": 3}'),
    (None, CONFIG, '{"model_type": "wav2vec2", "num_attention_heads": 0}'),
    (None, CONFIG, '{"model_type": "wav2vec2", "hidden_act": "relu"}'),
    (None, CONFIG, '{"model_type": "wav2vec2", "layerdrop": null}'),
    (None, CONFIG, {"vocab_size": "many"}),  # Only transformers refuses it.
]
"""The form of a folder, the file that is damaged, and its new content, or the bytes that are left of it."""


@needs_transformers
@pytest.mark.parametrize(("form", "name", "content"), DAMAGES)
def test_a_damaged_hugging_face_folder_is_one_line(
    form: Any, name: str, content: Any, small: Pretrained, tmp_path: Path
) -> None:
    folder = hf_folder(small, tmp_path / "hf")
    if form is not None:
        form(folder)
    path = folder / name
    if isinstance(content, int):
        path = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))[-1]
        path.write_bytes(path.read_bytes()[:content])
    elif isinstance(content, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_weights(str(folder))
    one_line(caught.value, path if isinstance(content, int) else folder)
    assert_refused([str(folder), "--from", "huggingface"], folder, tmp_path)


def assert_refused(arguments: list[str], named: Path, folder: Path) -> None:
    """The command raises one line that names the file; nothing new lies in ``folder``."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(SpeechtrainError) as caught:
        export.run([*arguments, "--out", str(folder / "out")])
    one_line(caught.value, named)
    assert caught.value.exit_code
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", b"\x80\x02}q\x00.", b"RIFF....WAVE" * 9])
def test_a_file_of_another_kind(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_weights(str(path))
    one_line(caught.value, path)
    assert_refused([str(path), "--from", "fairseq"], path, tmp_path)


@pytest.mark.parametrize("form", ["speechtrain", "huggingface"])
def test_an_out_that_cannot_be_written(form: str, small: Pretrained, tmp_path: Path) -> None:
    if form == "huggingface":
        pytest.importorskip("transformers")
    wav2vec2_fairseq.write(small, wav2vec2_fairseq.checkpoint_of(small), tmp_path / "c.pt")
    (tmp_path / "file").write_text("x")
    out, to = tmp_path / "file" / "out", ["--to", form] if form == "huggingface" else []
    with pytest.raises(MachineError, match="cannot be written") as caught:
        export.run([str(tmp_path / "c.pt"), "--from", "fairseq", *to, "--out", str(out)])
    one_line(caught.value, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.pt", "file"]


def test_folders_without_weights(tmp_path: Path) -> None:
    for name, error in (("empty", DataError), ("run", RunError), ("step-00000001", RunError)):
        folder = tmp_path / name
        folder.mkdir()
        if name == "run":
            (folder / "checkpoints").mkdir()
        if name.startswith("step"):
            (folder / "checkpoint.json").write_text("{}")
        with pytest.raises(error) as caught:
            read_weights(str(folder))
        one_line(caught.value, folder)


# --- without transformers -------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transformers: neither found nor imported."""
    monkeypatch.setitem(sys.modules, "transformers", None)


_CONVERT = "import sys; from speechtrain.commands.export import main; main()"


@pytest.mark.slow
@needs_transformers
def test_a_torchaudio_that_cannot_be_loaded_is_one_clear_line(small: Pretrained, tmp_path: Path) -> None:
    wav2vec2_fairseq.write(small, wav2vec2_fairseq.checkpoint_of(small), tmp_path / "c.pt")
    (tmp_path / "path" / "torchaudio").mkdir(parents=True)
    (tmp_path / "path" / "torchaudio-2.0.dist-info").mkdir()
    (tmp_path / "path/torchaudio/__init__.py").write_text("raise OSError('Could not load this library')")
    metadata = "Metadata-Version: 2.1\nName: torchaudio\nVersion: 2.0\n"
    (tmp_path / "path/torchaudio-2.0.dist-info/METADATA").write_text(metadata)
    arguments = [str(tmp_path / "c.pt"), "--from", "fairseq", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT, *arguments],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "path")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "Could not load this library" in done.stderr
    assert "--out" not in done.stderr
    assert not (tmp_path / "out").exists()


@needs_transformers
@pytest.mark.parametrize("direction", ["read", "from", "to"])
def test_without_transformers_hugging_face_is_one_clear_line(
    direction: str, small: Pretrained, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, file = hf_folder(small, tmp_path / "hf"), tmp_path / "c.pt"
    wav2vec2_fairseq.write(small, wav2vec2_fairseq.checkpoint_of(small), file)
    request.getfixturevalue("without")
    assert not wav2vec2_hf.is_available()
    before = sorted(tmp_path.rglob("*"))
    out = ["--out", str(tmp_path / "out")]
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: read_weights(str(folder)),
        "from": lambda: export.run([str(folder), "--from", "huggingface", *out]),
        "to": lambda: export.run([str(file), "--from", "fairseq", "--to", "huggingface", *out]),
    }
    with pytest.raises(MachineError, match=r"pip install -e '\.\[interop\]'") as caught:
        calls[direction]()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert sorted(tmp_path.rglob("*")) == before


def test_without_transformers_fairseq_works_unchecked(
    small: Pretrained,
    tmp_path: Path,
    without: None,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "c.pt"
    wav2vec2_fairseq.write(small, wav2vec2_fairseq.checkpoint_of(small), file)
    assert_equal(read_weights(str(file)), small.weights)
    assert "was not checked against Hugging Face's model" in caplog.text
    assert export.run([str(file), "--from", "fairseq", "--out", str(tmp_path / "out")]) == 0
    assert "NOT checked" in capsys.readouterr().out
    assert_equal(read_weights(str(tmp_path / "out")), small.weights)
