"""The model card: accepted by the hub's own classes, with the figures of the run, whatever its texts are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from speechtrain.errors import ConfigError, DataError
from speechtrain.report.card import CardOptions, card, read_evaluation
from speechtrain.report.run import read_run
from speechtrain.run_directory import CheckpointManifest, write_manifest

huggingface_hub = pytest.importorskip("huggingface_hub")

METRICS = {"wer": 0.1234567, "cer": 0.05, "unheard/wer": 0.1234567, "unheard/cer": 0.05, "unheard/loss": 3.0}
CONFIG: dict[str, Any] = {
    "model": {"_target_": "speechtrain.models.ctc.CTC"},
    "encoder": {"_target_": "speechtrain.encoders.fastconformer.FastConformer"},
    "decoder": {"_target_": "speechtrain.decoding.greedy.Greedy"},
    "final_decoder": {"_target_": "speechtrain.decoding.ctc_beam.CTCBeam"},
    "tokenizer": {"normaliser": "unicode"},
    "data": {"sample_rate": 8000, "max_seconds": 20.0, "train": {"a": {"path": "a", "language": "no"}}},
}
EVIL = "a\n---\nlicense: mit\n```\n| <img src=x> [b](c) `d` \x1b[31m\u2028\u202e"


@dataclass(frozen=True)
class Export:
    """A run that is written by hand, and the folder of its export."""

    run_dir: Path
    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.run_dir / "checkpoints" / "step-00000006"

    def card(self, **options: Any) -> str:
        return card(read_run(self.run_dir), self.checkpoint, self.folder, CardOptions(**options))


def write(
    folder: Path,
    metrics: dict[str, float | None] = METRICS,
    architecture: str = "ParakeetForCTC",
    argv: tuple[str, ...] = ("model=ctc", "data.train=corpus"),
    config: dict[str, Any] = CONFIG,
) -> Export:
    export = Export(folder / "run", folder / "model")
    export.checkpoint.mkdir(parents=True)
    export.folder.mkdir()
    (export.run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    data = {"recordings": 1200, "hours": 3.25, "speakers": 7, "digest": "0"}
    result = {"status": "finished", "steps": 6, "wall_s": 3725.0, "metrics": metrics, "data": data}
    (export.run_dir / "result.json").write_text(json.dumps(result))
    about = {
        "overrides": [],
        "argv": argv,
        "versions": {"torch": "2.13.0"},
        "git": {"commit": "c0ffee"},
        "host": "secret-host",
        "device": "cpu",
    }
    (export.run_dir / "run.json").write_text(json.dumps(about))
    device = {"device": "cpu", "chip": "Xeon <b>", "precision": "fp32", "policy": {}}
    (export.run_dir / "device.json").write_text(json.dumps(device))
    manifest = CheckpointManifest(1, 6, {}, metric=metrics.get("wer"), metrics=metrics)
    write_manifest(export.checkpoint, manifest)
    (export.folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return export


def evaluation(path: Path, export: Export, **content: Any) -> Path:
    """Write the output of speechtrain evaluate --json."""
    mistakes = {"utterances": 40, "wer_interval": [0.1, 0.15], "cer_interval": [0.04, 0.06]}
    summary = {
        "checkpoint": str(export.checkpoint),
        "decoder": "Greedy",
        "overrides": [],
        "metrics": {"unheard": {"wer": 0.1234567, "cer": 0.05, "loss": 3.0}},
        "mistakes": {"unheard": mistakes},
    }
    path.write_text(json.dumps(summary | content))
    return path


def test_card_is_accepted_by_the_hub_with_the_figures_of_the_result(tmp_path: Path) -> None:
    export = write(tmp_path)
    text = export.card(name="team/model", licence="cc-by-4.0", languages=("en", "mi"))
    data = huggingface_hub.ModelCard(text).data
    assert data.license == "cc-by-4.0"
    assert data.language == ["en", "mi"]
    assert (data.library_name, data.pipeline_tag) == ("transformers", "automatic-speech-recognition")
    stored = json.loads((export.run_dir / "result.json").read_text())["metrics"]
    figures = {f"{result.dataset_name}/{result.metric_type}": result for result in data.eval_results}
    assert figures.keys() == {"unheard/wer", "unheard/cer"}
    for name, result in figures.items():
        assert result.metric_value == round(100 * stored[name], 2)
        assert result.metric_name.endswith("Greedy")
    index, results = huggingface_hub.repocard_data.model_index_to_eval_results(data.to_dict()["model-index"])
    assert (index, len(results)) == ("model", 2)
    assert "| unheard | Greedy | WER | 12.35 % | not measured | not stored |" in text
    assert "3.25 hours, 1,200 recordings, 7 speakers" in text
    assert "1:02:05, 6 updates" in text
    assert f"- Run: {export.run_dir.name}, commit c0ffee of speechtrain\n- Software" in text
    assert r"cpu, Xeon \<b\>" in text
    assert "    speechtrain train model=ctc data.train=corpus\n" in text
    assert "8000 samples per second" in text
    assert "secret-host" not in text


def test_card_without_options_states_no_licence_and_the_languages_of_the_sets(tmp_path: Path) -> None:
    text = write(tmp_path).card()
    data = huggingface_hub.ModelCard(text).data
    assert data.license == "unknown"
    assert data.language == ["no"]
    assert "Its licence is not stated." in text
    assert 'model="."' in text


def test_card_of_evaluations_has_intervals_and_decoders(tmp_path: Path) -> None:
    export = write(tmp_path, {**METRICS, "final/unheard/wer": 0.11})
    greedy = read_evaluation(evaluation(tmp_path / "a", export), export.checkpoint)
    beam_content = {"decoder": "CTCBeam", "overrides": ["decoder=ctc_beam"]}
    beam = read_evaluation(evaluation(tmp_path / "b", export, **beam_content), export.checkpoint)
    text = export.card(evaluated_rates=(*greedy, *beam))
    rows = re.findall(r"^\| unheard .*", text, re.MULTILINE)
    assert rows == [
        "| unheard | Greedy | WER | 12.35 % | 10.00 to 15.00 % | 40 |",
        "| unheard | Greedy | CER | 5.00 % | 4.00 to 6.00 % | 40 |",
        "| unheard | CTCBeam | WER | 11.00 % | not measured | not stored |",
        r"| unheard | CTCBeam decoder=ctc\_beam | WER | 12.35 % | 10.00 to 15.00 % | 40 |",
        r"| unheard | CTCBeam decoder=ctc\_beam | CER | 5.00 % | 4.00 to 6.00 % | 40 |",
    ]
    assert len(huggingface_hub.ModelCard(text).data.eval_results) == 5


@pytest.mark.parametrize(
    "content",
    [
        {"checkpoint": 3},
        {"metrics": []},
        {"mistakes": 0},
        {"metrics": {"a": {"wer": "x"}}},
        {"decoder": None},
    ],
)
def test_read_evaluation_refuses_another_file(tmp_path: Path, content: dict[str, Any]) -> None:
    export = write(tmp_path)
    with pytest.raises(DataError, match="is not the output of speechtrain evaluate"):
        read_evaluation(evaluation(tmp_path / "a", export, **content), export.checkpoint)
    with pytest.raises(DataError, match="is not the output of speechtrain evaluate"):
        read_evaluation(tmp_path / "missing", export.checkpoint)


def test_read_evaluation_refuses_another_checkpoint(tmp_path: Path) -> None:
    export = write(tmp_path)
    path = evaluation(tmp_path / "a", export)
    with pytest.raises(DataError, match=r"step-00000006, and the export is of .*step-00000005"):
        read_evaluation(path, export.checkpoint.with_name("step-00000005"))


def test_card_of_a_part_of_the_model_has_no_rates(tmp_path: Path) -> None:
    for name in ("Wav2Vec2Model", "ParakeetForRNNT"):
        text = write(tmp_path / name, architecture=name).card()
        assert "12.35" not in text
        assert "This folder holds a part of the trained model" in text
        assert "model-index" not in huggingface_hub.ModelCard(text).data.to_dict()
    assert huggingface_hub.ModelCard(text).data.pipeline_tag == "automatic-speech-recognition"


def test_card_shows_no_secret(tmp_path: Path) -> None:
    text = write(tmp_path, argv=("model=ctc", "tracking.wandb.api_key=abc123")).card()
    assert "abc123" not in text
    assert "holds a secret" in text


@pytest.mark.parametrize("text", [EVIL, "---", "", "\r---\r", "# x", "no", "a: b", "\x85---\x85", "{{ 1 }}"])
def test_card_keeps_the_texts_of_a_stranger_in_their_places(tmp_path: Path, text: str) -> None:
    config = {**CONFIG, "decoder": {"_target_": f"a.{text}"}, "tokenizer": {"normaliser": text}}
    export = write(tmp_path, {f"{text}/wer": 0.5, "x/wer": 0.25}, argv=(text, f"a={text}"), config=config)
    harmless = write(tmp_path / "harmless", {"a/wer": 0.5, "x/wer": 0.25})
    content, harmless_content = export.card(), harmless.card()
    data = huggingface_hub.ModelCard(content).data
    assert data.license == "unknown"
    assert {"x"} <= {result.dataset_name for result in data.eval_results}
    headings = re.compile(r"^(?:#.*|```.*|---)$", re.MULTILINE)
    assert headings.findall(content) == headings.findall(harmless_content)
    assert not {"\x1b", "\u202e", "\u2028", "\r", "\x85"} & set(content)
    body = content.partition("\n---\n")[2]
    prose = re.sub(r"(?m)^    speechtrain train .*$|^```python[^`]*```$", "", body)  # code is literal
    prose = prose.replace("`recording.wav`", "")
    assert not re.search(r"(?<!\\)[<`]", prose)
    assert re.findall(r"(?<!\\)\]\(.*?\)", prose) == ["](https://github.com/speechtrain/speechtrain)"]
    for row in re.findall(r"^\| .*", prose, re.MULTILINE):
        assert len(re.findall(r"(?<!\\)\|", row)) == 7


@pytest.mark.parametrize("licence", ["", "Apache 2.0", "mit\nx: y", "-"])
def test_card_options_refuse_a_licence(licence: str) -> None:
    with pytest.raises(ConfigError, match="--licence"):
        CardOptions(licence=licence)


@pytest.mark.parametrize("language", ["english", "EN", "e", "en\n", ""])
def test_card_options_refuse_a_language(language: str) -> None:
    with pytest.raises(ConfigError, match="--language"):
        CardOptions(languages=(language,))
