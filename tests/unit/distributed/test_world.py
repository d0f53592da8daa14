"""The world of a rank, from the variables that launchers set."""

from __future__ import annotations

import subprocess
import sys

import pytest

from speechtrain.distributed.world import World
from speechtrain.errors import MachineError


@pytest.mark.parametrize(
    "environ",
    [
        *({"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}),
        *({"RANK": "2", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "2"}),
    ],
)
def test_half_a_world_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(MachineError, match="environment variable"):
        World.from_environment(environ)


def test_a_command_reads_its_rank_without_torch() -> None:
    code = "import sys, speechtrain.distributed.world; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
