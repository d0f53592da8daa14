"""What a validation reports for each context of a streaming encoder: error rates, and the delay of words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN
from speechtrain.decoding.greedy import Greedy
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.encoders.base import Encoder
from speechtrain.encoders.fastconformer import FastConformer
from speechtrain.encoders.lstm import LSTMEncoder
from speechtrain.encoders.stream import StreamTiming
from speechtrain.errors import ConfigError
from speechtrain.features.logmel import LogMel
from speechtrain.metrics import delay_counts, delay_of_90_percent
from speechtrain.models.ctc import CTC
from speechtrain.models.recogniser import Recogniser
from speechtrain.models.rnnt import RNNT
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction
from speechtrain.text.vocabulary import Characters
from speechtrain.training.evaluation import Outcome, evaluate
from tests.support.noise import batch

TOKENIZER = Characters()
BLANK = "-"
CHUNK, WINDOW = [8, 4, 0], [8, 1, 1]  # 4 frames at once; single frames, with one more frame for each layer


class Aligned(Encoder):
    """An encoder of 80 ms frames and two layers, whose frames are labels.

    ``paths`` has the labels of each frame by context, and then by row. None is the recording. The key of
    a row in a batch is its number.
    """

    width, sample_rate = TOKENIZER.size, 16_000
    has_exact_frames = False

    def __init__(self, paths: dict[tuple[int, ...] | None, list[str]]) -> None:
        super().__init__()
        self.paths = paths
        self.timings = [StreamTiming(context, 2, 0.08) for context in paths if context]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        context = batch.extra.get("context")
        paths = self.paths[None if context is None else tuple(context.tolist())]
        rows = [paths[key] for key in batch.keys.tolist()]
        encoded = torch.zeros(len(rows), max(map(len, rows)), self.width)
        for row, path in enumerate(rows):
            for frame, symbol in enumerate(path):
                label = TOKENIZER.blank if symbol == BLANK else TOKENIZER.encode(symbol)[0]
                encoded[row, frame, label] = 20.0
        return encoded, torch.tensor([len(path) for path in rows])

    def frames(self, samples: int) -> int:
        return samples // 1280

    def activation_bytes(self) -> float:
        return 1.0


class Spelling(CTC):
    """CTC whose frames are those of the encoder."""

    def search_frames(self, encoded: Tensor) -> Tensor:
        return encoded.log_softmax(-1)


def spelling(paths: dict[tuple[int, ...] | None, list[str]]) -> Spelling:
    return Spelling(TOKENIZER, Aligned(paths), dropout=0.0)


def rows_of(*keys: int, texts: list[str]) -> Batch:
    """Return a batch of the rows ``keys`` with their transcripts."""
    given = batch(*[16_000] * len(keys))
    texts_of_rows = tuple(texts[key] for key in keys)
    ids = tuple(f"cut{key}" for key in keys)
    return replace(given, keys=torch.tensor(keys), ids=ids, texts=texts_of_rows)


def outcome_of(task: Recogniser, *batches: Batch, group: Any = None) -> Outcome:
    return evaluate(task, {"dev": batches}, CPU(), PLAIN, group or SingleProcess())["dev"]


@pytest.mark.parametrize(
    ("context", "layers", "milliseconds", "departures"),
    [
        ([70, 14, 0], 17, 1040, [14, 14, 28]),
        ([70, 1, 0], 17, 0, [1, 14, 15]),
        ([10, 1, 2], 3, 480, [7, 20, 21]),
        ([0, 4, 1], 2, 400, [6, 18, 18]),
    ],
)
def test_a_timing_is_the_look_ahead_and_the_departure(
    context: list[int], layers: int, milliseconds: int, departures: list[int]
) -> None:
    timing = StreamTiming(context, layers, 0.08)
    assert timing.milliseconds == milliseconds
    assert [timing.departure(frame) for frame in (0, 13, 14)] == departures


def test_delays_of_a_constructed_alignment() -> None:
    """``ab`` ends at frame 3 and ``cd`` at frame 7 of the whole recording."""
    paths = {
        None: ["-ab c-d-"],
        # The run of b begins in frame 3, which leaves after 4 frames. The second word is another one.
        tuple(CHUNK): ["--abb cx-e"],
        # b in frame 2 leaves after 3 frames and 2 of look-ahead, and d in frame 9 after 10 and 2.
        tuple(WINDOW): ["-ab c----d"],
    }
    outcome = outcome_of(spelling(paths), rows_of(0, texts=["ab cd"]))
    metrics = outcome.metrics
    assert set(metrics) == {
        *("cer", "wer", "loss", "cer_240ms", "wer_240ms", "delay_240ms", "delay_240ms_90"),
        *("cer_160ms", "wer_160ms", "delay_160ms", "delay_160ms_90"),
    }
    assert (metrics["wer"], metrics["wer_240ms"], metrics["wer_160ms"]) == (0.0, 1 / 2, 0.0)
    assert metrics["cer_240ms"] == 2 / 5
    assert metrics["delay_240ms"] == pytest.approx(0.08)
    assert outcome.totals["delay_240ms"][1] == 1
    assert metrics["delay_240ms_90"] == 0.08
    assert metrics["delay_160ms"] == pytest.approx((2 + 5) / 2 * 0.08)
    assert metrics["delay_160ms_90"] == 0.40
    assert [example.hypothesis for example in outcome.examples] == ["ab cd"]


def test_rows_without_speech_have_no_delays() -> None:
    paths = {None: ["-ab-", "-ab-"], tuple(CHUNK): ["-ab-", "-ab-"]}
    given = rows_of(0, 1, texts=["ab", "ab"])
    silent = replace(given, unspoken=(False, True))
    padded = replace(given, ids=("cut0", ""), weight=torch.tensor([1.0, 0.0]))
    for batch_of_one, rate in ((silent, 0.5), (padded, 0.0)):
        outcome = outcome_of(spelling(paths), batch_of_one)
        assert outcome.totals["delay_240ms"] == pytest.approx((0.08, 1))
        assert outcome.metrics["wer_240ms"] == outcome.metrics["wer"] == rate


def test_without_common_words_a_delay_is_infinite() -> None:
    paths = {None: ["-ab-"], tuple(CHUNK): ["----"]}
    metrics = outcome_of(spelling(paths), rows_of(0, texts=["ab"])).metrics
    assert metrics["delay_240ms"] == metrics["delay_240ms_90"] == math.inf
    assert metrics["wer_240ms"] == 1.0


class OtherRank(SingleProcess):
    """Adds the vectors that another rank has passed to ``sum``."""

    def __init__(self, vectors: list[Tensor]) -> None:
        self.vectors = vectors

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor + self.vectors.pop(0)


class Recording(SingleProcess):
    """Keeps the vectors that a rank passes to ``sum``."""

    def __init__(self) -> None:
        self.vectors: list[Tensor] = []

    def sum(self, tensor: Tensor) -> Tensor:
        self.vectors.append(tensor.clone())
        return tensor


PATHS = {
    None: ["-ab c-d-", "a", "-xy- z ", "q-r-s ttu", "--a-b-c-d e"],
    tuple(CHUNK): ["-ab  c-d", "--a", "-xy---- zz", "q-rr-s t-u", "--a-b-c-d ----------e"],
    tuple(WINDOW): ["-ab", "b", "-xy--- z", "qr-s t-tu", "--a-b-c-d e"],
}
TEXTS = ["ab cd", "a", "xy z", "qrs tu", "abcd e"]


def test_metrics_depend_neither_on_batches_nor_on_ranks() -> None:
    task = spelling(PATHS)
    expected = outcome_of(task, rows_of(0, 1, 2, 3, 4, texts=TEXTS)).metrics
    assert expected["delay_240ms_90"] > expected["delay_240ms"] > 0
    for cuts in ([[0], [1], [2], [3], [4]], [[4, 1], [3, 0, 2]]):
        batches = [rows_of(*keys, texts=TEXTS) for keys in cuts]
        assert outcome_of(task, *batches).metrics == pytest.approx(expected, rel=1e-6)
        recording = Recording()
        outcome_of(task, *batches[1:], group=recording)
        both = outcome_of(task, batches[0], group=OtherRank(recording.vectors))
        assert both.metrics == pytest.approx(expected, rel=1e-6)
        assert both.metrics["delay_240ms_90"] == expected["delay_240ms_90"]


@pytest.mark.parametrize(
    ("delays", "percentile"),
    [
        ([0.3] * 9 + [5.0], 0.3),
        ([0.3] * 8 + [5.0] * 2, 5.0),
        ([-0.4, 0.0], 0.0),
        ([0.08 * number for number in range(101)], 7.2),
        ([700.0], 60.0),
        ([], math.inf),
    ],
)
def test_nine_of_ten_delays_are_at_most_the_percentile(delays: list[float], percentile: float) -> None:
    assert delay_of_90_percent(delay_counts(delays)) == percentile


def log_mel() -> LogMel:
    return LogMel(mels=16, splice=1, form="parakeet", normalise="none", padding="constant")


def conformer(**settings: Any) -> FastConformer:
    torch.manual_seed(3)
    sizes = {"width": 32, "layers": 2, "feed_forward": 48, "heads": 4, "subsampling": 4, "channels": 8}
    return FastConformer(log_mel(), **{**sizes, "causal": True, **settings})


def test_the_contexts_of_a_causal_encoder_are_measured() -> None:
    encoder = conformer(contexts=[None, [16, 4, 0], [8, 1, 1], [32, 4, 0], [8, 16, 0]])
    assert [(timing.milliseconds, timing.context) for timing in encoder.timings] == [
        (120, [16, 4, 0]),
        (80, [8, 1, 1]),
        (600, [8, 16, 0]),
    ]


def test_features_that_no_stream_has_are_refused() -> None:
    features = LogMel(mels=16, splice=1, normalise="loud")
    with pytest.raises(ConfigError, match=r"encoder\.features\.normalise=fixed"):
        FastConformer(features, width=16, layers=1, heads=2, subsampling=4, causal=True, contexts=[[8, 4, 0]])


@pytest.mark.parametrize(
    "encoder",
    [
        conformer(),
        conformer(contexts=[None]),
        conformer(context=[8, 4, 0]),
        conformer(causal=False, contexts=[[8, 4, 0]]),
        LSTMEncoder(log_mel(), hidden=8),
    ],
)
def test_other_encoders_report_no_streams(encoder: Encoder) -> None:
    outcome = outcome_of(CTC(TOKENIZER, encoder), batch(16_000, 9_000))
    assert set(outcome.metrics) == {"cer", "wer", "loss"}


@pytest.mark.parametrize("model", ["ctc", "rnnt"])
def test_an_evaluation_computes_features_once_and_encodes_with_each_context(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def task_of(**settings: Any) -> Recogniser:
        encoder = conformer(**settings)
        if model == "ctc":
            return CTC(TOKENIZER, encoder).eval()
        return RNNT(TOKENIZER, encoder, LSTMPrediction(hidden=8, embedding=4), Joint(hidden=8)).eval()

    task, given = task_of(contexts=[[16, 4, 0], None, [8, 1, 0]]), batch(40_000, 20_000, 31_000)
    calls = []
    forward = LogMel.forward

    def counted(log_mel: LogMel, *arguments: Any, **options: Any) -> Any:
        calls.append(log_mel)
        return forward(log_mel, *arguments, **options)

    monkeypatch.setattr(LogMel, "forward", counted)
    metrics = outcome_of(task, given).metrics
    assert len(calls) == 1
    for context, suffix in ((None, ""), ([16, 4, 0], "_120ms"), ([8, 1, 0], "_0ms")):
        limited = task_of(context=context)
        limited.load_state_dict(task.state_dict())
        expected = outcome_of(limited, given).metrics
        for name in ("cer", "wer"):
            assert metrics[name + suffix] == expected[name]
        if context is None:
            assert metrics["loss"] == expected["loss"]
        encoded, lengths = task.encoder.encode(given, context)
        assert torch.equal(encoded, limited.encoder.encode(given)[0])
        texts = [hypothesis.text for hypothesis in task.hypotheses(encoded, lengths, Greedy())]
        assert any(texts)


def test_another_normaliser_leaves_out_the_streams() -> None:
    outcome = outcome_of(spelling(PATHS), rows_of(0, 3, texts=TEXTS))
    assert set(outcome.with_normaliser(str.upper).metrics) == {"cer", "wer", "loss"}
