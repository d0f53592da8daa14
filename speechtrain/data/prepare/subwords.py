"""Training of a SentencePiece model, for ``speechtrain prepare tokenizer`` and the tokenizers of a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from speechtrain.data.formats.manifests import Record
from speechtrain.data.prepare.cut_files import FIX, normalised_texts
from speechtrain.errors import ConfigError
from speechtrain.files import writing
from speechtrain.text.vocabulary import SentencePiece, train_sentencepiece


@dataclass
class Subwords:
    """A SentencePiece model of ``size`` pieces. ``character_coverage`` is a share of characters."""

    kind: str
    size: int
    normaliser: str
    character_coverage: float = 1.0

    def train(self, cuts: Iterable[Record], out: Path) -> None:
        """Train the model on the normalised transcripts of ``cuts``. Print its size, and how to use it."""
        coverage = self.character_coverage
        if not 0 < coverage <= 1:
            raise ConfigError(f"--character-coverage {coverage}: must be above 0, at most 1")
        texts = list(normalised_texts(cuts, self.normaliser))
        with writing(out, FIX):
            train_sentencepiece(texts, out, self.kind, size=self.size, character_coverage=coverage)
        tokenizer = SentencePiece(str(out), self.normaliser)
        uncovered = sum(bool(tokenizer.unknown(text)) for text in texts)
        transcripts = [text for text in texts if text]
        label_count = sum(len(tokenizer.encode(text)) for text in transcripts if not tokenizer.unknown(text))
        mean = label_count / max(1, len(transcripts) - uncovered)
        pieces = f"{tokenizer.size - 1} {self.kind} pieces from {len(transcripts)} transcripts"
        print(f"{out}: {pieces}, {mean:.1f} labels each")
        if uncovered:
            print(f"{uncovered} transcripts have symbols outside the coverage. Training skips them")
        keys = f"tokenizer.model={out.absolute()} tokenizer.normaliser={self.normaliser}"
        print(f"use it with: tokenizer=sentencepiece {keys}")
