"""A data module of the embedded digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speechtrain.data.corpora.digits import Digits
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.text.vocabulary import Characters


def make_data(corpus: Path, **options: Any) -> SpeechData:
    options = {"batch": BatchLimits(count=3), "speed": [0.9, 1.1], "workers": 0, **options}
    options.setdefault("train", Digits("train", utterances=31))
    options.setdefault("valid", {"unheard": Digits("valid", utterances=21)})
    return SpeechData(tokenizer=Characters(), cache=str(corpus), **options)
