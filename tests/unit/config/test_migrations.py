"""Configs and weights of earlier formats, one format number at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speechtrain.checkpoint import migrations as weight_migrations
from speechtrain.checkpoint.migrations import migrate_names
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.config import migrations
from speechtrain.config.build import build_encoder, build_model, build_tokenizer
from speechtrain.config.migrations import FORMAT, migrate
from speechtrain.config.resolved import load
from speechtrain.errors import ConfigError, RunError
from speechtrain.runs.stored_config import config_at
from tests.support.checkpoints import restore

OLD_RUN = Path(__file__).resolve().parents[2] / "golden" / "old_runs" / "0.1.0" / "run"


def test_migrate_leaves_the_present_format_alone() -> None:
    present = {"device": {"_target_": "d", "lstm": "mine"}}
    assert migrate({"format": FORMAT, **present}, "config.yaml") == present


UNKNOWN_FORMATS: list[dict[str, Any]] = [
    *({}, {"format": 1}, {"format": 2}, {"format": "3"}, {"format": True}, {"format": 3.0}),
    *({"format": FORMAT + 1}, {"format": 10**500}),
]


@pytest.mark.parametrize("number", UNKNOWN_FORMATS)
def test_migrate_refuses_another_format(number: dict[str, Any]) -> None:
    says = (
        r"c\.yaml has format .*, which this version does not read\. Use the version that run\.json names, or"
    )
    with pytest.raises(ConfigError, match=says) as caught:
        migrate({**number, "seed": 1}, "c.yaml")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_migrate_calls_one_function_for_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_4(config: dict[str, Any]) -> None:
        config["device"] = {"pin": config.pop("pin")}

    def to_5(config: dict[str, Any]) -> None:
        config["device"]["cores"] = config["device"].pop("pin")

    monkeypatch.setattr(migrations, "FORMAT", 5)
    monkeypatch.setattr(migrations, "_STEPS", (to_4, to_5))
    assert migrate({"format": 3, "pin": 2}, "c.yaml") == {"device": {"cores": 2}}
    assert migrate({"format": 4, "device": {"pin": 2}}, "c.yaml") == {"device": {"cores": 2}}
    assert migrate({"format": 5, "device": {"pin": 2}}, "c.yaml") == {"device": {"pin": 2}}


def test_a_stored_run_of_an_earlier_format_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored config is written as if ``trainer.clip`` had another name in its format."""

    def rename_clip(config: dict[str, Any]) -> None:
        config["trainer"]["clip"] = config["trainer"].pop("largest_norm")

    config = load(OLD_RUN / "config.yaml")
    path = tmp_path / "config.yaml"
    _, _, content = (OLD_RUN / "config.yaml").read_text().partition("\n")
    assert "\n  clip: " in content
    path.write_text(content.replace("\n  clip: ", "\n  largest_norm: "))
    with pytest.raises(RunError, match="largest_norm"):
        load(path)
    monkeypatch.setattr(migrations, "FORMAT", FORMAT + 1)
    monkeypatch.setattr(migrations, "_STEPS", (rename_clip,))
    assert load(path) == config


# --- weights ----------------------------------------------------------------------------------------


def test_the_order_of_parameters_is_that_of_the_old_run() -> None:
    """An optimizer's state is kept by the parameter's number, so the order is a stored name, too."""
    config = config_at(OLD_RUN)
    with torch.device("meta"):
        task = build_model(config, build_tokenizer(config), build_encoder(config))
    (checkpoint,) = (OLD_RUN / "checkpoints").glob("step-*")
    saved = torch.load(checkpoint / "state.pt", weights_only=True)
    assert list(saved["task"]) == list(task.state_dict())
    shapes = [tuple(value.shape) for value in task.parameters()]
    states = saved["optimizer"]["state"]
    assert [tuple(states[number]["exp_avg"].shape) for number in sorted(states)] == shapes


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format in which ``old.`` became ``middle.``, and one in which ``middle.`` became ``new.``."""
    steps = (lambda name: name.replace("old.", "middle."), lambda name: name.replace("middle.", "new."))
    monkeypatch.setattr(weight_migrations, "_STEPS", steps)


def test_migrate_names_keeps_a_name_that_the_model_has(renamed: None) -> None:
    known = {"old.weight", "new.bias", "other"}
    saved = {"old.weight": 1, "old.bias": 2, "other": 3, "old.unknown": 4}
    assert migrate_names(saved, known) == {"old.weight": 1, "new.bias": 2, "other": 3, "old.unknown": 4}


def test_a_checkpoint_with_old_names_is_restored(tmp_path: Path, renamed: None) -> None:
    old = torch.nn.ModuleDict({"old": torch.nn.Linear(2, 3)})
    new = torch.nn.ModuleDict({"new": torch.nn.Linear(2, 3)})
    Checkpointer(tmp_path).save(1, {"task": old}, old.state_dict())
    assert restore(Checkpointer(tmp_path), {"task": new}) == 1
    assert torch.equal(new["new"].weight, old["old"].weight)
