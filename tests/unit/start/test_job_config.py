"""Tests of ``speechtrain.compose``, also in a program that uses Hydra itself."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import getbase
from omegaconf import OmegaConf

import speechtrain
from speechtrain.commands import train
from speechtrain.errors import SpeechtrainError

SET = ["recipe=intel_rnnt", "optimizer=lamb", "data.train=a.jsonl", "data.valid.dev=b.jsonl"]


def test_the_config_is_that_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = speechtrain.compose(SET)
    assert capsys.readouterr() == ("", "")
    assert train.run([*SET, f"run_dir={config['run_dir']}", "--cfg", "job", "--resolve"]) == 0
    shown = OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out))
    assert isinstance(shown, dict)
    assert config["data"].pop("train") == f"{tmp_path}/a.jsonl"
    shown["data"].pop("train")
    assert config["data"].pop("valid") == {"dev": f"{tmp_path}/b.jsonl"}
    shown["data"].pop("valid")
    assert config == shown
    assert Path(config["run_dir"]).parent == tmp_path / "runs"
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_uses_hydra_keeps_its_state(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults:\n  - schema\n  - _self_\n  - model: small\nsize: 3\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("width: 2\n")
    store = ConfigStore.instance()
    original = dict(store.repo)
    store.repo = {name: node for name, node in original.items() if name != "device"}  # of an earlier command
    store.store(name="schema", node={"size": 1})
    try:
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.2", job_name="host"):
            before = (store.repo, getbase(), JobRuntime.instance().get("name"))
            main = GlobalHydra.instance()
            assert speechtrain.compose(["recipe=demo"])["model"]["_target_"].endswith("RNNT")
            with pytest.raises(SpeechtrainError):
                speechtrain.compose(["recipe=none_such"])
            assert GlobalHydra.instance() is main
            assert (store.repo, getbase(), JobRuntime.instance().get("name")) == before
            assert "device" not in store.repo
            assert hydra.compose("config") == {"size": 3, "model": {"width": 2}}
    finally:
        store.repo = original
