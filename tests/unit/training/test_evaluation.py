"""One code path for every score: sums over the corpus, independent of batching, and interruptible."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN
from speechtrain.decoding.base import Decoder
from speechtrain.decoding.beam import TransducerBeam
from speechtrain.decoding.greedy import Greedy
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


class Stops(Task):
    """A recogniser whose hypotheses have ``part`` of the references, at ``nats`` a character."""

    writes_text = True
    beam = "beam"

    def __init__(self, part: float, nats: float, decoder: object) -> None:
        super().__init__()
        self.part, self.nats, self.decoder = part, nats, decoder

    def forward(self, batch: Batch) -> Loss:
        raise AssertionError

    def evaluate(self, batch: Batch) -> Evaluation:
        text = "abcdefghij"
        count = torch.tensor(float(len(batch.ids)))
        metrics = {"loss": (10 * self.nats * count, count), "cer": (count, 10 * count)}
        heard = text[: round(self.part * 10)]
        return Evaluation(metrics, tuple(Example(name, text, heard) for name in batch.ids))


@pytest.mark.parametrize(
    ("part", "nats", "decoder", "is_told"),
    [
        (0.5, 0.01, Greedy(), True),
        (0.5, 0.01, TransducerBeam(), False),
        (0.5, 2.0, Greedy(), False),  # a model that is plainly wrong
        (0.9, 0.01, Greedy(), False),
    ],
)
def test_texts_that_are_too_short_for_the_loss_are_told(
    part: float, nats: float, decoder: Decoder, is_told: bool
) -> None:
    task = Stops(part, nats, decoder)
    outcome = evaluate(task, {"dev": [batch_of(ROWS)]}, CPU(), PLAIN, SingleProcess())["dev"]
    assert bool(outcome.contradiction) == is_told
    assert not is_told or ("decoder=beam" in outcome.contradiction and "50%" in outcome.contradiction)
    assert "length" not in outcome.metrics


def test_the_worst_are_kept() -> None:
    hypotheses = ["one two", "one", "", "one two three"]

    class Heard(Errors):
        def evaluate(self, batch: Batch) -> Evaluation:
            given = (Example(n, "one two", hypotheses[int(n)]) for n in batch.ids)
            return Evaluation({}, tuple(given))

    batches = [batch_of(ROWS[:2]), batch_of(ROWS[2:], 2)]
    outcome = evaluate(Heard(), {"dev": batches}, CPU(), PLAIN, SingleProcess(), examples=3)["dev"]
    assert [example.id for example in outcome.examples] == ["2", "1", "3"]
