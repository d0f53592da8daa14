"""A device: the CPU with torch's own settings."""

import torch

from speechtrain.batch import Batch
from speechtrain.devices.base import Device


class PlainCPU(Device):
    """Torch on the CPU, in fp32, with no thread or core of its own choice."""

    name = "cpu"
    on_host = True

    def open(self, local_rank: int) -> None:
        """There is nothing to claim."""

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def move(self, batch: Batch) -> Batch:
        return batch
