"""A run on lhotse's Shar, killed and continued, with and without copies on a local disk: the same run."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.digits import write_digits
from .conftest import RECORDED, TINY, Command, wait_for
from .forked import Forks


@pytest.fixture
def shar(tmp_path: Path) -> Path:
    """The embedded corpus as two Shar folders, in shards of seven."""
    from lhotse import CutSet

    folder = tmp_path / "corpus"
    write_digits(folder, train=48, valid=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("train", "valid"):
            cuts = CutSet.from_file(folder / f"{name}.jsonl")
            (folder / name).mkdir()
            cuts.to_shar(folder / name, fields={"recording": "flac"}, shard_size=7)
    return folder


def test_a_killed_run_on_shar_leaves_no_trace(
    command: Callable[..., Command], shar: Path, forks: Forks, tmp_path: Path
) -> None:
    kept = [argument for argument in TINY if not argument.startswith(("recipe=", "data."))]
    sets = [f"data.train={shar}/train", f"+data.valid.dev={shar}/valid", "data.batch.count=4"]
    runs = {}
    for name, own in {
        "undisturbed": ["data.workers=0"],
        "killed": ["data.workers=1", f"data.stage={tmp_path}/stage"],
    }.items():
        runs[name] = command(name)
        given = ["recipe=demo", "data=manifest", *kept, *sets, *own, *RECORDED]
        runs[name].arguments = [*given, f"run_dir={runs[name].run_dir}"]
    undisturbed, killed = runs.values()
    assert forks.run(undisturbed.write()) == [0], undisturbed.result()

    config = killed.write()
    for step in (5, 17):
        before = len(killed.events("train"))
        forks.start(config)
        wait_for(lambda: any(e["step"] >= step for e in killed.events("train")[before:]))  # noqa: B023
        os.kill(killed.pid(), signal.SIGKILL)
        assert forks.wait() == [-signal.SIGKILL]
    assert forks.run(config) == [0], killed.result()
    assert len(list((tmp_path / "stage").glob("*/[!.]*"))) == 8  # 7 tars of training, 1 of validation
    assert killed.losses() == undisturbed.losses()
    assert killed.handed() == undisturbed.handed()
    assert killed.weights() == undisturbed.weights()
    assert killed.result()["metrics"] == undisturbed.result()["metrics"]
    assert not [e for e in killed.events("warning") if "stage" in e["message"]]
