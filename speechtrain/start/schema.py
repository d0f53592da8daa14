"""The root of the config as a dataclass, and the interface of each config group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from speechtrain.trainer_config import TrainerConfig


@dataclass
class Config:
    """The root of the config: typed keys, and groups with the constructor parameters of a class as keys."""

    world_size: int = 1
    seed: int = 1
    run_dir: str | None = None
    resume: str = "auto"
    accept_code: bool = False
    dry_run: bool = False
    init_from: str | None = None
    # ``scratch`` or ``finetune``: keys that are not set follow from the data (start/sizing.py). The stored
    # config has a text instead, which lists these keys and their values.
    from_data: str | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: Any = MISSING
    encoder: Any = MISSING
    tokenizer: Any = MISSING
    data: Any = MISSING
    augment: Any = MISSING
    device: Any = MISSING
    precision: Any = MISSING
    launcher: Any = MISSING
    optimizer: Any = MISSING
    schedule: Any = MISSING
    tracking: Any = MISSING
    decoder: Any = MISSING
    final_decoder: Any = MISSING


INTERFACES = {
    "model": "speechtrain.task.Task",
    "encoder": "speechtrain.encoders.base.Encoder",
    "tokenizer": "speechtrain.text.vocabulary.Tokenizer",
    "data": "speechtrain.data.base.DataModule",
    "augment": "speechtrain.features.augment.Augment",
    "device": "speechtrain.devices.base.Device",
    "precision": "speechtrain.precision.Precision",
    "launcher": "speechtrain.launch.launcher.Launcher",
    "optimizer": "torch.optim.Optimizer",
    "schedule": "speechtrain.optim.schedules.Schedule",
    "tracking": "speechtrain.tracking.base.Tracker",
    "decoder": "speechtrain.decoding.base.Decoder",
    "final_decoder": "speechtrain.decoding.base.Decoder",
}
"""The interface that the class of each group implements. It is a text, so that nothing is imported."""

INJECTED = {
    "model": {"tokenizer", "encoder"},
    "encoder": {"augment"},
    "data": {"tokenizer", "footprint", "normalise", "initial_run", "stop_requested"},
    "optimizer": {"params"},
    "schedule": {"steps_per_epoch", "planned_steps"},
}
"""Constructor parameters of each group that ``start.build`` injects. A config cannot contain them."""

NESTED_GROUPS = {"prediction": "model.prediction"}
"""Groups whose choice is a node inside another group, with the key of this node."""

BORROWED_GROUPS = {"final_decoder": "decoder@final_decoder"}
"""Groups without choices of their own, with the group whose choices they use, in Hydra's syntax."""
