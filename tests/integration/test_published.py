"""recipe=finetune init_from=hf:…: a published recogniser with its tokenizer, continued without its files."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file

from .conftest import Command

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LETTERS = " " + string.ascii_lowercase


def published(family: str, folder: Path, **attention: int) -> Path:
    """Write a random tiny transducer of ``family`` to ``folder``, as publishers save one."""
    encoder = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
    encoder |= {"num_mel_bins": 16, "subsampling_factor": 4, "subsampling_conv_channels": 4}
    sizes = {"vocab_size": len(LETTERS) + 1, "blank_token_id": len(LETTERS), "decoder_hidden_size": 16}
    model_class = getattr(transformers, f"{family}ForRNNT")
    config = model_class.config_class(encoder_config=encoder | attention, num_decoder_layers=1, **sizes)
    model_class(config).save_pretrained(folder)
    vocabulary = {symbol: label for label, symbol in enumerate(LETTERS)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.ParakeetTokenizer(tokenizer_object=library, pad_token="<blank>")
    extractor = getattr(transformers, f"{family}FeatureExtractor")(feature_size=16)
    getattr(transformers, f"{family}Processor")(extractor, tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return published("Parakeet", tmp_path / "published")


def command(tmp_path: Path, environment: dict[str, str], name: str, *overrides: str) -> Command:
    made = Command(tmp_path / name, environment, [])
    made.arguments = [
        *("recipe=finetune", "data=digits", "data.train.utterances=16", "data.valid.unheard.utterances=2"),
        *("data.workers=0", "device.threads=1", "device.autotune=false", "trainer.max_hours=null"),
        *(f"init_from=hf:{tmp_path / 'published'}", f"run_dir={tmp_path / name}", *overrides),
    ]
    return made


def test_the_published_tokenizer_and_settings_are_kept(
    model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    first = command(
        tmp_path, environment, "run", "model.freeze_encoder_steps=1", "model.encoder_lr_scale=0.1"
    )
    done = first.run_inline("trainer.max_steps=1")
    assert done.returncode == 0, done.stderr
    (start,) = first.events("start")
    assert start["fresh"] == 0
    config = OmegaConf.load(first.run_dir / "config.yaml")
    assert config.init_from == f"hf:{model}"
    assert config.tokenizer.labels == len(LETTERS)
    assert (first.run_dir / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    before = load_file(model / "model.safetensors")
    after = load_file(first.run_dir / "checkpoints/step-00000001/model.safetensors")
    name = "encoder.layers.0.self_attn.q_proj.weight"
    assert after[name].equal(before[name]), "frozen"
    assert not after["joint.output.weight"].equal(before["joint.head.weight"])
    shutil.rmtree(model)
    done = first.run_inline("trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert first.result()["steps"] == 2
    exported = first.tool("export", str(first.run_dir), "--to", "huggingface", "--out", str(tmp_path / "out"))
    assert "largest difference" in exported.stdout, exported.stderr
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "parakeet_rnnt"
    missing = command(tmp_path, environment, "other").run("trainer.max_steps=1")
    assert missing.returncode == 3
    assert len(missing.stderr.splitlines()) == 1
    assert not (tmp_path / "other").exists()


def test_a_streaming_recogniser_is_continued_and_written(tmp_path: Path, environment: dict[str, str]) -> None:
    if not hasattr(transformers, "NemotronAsrStreamingForRNNT"):
        pytest.skip("this transformers has no streaming FastConformer")
    published("NemotronAsrStreaming", tmp_path / "published", sliding_window=15)
    run = command(tmp_path, environment, "run")
    done = run.run_inline("trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    (start,) = run.events("start")
    assert start["fresh"] == 0
    config = OmegaConf.load(run.run_dir / "config.yaml")
    assert config.encoder.contexts == [[14, 14, 0], [14, 7, 0], [14, 2, 0], [14, 1, 0]]
    assert config.decoder.max_symbols_per_step == 10
    exported = run.tool("export", str(run.run_dir), "--to", "huggingface", "--out", str(tmp_path / "out"))
    assert "NemotronAsrStreaming, all of the model" in exported.stdout, exported.stderr
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["model_type"] == "nemotron_asr_streaming"
    assert written["encoder_config"]["sliding_window"] == 15
