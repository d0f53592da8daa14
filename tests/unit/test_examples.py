"""The examples that train: ``examples/by_hand.py`` and ``examples/own_module.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.data.corpora.digits import Digits
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import TorchGroup
from speechtrain.distributed.world import World
from speechtrain.encoders.lstm import LSTMEncoder
from speechtrain.errors import ConfigError, DataError, MachineError
from speechtrain.features.logmel import LogMel
from speechtrain.models.rnnt import RNNT
from speechtrain.optim.ema import EMA
from speechtrain.optim.schedules import Constant
from speechtrain.text.vocabulary import Characters, NoText
from speechtrain.tracking.group import Trackers
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.trainer import Trainer
from tests.support.small_trainer import Counted, Line

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROGRAM = """
import sys
import by_hand, own_module
by_hand.train(by_hand.small_rnnt, "by_hand", steps=11, valid=4)
own_module.train(own_module.Convolutions, "own_module", steps=2, valid=4)
assert not {"hydra", "omegaconf"} & set(sys.modules)
"""
DEMO = (
    *("recipe=demo", "device=cpu", "device.threads=1", "device.autotune=false", "trainer.max_steps=11"),
    *("data.valid.unheard.utterances=4", "run_dir=demo", "tracking=jsonl", "data.workers=0"),
    *("launcher=local", "launcher.inline=true"),
)


def losses(run_dir: Path) -> list[tuple[object, ...]]:
    """The names and values of each train and valid event that do not depend on time and memory."""
    names = ("event", "step", "loss", "loss_ctc", "loss_transducer", "lr", "grad_norm", "cer", "wer")
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [tuple(map(event.get, names)) for event in events if event["event"] in ("train", "valid")]


def test_the_examples_train_without_hydra_and_by_hand_as_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "speechtrain", "train", *DEMO]
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, **options) as demo:  # type: ignore[call-overload]
        subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300, **options)  # type: ignore[call-overload]
        assert demo.wait(300) == 0
    by_hand = losses(tmp_path / "by_hand")
    assert [(event[0], event[1]) for event in by_hand] == [("train", 10), ("train", 11), ("valid", 11)]
    assert by_hand == losses(tmp_path / "demo")
    assert losses(tmp_path / "own_module")[-1][:2] == ("valid", 2)


def lines_of(path: Path) -> list[str]:
    """The lines of a program that are neither blank nor imports."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith(("from ", "import "))]


def test_the_examples_are_short() -> None:
    assert len(lines_of(EXAMPLES / "by_hand.py")) <= 60
    assert len(lines_of(EXAMPLES / "own_module.py")) <= 30


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_a_page_shows_the_core_of_the_example(page: str) -> None:
    blocks = (ROOT / page).read_text().split("```python\n")[1:]
    core = next(block.split("```")[0] for block in blocks if "trainer.fit(" in block)
    shown = [line.strip() for line in core.splitlines() if line.strip()]
    assert len(shown) <= 20
    assert not set(shown) - set(lines_of(EXAMPLES / "by_hand.py"))


def trained_data(**settings: object) -> SpeechData:
    return SpeechData(**{"train": Digits("train", 8), "valid": {}, "tokenizer": Characters(), **settings})  # type: ignore[arg-type]


def small_encoder() -> LSTMEncoder:
    return LSTMEncoder(LogMel(), hidden=8)


def fit_without_limits() -> None:
    task = Line()
    Trainer(TrainerConfig(), CPU(), "never", Trackers()).fit(task, Counted(), None, Constant(peak=1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("construct", "error", "message"),
    [
        (lambda: TrainerConfig(accumulate=0), ConfigError, "accumulate=0: it must be above 0"),
        (lambda: TrainerConfig(ema=1.0), ConfigError, "ema=1.0: it must be at least 0"),
        (lambda: TrainerConfig(clip=-1.0), ConfigError, "clip=-1.0: it must be at least 0"),
        (lambda: TrainerConfig(shard="rows"), ConfigError, "shard=rows: choose none or parameters"),
        (fit_without_limits, ConfigError, "nothing ends this run. Set trainer.max_steps"),
        (lambda: EMA(Line(), 2.0), ValueError, "decay is 2.0"),
        (lambda: Checkpointer("nowhere").weights(), Exception, "holds no checkpoint"),
        (lambda: CPU(matmul="fast"), ValueError, "matmul is 'fast'. It must be one of auto, highest"),
        (lambda: BatchLimits(count=0), ValueError, "count=0: it must be above 0"),
        (lambda: trained_data(train="missing.jsonl").check(), DataError, "missing.jsonl"),
        (lambda: trained_data(shapes=-1), ValueError, "shapes=-1: it must be at least 0"),
        (lambda: RNNT(Characters(), small_encoder(), fastemit=-1), ValueError, "fastemit is -1"),
        (lambda: RNNT(NoText(), small_encoder()), ConfigError, "learns from transcripts"),
        (lambda: TorchGroup(World(0, 2, 0, 2), timeout_seconds=1.0), MachineError, "MASTER_ADDR"),
    ],
)  # fmt: skip
def test_a_constructor_names_the_wrong_value(
    construct: Callable[[], object], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(error) as caught:
        construct()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
