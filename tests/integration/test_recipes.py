"""Each recipe of a reference system trains on its corpus as it lies in DATASET_DIR, with a small network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from speechtrain.commands import prepare, train
from speechtrain.data.corpora.digits import Digits
from speechtrain.start.compose import compose
from speechtrain.text.vocabulary import train_sentencepiece
from tests.support import corpora

TRAINING = ("train-clean-100", "train-clean-360", "train-other-500")
COMMON = (
    *("device=cpu", "precision=fp32", "device.threads=1", "data.workers=0"),
    *("launcher=local", "launcher.inline=true", "trainer.max_steps=2", "trainer.max_epochs=null"),
)
LSTM = (
    *("encoder.hidden=16", "model.prediction.hidden=16", "model.prediction.embedding=8"),
    *("model.joint.hidden=16", "decoder.max_symbols=20"),
)
CONVOLUTIONS = ("encoder.filters=16", "encoder.repeat=1", "encoder.blocks=[{stride: 2}, {stride: 2}]")
CONTEXTNET = (
    *CONVOLUTIONS,
    *("model.prediction.hidden=16", "model.prediction.embedding=8", "model.joint.hidden=16"),
    *("decoder.max_symbols=20", "final_decoder.width=2"),
)
WAV2VEC2 = (
    "encoder.conv_layers=[[8,10,5],[8,3,2],[8,3,2],[8,3,2],[8,3,2],[8,2,2],[8,2,2]]",
    *("encoder.width=16", "encoder.layers=1", "encoder.feed_forward=32", "encoder.heads=2"),
    *("encoder.position_kernel=4", "encoder.position_groups=2", "model.final_width=8"),
    *("model.code_width=8", "model.codes=4", "data.min_seconds=0.1", "data.crop_seconds=0.8"),
    *("data.hold_out=0.3", "trainer.simulate_world=2"),
)
RECIPES = {
    "intel_rnnt": (*LSTM, "trainer.simulate_world=2"),
    "aidk_rnnt": LSTM,
    "mlperf_2048": (*LSTM, "trainer.simulate_world=2"),
    "mlperf_3072": (*LSTM, "trainer.simulate_world=2"),
    "gaudi_wav2vec2": WAV2VEC2,
    "nemo_quartznet": CONVOLUTIONS,
    "contextnet_librispeech": CONTEXTNET,
    "contextnet_common_voice": CONTEXTNET,
    "contextnet_tedlium": CONTEXTNET,
    "contextnet_switchboard": CONTEXTNET,
    "contextnet_dummy": (*CONTEXTNET, "data.train.utterances=16", "data.valid.unheard.utterances=4"),
}


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A DATASET_DIR with a few digits in the layout of each corpus, their manifests and tokenizers."""
    folder = tmp_path_factory.mktemp("data")
    texts = [utterance.text for utterance in Digits("train", 200).all_utterances()]
    parts = (*TRAINING, "dev-clean", "dev-other")
    corpora.librispeech(folder / "librispeech", parts)
    for name in ("common_voice", "tedlium3", "switchboard"):
        corpora.CORPORA[name](folder / name)
    for name in ("librispeech", "common_voice", "tedlium3", "switchboard"):
        out = folder / "manifests" / name
        out.mkdir(parents=True)
        train_sentencepiece(texts, out / "tokenizer.model", size=24)
        train_sentencepiece(texts, out / "bpe1024.model", "bpe", size=24)
        assert prepare.run([f"corpus={name}", f"root={folder / name}", f"out={out}"]) == 0
    sources = [f"{folder}/manifests/librispeech/{part}.jsonl.gz" for part in TRAINING]
    copies = folder / "manifests" / "librispeech_sp10pcnt"
    assert prepare.run(["perturb", *sources, "--out", str(copies)]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_DIR", str(folder))
        patch.setenv("SPEECHTRAIN_CACHE", str(folder / "cache"))
        yield folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_its_corpus(name: str, dataset_dir: Path, tmp_path: Path) -> None:
    overrides = [f"recipe={name}", *COMMON, *RECIPES[name]]
    if "contextnet" in name:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing (extra 'memory')")
    assert train.run([*overrides, f"run_dir={tmp_path / 'run'}"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 2)
    config = compose(overrides)
    key = "loss" if name == "gaudi_wav2vec2" else "wer"
    for evaluation_set in config.data.valid or ["held_out"]:
        assert math.isfinite(result["metrics"][f"{evaluation_set}/{key}"])
        is_scored_twice = f"final/{evaluation_set}/{key}" in result["metrics"]
        assert is_scored_twice == name.startswith("contextnet_")
