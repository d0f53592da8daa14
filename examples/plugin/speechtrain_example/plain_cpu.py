"""A device: the CPU with torch's own settings."""

import resource

import torch

from speechtrain.batch import Batch
from speechtrain.devices.base import Device


class PlainCPU(Device):
    """Torch on the CPU, in fp32, with no thread or core of its own choice."""

    name = "cpu"
    on_host = True

    def environment(self, processes: int) -> dict[str, str]:
        return {}

    def open(self, local_rank: int) -> None:
        """There is nothing to claim."""

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def move(self, batch: Batch) -> Batch:
        return batch

    def memory(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
