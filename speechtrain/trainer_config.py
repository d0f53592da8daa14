"""The typed ``trainer`` node of the config. This module imports no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from speechtrain.errors import ConfigError

# Settings that are None or positive.
_POSITIVE = (
    *("max_steps", "max_epochs", "max_hours", "accumulate", "simulate_world", "log_every", "validate_every"),
    *("save_every", "keep", "max_bad_updates", "timeout_seconds"),
)
_CHOICES = {
    "on_save_error": ("continue", "stop"),
    "on_collapse": ("stop", "warn"),
    "shard": ("none", "parameters"),
}


@dataclass
class TrainerConfig:
    """Settings of the shared trainer. A step is one optimizer update.

    Raises ConfigError for a value out of range.
    """

    max_steps: int | None = None  # optimizer updates
    max_epochs: float | None = None  # epochs of the training set
    # hours of all starts together. If max_steps and max_epochs are null, the updates are planned to fill them
    max_hours: float | None = None
    target: float | None = None  # stop when the task's metric (WER as a fraction) is this low
    accumulate: int = 1  # micro-batches per rank and step
    simulate_world: int | None = None  # micro-batches per step of all ranks. trainer.accumulate follows
    shard: str = "none"  # none (DDP) | parameters (FSDP2: each rank holds a shard of the parameters)
    # true: repeated layers are computed again in backward, which costs time and saves memory
    checkpoint_layers: bool = False
    clip: float = 1.0  # largest global gradient norm. 0 turns clipping off
    ema: float = 0.999  # decay of the weight average that is evaluated and exported. 0 turns it off
    log_every: int = 10  # steps from one log line to the next
    validate_every: int | None = None  # steps from one validation to the next. null: after each epoch
    save_every: int | None = None  # steps from one checkpoint to the next. null: after each validation
    keep: int = 2  # number of the newest checkpoints that are kept, in addition to the best
    on_save_error: str = "continue"  # the response to a checkpoint that cannot be written: continue | stop
    on_collapse: str = "stop"  # the response to a collapse that the task detects: stop | warn
    # more graph compilations end the run, on a device that counts them. null: no limit
    max_graphs: int | None = None
    max_bad_updates: int = 10  # number of non-finite updates in a row that ends the run
    timeout_seconds: float = 1800.0  # a rank without progress for longer ends the run, in seconds
    profile: str = ""  # A:B writes a torch profile of steps A to B. Empty: none

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value}: it must be above 0")
        if not 0 <= self.ema < 1:
            raise ConfigError(f"ema={self.ema}: it must be at least 0 (off) and below 1")
        for name in ("clip", "target"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}={value}: it must be at least 0")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)}: choose {' or '.join(choices)}")

    def require_end(self) -> None:
        """Raise ConfigError if no limit and no target ends the run."""
        if (self.max_steps, self.max_epochs, self.max_hours, self.target) == (None, None, None, None):
            raise ConfigError("nothing ends this run. Set trainer.max_steps, max_epochs, max_hours or target")

    def divide_micro_batches(self, world_size: int) -> None:
        """Divide the ``simulate_world`` micro-batches of a step among the ranks, by setting ``accumulate``.

        Raises ConfigError if ``world_size`` does not divide them.
        """
        if self.simulate_world is None:
            return
        if self.simulate_world % world_size:
            raise ConfigError(
                f"trainer.simulate_world={self.simulate_world} is not a multiple of world_size={world_size}"
            )
        self.accumulate = self.simulate_world // world_size


def is_planned_by_time(config: TrainerConfig) -> bool:
    """Return whether only ``max_hours`` limits the run, so that its updates are planned to fill this time."""
    return config.max_hours is not None and config.max_steps is None and config.max_epochs is None


def planned_steps(config: TrainerConfig, steps_per_epoch: float) -> int | None:
    """Return the updates within the limits by steps and epochs, or None if the config has no such limit."""
    limits = []
    if config.max_steps is not None:
        limits.append(config.max_steps)
    if config.max_epochs is not None:
        limits.append(math.ceil(config.max_epochs * steps_per_epoch))
    return min(limits, default=None)


def profile_steps(spec: str) -> tuple[int, int]:
    """Return the first and the last step that ``spec``, the value of ``trainer.profile``, names.

    Both steps are profiled, and steps are counted from 1. An empty ``spec`` gives (0, 0). Raises ConfigError
    for a malformed text.
    """
    if not spec:
        return 0, 0
    match = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", spec)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(
            f"trainer.profile={spec}: write it as A:B, the first and the last step, such as 10:12"
        )
    return int(match[1]), int(match[2])
