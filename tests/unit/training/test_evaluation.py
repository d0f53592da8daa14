"""One code path for every score: sums over the corpus, independent of batching, and interruptible."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.task import Evaluation, Example, Loss, Task
from speechtrain.training.evaluation import Interrupted, evaluate


class Errors(Task):
    """Scores a batch by the numbers in its audio: errors in column 0, words in column 1."""

    def forward(self, batch: Batch) -> Loss:
        return Loss(batch.audio.sum(), batch.weight.sum())

    def evaluate(self, batch: Batch) -> Evaluation:
        assert not self.training
        assert not torch.is_grad_enabled()
        errors, words = batch.audio.sum(0)
        return Evaluation({"wer": (errors, words)}, tuple(Example(n, n, n) for n in batch.ids))


def batch_of(rows: list[tuple[int, int]], first: int = 0) -> Batch:
    audio = torch.tensor(rows, dtype=torch.float32)
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    ids = tuple(str(first + n) for n in range(len(rows)))
    return Batch(audio, zeros, zeros[:, None], zeros, torch.ones(len(rows)), zeros, ids, ids)


ROWS = [(1, 10), (0, 3), (7, 7), (2, 1)]


@pytest.mark.parametrize("cuts", [(4,), (1, 3), (3, 1), (1, 1, 1, 1)])
def test_corpus_sums_do_not_depend_on_batches(cuts: tuple[int, ...]) -> None:
    batches, start = [], 0
    for size in cuts:
        batches.append(batch_of(ROWS[start : start + size], start))
        start += size
    task = Errors().train()
    outcome = evaluate(task, {"dev": batches}, CPU(), PLAIN, SingleProcess(), examples=3)["dev"]
    assert outcome.metrics == {"wer": 10 / 21}
    assert [example.id for example in outcome.examples] == ["0", "1", "2"]
    assert task.training


def test_sums_are_reduced_over_the_group_before_they_are_divided() -> None:
    class Two(SingleProcess):
        def sum(self, tensor: Tensor) -> Tensor:
            return tensor + tensor.new_tensor([5.0, 100.0])  # what the other rank counted

    outcome = evaluate(Errors(), {"dev": [batch_of(ROWS)]}, CPU(), PLAIN, Two())["dev"]
    assert outcome.metrics == {"wer": 15 / 121}


def test_no_words_are_no_perfect_score() -> None:
    assert (
        evaluate(Errors(), {"dev": [batch_of([(0, 0)])]}, CPU(), PLAIN, SingleProcess())["dev"].metrics["wer"]
        == math.inf
    )


def test_a_stop_leaves_no_figures_and_the_task_as_it_was() -> None:
    answers = iter([False, True])
    task = Errors().train()
    with pytest.raises(Interrupted):
        evaluate(
            task,
            {"dev": [batch_of(ROWS)] * 9},
            CPU(),
            PLAIN,
            SingleProcess(),
            stop_requested=lambda: next(answers),
        )
    assert task.training
