"""What whole updates of the trainer read and copy, by the policies of CUDA and Gaudi."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speechtrain.rank.build import build_task
from speechtrain.start.build import build_data
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from tools.rehearsal.recorded_updates import RecordedUpdates

pytestmark = pytest.mark.nightly

SMALL = [
    *("data=digits", "data.workers=0", "data.train.utterances=32", "data.valid.unheard.utterances=2"),
    *("data.train.max_words=2", "data.train.min_words=1"),
]
RNNT = [
    *(*SMALL, "model=rnnt_small", "encoder.hidden=8", "model.prediction.hidden=8", "model.joint.hidden=8"),
    *("model.prediction.embedding=8", "encoder.features.mels=8"),
]
WAV2VEC2 = [
    *(*SMALL, "model=wav2vec2_small", "encoder.layers=1", "encoder.width=16", "encoder.heads=2"),
    *("encoder.feed_forward=16", "encoder.position_groups=2", "model.codes=8", "model.negatives=4"),
]
TENSORS = {"rnnt": 7, "wav2vec2": 12}
"""The tensors of a prepared batch."""
LOSS_READS = {"rnnt": 14, "wav2vec2": 0}
"""The reads of the loss of a micro-batch of one group and one chunk of cells, and of its CTC loss."""


@pytest.fixture(autouse=True)
def _cache(cache: Path) -> None:
    """Index the data in the test's own cache."""


def updates_of(recipe: list[str], folder: Path) -> RecordedUpdates:
    config = compose([*recipe, f"run_dir={folder}"])
    task, tokenizer = build_task(run_config(config))
    device = part_of(config, "device").build()
    policy = replace(device.policy(part_of(config, "precision").build().dtype), ctc_kernel=None)
    data = build_data(run_config(config), tokenizer, task)
    return RecordedUpdates(config, data, task, device, policy, folder)


@pytest.mark.parametrize(("model", "recipe"), [("rnnt", RNNT), ("wav2vec2", WAV2VEC2)])
def test_recorded_updates_copy_the_batch_and_read_with_the_log_line(
    model: str, recipe: list[str], tmp_path: Path
) -> None:
    updates = updates_of([*recipe, "device=cuda"], tmp_path)
    line = updates.run()
    assert updates.costs.copies == TENSORS[model]
    # One read of every update: whether it is finite. The log line waits once, reads the norm, and reads the
    # sums of the two updates since the last line.
    log_reads = 1 + 1 + 2
    assert updates.costs.reads <= 1 + log_reads + LOSS_READS[model]
    assert f"{updates.costs.reads} reads by the host, {TENSORS[model]} copies" in line


@pytest.mark.parametrize("recipe", [RNNT, WAV2VEC2])
def test_recorded_updates_of_gaudi_make_no_graph_twice(recipe: list[str], tmp_path: Path) -> None:
    updates = updates_of([*recipe, "device=hpu", "trainer.accumulate=2"], tmp_path)
    updates.run()
    recorder = updates.recorder
    assert recorder.distinct < len(recorder.segments) / 1.5
    # Two micro-batches, the flag of the update and the decay of the average.
    batch_tensors = updates.costs.copies - 2
    assert batch_tensors % 2 == 0


def test_recorded_updates_of_a_large_batch_in_fp16_take_some_rows(tmp_path: Path) -> None:
    updates = updates_of([*RNNT, "device=cuda", "precision=fp16", "data.batch.count=32"], tmp_path)
    line = updates.run()
    rows, samples = line.removeprefix("updates of ").split(" and ")[0].split(" × ")
    assert 2 <= int(rows) < 32
    assert int(rows) * int(samples) <= 20 * 16_000
    assert updates.policy.autocast_dtype == torch.bfloat16  # A CPU computes fp16 slowly.
