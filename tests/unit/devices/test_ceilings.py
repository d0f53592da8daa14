"""Ceilings of what accelerators are given: the counts of benchmarks/accelerators.py at small widths.

Widths change no count of operations; the cells of the lattice at once are the policy's.
"""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speechtrain.compute_policy import apply_policy
from speechtrain.devices.cuda import CUDA
from speechtrain.devices.hpu import HPU
from speechtrain.rank.build import build_task
from speechtrain.start.build import build_encoder, build_model
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from speechtrain.text.vocabulary import Characters
from speechtrain.training.recompute import checkpoint_layers
from tools.rehearsal.operations import GAUDI, Operations
from tools.rehearsal.recorder import Recorder, Unfit

pytestmark = pytest.mark.slow

BENCHMARK: Any = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks/accelerators.py"))
batch_of = BENCHMARK["batch_of"]


@pytest.mark.parametrize(("dtype", "operations"), [(torch.float32, 33_500), (torch.bfloat16, 48_000)])
def test_the_mlperf_model_on_gaudi(dtype: torch.dtype, operations: int) -> None:
    narrow = ["encoder.hidden=8", "model.prediction.hidden=8", "encoder.features.mels=8"]
    task, tokenizer = build_task(run_config(compose(["model=rnnt_mlperf", *narrow])))
    recorder = Recorder(GAUDI)
    policy = replace(HPU().policy(dtype), mark_step=recorder.mark_step)
    apply_policy(task, policy)
    graphs = []
    for seconds, labels in ((16.7, 100), (4, 25)):
        first, launches = len(recorder.segments), recorder.costs.launches
        batch = recorder.move(task.prepare(batch_of(1, seconds, labels, tokenizer.size), 1))
        with recorder.warm_up():
            with policy.autocast("cpu"):
                loss = task.train()(batch).total
            torch.autograd.backward(loss)
            recorder.mark_step()
        assert len(recorder.segments) - first <= 20
        assert recorder.costs.launches - launches <= operations
        task.zero_grad()
        with recorder.warm_up(), torch.no_grad(), policy.autocast("cpu"):
            task.eval()(batch)
            recorder.mark_step()
        graphs.append(recorder.distinct)
    assert max(recorder.segments) <= 3000
    assert graphs[0] <= 15
    assert graphs[1] - graphs[0] <= 7  # graphs of the encoder's segments serve every length


def test_an_encoder_in_one_graph_is_refused() -> None:
    task, tokenizer = build_task(
        run_config(compose(["model=rnnt_mlperf", "encoder.hidden=8", "model.prediction.hidden=8"]))
    )
    recorder = Recorder(GAUDI)
    apply_policy(task, replace(HPU().policy(torch.float32), lstm_segment=0))
    batch = recorder.move(task.prepare(batch_of(1, 16.7, 100, tokenizer.size), 1))
    with recorder.warm_up(), pytest.raises(Unfit, match="makes a graph of more than 5,000") as raised:
        task(batch)
    assert raised.value.source.file.endswith("lstm.py")


def test_the_loss_on_cuda() -> None:
    costs = BENCHMARK["cuda"](8, 100, 40, classes=16, hidden=8)
    assert costs.launches <= 2 * 100 + 450  # two in each frame of the recursion
    assert costs.reads <= 6


@pytest.mark.parametrize(
    ("choices", "reads"),
    [
        (["model=ctc"], 0),
        (["model=ctc", "encoder.features.trim_silence_db=-60"], 1),
        (["model=rnnt"], 5),
        (["model=rnnt", "device.deterministic=true"], 0),
    ],
)
def test_reads_of_a_step_on_cuda(choices: list[str], reads: int) -> None:
    """The ragged loss of the RNN-T chooses its cells by values, so the host reads in it, and only there."""
    config = compose([*choices, "device=cuda"])
    task, tokenizer = build_task(run_config(config))
    apply_policy(task.train(), part_of(config, "device").build().policy(torch.float32))
    recorder = Recorder(Operations())
    batch = recorder.move(task.prepare(batch_of(3, 2.2, 12, tokenizer.size), 1))
    with recorder:
        torch.autograd.backward(task(batch).total)
    assert recorder.costs.reads == reads


@pytest.mark.parametrize("rows", [2, 40])
def test_a_step_of_wav2vec2_on_cuda(rows: int) -> None:
    """The base model's layers, narrow: forward and backward have as many launches for any number of rows."""
    convolutions = "[8,10,5],[8,3,2],[8,3,2],[8,3,2],[8,3,2],[8,2,2],[8,2,2]"
    narrow = ["encoder.width=32", "encoder.feed_forward=32", "encoder.heads=2", "encoder.layer_drop=0"]
    task, _ = build_task(
        run_config(compose(["model=wav2vec2", f"encoder.conv_layers=[{convolutions}]", *narrow]))
    )
    policy = CUDA().policy(torch.float32)
    apply_policy(task.train(), policy)
    recorder = Recorder(Operations())
    batch = task.prepare(batch_of(rows, 2.2, 1, 3), 1)
    with recorder:
        torch.autograd.backward(task(batch).total)
    assert recorder.costs.launches <= 1500
    assert recorder.costs.reads == 0


@pytest.mark.parametrize(("saver", "gib"), [(False, 13), (True, 3)])
def test_contextnet_large_trains_at_the_references_batch(saver: bool, gib: float) -> None:
    """8 rows of 16.7 s with 80 labels in fp32: bytes beyond weights, on tensors without values."""
    config = compose(
        ["model=rnnt_mlperf", "encoder=contextnet_large", "prediction=contextnet", "data=digits"]
    )
    config.model.joint.hidden = 640
    recorder = Recorder()
    with torch.device("meta"):
        letters = Characters("".join(map(chr, range(0x4E00, 0x5200))))
        model = build_model(run_config(config), letters, build_encoder(run_config(config))).train()
        if saver:
            checkpoint_layers(model)
        apply_policy(
            model, replace(HPU().policy(torch.float32), mark_step=recorder.mark_step, lstm_segment=0)
        )
    batch = model.prepare(batch_of(8, 16.7, 80, letters.size), 0).to(lambda tensor: tensor.to("meta"))
    with recorder:
        torch.autograd.backward(model(batch).total)
    assert 0.7 * gib * 2**30 <= recorder.costs.peak <= gib * 2**30
