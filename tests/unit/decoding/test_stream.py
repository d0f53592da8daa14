"""Searches that carry on over pieces of frames: texts, final labels, and the ends of utterances."""

from __future__ import annotations

import io
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speechtrain.decoding.base import CTCScorer, Decoder, Hypothesis, NoDecoder, Scorer, SearchStream
from speechtrain.decoding.beam import TransducerBeam
from speechtrain.decoding.ctc_beam import CTCBeam
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError
from speechtrain.text.ngram import NGram, write_ngram
from speechtrain.text.vocabulary import Characters
from tests.support.label_sequences import small_transducer
from tests.support.scorers import FRAMES, one_hot, table

LETTERS = Characters(" ab")  # The labels 0, 1 and 2 are the space, a and b. The blank is 3.
FRAME_SECONDS = 1.0  # 50 labels per second of audio are more than the 30 labels of a frame.
DURATIONS = [0, 1, 2, 4]
DECODERS = {
    "rnnt": ("rnnt", Greedy(max_symbols_per_step=4)),
    "rnnt 30 a frame": ("rnnt", Greedy()),
    "rnnt 1 a frame": ("rnnt", Greedy(max_symbols_per_step=1)),
    "rnnt 3 in all": ("rnnt", Greedy(max_symbols=3)),
    "tdt": ("tdt", Greedy()),
    "tdt 2 a frame": ("tdt", Greedy(max_symbols_per_step=2)),
    "tdt 3 in all": ("tdt", Greedy(max_symbols=3)),
    "ctc": ("ctc", Greedy()),
    "beam": ("rnnt", TransducerBeam()),
    "beam by score": ("rnnt", TransducerBeam(normalise_score=False, max_symbols_per_step=2)),
    "beam with fusion": ("rnnt", None),
    "beam with fusion by score": ("rnnt", None),
}
"""For each name: the model and the decoder. The decoders with a language model are made by ``decoder``."""


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("lm") / "lm.arpa"
    write_ngram(["a ab", "ab b a", "b b", "ab a"], path, 2)
    return str(path)


def named(name: str, lm: str) -> tuple[str, Decoder]:
    """Return the model and the decoder of a name in ``DECODERS``."""
    model, decoder = DECODERS[name]
    if decoder is None:
        decoder = TransducerBeam(
            lm=lm, word_bonus=0.7, hotwords=["ab", "b a"], normalise_score="score" not in name
        )
    return model, decoder


def random_model(model: str, seed: int) -> Scorer:
    if model == "ctc":
        return CTCScorer(LETTERS, FRAME_SECONDS)
    network = "lstm" if seed % 2 else "stateless"
    scorer = small_transducer(seed, network, DURATIONS if model == "tdt" else None)
    if model == "rnnt":  # Many of these models would never stop to write labels.
        with torch.no_grad():
            scorer.joint.output.bias[LETTERS.blank] += 1.5
    return replace(scorer, tokenizer=LETTERS, frame_seconds=FRAME_SECONDS)


def random_frames(model: str, seed: int, count: int) -> Tensor:
    torch.manual_seed(seed)
    if model == "ctc":
        frames = torch.randn(1, count, 4) * 1.5
        return frames.log_softmax(-1)
    return torch.randn(1, count, 8)


def random_pieces(frames: Tensor, seed: int) -> list[Tensor]:
    """Cut frames (1, T, ·) into pieces. Some are empty, and some have one frame."""
    generator = random.Random(seed)
    sizes = []
    rest = frames.shape[1]
    while rest:
        size = min(rest, generator.choice([0, 1, 1, 2, 3, 5, 8]))
        sizes.append(size)
        rest -= size
    return [*frames.split(sizes, 1)]


def decoded(decoder: Decoder, scorer: Scorer, frames: Tensor) -> Hypothesis:
    """Return the hypothesis of all frames at once."""
    (hypothesis,) = decoder.decode(scorer, frames, torch.tensor([frames.shape[1]]))
    return hypothesis


def read(stream: SearchStream, pieces: list[Tensor]) -> Hypothesis:
    for piece in pieces:
        stream.step(piece)
    return stream.finish()


def assert_equal(found: Hypothesis, expected: Hypothesis, first_frame: int = 0) -> None:
    """Compare a hypothesis with that of the same frames as a recording of their own."""
    start = first_frame * FRAME_SECONDS
    assert found.labels == expected.labels
    assert found.text == expected.text
    assert found.times == pytest.approx([start + time for time in expected.times], abs=1e-9)
    assert found.ends == pytest.approx([start + end for end in expected.ends], abs=1e-9)
    assert found.confidences == pytest.approx(expected.confidences, abs=1e-5)
    assert found.score == pytest.approx(expected.score, abs=1e-4)
    assert len(found.alternatives) == len(expected.alternatives)
    for alternative, expected_alternative in zip(found.alternatives, expected.alternatives, strict=True):
        assert_equal(alternative, expected_alternative, first_frame)


def assert_pieces_change_nothing(model: str, decoder: Decoder, seed: int) -> int:
    """Compare pieces of random frames with all frames at once. Return the number of labels."""
    scorer = random_model(model, seed)
    frames = random_frames(model, seed, 1 + seed % 11)
    expected = decoded(decoder, scorer, frames)
    assert_equal(read(decoder.stream(scorer), random_pieces(frames, seed)), expected)
    return len(expected.labels)


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_give_the_hypothesis_of_all_frames_at_once(name: str, lm: str) -> None:
    model, decoder = named(name, lm)
    labels = [assert_pieces_change_nothing(model, decoder, seed) for seed in range(10)]
    assert sum(labels) >= 10


@pytest.mark.parametrize("name", DECODERS)
def test_final_labels_do_not_change(name: str, lm: str) -> None:
    model, decoder = named(name, lm)
    final_count = 0
    for seed in range(4):
        stream = decoder.stream(random_model(model, seed))
        final = tuple[int, ...]()
        for piece in random_pieces(random_frames(model, seed, 10), seed):
            stream.step(piece)
            labels = stream.hypothesis.labels
            assert labels[: len(final)] == final
            assert len(final) <= stream.final_labels <= len(labels)
            final = labels[: stream.final_labels]
        assert stream.finish().labels[: len(final)] == final
        final_count += len(final)
    assert final_count > 0


@pytest.mark.parametrize("name", ["rnnt", "rnnt 3 in all", "tdt", "ctc", "beam", "beam with fusion"])
def test_an_utterance_does_not_depend_on_the_utterances_before(name: str, lm: str) -> None:
    model, decoder = named(name, lm)
    for seed in range(2):
        scorer = random_model(model, seed)
        stream = decoder.stream(scorer)
        first_frame = 0
        for number in range(2):
            frames = random_frames(model, 10 * seed + number, 7)
            other = decoded(decoder, scorer, frames.flip(1))  # another search by the same decoder
            stream.step(frames[:, :4])
            assert_equal(decoded(decoder, scorer, frames.flip(1)), other)
            found = read(stream, random_pieces(frames[:, 4:], seed))
            assert_equal(found, decoded(decoder, scorer, frames), first_frame)
            first_frame += 7
        assert read(stream, [frames[:, :0]]).labels == ()


class StatePickler(pickle.Pickler):
    """Writes an object without its model."""

    def persistent_id(self, value: object) -> str | None:
        return "model" if isinstance(value, Scorer | torch.nn.Module | NGram) else None


def state_bytes(stream: SearchStream) -> int:
    file = io.BytesIO()
    StatePickler(file).dump(vars(stream))
    return file.tell()


@pytest.mark.parametrize("name", ["rnnt", "tdt", "ctc", "beam", "beam with fusion"])
def test_memory_does_not_grow_with_the_utterances(name: str, lm: str) -> None:
    model, decoder = named(name, lm)
    stream = decoder.stream(random_model(model, 1))
    sizes = []
    for _ in range(4):
        assert read(stream, random_pieces(random_frames(model, 1, 20), 1)).labels
        sizes.append(state_bytes(stream))
    assert sizes[-1] <= sizes[0] + 50  # Greater numbers of frames have more bytes.


def stream_of(name: str, endpoint_seconds: float | None) -> tuple[SearchStream, list[Tensor]]:
    """Return a stream, and a frame of 0.5 s for each symbol of two blanks, an a and three blanks."""
    classes = [3, 3, 0, 3, 3, 3]
    if name == "ctc":
        frames = one_hot(*classes)[None]
        stream = Greedy(endpoint_seconds=endpoint_seconds).stream(FRAMES)
    else:
        # After the first label, all symbols are blanks.
        logits = torch.stack([one_hot(symbol, *[3] * 9) for symbol in classes])
        frames = torch.arange(6.0)[None, :, None]
        decoder = TransducerBeam if name == "beam" else Greedy
        stream = decoder(endpoint_seconds=endpoint_seconds).stream(table(logits))
    return stream, [*frames.split(1, 1)]


@pytest.mark.parametrize("name", ["rnnt", "ctc", "beam"])
def test_an_utterance_ends_after_seconds_of_blanks(name: str) -> None:
    ends = {}
    for endpoint_seconds in (0.5, 1.0, 1.2, None):
        stream, pieces = stream_of(name, endpoint_seconds)
        is_ended = []
        for piece in pieces:
            stream.step(piece)
            is_ended.append(stream.is_ended)
        assert stream.hypothesis.text == "a"
        ends[endpoint_seconds] = is_ended.index(True) if any(is_ended) else None
    # The label is in frame 2. The blanks before it do not end the utterance.
    assert ends == {0.5: 3, 1.0: 4, 1.2: 5, None: None}


@pytest.mark.parametrize("name", ["rnnt", "ctc"])
def test_an_utterance_begins_without_an_end(name: str) -> None:
    stream, pieces = stream_of(name, 1.0)
    for piece in pieces:
        stream.step(piece)
    assert stream.finish().times == (1.0,)
    assert not stream.is_ended
    stream.step(pieces[3])
    assert not stream.is_ended
    assert stream.hypothesis.text == ""


def test_a_duration_leads_into_later_pieces() -> None:
    # frame 0: a (3 on); frames 1 and 2 are not visited; frame 3: b
    symbols = torch.stack([one_hot(0, 3, 3), one_hot(2, 2, 2), one_hot(2, 2, 2), one_hot(3, 1, 3)])
    durations = (torch.eye(2)[torch.tensor([[1, 0, 0]] * 4)] * 9).log_softmax(-1)
    scorer = table(torch.cat((symbols, durations), -1), [1, 3])
    stream = Greedy().stream(scorer)
    for frame in torch.arange(4.0):
        stream.step(frame.view(1, 1, 1))
    assert stream.finish().text == "ab"


def test_without_max_symbols_a_stream_has_no_limit_of_labels() -> None:
    endless = table(torch.stack([one_hot(*[0] * 500)]))
    frames = torch.zeros(1, 4, 1)
    # Two seconds allow 100 labels, and each frame writes 70.
    assert len(decoded(Greedy(70), endless, frames).labels) == 140
    assert len(read(Greedy(70).stream(endless), [frames]).labels) == 280
    limited = Greedy(70, max_symbols=100)
    stream = limited.stream(endless)
    for _ in range(2):  # The limit is that of an utterance.
        assert len(read(stream, [frames[:, :1], frames[:, 1:]]).labels) == 140


REFUSALS = [
    (CTCBeam(), FRAMES, "decoder: CTCBeam cannot search a recording in pieces. Set decoder=greedy"),
    (NoDecoder(), FRAMES, "decoder: NoDecoder cannot search a recording in pieces"),
    (TransducerBeam(), FRAMES, "decoder=beam searches transducers, not CTCScorer. Choose ctc_beam"),
    (TransducerBeam(), random_model("tdt", 0), "decoder=beam: joint.durations (TDT) has no beam search"),
    (Greedy(), Scorer(LETTERS, 0.04), "decoder=greedy cannot search Scorer. Choose another decoder"),
]


@pytest.mark.parametrize(("decoder", "scorer", "words"), REFUSALS)
def test_a_decoder_that_cannot_stream_says_so(decoder: Decoder, scorer: Scorer, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        decoder.stream(scorer)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)
