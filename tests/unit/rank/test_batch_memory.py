"""The memory of a batch that the free memory of a host decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.distributed.world import World
from speechtrain.errors import MachineError
from speechtrain.rank.batch_memory import choose_batch_memory, free_batch_memory
from speechtrain.rank.build import build_task
from speechtrain.start.build import build_data
from speechtrain.start.compose import compose
from speechtrain.start.resolved import dump, load
from speechtrain.start.run_config import part_of, run_config
from speechtrain.tracking.console import start_lines
from tests.support.composed import composed


class Rank(SingleProcess):
    """A rank that hears ``told`` from rank 0."""

    def __init__(self, rank: int, told: float = 0.0) -> None:
        self.world, self.told = World(rank, 2, rank, 2), told

    def from_rank_0(self, value: Any) -> Any:
        return value if self.world.rank == 0 else self.told


class Roomy(CPU):
    """A CPU with so much free memory."""

    free = 10 * 2**30

    def free_memory(self, processes: int) -> int:
        return self.free // processes


def run_with_auto(run_dir: Path, *more: str) -> DictConfig:
    keys = ["data.batch.memory_gib=auto", "data.batch.count=null", f"run_dir={run_dir}"]
    config = compose([*keys, *more])
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump(config))
    return load(run_dir / "config.yaml")


def test_choose_batch_memory_divides_once_for_ranks_and_starts(tmp_path: Path) -> None:
    config = run_with_auto(tmp_path / "run", "data.valid_batch.memory_gib=auto")
    task, tokenizer = build_task(run_config(config))
    path = tmp_path / "run" / "config.yaml"
    run = other = run_config(config)  # ``other`` is rank 1's
    run, note = choose_batch_memory(run, Roomy(), Rank(0), task=task)
    values = sum(p.numel() for p in task.parameters())
    half = (10 * 2**30 - 5 * 4 * values) / 2 / 2**30  # weights, gradients, two moments, average
    chosen = run.data.node["batch"]["memory_gib"]
    assert chosen == pytest.approx(half, abs=1e-3)
    assert start_lines(note) == [f"plan     memory of a batch {chosen} GiB"]
    assert run_config(load(path)) == run
    assert build_data(run, tokenizer, task).size.limits.bytes == chosen * 2**30
    assert run.data.node["valid_batch"]["memory_gib"] == chosen
    before = path.read_bytes()
    little = Roomy()
    little.free = 2**20
    assert choose_batch_memory(other, little, Rank(1, chosen), task=task)[0] == run
    assert choose_batch_memory(run, little, Rank(0), task=task) == (run, {})  # a later start chooses nothing
    assert path.read_bytes() == before


def test_a_rank_shares_its_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("data.batch.memory_gib=auto")
    task, _ = build_task(run_config(config))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_batch_memory(run_config(config), Roomy(), task) < 2.5
    little = Roomy()
    little.free = 2**20
    with pytest.raises(
        MachineError, match=r"memory_gib=auto: 0\.\d\d GiB of weights, gradients and state, 0\.00 GiB free"
    ):
        free_batch_memory(run_config(config), little, task)
    assert 0 < CPU().free_memory(2) < CPU().free_memory(1)


def test_a_device_that_does_not_tell_its_memory_is_named() -> None:
    config = compose(["data.batch.memory_gib=auto", "device=lazy", "data.shapes=2"])
    with pytest.raises(
        MachineError, match=r"memory_gib=auto: device=lazy does not report its free memory. Set GiB"
    ):
        free_batch_memory(
            run_config(config), part_of(config, "device").build(), build_task(run_config(config))[0]
        )
