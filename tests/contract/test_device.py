"""Every device of ``conf/device``: pure before Python starts, and open in one sentence or not at all.

``device=hpu`` is held to its vendor's documented module by a strict stand-in (``habana_fake``): a name,
an argument or a variable without the address of who documents it fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.compute_policy import PLAIN, ComputePolicy, GraphFunction, compile_module
from speechtrain.counter_rng import DITHER_PERIOD
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.devices.cpu import CPU
from speechtrain.devices.cuda import CUDA
from speechtrain.devices.hpu import HPU
from speechtrain.devices.out_of_memory import out_of_memory_error
from speechtrain.errors import ConfigError, MachineError
from speechtrain.losses.ctc import ctc_loss
from speechtrain.optim.ema import NoEMA
from speechtrain.optim.schedules import Constant
from speechtrain.rank.build import open_device, plan_updates
from speechtrain.start.build import build_data
from speechtrain.start.compose import compose
from speechtrain.start.from_data import explicit_keys, follow_data
from speechtrain.start.run_config import part_of, run_config
from speechtrain.task import Evaluation, Loss, Task
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.trainer import Trainer

from .conftest import choices, composed, folder_of, run_in_forks

CHOICES = choices("device")


def device_of(choice: str, *overrides: str) -> Device:
    device: Device = part_of(composed("device", choice, *overrides), "device").build()
    return device


# --- every device -----------------------------------------------------------------------------------


_IMPORTS = """
import torch
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of
from speechtrain.errors import MachineError
"""
_OPEN = """
device = part_of(compose([f"device={sys.argv[1]}"], sys.argv[2] or None), "device").build()
obstacle = device.obstacle()
assert obstacle.isprintable() and len(obstacle) < 400, obstacle
try:
    device.check(1)
    device.open(0)
except MachineError as error:
    text = str(error)
    assert obstacle, "device=auto would choose it"
    assert text.startswith(f"device={sys.argv[1]}: "), text
    assert text.isprintable() and len(text) < 400, text
    print(text)
else:
    assert not obstacle, obstacle
    tensor = device.tensor(torch.ones(3))
    device.mark_step(); device.synchronize()
    assert float((tensor + tensor).sum().cpu()) == 6.0
    assert device.on_host or not tensor.is_cpu, "a plan would count it as a card"
    assert device.memory() >= 0 and device.graphs() >= 0
    print("open")
"""


@pytest.fixture(scope="module")
def opened() -> dict[str, tuple[int, str]]:
    arguments = {choice: [choice, *folder_of("device", choice), ""] for choice in CHOICES}
    return run_in_forks(_IMPORTS, _OPEN, arguments)


@pytest.mark.parametrize("choice", CHOICES)
def test_open_works_or_says_in_one_sentence_what_is_missing(
    choice: str, opened: dict[str, tuple[int, str]]
) -> None:
    code, output = opened[choice]
    assert code == 0, output
    assert len(output.splitlines()) == 1, output


def test_lazy_tensors_are_for_one_process() -> None:
    device_of("lazy").check(1)
    with pytest.raises(MachineError, match="world_size=1"):
        device_of("lazy").check(2)


# --- a lack of memory ---------------------------------------------------------------------------------


def batch_of(rows: int = 2, samples: int = 16000, labels: int = 3) -> Batch:
    zeros = torch.zeros(rows, dtype=torch.int64)
    return Batch(
        torch.zeros(rows, samples), zeros + samples, torch.zeros(rows, labels, dtype=torch.int64), zeros,
        torch.ones(rows), zeros + DITHER_PERIOD - 1, ("a",) * rows, ("a",) * rows,
        seconds=rows * samples / 16000,
    )  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        MemoryError(),
    ],
)
def test_a_lack_of_memory_names_the_batch_and_the_knob(choice: str, error: BaseException) -> None:
    found = out_of_memory_error(device_of(choice), error, batch_of(), Footprint(100.0, 10.0), classes=29)
    assert isinstance(found, MachineError)
    text = str(found)
    for part in ("B=2 rows", "T=1.0 s", "U=3 labels", "V=29", "260 bytes", "data.batch.", "\n"):
        assert (part in text) == (part != "\n")


def test_the_cpus_own_lack_of_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory_error(CPU(), raised.value, None, Footprint(0.0)) is not None


def test_other_errors_are_not_explained() -> None:
    assert out_of_memory_error(CPU(), RuntimeError("shape mismatch"), batch_of(), Footprint(0.0)) is None


# --- cuda ---------------------------------------------------------------------------------------------


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    CUDA().check(2)
    with pytest.raises(MachineError, match="3 processes on this host, which has 2 GPUs"):
        CUDA().check(3)


def test_compiling_needs_fixed_shapes() -> None:
    CUDA(compile=True).validate_shapes([(2, 16000, 3)])
    CUDA().validate_shapes([])
    for device in (CUDA(compile=True), HPU(), HPU(mode="compile")):
        with pytest.raises(ConfigError, match=r"data\.shapes"):
            device.validate_shapes([])
    HPU(mode="eager").validate_shapes([])


# --- hpu ------------------------------------------------------------------------------------------------


def _fake() -> ModuleType:
    path = Path(__file__).parent / "habana_fake" / "vendor.py"
    spec = importlib.util.spec_from_file_location("habana_fake_vendor", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


VENDOR = _fake()


class OnHost(HPU):
    """Its tensors stay on the CPU: everything else is the device's own."""

    name = "cpu"


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for variable in (*VENDOR.VARIABLES, "LOCAL_RANK"):
        monkeypatch.setenv(variable, "")  # put back afterwards, whatever the device does to them
        monkeypatch.delenv(variable)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return VENDOR.install(monkeypatch)


@pytest.fixture
def calls(vendor: Any) -> list[str]:
    found: list[str] = vendor.calls
    return found


def test_every_name_has_the_url_of_its_documentation() -> None:
    urls = {
        **VENDOR.MODULES,
        **VENDOR.VARIABLES,
        **VENDOR.BACKENDS,
        **{name: function.url for name, function in VENDOR.NAMES.items()},
        "operations": VENDOR.OPERATIONS,
        "the file of torch's version": VENDOR.TORCH_VERSION_FILE[1],
    }
    for name, url in urls.items():
        assert re.match(r"https://(docs\.habana\.ai|github\.com)/\S+/\S+", url), name


@pytest.mark.parametrize("mode", ["lazy", "eager", "compile"])
def test_variables_are_documented_ones(mode: str) -> None:
    environment = HPU(mode, recipe_cache="/fast/recipes").environment(8)
    assert environment.keys() <= VENDOR.VARIABLES.keys()
    assert environment["PT_HPU_LAZY_MODE"] == ("1" if mode == "lazy" else "0")
    assert environment.get("PT_HPU_ENABLE_WEIGHT_CPU_PERMUTE") == ("0" if mode == "lazy" else None)
    assert environment["PT_HPU_RECIPE_CACHE_CONFIG"] == "/fast/recipes,false,1024"  # bridge 1.19 takes 1 to 3
    assert environment["HABANA_PGM_LRU_MAX"] == "100000"
    assert "PT_HPU_RECIPE_CACHE_CONFIG" not in HPU(mode).environment(1)


def test_the_stand_in_is_strict(calls: list[str]) -> None:
    core = importlib.import_module("habana_frameworks.torch.core")
    with pytest.raises(AttributeError, match="mark_stepp"):
        core.mark_stepp()
    with pytest.raises(TypeError, match="takes"):
        core.mark_step(1)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("habana_frameworks.torch.hmp")
    metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
    with pytest.raises(TypeError, match="takes"):
        metrics.metric_global(3)
    assert calls == []


def test_everything_that_the_device_asks_of_the_vendor_is_documented(
    vendor: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    device = OnHost()
    before = dict(os.environ)
    device.open(3)
    assert {n for n, v in os.environ.items() if before.get(n) != v} <= VENDOR.VARIABLES.keys()
    assert os.environ["ID"] == "3"
    device.mark_step()
    device.synchronize()
    assert device.memory() == 1 << 20
    assert device.graphs() == 7
    assert device.counts() == {"graphs": 7, "fallbacks": 7, "defragmentations": 7}
    assert set(calls) == {name.rpartition(".")[2] for name in VENDOR.NAMES}
    # The lists that the bridge reads when it is imported.
    assert list(vendor.lists.values()) == [device.bf16_ops, device.fp32_ops]


def test_the_command_of_the_readme_fits_its_data_and_trains_in_bf16(calls: list[str]) -> None:
    typed = ["model=wav2vec2", "device=hpu", "world_size=8", "dry_run=true", "data.workers=0"]
    config = compose(typed)
    run = run_config(config)
    assert open_device(run.device.build(), run.precision.build()).name == "bf16"
    data = build_data(run, run.tokenizer.build())
    schedule, planned = plan_updates(run, run.trainer, data)
    assert planned
    assert schedule.warmup == round(0.08 * planned) < 32_000
    sources = [config.data.train, *config.data.valid.values()]
    assert {source._target_.rpartition(".")[2] for source in sources} == {"Digits"}
    published = compose(["recipe=wav2vec2", "data.train=train.tsv", "++data.valid.dev=valid.tsv"])
    assert published.data.valid == {"dev": "valid.tsv"}
    assert published.schedule.warmup_steps == 32_000


@pytest.mark.usefixtures("vendor")
def test_ctc_is_the_vendors_node_where_it_exists() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 12, 5, generator=generator).requires_grad_()
    labels = torch.randint(0, 4, (3, 4), generator=generator)
    frames, symbols = torch.tensor([12, 7, 3]), torch.tensor([4, 2, 4])  # the last one does not fit
    device = OnHost()
    assert device.policy(torch.float32).ctc == "static"  # the library is not loaded yet
    device.open(0)
    policy = device.policy(torch.float32)
    read = ComputePolicy.from_record(policy.record())
    assert read is not None
    found = []
    for each in (policy, device.attach(read), replace(policy, ctc_kernel=None), PLAIN):
        losses = ctc_loss(logits.log_softmax(-1), labels, frames, symbols, 4, each)
        found.append((losses.detach(), *torch.autograd.grad(losses.sum(), logits)))
    assert read == policy
    assert (policy.ctc, read.ctc_kernel, device.attach(read).ctc_kernel) == (
        "vendor",
        None,
        policy.ctc_kernel,
    )
    assert found[0][0][2] == 0
    for loss, gradient in found[:3]:  # the third computes without the vendor's library, as the recorder does
        torch.testing.assert_close(loss, found[3][0])
        torch.testing.assert_close(gradient, found[3][1])


_AUTOLOAD = "import os, torch; print(os.environ.get('LOADED', 'later'))"


@pytest.mark.parametrize("mode", ["lazy", "eager", "compile"])
def test_importing_torch_does_not_load_the_bridge(mode: str, tmp_path: Path) -> None:
    """Torch imports the entry points of ``torch.backends``, unless the device's environment forbids it."""
    (tmp_path / "bridge.py").write_text("import os\ndef load(): os.environ['LOADED'] = 'early'\n")
    entry = tmp_path / "bridge-1.0.dist-info" / "entry_points.txt"
    entry.parent.mkdir()
    entry.write_text("[torch.backends]\nhpu = bridge:load\n")
    (entry.parent / "METADATA").write_text("Metadata-Version: 2.1\nName: bridge\nVersion: 1.0\n")
    plain = {**os.environ, "PYTHONPATH": str(tmp_path)}
    plain.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    told = [
        subprocess.run(
            [sys.executable, "-c", _AUTOLOAD],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.strip()
        for env in (plain, plain | HPU(mode).environment(1))
    ]
    assert told == ["early", "later"]


def test_a_checkpoint_of_gaudi_loads_in_plain_torch(calls: list[str], tmp_path: Path) -> None:
    OnHost().open(0)
    checkpointer = Checkpointer(tmp_path / "checkpoints", 1)
    task = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(task.parameters())
    task(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    saved = checkpointer.save(1, {"optimizer": optimizer}, task.state_dict())
    read = [
        "import sys",
        "from safetensors.torch import load_file",
        "print(*load_file(sys.argv[1]))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(read), str(saved / "state.safetensors")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "optimizer/state/0/exp_avg" in done.stdout


def test_its_lack_of_memory_is_known() -> None:
    text, _ = VENDOR.OUT_OF_MEMORY
    found = out_of_memory_error(HPU(), RuntimeError(text), batch_of(), Footprint(100.0, 10.0), classes=29)
    assert "out of memory at a micro-batch of B=2 rows" in str(found)


def test_what_the_user_has_set_wins(vendor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("softmax\n")
    monkeypatch.setenv("PT_HPU_AUTOCAST_FP32_OPS_LIST", str(tmp_path / "mine.txt"))
    OnHost(bf16_ops=None).open(0)
    assert vendor.lists == {"PT_HPU_AUTOCAST_FP32_OPS_LIST": ["softmax"]}
    assert "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST" not in os.environ


def test_a_ninth_rank_is_refused(calls: list[str]) -> None:
    with pytest.raises(MachineError, match="local rank 8 finds 8 Gaudi cards"):
        OnHost().open(8)


def test_a_bridge_that_does_not_load_is_one_line(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(VENDOR.MODULES, "habana_frameworks.torch.core")
    with pytest.raises(MachineError, match="does not load") as raised:
        OnHost().open(0)
    assert "\n" not in str(raised.value)


def test_collectives_are_loaded_for_several_processes_only(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the bridge's module writes WORLD_SIZE and a card into the environment when it is imported
    monkeypatch.delitem(VENDOR.MODULES, "habana_frameworks.torch.distributed.hccl")
    OnHost().open(0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(MachineError, match="hccl"):
        OnHost().open(0)


def test_compile_mode_names_the_documented_backend(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphFunction, "compiler", "")  # put back afterwards
    told: dict[str, Any] = {}
    module = nn.Linear(2, 2)
    monkeypatch.setattr(module, "compile", lambda **keywords: told.update(keywords))
    compile_module(module, HPU("compile").policy(torch.bfloat16), 8)
    assert told["backend"] in VENDOR.BACKENDS
    told.clear()
    compile_module(module, HPU("lazy").policy(torch.bfloat16), 8)
    assert not told
    assert HPU.facts.collectives["hpu"] in VENDOR.BACKENDS


class _Written(torch.autograd.Function):
    """Identity whose backward is written into the record of calls."""

    calls: list[str]

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        _Written.calls.append("forward")
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _Written.calls.append("backward")
        return gradients[0]


class Tiny(Task):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, batch: Batch) -> Loss:
        output: Tensor = _Written.apply(self.linear(batch.audio))  # type: ignore[no-untyped-call]
        return Loss(output.square().sum(), batch.weight.sum())

    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
        loss = self(batch)
        return Evaluation({"loss": (loss.total, loss.weight)})


class Same(DataModule):
    """One batch, over and over."""

    micro_batches_per_epoch = 4

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        while True:
            yield batch_of(samples=8)

    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        return {"set": [batch_of(samples=8)]}

    def shapes(self) -> list[tuple[int, int, int]]:
        return [(2, 8, 3)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Silent(Tracker):
    def log(self, event: str, values: Any) -> None:
        json.dumps(list(values))


class Noted(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        _Written.calls.append("step")
        super().step()


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_mark_step_follows_every_backward_and_every_update(
    mode: str, calls: list[str], tmp_path: Path
) -> None:
    _Written.calls = calls
    device = OnHost(mode)
    device.open(0)
    task = Tiny()
    # the weights are in place; what comes before the first step does not count
    limits = TrainerConfig(max_steps=3, max_epochs=None, accumulate=2, log_every=1000, validate_every=1000)
    trainer = Trainer(
        limits, device, tmp_path, Silent(), checkpointer=Checkpointer(tmp_path, 1), policy=PLAIN
    )
    calls.clear()
    trainer.fit(task, Same(), Noted(task.parameters(), 0.1), Constant(peak=0.1), NoEMA())
    steps = [name for name in calls if name in ("backward", "step", "mark_step")]
    micro = ["backward", "mark_step"] if mode == "lazy" else ["backward"]
    update = ["step", "mark_step"] if mode == "lazy" else ["step"]
    whole = [*micro, *micro, *update]
    # what is marked after the last update belongs to validation and saving
    last = len(steps) - steps[::-1].index("step") + (mode == "lazy")
    assert steps[last - 3 * len(whole) : last] == whole * 3
    # warm-up comes before: the same segments, in the same order
    segments = [name for name in steps if name != "mark_step"]
    assert segments == ["backward", "backward", "step"] * (len(segments) // 3)
    if mode == "lazy":
        follows = [after for name, after in pairwise(steps) if name != "mark_step"]
        assert set(follows) == {"mark_step"}
    else:
        assert "mark_step" not in steps


# --- plans ----------------------------------------------------------------------------------------------


def test_a_device_that_computes_on_the_host_gets_the_network_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A card's cores would train a network of 176 units on these 25 hours within half an hour."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(tmp_path / "cache"))
    row = {"audio_filepath": "a.wav", "duration": 18.0, "text": "a quick brown fox"}
    manifest = tmp_path / "train.jsonl"
    manifest.write_text(f"{json.dumps(row)}\n" * 5000)
    keys = ["recipe=scratch", "world_size=1", "trainer.max_hours=0.5", f"data.train={manifest}"]
    summaries = {}
    for choice in ("cpu", "plain_cpu", "cuda"):
        config = composed("device", choice, *keys, f"run_dir={tmp_path / 'run'}")
        follow_data(config, explicit_keys(keys, {}))
        summaries[choice] = config.from_data
    assert summaries["plain_cpu"] == summaries["cpu"] != summaries["cuda"]
