"""The checkpoint from which several ranks continue: rank 0 chooses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speechtrain.distributed.group import SingleProcess
from speechtrain.distributed.world import World
from speechtrain.errors import RunError
from speechtrain.optim.ema import EMA
from speechtrain.optim.schedules import Constant
from speechtrain.precision import FP32
from speechtrain.training.run_state import Parts, Progress
from speechtrain.training.saving import Saving, choose_checkpoint
from tests.support.small_trainer import Recorder, Rig


class SecondRank(SingleProcess):
    """Rank 1 of two ranks, whose rank 0 has the value ``step``."""

    world = World(1, 2, 1, 2)

    def __init__(self, step: int | None) -> None:
        self.step = step

    def from_rank_0(self, value: Any) -> Any:
        return self.step


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A run with the checkpoints of steps 2, 4 and 6."""
    return Rig(tmp_path / "run", max_steps=6, save_every=2)


def test_a_rank_continues_from_the_checkpoint_of_rank_0(rig: Rig) -> None:
    """A network file system may show other files to its host."""
    checkpointer = rig.trainer.checkpointer
    checkpointer.folder(6).joinpath("state.safetensors").write_bytes(b"torn")
    assert choose_checkpoint(SecondRank(4), checkpointer) == 4
    assert choose_checkpoint(SecondRank(None), checkpointer) is None
    assert [folder.name[-1] for folder in checkpointer.folders()] == ["2", "4", "6"], "only rank 0 renames"
    assert choose_checkpoint(SingleProcess(), checkpointer) == 4
    assert choose_checkpoint(SingleProcess(), checkpointer, "never") is None


@pytest.mark.parametrize("step", [6, 8])
def test_a_rank_that_cannot_read_the_checkpoint_of_rank_0_ends(rig: Rig, step: int) -> None:
    checkpointer = rig.trainer.checkpointer
    parts = Parts(
        task=rig.task, data=rig.data, optimizer=rig.optimizer, schedule=Constant(peak=0.05),
        average=EMA(rig.task, 0.9), precision=FP32(), progress=Progress(), updates_per_epoch=7.0,
    )  # fmt: skip
    checkpointer.folder(6).joinpath("state.safetensors").write_bytes(b"torn")
    saving = Saving(SecondRank(step), checkpointer, Recorder(), "stop")
    message = rf"rank 1 cannot continue from the checkpoint of rank 0: .*step-0000000{step}.* same run_dir"
    with pytest.raises(RunError, match=message):
        saving.restore(parts, step)
    saving.restore(parts, 4)
    assert parts.progress.step == 4
