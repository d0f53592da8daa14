"""The config keys that follow from a run's training data: the labels, and the keys that a recipe leaves open.

The data is read once, when a run begins. Its config.yaml then has the values, so ranks, restarts and other
commands derive nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from speechtrain.config.build import (
    build,
    build_device,
    build_encoder,
    build_launcher,
    build_model,
    build_tokenizer,
)
from speechtrain.config.check import check
from speechtrain.config.resume_fields import key_of_override
from speechtrain.data.base import DataModule
from speechtrain.data.cache import cache_folder
from speechtrain.data.formats.manifests import digest
from speechtrain.devices import host
from speechtrain.devices.base import Device
from speechtrain.errors import ConfigError, DataError
from speechtrain.files import print_line, writing
from speechtrain.launcher import Job
from speechtrain.runs.resume import drop_recipe_hours
from speechtrain.runs.sizing import TABLES, Speech, pieces
from speechtrain.runs.user_yaml import values_of
from speechtrain.text.vocabulary import NoText, Tokenizer, train_sentencepiece

# A character is rare if fewer utterances hold it, or if it is a smaller share of all characters.
_RARE_UTTERANCES, _RARE_SHARE = 3, 1e-5
_SHOWN = 10  # rare characters in a line
_PIECE_TEXTS = 200_000  # transcripts that SentencePiece learns from
_MAX_SECONDS = 60.0  # of a recording that recipe=scratch reads. 35 were tried.
_CARD_BYTES = 16 * 2**30  # of a device whose memory this host cannot read
_UNLIMITED_HOURS = 24.0  # of the plan of a run without a limit
_BATCH_SHARE = 0.5  # of the free memory
_FAST_PERCENTILE = 95  # of the labels per second
_SENTENCEPIECE = "speechtrain.text.vocabulary.SentencePiece"


def explicit_keys(overrides: Sequence[str], user_files: Mapping[str, str]) -> set[str]:
    """Return the keys and groups that the user sets by overrides, or in YAML files of the user's own."""
    keys = {key_of_override(text) for text in overrides}
    for name, text in user_files.items():
        keys |= values_of(name, text).keys()
    return keys - {"data"}  # A choice of data names the data and sets no key.


def follow_data(config: DictConfig, explicit_keys: Collection[str], *, is_plan: bool = False) -> None:
    """Set the keys of ``config`` that its training data decides, except ``explicit_keys``.

    An explicit number of steps or epochs first removes a recipe's ``max_hours``. A plan has no data to read,
    so it gets no other key. Raises ConfigError if the data set does not list its recordings, DataError if it
    has no transcript or cannot be read on this host.
    """
    drop_recipe_hours(config, explicit_keys)
    if is_plan or (config.from_data is None and not _has_open_alphabet(config)):
        return
    check(config)  # The data takes longer to read, so errors of the config come first.
    _check_table(config)
    max_seconds = _open_max_seconds(config, explicit_keys)
    transcripts = _read_transcripts(config)
    settings: dict[str, Any] = {}
    if _has_open_alphabet(config):
        settings["tokenizer"] = _choose_tokenizer(config, transcripts)
    if config.from_data is not None:
        device = build_device(config)
        speech = Speech(
            recordings=len(transcripts.seconds),
            hours=transcripts.hours,
            labels_per_second=_fast_rate(transcripts, build_tokenizer(config)),
            core_hours=_core_hours(config, device),
            width=int(config.encoder.get("width") or 0),
        )
        settings |= _apply_table(config, speech, explicit_keys)
        if max_seconds:
            settings |= _raise_max_seconds(config, device, transcripts, speech.labels_per_second, max_seconds)
    assignments = " ".join(f"{key}={value}" for key, value in settings.items())
    config.from_data = f"{len(transcripts.seconds):,} recordings, {transcripts.hours:.2f} h: {assignments}"


def _is_explicit(key: str, explicit_keys: Collection[str]) -> bool:
    """Return whether ``key``, a key below it or a group above it is explicit."""
    for explicit in explicit_keys:
        if f"{key}.".startswith(f"{explicit}.") or explicit.startswith(f"{key}."):
            return True
    return False


def _apply_table(config: DictConfig, speech: Speech, explicit_keys: Collection[str]) -> dict[str, Any]:
    """Set the keys of the recipe's table, except explicit ones. Return the values for the start line."""
    settings = {}
    for key, value in TABLES[config.from_data](speech).items():
        if not _is_explicit(key, explicit_keys) and OmegaConf.select(config, key, default="") != "":
            OmegaConf.update(config, key, value, merge=False)
            settings[key] = value["probability"] if isinstance(value, dict) else value
    return settings


def _open_max_seconds(config: DictConfig, explicit_keys: Collection[str]) -> float:
    """Raise ``data.max_seconds`` for reading the data. Return its former value, or 0 if it stays."""
    max_seconds = float(config.data.get("max_seconds") or math.inf)
    is_explicit = _is_explicit("data.max_seconds", explicit_keys)
    if config.from_data != "scratch" or max_seconds >= _MAX_SECONDS or is_explicit:
        return 0.0
    config.data.max_seconds = _MAX_SECONDS
    return max_seconds


def _raise_max_seconds(
    config: DictConfig,
    device: Device,
    transcripts: _Transcripts,
    labels_per_second: float,
    lowest_seconds: float,
) -> dict[str, Any]:
    """Set ``data.max_seconds`` so that a batch of the longest recordings fits into the free memory.

    It is at least ``lowest_seconds``. A higher value is returned for the start line.
    """
    config.data.max_seconds = lowest_seconds
    longest = math.ceil(max(transcripts.seconds))
    if longest <= lowest_seconds:
        return {}
    try:
        with torch.device("meta"):
            footprint = build_model(config, build_tokenizer(config), build_encoder(config)).footprint()
    except (NotImplementedError, RuntimeError):  # The network cannot be built without values.
        return {}
    count = int(config.data.batch.count or 1)
    free_bytes = host.free_memory() / int(config.world_size) if device.on_host else _CARD_BYTES
    for seconds in range(longest, int(lowest_seconds), -1):
        labels = math.ceil(labels_per_second * seconds)
        if footprint.bytes(count, seconds, labels) <= _BATCH_SHARE * free_bytes:
            config.data.max_seconds = float(seconds)
            return {"data.max_seconds": float(seconds)}
    return {}


def _check_table(config: DictConfig) -> None:
    """Raise an error if ``from_data`` names no table, or if ``recipe=finetune`` has no pretrained weights."""
    if config.from_data is not None and config.from_data not in TABLES:
        raise ConfigError(f"from_data={config.from_data}: choose {' or '.join(TABLES)}, or null")
    if config.from_data != "finetune":
        return
    if not config.init_from:
        raise ConfigError("recipe=finetune starts from the weights of a run, add init_from=RUN or hf:NAME")
    if not config.init_from.startswith("hf:") and not Path(config.init_from).exists():
        raise DataError(f"init_from={config.init_from} does not exist. Name a run or a folder of weights")


def _has_open_alphabet(config: DictConfig) -> bool:
    return "alphabet" in config.tokenizer and config.tokenizer.alphabet is None


@dataclass
class _Transcripts:
    """The duration and the normalised transcript of each recording that has one."""

    seconds: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def hours(self) -> float:
        return sum(self.seconds) / 3600


def _read_transcripts(config: DictConfig) -> _Transcripts:
    """Read the transcripts of the training data. Raises ConfigError or DataError if there are none."""
    reader = "tokenizer=auto" if _has_open_alphabet(config) else f"recipe={config.from_data}"
    data: DataModule = build(config, "data", tokenizer=NoText())
    normalise = build_tokenizer(config).normalise
    transcripts = _Transcripts()
    is_empty = True
    try:
        for seconds, text in data.recordings(normalise):
            is_empty = False
            if text:
                transcripts.seconds.append(seconds)
                transcripts.texts.append(text)
    except DataError as error:
        job = Job(Path(), Path(), world_size=config.world_size)
        if build_launcher(config).is_here(job):
            raise
        raise DataError(f"{error} ({reader} reads data.train on this host, before the ranks start)") from None
    finally:
        data.close()
    if is_empty:
        raise ConfigError(f"{reader}: {type(data).__name__} does not list its recordings. Set each key")
    if not transcripts.texts:
        raise _no_transcripts(data, config.tokenizer.normaliser)
    return transcripts


def _no_transcripts(data: DataModule, normaliser: str) -> DataError:
    """Return the error of data whose recordings have no transcript, or an empty one after normalisation."""
    for _, text in data.recordings(str):
        if text.strip():
            cause = (
                f"tokenizer.normaliser={normaliser} leaves nothing of any transcript, such as {text[:40]!r}"
            )
            return DataError(f"data.train: {cause}. Choose another one, such as none")
    fix = "Put a.txt beside a.wav, or name it in a manifest"
    return DataError(f"data.train: no recording has a transcript. {fix}")


def _choose_tokenizer(config: DictConfig, transcripts: _Transcripts) -> str:
    """Set the labels of ``tokenizer=auto``. Return their kind and number for the start line."""
    counts: Counter[str] = Counter()
    utterances: Counter[str] = Counter()
    for text in transcripts.texts:
        counts.update(text)
        utterances.update(set(text))
    budget = float(config.data.get("max_bad_share") or 0.0) * len(transcripts.texts)
    rare = rare_characters(counts, utterances, budget)
    alphabet = "".join(sorted(counts.keys() - rare))
    spelt_texts = [text for text in transcripts.texts if set(rare).isdisjoint(text)]
    if rare:
        _report_rare(rare, counts, len(transcripts.texts) - len(spelt_texts))
    size = pieces(transcripts.hours, len(alphabet))
    if size:
        with contextlib.suppress(DataError):  # The texts have too few different words.
            config.tokenizer = _train_pieces(spelt_texts, size, config.tokenizer.normaliser)
            return f"sentencepiece({size})"
    config.tokenizer.alphabet = alphabet
    return f"characters({len(alphabet)})"


def _report_rare(rare: Sequence[str], counts: Counter[str], skipped: int) -> None:
    """Print the first rare characters with their counts, and the number of recordings that hold one."""
    examples = [f"{character!r} ({counts[character]})" for character in rare[:_SHOWN]]
    if len(rare) > _SHOWN:
        examples.append("…")
    line = f"{len(rare)} rare characters have no label, {skipped} recordings are skipped"
    print_line(f"tokenizer: {line}: {', '.join(examples)}")


def _train_pieces(texts: Sequence[str], size: int, normaliser: str) -> DictConfig:
    """Return the node of a SentencePiece tokenizer of ``size`` pieces. Its model is in the cache.

    Raises DataError if the texts have too few different words.
    """
    texts = texts[:: len(texts) // _PIECE_TEXTS + 1]
    path = cache_folder() / "tokenizers" / f"{digest(size, normaliser, *texts)}.model"
    if not path.exists():
        with writing(path, "set SPEECHTRAIN_CACHE to another folder"):
            path.parent.mkdir(parents=True, exist_ok=True)
            train_sentencepiece(texts, path, size=size)
    return OmegaConf.create({"_target_": _SENTENCEPIECE, "model": str(path), "normaliser": normaliser})


def rare_characters(counts: Counter[str], utterances: Counter[str], budget: float) -> list[str]:
    """Return the rare characters, the rarest first, until more than ``budget`` utterances would hold one.

    ``counts`` has the occurrences of each character, ``utterances`` the number of utterances that hold it.
    """
    total = counts.total()
    rare = []
    skipped = 0
    for character in sorted(counts, key=lambda c: (utterances[c], counts[c], c)):
        skipped += utterances[character]
        is_rare = utterances[character] < _RARE_UTTERANCES or counts[character] < _RARE_SHARE * total
        if not is_rare or skipped > budget:
            break
        rare.append(character)
    return rare


def _fast_rate(transcripts: _Transcripts, tokenizer: Tokenizer) -> float:
    """Return the labels per second of fast speech. A blank between two equal labels counts as one more."""
    rates = []
    for seconds, text in zip(transcripts.seconds, transcripts.texts, strict=True):
        if seconds > 0 and not tokenizer.unknown(text):
            ids = tokenizer.encode(text)
            blanks = sum(first == second for first, second in pairwise(ids))
            rates.append((len(ids) + blanks) / seconds)
    return float(np.percentile(rates, _FAST_PERCENTILE)) if rates else 0.0


def _core_hours(config: DictConfig, device: Device) -> float:
    """Return the hours of the plan times the cores that all ranks are equivalent to."""
    hours = config.trainer.max_hours
    if hours is None:
        hours = _UNLIMITED_HOURS
    return device.equivalent_cores(int(config.world_size)) * float(hours)
