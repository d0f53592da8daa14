"""speechtrain export writes the card of a run, whose code works, and uploads nothing without a token."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.commands import evaluate, export, train
from speechtrain.errors import ConfigError, DataError, MachineError
from tests.support.recordings import write_tone
from tests.support.tiny_run import untrained

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")

TINY = (
    *("model=ctc", "encoder=fastconformer_tiny", "encoder.layers=1", "tokenizer=characters"),
    *("device.threads=1", "trainer.max_steps=2", "data.workers=0"),
    *("data.train.utterances=16", "data.valid.unheard.utterances=4"),
)


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FastConformer with CTC after two steps, which the export writes as Parakeet."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert train.run([*TINY, f"run_dir={run_dir}"]) == 0
    return run_dir


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))


@pytest.mark.slow
def test_write_card_has_the_figures_of_the_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.run([str(trained), "device.threads=1", "--json"]) == 0
    evaluation = tmp_path / "evaluation.json"
    evaluation.write_text(capsys.readouterr().out.splitlines()[-1])
    folder = tmp_path / "model"
    arguments = [str(trained), "--to", "huggingface", "--out", str(folder), "--evaluation", str(evaluation)]
    assert export.run([*arguments, "--licence", "CC-BY-4.0", "--language", "en"]) == 0
    assert f"{folder / 'README.md'}: the model card" in capsys.readouterr().out
    text = (folder / "README.md").read_text()
    card = huggingface_hub.ModelCard(text)
    assert (card.data.license, card.data.language) == ("cc-by-4.0", ["en"])
    result = json.loads((trained / "result.json").read_text())
    for rate in card.data.eval_results:
        stored = result["metrics"][f"{rate.dataset_name}/{rate.metric_type}"]
        assert rate.metric_value == round(100 * stored, 2)
    assert len(card.data.eval_results) == 2
    mistakes = json.loads(evaluation.read_text())["mistakes"]["unheard"]
    low, high = mistakes["wer_interval"]
    assert f"| {100 * low:.2f} to {100 * high:.2f} % | {mistakes['utterances']} |" in text
    data = result["data"]
    assert f"- Data: {data['hours']:.10g} hours, 16 recordings, {data['speakers']} speakers\n" in text


@pytest.mark.slow
def test_write_card_has_three_lines_of_code_that_work(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert export.run([str(trained), "--to", "huggingface", "--out", str(folder)]) == 0
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) == 3
    write_tone(folder / "recording.wav", 1.5)
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("\n")


def test_card_options_need_a_token_before_anything_is_written(tmp_path: Path) -> None:
    run_dir = untrained(tmp_path / "run", *TINY)
    arguments = [str(run_dir), "--to", "huggingface", "--out", str(tmp_path / "model")]
    with pytest.raises(MachineError, match=r"--push team/model needs a token of the hub\. Create one"):
        export.run([*arguments, "--push", "team/model"])
    with pytest.raises(ConfigError, match="--push model: name the owner"):
        export.run([*arguments, "--push", "model"])
    with pytest.raises(ConfigError, match="--licence my own: name an identifier"):
        export.run([*arguments, "--licence", "my own"])
    with pytest.raises(DataError, match="is not the output of speechtrain evaluate"):
        export.run([*arguments, "--evaluation", str(run_dir / "config.yaml")])
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_write_card_of_a_dry_run_prints_the_files_and_the_card(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    arguments = [str(trained), "--to", "huggingface", "--out", str(folder)]
    assert export.run([*arguments, "--push", "team/model", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "the card states no licence. --licence NAME states it" in output
    assert "files: README.md, config.json, " in output
    assert (folder / "README.md").read_text() in output
    assert 'model="team/model"' in output
    assert "uploaded" not in output
