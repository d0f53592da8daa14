"""The CUDA device without a GPU: its policy, which GPU a rank takes, and what it sets for torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from speechtrain.compute_policy import apply_policy
from speechtrain.devices.cuda import CUDA
from speechtrain.errors import MachineError


@pytest.fixture
def matmul() -> Iterator[None]:
    """Torch's settings of fp32 products, restored afterwards."""
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.allow_tf32 = kept[1]


@pytest.mark.usefixtures("matmul")
@pytest.mark.parametrize(
    ("tf32", "dtype", "is_on"),
    [
        (None, torch.float32, False),
        (None, torch.bfloat16, True),
        (None, torch.float16, True),
        (True, torch.float32, True),
        (False, torch.bfloat16, False),
    ],
)
def test_tf32_is_on_unless_precision_is_fp32(tf32: bool | None, dtype: torch.dtype, is_on: bool) -> None:
    torch.backends.cudnn.allow_tf32 = not is_on
    apply_policy(nn.Identity(), CUDA(tf32=tf32).policy(dtype))
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == is_on


def test_its_sizes_keep_the_number_of_launches_low() -> None:
    policy = CUDA().policy(torch.bfloat16)
    assert (policy.lattice_cells, policy.logit_bytes, policy.feature_frames) == (65536, 4 << 30, 0)


def opened(monkeypatch: pytest.MonkeyPatch, local_rank: int, visible: int, **environ: str) -> int:
    """The GPU that a rank takes."""
    for name in ("SLURM_LOCALID", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None: zeros(*shape))
    CUDA().open(local_rank)
    return taken[0]


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "h100:1", "CUDA_VISIBLE_DEVICES": "0"},
        {"SLURM_LOCALID": "3", "SLURM_TRES_PER_TASK": "cpu=8,gres/gpu:1"},
        {"SLURM_LOCALID": "3", "SLURM_TRES_PER_TASK": "gres/gpu=h100:1,cpu:16"},
        {"SLURM_LOCALID": "3", "SLURM_GPU_BIND": "verbose,single:1"},
        {"SLURM_LOCALID": "3", "SLURM_GPU_BIND": "per_task:1"},
        {"CUDA_VISIBLE_DEVICES": "3"},
    ],
)
def test_a_rank_with_a_gpu_of_its_own_takes_the_first(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    assert opened(monkeypatch, 3, 1, **environ) == 0


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_LOCALID": "3"},  # four tasks of srun share the job's GPU
        {"SLURM_LOCALID": "0", "SLURM_GPUS_PER_TASK": "1"},  # one task that started four ranks
        {"SLURM_LOCALID": "3", "SLURM_GPU_BIND": "single:2"},  # two tasks for each GPU
        {"SLURM_LOCALID": "3", "SLURM_GPU_BIND": "none"},
        {"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "2"},
        {"CUDA_VISIBLE_DEVICES": "0"},
    ],
)
def test_ranks_that_see_the_same_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    with pytest.raises(MachineError, match="4 processes on this host, which has 1 GPU"):
        opened(monkeypatch, 3, 1, **environ)


def test_a_rank_that_sees_all_gpus_takes_that_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(monkeypatch, 3, 4) == 3
    unbound = {"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "none"}
    assert opened(monkeypatch, 3, 4, **unbound) == 3
    assert opened(monkeypatch, 1, 2, SLURM_LOCALID="1", SLURM_GPUS_PER_TASK="2") == 0


def test_nccl_records_its_collectives() -> None:
    recorder = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
    assert recorder < CUDA().environment(1).keys()  # one on each of several hosts
