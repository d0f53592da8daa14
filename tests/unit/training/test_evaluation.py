"""One code path for every score: sums over the corpus, independent of batching, and interruptible."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN
from speechtrain.decoding.ctc_beam import CTCBeam
from speechtrain.decoding.greedy import Greedy
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.encoders.base import Encoder
from speechtrain.models.ctc import CTC
from speechtrain.optim.ema import NoEMA
from speechtrain.optim.schedules import Constant
from speechtrain.precision import FP32
from speechtrain.task import Evaluation, Example, Loss, Task
from speechtrain.text.vocabulary import Characters
from speechtrain.tracking.base import Tracker
from speechtrain.training.evaluation import Interrupted, evaluate
from speechtrain.training.run_state import Parts, Progress
from speechtrain.training.validation import Validation


class Errors(Task):
    """Scores a batch by the numbers in its audio: errors in column 0, words in column 1."""

    def forward(self, batch: Batch) -> Loss:
        return Loss(batch.audio.sum(), batch.weight.sum())

    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
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
            other = tensor.new_zeros(len(tensor))
            other[-2:] = tensor.new_tensor([5.0, 100.0])  # what the other rank counted
            return tensor + other

    outcome = evaluate(Errors(), {"dev": [batch_of(ROWS)]}, CPU(), PLAIN, Two())["dev"]
    assert outcome.metrics == {"wer": 15 / 121}


def test_the_real_time_factor_is_seconds_of_work_for_each_second_of_audio() -> None:
    class Two(SingleProcess):
        def sum(self, tensor: Tensor) -> Tensor:
            return 2 * tensor

    batches = [replace(batch_of(ROWS), seconds=seconds) for seconds in (3.0, 5.0)]
    for group, audio_seconds in ((SingleProcess(), 8.0), (Two(), 16.0)):
        outcome = evaluate(Errors(), {"dev": batches}, CPU(), PLAIN, group)["dev"]
        assert outcome.audio_seconds == audio_seconds
        assert outcome.real_time_factor == outcome.seconds / audio_seconds > 0
    (silent,) = evaluate(Errors(), {"dev": [batch_of(ROWS)]}, CPU(), PLAIN, SingleProcess()).values()
    assert silent.real_time_factor == math.inf


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


SHARE = 0.49  # of a label in each of its two frames, so 0.74 in both together; greedy finds the blank in each


class Spread(CTC):
    """CTC whose last labels of each text are spread over two frames; ``clear`` labels are sure."""

    def __init__(self, clear: int, peak: float = 0.9999, others: float = SHARE) -> None:
        super().__init__(Characters(), Encoded(), dropout=0.0)
        self.clear, self.peak, self.others = clear, peak, others

    def search_frames(self, encoded: Tensor) -> Tensor:
        blank = self.tokenizer.blank
        rows = torch.full((len(encoded), 30, self.tokenizer.size), 1e-9)
        for place, label in enumerate(self.tokenizer.encode("abcdefghij")):
            share = self.peak if place < self.clear else self.others
            rows[:, 3 * place : 3 * place + 2, label] = share
            rows[:, 3 * place : 3 * place + 2, blank] = 1 - share
            rows[:, 3 * place + 2, blank] = 1.0
        return rows.log_softmax(-1) if self.peak == 0 else rows.log()


class Encoded(Encoder):
    width = 1
    sample_rate = 16_000

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(batch.ids), 30, 1), torch.full((len(batch.ids),), 30)

    def frames(self, samples: int) -> int:
        return samples // 160

    def activation_bytes(self) -> float:
        return 1.0


def spoken(*texts: str, weight: float = 1.0) -> Batch:
    """Silence with these transcripts; of weight 0, they cannot be encoded and have no labels."""
    tokens = [Characters().encode(text) if weight else [] for text in texts]
    width = max(map(len, tokens))
    return Batch(
        audio=torch.zeros(len(texts), 4800),
        audio_lengths=torch.full((len(texts),), 4800),
        labels=torch.tensor([ids + [0] * (width - len(ids)) for ids in tokens]).reshape(len(texts), width),
        label_lengths=torch.tensor([len(ids) for ids in tokens]),
        weight=torch.full((len(texts),), weight),
        keys=torch.arange(len(texts)),
        ids=tuple(f"{text}-{row}" for row, text in enumerate(texts)),
        texts=texts,
    )


def contradiction(task: Task, *batches: Batch) -> str:
    return evaluate(task, {"dev": batches}, CPU(), PLAIN, SingleProcess())["dev"].warnings.get(
        "contradiction", ""
    )


def test_a_search_that_stops_half_way_is_told_and_the_beam_it_names_finds_the_rest() -> None:
    task = Spread(clear=5)
    heard = evaluate(task, {"dev": [spoken("abcdefghij")]}, CPU(), PLAIN, SingleProcess())["dev"]
    assert heard.examples[0].hypothesis == "abcde"
    assert "decoder=ctc_beam" in heard.warnings["contradiction"]
    assert "50%" in heard.warnings["contradiction"]
    assert set(heard.metrics) == {"wer", "cer", "loss"}
    task.decoder = CTCBeam()
    found = evaluate(task, {"dev": [spoken("abcdefghij")]}, CPU(), PLAIN, SingleProcess())["dev"]
    assert found.metrics["cer"] == 0
    assert found.metrics["loss"] == heard.metrics["loss"]
    task.decoder = CTCBeam(width=1, nbest=1)  # whatever it finds, a beam is chosen
    assert contradiction(task, spoken("abcdefghij")) == ""


@pytest.mark.parametrize(
    "task",
    [
        Spread(clear=9),  # a label of ten is not much
        Spread(clear=5, others=0.05),  # it believes that half of the text was not said
        Spread(clear=0, peak=0.0),  # it knows nothing
    ],
)
def test_a_model_that_is_wrong_or_nearly_right_is_not_told(task: Spread) -> None:
    assert contradiction(task, spoken("abcdefghij")) == ""


def test_texts_that_the_loss_leaves_out_do_not_contradict_it() -> None:
    left_out = spoken("x" * 80, weight=0.0)
    assert contradiction(Spread(clear=10), spoken("abcdefghij"), left_out) == ""
    assert contradiction(Spread(clear=10), left_out) == ""


class Subwords(Task):
    """A recogniser whose labels have ten characters each, at ``nats`` a label; it writes half of them."""

    writes_text = True
    beam = "beam"

    def __init__(self, nats: float) -> None:
        super().__init__()
        self.nats, self.decoder = nats, Greedy()

    def forward(self, batch: Batch) -> Loss:
        raise AssertionError

    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
        labels, count = batch.label_lengths.sum(), batch.weight.sum()
        heard = tuple(
            Example(name, text * 10, text * 5) for name, text in zip(batch.ids, batch.texts, strict=True)
        )
        return Evaluation({"loss": (self.nats * labels, count), "cer": (count, 100 * count)}, heard)


def test_the_loss_counts_by_label_however_many_characters_a_label_has() -> None:
    assert contradiction(Subwords(nats=2.0), spoken("abcdefghij")) == ""
    assert "decoder=beam" in contradiction(Subwords(nats=0.1), spoken("abcdefghij"))


def test_a_contradiction_is_logged_once_for_a_set() -> None:
    logged: list[tuple[str, str]] = []

    class Kept(Tracker):
        def log(self, event: str, values: Mapping[str, Any]) -> None:
            if event == "warning":
                logged.append((event, values["message"]))

    class Sets:
        def valid(self, rank: int, size: int) -> dict[str, Iterable[Batch]]:
            return {"dev": [spoken("abcdefghij")], "test": [spoken("abcde")]}

    task = Spread(clear=5)
    parts = Parts(
        task=task,
        data=Sets(),  # type: ignore[arg-type]
        optimizer=torch.optim.SGD(task.parameters(), lr=1.0),
        schedule=Constant(peak=1.0),
        average=NoEMA(),
        precision=FP32(),
        progress=Progress(),
        updates_per_epoch=1.0,
    )
    validation = Validation(
        CPU(), PLAIN, SingleProcess(), Kept(), target=None, stop_requested=lambda: False, record_latest=iter
    )
    for parts.progress.step in (1, 2):
        assert validation.run(parts) is None
    assert [event for event, _ in logged] == ["warning"]
    assert logged[0][1].startswith("dev: ")
    assert "decoder=ctc_beam" in logged[0][1]


def test_the_worst_are_kept() -> None:
    hypotheses = ["one two", "one", "", "one two three"]

    class Heard(Errors):
        def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
            given = (Example(n, "one two", hypotheses[int(n)]) for n in batch.ids)
            return Evaluation({}, tuple(given))

    batches = [batch_of(ROWS[:2]), batch_of(ROWS[2:], 2)]
    outcome = evaluate(Heard(), {"dev": batches}, CPU(), PLAIN, SingleProcess(), examples=3)["dev"]
    assert [example.id for example in outcome.examples] == ["2", "1", "3"]
