"""A device: the CPU with the default settings of torch."""

import torch

from speechtrain.batch import Batch
from speechtrain.devices.base import Device


class PlainCPU(Device):
    """Torch on the CPU, in fp32. The device sets neither the number of threads nor the cores."""

    name = "cpu"
    on_host = True

    def open(self, local_rank: int = 0) -> None:
        """The CPU needs no preparation."""

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def move(self, batch: Batch) -> Batch:
        return batch
