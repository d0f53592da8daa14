from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from speechtrain.commands import export
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.errors import ConfigError, DataError
from speechtrain.interop import pretrained, wav2vec2_fairseq, wav2vec2_hf
from speechtrain.interop.pretrained import Pretrained, describe
from speechtrain.interop.weights import initialise, read_weights
from speechtrain.models.wav2vec2 import Wav2Vec2
from speechtrain.nn.masking import SpanMask
from speechtrain.start.compose import compose
from tests.support.tiny_run import untrained

SMALL = (
    *("encoder=wav2vec2_small", "encoder.width=32", "encoder.feed_forward=32", "encoder.layers=1"),
    *("encoder.conv_layers=[[16,10,5],[16,3,2],[16,3,2],[16,3,2],[16,3,2],[16,2,2],[16,2,2]]",),
    "encoder.position_kernel=16",
)


@pytest.fixture(scope="module")
def model() -> Pretrained:
    torch.manual_seed(0)
    thin = [[32, 10, 5], *[[32, 3, 2]] * 4, *[[32, 2, 2]] * 2]
    encoder = Wav2Vec2Encoder(thin, width=48, layers=2, feed_forward=96, heads=4, mask=SpanMask())
    task = Wav2Vec2(encoder, 24, codes=32, code_width=16)
    return describe(task, task.state_dict())


@pytest.fixture
def file(model: Pretrained, tmp_path: Path) -> Path:
    wav2vec2_fairseq.write(model, wav2vec2_fairseq.checkpoint_of(model), tmp_path / "c.pt")
    return tmp_path / "c.pt"


def test_there_and_back(
    model: Pretrained, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    assert export.run([str(file), "--from", "fairseq", "--to", "huggingface", "--out", str(hf)]) == 0
    assert "largest difference" in capsys.readouterr().out
    assert export.run([str(hf), "--from", "huggingface", "--out", str(ours)]) == 0
    for path in (file, hf, ours, hf / "model.safetensors", ours / "model.safetensors"):
        weights = read_weights(str(path))
        assert weights.keys() == model.weights.keys()
        assert all(torch.equal(value, model.weights[name]) for name, value in weights.items())
    assert load_file(ours / "model.safetensors").keys() == model.weights.keys()
    assert yaml.safe_load((ours / "encoder" / "imported.yaml").read_text())["width"] == 48
    assert yaml.safe_load((ours / "model" / "imported.yaml").read_text())["model"]["codes"] == 32


def test_nothing_is_overwritten(file: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("x")
    with pytest.raises(ConfigError, match="--force"):
        export.run([str(file), "--from", "fairseq", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match="both"):
        export.run([str(file), "--out", str(tmp_path / "n")])


def test_models_that_differ_leave_nothing(
    model: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    swapped = pretrained._ATTENTION | {"query": "k_proj", "key": "q_proj"}
    monkeypatch.setattr(pretrained, "_ATTENTION", swapped)
    with pytest.raises(DataError, match="differ by"):
        wav2vec2_hf.write(model, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_an_encoder_is_initialised_whole_or_not_at_all(model: Pretrained) -> None:
    task = torch.nn.ModuleDict({"encoder": model.build()[0], "head": torch.nn.Linear(48, 3)})
    done = initialise(task, model.weights, "x")
    assert done.fresh == ["head.weight", "head.bias"]
    other = {n: v for n, v in model.weights.items() if n != "encoder.norm.bias"}
    with pytest.raises(ConfigError, match=r"init_from=x: encoder\.norm\.bias is missing in it"):
        initialise(task, other, "x")
    small = dict(compose(["encoder=wav2vec2_small"]).encoder)
    del small["_target_"]
    shipped = Wav2Vec2Encoder(**(small | {"mask": None}))
    weights = {f"encoder.{n}": v for n, v in shipped.state_dict().items()}
    with pytest.raises(ConfigError, match="encoder=finetuned takes"):
        initialise(task, weights, "x")


@pytest.mark.slow
@pytest.mark.parametrize("mask", [[], ["encoder.mask=null"]], ids=["masked", "unmasked"])
def test_a_ctc_run_is_exported_with_its_head_or_as_an_encoder(
    mask: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run = untrained(tmp_path / "run", *SMALL, "model=ctc", *mask)
    to = ["--to", "huggingface", "--out"]
    assert export.run([str(run), *to, str(tmp_path / "whole")]) == 0
    assert "CTC model" in capsys.readouterr().out
    assert "'" in transformers.AutoTokenizer.from_pretrained(tmp_path / "whole").get_vocab()
    assert export.run([str(run), "--encoder", *to, str(tmp_path / "encoder")]) == 0
    assert ": encoder, " in capsys.readouterr().out
    assert not (tmp_path / "encoder" / "vocab.json").exists()
