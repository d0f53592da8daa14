"""The counting backend of torch.compile: the faults that it shows, and the graphs of both models."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.compute_policy import GraphFunction, apply_policy
from speechtrain.devices.hpu import HPU
from speechtrain.errors import MachineError
from speechtrain.rank.build import build_task
from speechtrain.start.compose import compose
from speechtrain.start.run_config import run_config
from speechtrain.task import Evaluation, Loss, Task
from tools.rehearsal.graph_count import GraphCount, count_graphs

PROGRAM = Path(__file__).parents[2] / "benchmarks/accelerators.py"
BENCHMARK: Any = runpy.run_path(str(PROGRAM))
batch_of = BENCHMARK["batch_of"]

# dynamo looks for gradients of tensors that have none, and makes an object of an autograd function
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _clean_compiler() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield
    torch._dynamo.reset()


class Planted(Task):
    """A layer and a planted function, which the whole task's graph contains."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(1, 4), function

    def forward(self, batch: Batch) -> Loss:
        output = self.function(self.linear(batch.audio[..., None]))
        return Loss(output.sum(), batch.weight.sum())

    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
        return Evaluation({})


def count_of(function: Callable[[Tensor], Tensor]) -> GraphCount:
    batches = [batch_of(rows, 0.01, 2, 5) for rows in (2, 3)]
    return count_graphs(Planted(function), HPU("compile").policy(torch.float32), batches)


def test_count_graphs_counts_forward_and_backward_of_each_shape() -> None:
    count = count_of(torch.tanh)
    count.check(5000)
    # Forward and backward of training, and the forward of evaluation.
    assert (count.shapes, count.functions, count.graphs) == (2, 1, 6)
    assert count.dynamic == count.repeated == 0
    assert not GraphFunction.compiler


def test_count_graphs_shows_a_graph_break() -> None:
    def read_maximum(x: Tensor) -> Tensor:
        maximum = x.detach().max()
        return x * maximum.item()

    count = count_of(read_maximum)
    assert count.breaks
    with pytest.raises(MachineError, match=r"torch\.compile breaks a graph: .*item") as raised:
        count.check(5000)
    assert "\n" not in str(raised.value)


def test_count_graphs_shows_a_number_that_changes() -> None:
    numbers = iter(range(100))
    count = count_of(lambda x: x * next(numbers))
    assert count.repeated
    with pytest.raises(MachineError, match="of a shape that was known"):
        count.check(5000)


def test_count_graphs_shows_a_graph_that_is_too_large() -> None:
    def add_often(x: Tensor) -> Tensor:
        for _ in range(30):
            x = x + 1.0
        return x

    count = count_of(add_often)
    count.check(100)
    with pytest.raises(MachineError, match="compiles at most 30"):
        count.check(30)


NARROW_LSTM = ("encoder.hidden=8", "model.prediction.hidden=8", "encoder.features.mels=8")
CONV_LAYERS = "encoder.conv_layers=[[8,10,5],[8,3,2],[8,3,2],[8,3,2],[8,3,2],[8,2,2],[8,2,2]]"
NARROW_TRANSFORMER = ("encoder.width=32", "encoder.feed_forward=32", "encoder.heads=2", CONV_LAYERS)


@pytest.mark.parametrize(
    ("recipe", "graphs", "largest"),
    [
        (("model=rnnt_mlperf", *NARROW_LSTM, "model.joint.hidden=8"), 16, 500),
        (("model=wav2vec2", *NARROW_TRANSFORMER, "encoder.layers=2"), 3, 400),
    ],
    ids=["rnnt_mlperf", "wav2vec2"],
)
@pytest.mark.usefixtures("cache")
def test_count_graphs_of_gaudi_are_static_and_few(recipe: tuple[str, ...], graphs: int, largest: int) -> None:
    """Narrow networks have the operations of the wide ones. The recursions of 2.5 s have two equal parts."""
    task, tokenizer = build_task(run_config(compose([*recipe, "data=digits"])))
    policy = HPU("compile").policy(torch.bfloat16)
    apply_policy(task, policy)
    batches = []
    for rows, seconds, labels in ((2, 0.8, 5), (1, 2.5, 40)):
        batches.append(task.prepare(batch_of(rows, seconds, labels, max(5, tokenizer.size)), 1))
    count = count_graphs(task, policy, batches)
    count.check(largest)
    assert count.shapes == 2
    assert count.graphs <= graphs * count.shapes
    assert count.graphs <= 3 * count.functions * count.shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_count_graphs_runs_the_same_numbers_as_without_a_compiler(dtype: torch.dtype) -> None:
    policy = HPU("compile").policy(dtype)
    results = []
    for is_compiled in (False, True):
        task, tokenizer = build_task(run_config(compose(["model=rnnt_small", *NARROW_LSTM, "data=digits"])))
        apply_policy(task.train(), policy)
        batch = task.prepare(batch_of(2, 3.0, 90, tokenizer.size), 1)  # two parts of each recursion
        if is_compiled:
            count_graphs(task, policy, [batch])
            task.train().zero_grad()
        torch.manual_seed(0)
        with policy.autocast("cpu"):
            loss = task(batch).total
        torch.autograd.backward(loss)
        results.append([loss.detach(), *(p.grad for p in task.parameters() if p.grad is not None)])
    assert len(results[0]) > 10
    for reference, value in zip(*results, strict=True):
        assert torch.equal(reference, value)
