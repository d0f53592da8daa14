"""What rank 0 passes to the ranks that another program has started beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speechtrain.distributed.world import World
from speechtrain.errors import RunError
from speechtrain.launch.launcher import RANK_MEMORY, Job
from speechtrain.start.external_launch import RENDEZVOUS, ExternalLaunch
from speechtrain.start.targets import ALLOW_TARGETS


def ranks(folder: Path) -> list[ExternalLaunch]:
    return [ExternalLaunch(World(rank, 2, rank, 2), folder) for rank in range(2)]


def test_rank_0_passes_where_to_meet_and_nothing_that_runs_code(tmp_path: Path) -> None:
    first, _ = ranks(tmp_path)
    job = Job(tmp_path / "config.yaml", tmp_path, 2, {ALLOW_TARGETS: "mine", RANK_MEMORY: "1"})
    assert first.launch(job).returncode != 0, "there is no config"
    told = json.loads((tmp_path / RENDEZVOUS).read_text())["environment"]
    assert told.keys() == {"MASTER_ADDR", "MASTER_PORT", RANK_MEMORY}


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "PATH", ALLOW_TARGETS, "OMP_TOOL_LIBRARIES"])
def test_a_rank_takes_no_other_variable_from_the_run_directory(name: str, tmp_path: Path) -> None:
    first, second = ranks(tmp_path)
    first._send({"environment": {"MASTER_ADDR": "127.0.0.1", name: "evil.so"}})
    with pytest.raises(RunError, match=f"{RENDEZVOUS} sets {name}"):
        second.join()
