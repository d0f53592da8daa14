"""The world of a rank, from the variables that launchers set."""

from __future__ import annotations

import pytest

from speechtrain.errors import MachineError
from speechtrain.launcher import World


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
