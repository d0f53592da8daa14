"""The CUDA device without a GPU: its policy, which GPU a rank takes, and what it sets for torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from speechtrain.batch import Batch
from speechtrain.compute_policy import apply_policy, compile_module
from speechtrain.devices import affinity, cuda, host
from speechtrain.devices.cuda import CUDA, driver_starts, obstacle
from speechtrain.devices.hpu import HPU
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.errors import MachineError
from speechtrain.nn.transformer import Transformer
from speechtrain.rank.build import build_task
from speechtrain.start.compose import compose
from speechtrain.start.run_config import run_config


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


def opened(
    monkeypatch: pytest.MonkeyPatch,
    local_rank: int,
    visible: int,
    device: CUDA | None = None,
    /,
    **environ: str,
) -> int:
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
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=local_rank, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    (device or CUDA()).open(local_rank)
    return taken[0]


def test_a_rank_computes_on_the_cpus_beside_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = [affinity.Core((2 * number, 2 * number + 1), node=number // 2) for number in range(4)]
    monkeypatch.setattr(affinity, "topology", lambda: cores)
    monkeypatch.setattr(cuda, "usable_cpus", lambda: set(range(7)))
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xAB, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    place = tmp_path / "0000:ab:01.0"
    place.mkdir()
    for node, cpus in {"1": {4, 5, 6}, "0": {0, 1, 2, 3}, "-1": set[int](), "7": set[int]()}.items():
        (place / "numa_node").write_text(f"{node}\n")
        assert cuda._near_cpus(0, tmp_path) == cpus
    place.rename(tmp_path / "gone")
    assert cuda._near_cpus(0, tmp_path) == set()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert cuda._near_cpus(0, tmp_path) == set()


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_are_an_option(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CUDA(deterministic=deterministic)
    assert ("CUBLAS_WORKSPACE_CONFIG" in device.environment(1)) == deterministic
    try:
        opened(monkeypatch, 0, 1, device)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
    finally:
        torch.use_deterministic_algorithms(False)


# Operations that ``torch.use_deterministic_algorithms`` refuses on a GPU, with the type of their output.
REFUSED = re.compile(
    r"_*(adaptive_|avg_pool3d|bincount|ctc_loss|fractional_|grid_sampler|histc|max_unpool|median|nll_loss2d|put_"
    r"|reflection_pad|upsample_)|_*cumsum.*float"
)


class OperationNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the name of each operation and the type of its output."""

    names: set[str]

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        output = operation(*inputs, **(options or {}))
        self.names.add(f"{operation.__name__} {getattr(output, 'dtype', None)}")
        return output


@pytest.mark.parametrize(
    "choices",
    [
        ["model=rnnt_small"],
        ["model=rnnt_small", "model.joint.durations=[0,1,2]", "model.ctc_weight=0.3"],
        ["model=ctc", "encoder=fastconformer_tiny"],
        ["model=wav2vec2_small"],
    ],
)
def test_a_deterministic_step_has_only_deterministic_operations(choices: list[str]) -> None:
    task, tokenizer = build_task(run_config(compose([*choices, "data=digits"])))
    apply_policy(task.train(), CUDA(deterministic=True).policy(torch.float32))
    batch = batch_of()
    if tokenizer.reads_text:
        ones = torch.ones(2, dtype=torch.int64)
        batch = replace(batch, labels=ones[:, None], label_lengths=ones)
    operations = OperationNames()  # type: ignore[no-untyped-call]
    operations.names = set()
    with operations:
        torch.autograd.backward(task(task.prepare(batch, 1)).total)
    assert operations.names
    assert not [name for name in operations.names if REFUSED.match(name)]


@pytest.mark.parametrize(("threads", "expected"), [(8, 4), (2, 2)])
def test_a_pinned_rank_has_no_more_threads_than_its_node_has_cores(
    threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable, thread_counts = set(range(8)), [threads]
    monkeypatch.setattr(host, "topology", lambda: [affinity.Core((number,)) for number in range(8)])
    monkeypatch.setattr(host, "cpu_quota", lambda: 8)
    for module in (cuda, host):
        monkeypatch.setattr(module, "usable_cpus", lambda: set(usable))
    monkeypatch.setattr(cuda, "_near_cpus", lambda index: {4, 5, 6, 7})
    monkeypatch.setattr(affinity, "pin", usable.intersection_update)
    monkeypatch.setattr(torch, "get_num_threads", lambda: thread_counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", thread_counts.append)
    opened(monkeypatch, 0, 1)
    assert thread_counts[-1] == expected


def test_every_rank_of_an_accelerators_host_has_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "topology", lambda: [affinity.Core((number,)) for number in range(96)])
    monkeypatch.setattr(host, "usable_cpus", lambda: set(range(64)))
    monkeypatch.setattr(host, "cpu_quota", lambda: 48)
    for device in (CUDA(), HPU()):
        found = [device.environment(processes)["OMP_NUM_THREADS"] for processes in (1, 8, 100)]
        assert found == ["48", "6", "1"]


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


class Small(nn.Module):
    """A model without repeated layers, and a loss that reads its lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int((x.sum() * 0).item()) + 1].sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.losses(self.line(x))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Torch's counts of graphs, from 0, with a backend that needs no compiler."""
    compiling = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **keys: compiling(self, **{**keys, "backend": "aot_eager"})
    )
    torch._dynamo.reset()
    counters.clear()
    with config.patch(recompile_limit=config.recompile_limit):
        yield counters["stats"]
    torch._dynamo.reset()


# dynamo looks for gradients of tensors that have none
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def batch_of() -> Batch:
    return Batch(
        audio=torch.randn(2, 8000),
        audio_lengths=torch.tensor([8000, 6000]),
        labels=torch.zeros(2, 0, dtype=torch.int64),
        label_lengths=torch.zeros(2, dtype=torch.int64),
        weight=torch.ones(2),
        keys=torch.arange(2),
        ids=("a", "b"),
        texts=("", ""),
    )


def prepared(module: nn.Module, shapes: int) -> CUDA:
    device = CUDA(compile=True)
    compile_module(module, device.policy(torch.float32), shapes)
    return device


@pytest.mark.slow
def test_compiled_layers_share_a_graph_for_each_shape_and_mode(graphs: Counter[str]) -> None:
    torch.manual_seed(0)
    values = {"position_kernel": 4, "position_groups": 2, "dropout": 0.0, "attention_dropout": 0.0}
    plain, compiled = (Transformer(8, 2, 16, heads=2, **values) for _ in range(2))  # type: ignore[arg-type]
    compiled.load_state_dict(plain.state_dict())
    shapes = range(10, 15)  # more graphs than torch's limit of 8 would allow
    device = prepared(compiled, len(shapes))
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for frames in (*shapes, *shapes):
        x, lengths = torch.randn(2, frames, 8), torch.tensor([frames, frames - 2])
        found = []
        for model in (plain, compiled):
            y = model.train()(x, lengths)
            y.square().sum().backward()
            with torch.no_grad():
                found.append([y, model.eval()(x, lengths), *(p.grad for p in model.parameters())])
            model.zero_grad()
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert device.graphs() == graphs["unique_graphs"] == 2 * len(shapes)


@pytest.mark.slow
def test_another_model_is_compiled_without_its_loss(graphs: Counter[str]) -> None:
    model = Small()
    x = torch.randn(3, 4)
    wanted = model(x)
    device = prepared(model, 1)
    for _ in range(2):
        torch.testing.assert_close(model(x), wanted)
    assert device.graphs() == 1  # the loss would have broken it into several


REAL = """
import sys
sys.path.insert(0, sys.argv[1])
import test_cuda
test_cuda.compile_wav2vec2()
"""


def compile_wav2vec2() -> None:
    """Compare the gradients of a compiled encoder with its own before."""
    torch.set_num_threads(1)
    layers = [[8, 10, 20], [8, 3, 16]]  # the compiler needs seconds for each layer
    sizes = {"conv_layers": layers, "width": 16, "layers": 1, "feed_forward": 32, "heads": 2}
    calm = {"dropout": 0.0, "attention_dropout": 0.0, "input_dropout": 0.0, "layer_drop": 0.0}
    torch.manual_seed(0)
    encoder = Wav2Vec2Encoder(**sizes, **calm)  # type: ignore[arg-type]
    batch = encoder.prepare(batch_of(), 1)

    def found() -> list[torch.Tensor]:
        encoder.zero_grad()
        output = encoder(batch)[0]
        output.square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in encoder.parameters() if p.grad is not None)]

    wanted = found()
    device = prepared(encoder, 1)
    torch.testing.assert_close(found(), wanted, rtol=1e-4, atol=1e-4)
    assert device.graphs() == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU, torch.compile needs a C++ compiler")
def test_real_kernels_keep_the_gradients_of_wav2vec2(tmp_path: Path) -> None:
    # a process of its own: torch's compiler leaves variables and a cache behind
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-c", REAL, str(Path(__file__).parent)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **own, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((6, 1), torch.float16, "(compute capability 6.1) has no tensor cores for fp16"),
        ((7, 0), torch.float16, ""),
        ((7, 5), torch.bfloat16, "(compute capability 7.5) has no bf16"),
        ((8, 0), torch.bfloat16, ""),
        ((6, 1), torch.float32, ""),
    ],
)
def test_precision_fallback_reason_names_the_capability(
    capability: tuple[int, int], dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    message = CUDA().precision_fallback_reason(dtype)
    assert reason in message
    assert bool(message) == bool(reason)


# --- is a GPU usable? -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "count", "has_file", "starts", "reason"),
    [
        ("12.8", 2, True, True, ""),
        ("12.8", 2, True, False, "the NVIDIA driver does not start for the CUDA 12.8 of this torch"),
        ("12.8", 0, True, False, "no CUDA device"),  # CUDA_VISIBLE_DEVICES hides it
        (None, 0, True, False, "this torch is built without CUDA"),
        (None, 0, False, False, "no CUDA device"),
        (None, 1, False, True, ""),  # another vendor's build of torch.cuda
    ],
)
def test_the_obstacle_to_a_gpu_is_named(
    release: str | None,
    count: int,
    has_file: bool,
    starts: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", release)
    assert obstacle(count, has_file, starts) == reason


_DRIVER = """
int cuInit(unsigned int flags) {{ return {error}; }}
int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("error", "version", "release", "starts"),
    [
        (0, 12080, "12.8", True),
        (0, 12000, "12.8", True),  # an older driver of the same major version
        (0, 13000, "12.8", True),
        (0, 11080, "12.8", False),
        (100, 12080, "12.8", False),  # no device
        (999, 12080, "12.8", False),  # its kernel module is not loaded
        (256, 12080, "12.8", False),  # exit codes have eight bits
    ],
)
def test_another_process_starts_the_driver(
    error: int, version: int, release: str, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver.c").write_text(_DRIVER.format(error=error, version=version))
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert driver_starts(release) == starts


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a driver")
def test_without_a_driver_no_gpu_is_usable() -> None:
    assert not driver_starts("12.8")
    assert CUDA().obstacle() == "no CUDA device"
