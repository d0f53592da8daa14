"""A model whose frames are too long for its labels: one warning when a run starts, and in its dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechtrain.commands import train
from tests.support.tiny_run import TINY

pytestmark = pytest.mark.slow

LINE = "transcripts have more labels than encoder frames"


@pytest.mark.parametrize("dry_run", ["true", "false"])
@pytest.mark.parametrize(("stack_time", "count"), [(2, 0), (8, 1)])  # 60 ms and 240 ms for a character
def test_it_is_said_once(
    stack_time: int,
    count: int,
    dry_run: str,
    cache: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    overrides = (f"encoder.stack_time={stack_time}", "data.train.min_words=6", "trainer.max_steps=1")
    assert train.run([*TINY, *overrides, f"dry_run={dry_run}", f"run_dir={tmp_path / 'run'}"]) == 0
    output = capfd.readouterr()
    assert (output.out + output.err).count(LINE) == count
