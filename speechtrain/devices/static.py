"""The base class of devices that record graphs, in which no shape depends on data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from speechtrain.compute_policy import STATIC, ComputePolicy
from speechtrain.devices.base import Device
from speechtrain.errors import ConfigError
from speechtrain.optim.optimizer_step import BranchFreeUpdate, Update
from speechtrain.precision import Precision
from speechtrain.trainer_config import TrainerConfig


class StaticDevice(Device):
    """A device whose graphs must all be known before the first update."""

    static_shapes = True

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        policy = super().policy(dtype)
        return replace(
            STATIC,
            mark_step=self.mark_step,
            autocast_dtype=policy.autocast_dtype,
            product_dtype=policy.product_dtype,
        )

    def check_settings(self, settings: TrainerConfig) -> None:
        if settings.checkpoint_layers:
            raise ConfigError(
                f"trainer.checkpoint_layers=true: device={self.name} records graphs, which compute nothing "
                "twice. Set trainer.checkpoint_layers=false"
            )

    def check_parts(self, check: Callable[[], None]) -> None:
        """Compute nothing, because the check would compile graphs. The doctor makes it on the CPU."""

    def update(self, precision: Precision, clip: float) -> Update:
        return BranchFreeUpdate(precision, clip)

    def warm_up(self, rehearse: Callable[[], None]) -> None:
        rehearse()
