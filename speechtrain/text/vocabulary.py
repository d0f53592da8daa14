"""Tokenizers convert transcripts to label ids and back. The blank is always the last id."""

from __future__ import annotations

import hashlib
import io
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from speechtrain.errors import ConfigError, DataError, RunError
from speechtrain.files import MOST_LOG_BYTES, FilePath, atomic, read_bytes
from speechtrain.text.normalise import normaliser as normaliser_of

_SPACE = "▁"  # the space in the pieces of SentencePiece


class Tokenizer(ABC):
    """Normalises transcripts, and converts normalised text to label ids and back."""

    labels: list[str]
    """The symbol of each id, in order. The blank has no symbol and is not in the list."""

    reads_text: bool = True
    """Whether transcripts are used. If false, they are neither required nor checked."""

    is_preparable: bool = False
    """Whether ``speechtrain prepare tokenizer`` can write the model of this tokenizer."""

    @property
    def size(self) -> int:
        """The number of classes: the labels and the blank."""
        return len(self.labels) + 1

    def spelling(self) -> list[str]:
        """Return the text that each label adds, with a space before a label that begins a word."""
        return [label.replace(_SPACE, " ") for label in self.labels]

    @property
    def blank(self) -> int:
        """The id of the blank, which is the last id."""
        return len(self.labels)

    @abstractmethod
    def normalise(self, text: str) -> str:
        """Return a transcript as ``encode``, the loss and the error rates need it."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the label ids of a normalised text. Raises ValueError, which lists unknown symbols."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of label ids. Raises ValueError for the blank and for ids out of range."""

    @abstractmethod
    def unknown(self, text: str) -> set[str]:
        """Return the symbols of a normalised text that the vocabulary does not have."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the identity of the tokenizer as plain JSON: equal states mean equal tokenizers."""

    def save(self, run_dir: str) -> None:  # noqa: B027 - empty by default
        """Copy the files that the constructor reads into the run."""

    @classmethod
    def saved_arguments(cls, run_dir: str) -> dict[str, str]:
        """Return constructor arguments that load the tokenizer of a run, or nothing if the run has none."""
        return {}


def cannot_spell(symbols: set[str]) -> ValueError:
    return ValueError(f"unknown symbols {' '.join(repr(symbol) for symbol in sorted(symbols))}")


def check_ids(ids: Sequence[int], blank: int) -> None:
    if any(not 0 <= label < blank for label in ids):
        raise ValueError(f"label ids must be 0 to {blank - 1}, got {min(ids)} to {max(ids)}")


class NormalisingTokenizer(Tokenizer):
    """A tokenizer with a normaliser, which ``normaliser`` names."""

    def __init__(self, normaliser: str) -> None:
        self._normaliser = normaliser
        self._normalise = normaliser_of(normaliser)

    def normalise(self, text: str) -> str:
        return self._normalise(text)


class Characters(NormalisingTokenizer):
    """A tokenizer with one label for each character of an alphabet, in its order.

    The default alphabet has 28 characters: space, a to z and the apostrophe (Intel's RNN-T). With null the
    list of labels is empty, and ``speechtrain train`` sets the alphabet to the characters of the training
    transcripts.
    """

    def __init__(
        self, alphabet: str | None = " abcdefghijklmnopqrstuvwxyz'", normaliser: str = "lower"
    ) -> None:
        if alphabet == "":
            raise ConfigError("alphabet is empty. List each character once")
        alphabet = alphabet or ""
        repeated = sorted(symbol for symbol, count in Counter(alphabet).items() if count > 1)
        if repeated:
            raise ConfigError(f"alphabet repeats {''.join(repeated)[:100]!r}. List each character once")
        self.labels = list(alphabet)
        self._ids = {symbol: label for label, symbol in enumerate(alphabet)}
        super().__init__(normaliser)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[symbol] for symbol in text]
        except KeyError:
            raise cannot_spell(self.unknown(text)) from None

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.blank)
        return "".join([self.labels[label] for label in ids])

    def unknown(self, text: str) -> set[str]:
        return set(text) - self._ids.keys()

    def state(self) -> dict[str, Any]:
        return {"kind": "characters", "normaliser": self._normaliser, "labels": "".join(self.labels)}


class NoText(Tokenizer):
    """A tokenizer for audio without transcripts, as in pretraining: every transcript becomes "".

    The blank, id 0, is the only class. Only "" can be encoded, to no labels.
    """

    reads_text = False

    def __init__(self) -> None:
        self.labels = []

    def normalise(self, text: str) -> str:
        return ""

    def encode(self, text: str) -> list[int]:
        if text:
            raise cannot_spell(self.unknown(text))
        return []

    def decode(self, ids: Sequence[int]) -> str:
        if ids:
            raise ValueError(f"tokenizer=none has no label ids, got {list(ids)[:10]}")
        return ""

    def unknown(self, text: str) -> set[str]:
        return set(text)

    def state(self) -> dict[str, Any]:
        return {"kind": "none"}


class FileTokenizer(NormalisingTokenizer):
    """A tokenizer that is read from one file, ``model``. A run keeps a copy of the file.

    Raises DataError, with ``advice``, for a file that cannot be read.
    """

    saved_name: str

    def __init__(self, model: FilePath, normaliser: str, advice: str) -> None:
        super().__init__(normaliser)
        try:
            self._content = read_bytes(model, MOST_LOG_BYTES, follow=True)
        except OSError as error:
            raise DataError(f"model: {model}: {error.strerror}. Correct the path, or {advice}") from None

    def _identity(self) -> dict[str, Any]:
        digest = hashlib.sha256(self._content).hexdigest()
        return {"normaliser": self._normaliser, "size": self.size, "sha256": digest}

    def save(self, run_dir: str) -> None:
        """Copy the model into the run. Raises RunError if the run has a different one."""
        path = Path(run_dir) / self.saved_name
        if not path.exists():
            with atomic(path) as temporary:
                temporary.write_bytes(self._content)
        elif read_bytes(path, MOST_LOG_BYTES) != self._content:
            raise RunError(f"{path} differs from tokenizer.model. Use a new run_dir")

    @classmethod
    def saved_arguments(cls, run_dir: str) -> dict[str, str]:
        path = Path(run_dir) / cls.saved_name
        return {"model": str(path)} if path.exists() else {}


class SentencePiece(FileTokenizer):
    """A subword tokenizer: a trained SentencePiece model (unigram or BPE), read from the file ``model``.

    Label ids are the ids of the model's pieces. One piece is the unknown piece, which ``encode`` never
    returns. The sign ``▁`` is unknown, too, because pieces have it in place of a space. Raises DataError if
    the file is missing or is not a SentencePiece model.
    """

    saved_name = "tokenizer.model"
    is_preparable = True

    def __init__(self, model: FilePath, normaliser: str = "lower") -> None:
        super().__init__(model, normaliser, "train a model with speechtrain prepare tokenizer")
        try:
            if not self._content:
                raise RuntimeError
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=self._content)
            self.labels = [self._pieces.IdToPiece(label) for label in range(self._pieces.GetPieceSize())]
        except (RuntimeError, UnicodeDecodeError):
            raise DataError(f"model: {model} is not a SentencePiece model. Train one") from None
        self.unknown_id = self._pieces.unk_id()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._pieces.EncodeAsIds(text)
        if self.unknown_id in ids or _SPACE in text:
            raise cannot_spell(self.unknown(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.blank)
        text: str = self._pieces.DecodeIds([int(label) for label in ids])
        return text

    def unknown(self, text: str) -> set[str]:
        symbols = {_SPACE} & set(text)
        for piece in self._pieces.EncodeAsPieces(text):
            if self._pieces.PieceToId(piece) == self.unknown_id:
                symbols.update(piece)
        return symbols

    def scores(self) -> list[tuple[str, float]]:
        """Return the pieces with their log probabilities."""
        return [(piece, float(self._pieces.GetScore(label))) for label, piece in enumerate(self.labels)]

    def state(self) -> dict[str, Any]:
        return {"kind": "sentencepiece", **self._identity()}


_LONGEST_LINE = 999  # characters
_LINE = re.compile(rf"\S.{{0,{_LONGEST_LINE - 1}}}(?!\S)|\S{{{_LONGEST_LINE}}}", re.DOTALL)
"""A part of a text: whole words of up to 999 characters, or 999 characters of a longer word. The training of
SentencePiece takes quadratic time in the repetitions of a line, so 100,000 times "9" took minutes."""
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)")
_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")


def train_sentencepiece(
    texts: Iterable[str],
    path: str | Path,
    kind: str = "unigram",
    size: int = 1023,
    character_coverage: float = 1.0,
) -> None:
    """Train a SentencePiece model on normalised transcripts and write it to ``path``.

    ``kind`` is ``unigram`` (MLPerf's RNN-T: 1023 pieces and the blank) or ``bpe``. ``size`` is the number of
    pieces, with the unknown piece (id 0) and without the blank. Equal texts give equal files. Raises
    ConfigError for an unknown ``kind``, DataError if the texts do not allow ``size``.
    """
    if kind not in ("unigram", "bpe"):
        raise ConfigError(f"tokenizer: the kind {kind!r} is unknown. Choose unigram or bpe")
    transcripts = [text for text in texts if text.strip()]
    if not transcripts:
        raise DataError("tokenizer: every transcript is empty. Use sources with transcripts")
    lines: list[str] = []
    for text in transcripts:
        if len(text) > _LONGEST_LINE:
            lines += _LINE.findall(text)
        else:
            lines.append(text)
    buffer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(lines),
            model_writer=buffer,
            model_type=kind,
            vocab_size=size,
            character_coverage=character_coverage,
            bos_id=-1,
            eos_id=-1,
            unk_id=0,
            # The default rule changes the text, such as № to No, and a zero-width non-joiner to a space.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            # SentencePiece omits longer lines without an error. Its limit is in bytes.
            max_sentence_length=max(10, *(len(line.encode()) + 1 for line in lines)),
            num_threads=1,  # With more threads, sums depend on the order in which the threads end.
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(str(error), size, len(transcripts)) from None
    with atomic(Path(path)) as temporary:
        temporary.write_bytes(buffer.getvalue())


def _training_error(message: str, size: int, transcripts: int) -> DataError:
    too_large, too_small = _TOO_LARGE.search(message), _TOO_SMALL.search(message)
    if too_large:
        problem = f"{size} pieces are too many for {transcripts} transcripts"
        return DataError(f"tokenizer: {problem}. The largest possible size is {too_large[1]}")
    if too_small:
        problem = f"{size} pieces are too few for the characters of {transcripts} transcripts"
        advice = f"The smallest possible size is {too_small[1]}, or lower the character coverage"
        return DataError(f"tokenizer: {problem}. {advice}")
    return DataError(f"tokenizer: SentencePiece cannot train on {transcripts} transcripts: {message.strip()}")
