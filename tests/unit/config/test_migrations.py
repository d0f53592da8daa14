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
from speechtrain.config.migrations import FORMAT, migrate, migrate_limits
from speechtrain.errors import ConfigError
from speechtrain.runs.stored_config import config_at
from speechtrain.trainer_config import TrainerConfig

OLD_RUN = Path(__file__).resolve().parents[2] / "golden" / "old_runs" / "rnnt" / "interrupted"


def test_migrate_leaves_the_present_format_alone() -> None:
    present = {"device": {"_target_": "d", "lstm": "mine"}}
    assert migrate({"format": FORMAT, **present}, "config.yaml") == present


@pytest.mark.parametrize("number", [{}, {"format": 1}, {"format": 2}, {"format": "3"}, {"format": True}])
def test_migrate_refuses_runs_before_the_first_release(number: dict[str, Any]) -> None:
    says = r"c\.yaml has format .*\. Runs made before 0\.1\.0 are not read\. Finish .* the commit that git"
    with pytest.raises(ConfigError, match=says) as caught:
        migrate({**number, "seed": 1}, "c.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [99, 10**500])
def test_migrate_refuses_a_later_format(number: int) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml has a format above 3\. Use the later release"):
        migrate({"format": number}, "c.yaml")


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


def test_migrate_limits_gives_a_missing_key_its_default() -> None:
    limits = migrate_limits({"max_steps": 7})
    assert limits["max_steps"] == 7
    assert limits["keep"] == TrainerConfig.keep
    assert migrate_limits(None) is None


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
    assert Checkpointer(tmp_path).restore({"task": new}) == 1
    assert torch.equal(new["new"].weight, old["old"].weight)
