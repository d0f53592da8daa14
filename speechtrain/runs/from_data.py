"""What a run's config takes from its training data: the labels, and the keys that a recipe leaves open.

It is read once, when a run begins, and its config.yaml then has plain values: ranks, restarts and other
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
from speechtrain.config.resume_fields import key_of
from speechtrain.data.base import DataModule
from speechtrain.data.cache import cache_folder
from speechtrain.data.formats.manifests import digest
from speechtrain.devices import host
from speechtrain.devices.base import Device
from speechtrain.errors import ConfigError, DataError
from speechtrain.files import say, writing
from speechtrain.launcher import Job
from speechtrain.runs.resume import drop_recipe_hours
from speechtrain.runs.sizing import TABLES, Speech, pieces
from speechtrain.runs.user_yaml import values_of
from speechtrain.text.vocabulary import NoText, Tokenizer, train_sentencepiece

_RARE_UTTERANCES, _RARE_SHARE = 3, 1e-5  # a character of fewer, or of a smaller share of all, is rare
_SHOWN = 10  # rare characters in a line
_PIECE_TEXTS = 200_000  # transcripts that SentencePiece learns from
_LONGEST = 60.0  # seconds of a recording that recipe=scratch trains on (35 were tried)
_CARD_BYTES = 16 * 2**30  # of a device whose memory this host cannot ask for
_UNLIMITED_HOURS = 24.0  # of the plan of a run without a limit
_BATCH_SHARE = 0.5  # of the free memory
_FAST = 95  # percentile of labels per second
_SENTENCEPIECE = "speechtrain.text.vocabulary.SentencePiece"


def typed_keys(overrides: Sequence[str], written: Mapping[str, str]) -> set[str]:
    """The keys and groups that the user has typed, or set in YAML files of his own."""
    keys = {key_of(text) for text in overrides}
    for name, text in written.items():
        keys |= values_of(name, text).keys()
    return keys - {"data"}  # its choice says where the data is, and no values


def follow_data(config: DictConfig, typed: Collection[str], *, is_plan: bool = False) -> None:
    """Set the keys of ``config`` that its training data decides, except ``typed`` keys.

    A length among ``typed`` replaces a recipe's ``max_hours`` first. A plan without its data gets no other
    key. Raises ConfigError for a data set that
    does not list its transcripts, DataError for one without any, or that cannot be read on this host.
    """
    drop_recipe_hours(config, typed)
    if is_plan or (config.from_data is None and not _has_open_alphabet(config)):
        return
    check(config)  # An error in it costs less before the data is read.
    _check_table(config)
    length = _open_length(config, typed)
    texts = _read(config)
    set_keys: dict[str, Any] = {}
    if _has_open_alphabet(config):
        set_keys["tokenizer"] = _choose_tokenizer(config, texts)
    if config.from_data is not None:
        device = build_device(config)
        speech = Speech(
            recordings=len(texts.seconds),
            hours=texts.hours,
            labels_per_second=_fast_labels(texts, build_tokenizer(config)),
            core_hours=_core_hours(config, device),
            width=int(config.encoder.get("width") or 0),
        )
        set_keys |= _set_table(config, speech, typed)
        if length:
            set_keys |= _set_length(config, device, texts, speech.labels_per_second, length)
    chosen = " ".join(f"{key}={value}" for key, value in set_keys.items())
    config.from_data = f"{len(texts.seconds):,} recordings, {texts.hours:.2f} h: {chosen}"


def _is_typed(key: str, keys: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{prefix}.") or prefix.startswith(f"{key}.") for prefix in keys)


def _set_table(config: DictConfig, speech: Speech, keys: Collection[str]) -> dict[str, Any]:
    """Set the keys of the recipe's table, except ``keys``. Return them as the start line shows them."""
    set_keys = {}
    for key, value in TABLES[config.from_data](speech).items():
        if not _is_typed(key, keys) and OmegaConf.select(config, key, default="") != "":
            OmegaConf.update(config, key, value, merge=False)
            set_keys[key] = value["probability"] if isinstance(value, dict) else value
    return set_keys


def _open_length(config: DictConfig, keys: Collection[str]) -> float:
    """Let ``data.max_seconds`` follow from the data. Return its value before, or 0 if it stays."""
    length = float(config.data.get("max_seconds") or math.inf)
    if config.from_data != "scratch" or length >= _LONGEST or _is_typed("data.max_seconds", keys):
        return 0.0
    config.data.max_seconds = _LONGEST
    return length


def _set_length(
    config: DictConfig, device: Device, texts: _Texts, labels_per_second: float, lowest: float
) -> dict[str, Any]:
    """Set ``data.max_seconds`` to the longest recording of which a batch fits into the free memory.

    It is at least ``lowest``. A higher one is returned, as the start line shows it.
    """
    config.data.max_seconds, longest = lowest, math.ceil(max(texts.seconds))
    if longest <= lowest:
        return {}
    try:
        with torch.device("meta"):
            footprint = build_model(config, build_tokenizer(config), build_encoder(config)).footprint()
    except (NotImplementedError, RuntimeError):  # a network that needs values to be built
        return {}
    count = int(config.data.batch.count or 1)
    free = host.free_memory() / int(config.world_size) if device.on_host else _CARD_BYTES
    for seconds in range(longest, int(lowest), -1):
        if footprint.bytes(count, seconds, math.ceil(labels_per_second * seconds)) <= _BATCH_SHARE * free:
            config.data.max_seconds = float(seconds)
            return {"data.max_seconds": float(seconds)}
    return {}


def _check_table(config: DictConfig) -> None:
    """Refuse a ``from_data`` that is no table, and a fine-tuning run without weights to begin with."""
    if config.from_data is not None and config.from_data not in TABLES:
        raise ConfigError(f"from_data={config.from_data}: choose {' or '.join(TABLES)}, or null")
    if config.from_data == "finetune":
        if not config.init_from:
            raise ConfigError(
                "recipe=finetune begins with what another run has learnt; add init_from=RUN or hf:NAME"
            )
        if not config.init_from.startswith("hf:") and not Path(config.init_from).exists():
            raise DataError(
                f"init_from={config.init_from} does not exist; give a run, or a folder of weights"
            )


def _has_open_alphabet(config: DictConfig) -> bool:
    return "alphabet" in config.tokenizer and config.tokenizer.alphabet is None


@dataclass
class _Texts:
    """Seconds and transcripts of the recordings that have one, normalised."""

    seconds: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def hours(self) -> float:
        return sum(self.seconds) / 3600


def _read(config: DictConfig) -> _Texts:
    what = "tokenizer=auto" if _has_open_alphabet(config) else f"recipe={config.from_data}"
    data: DataModule = build(config, "data", tokenizer=NoText())
    normalise, found = build_tokenizer(config).normalise, _Texts()
    try:
        is_empty = True
        for seconds, text in data.recordings(normalise):
            is_empty = False
            if text:
                found.seconds.append(seconds)
                found.texts.append(text)
    except DataError as error:
        job = Job(Path(), Path(), world_size=config.world_size)
        if build_launcher(config).is_here(job):
            raise
        raise DataError(f"{error} ({what} reads data.train on this host, before the ranks start)") from None
    finally:
        data.close()
    if is_empty:
        raise ConfigError(
            f"{what}: {type(data).__name__} does not list its recordings; set the keys themselves"
        )
    if written := not found.texts and next((text for _, text in data.recordings(str) if text.strip()), ""):
        left = (
            f"data.train: tokenizer.normaliser={config.tokenizer.normaliser} leaves nothing of any transcript"
        )
        raise DataError(f"{left}, such as {written[:40]!r}; choose another, such as none")
    if not found.texts:
        raise DataError(
            "data.train: no recording has a transcript; put a.txt beside a.wav, or name it in a manifest"
        )
    return found


def _choose_tokenizer(config: DictConfig, found: _Texts) -> str:
    """Set the labels of ``tokenizer=auto``; what they are."""
    counts: Counter[str] = Counter()
    utterances: Counter[str] = Counter()
    for text in found.texts:
        counts.update(text)
        utterances.update(set(text))
    budget = float(config.data.get("max_bad_share") or 0.0) * len(found.texts)
    rare = rare_characters(counts, utterances, budget)
    alphabet = "".join(sorted(counts.keys() - rare))
    if rare:
        shown = ", ".join(f"{c!r} ({counts[c]})" for c in rare[:_SHOWN]) + (
            " …" if len(rare) > _SHOWN else ""
        )
        lost = sum(not set(rare).isdisjoint(text) for text in found.texts)
        say(f"tokenizer: {len(rare)} rare characters have no label: {shown}; {lost} recordings are skipped")
    if size := pieces(found.hours, len(alphabet)):
        spelt = [text for text in found.texts if set(rare).isdisjoint(text)]
        with contextlib.suppress(DataError):  # too few different words for so many pieces
            path = _train_pieces(spelt[:: len(spelt) // _PIECE_TEXTS + 1], size, config.tokenizer.normaliser)
            node = {"_target_": _SENTENCEPIECE, "model": path, "normaliser": config.tokenizer.normaliser}
            config.tokenizer = OmegaConf.create(node)
            return f"sentencepiece({size})"
    config.tokenizer.alphabet = alphabet
    return f"characters({len(alphabet)})"


def _train_pieces(texts: Sequence[str], size: int, normaliser: str) -> str:
    """The path of a model of ``size`` pieces in the cache, from which the run takes its copy."""
    path = cache_folder() / "tokenizers" / f"{digest(size, normaliser, *texts)}.model"
    if not path.exists():
        with writing(path, "set SPEECHTRAIN_CACHE to another folder"):
            path.parent.mkdir(parents=True, exist_ok=True)
            train_sentencepiece(texts, path, size=size)
    return str(path)


def rare_characters(counts: Counter[str], utterances: Counter[str], budget: float) -> list[str]:
    """The rare characters, the rarest first, while at most ``budget`` utterances hold one."""
    total, rare, lost = counts.total(), [], 0
    for character in sorted(counts, key=lambda c: (utterances[c], counts[c], c)):
        lost += utterances[character]
        is_rare = utterances[character] < _RARE_UTTERANCES or counts[character] < _RARE_SHARE * total
        if not is_rare or lost > budget:
            break
        rare.append(character)
    return rare


def _fast_labels(found: _Texts, tokenizer: Tokenizer) -> float:
    """Labels per second of fast speech, with a blank between two equal ones."""
    rates = []
    for seconds, text in zip(found.seconds, found.texts, strict=True):
        if seconds > 0 and not tokenizer.unknown(text):
            ids = tokenizer.encode(text)
            rates.append((len(ids) + sum(a == b for a, b in pairwise(ids))) / seconds)
    return float(np.percentile(rates, _FAST)) if rates else 0.0


def _core_hours(config: DictConfig, device: Device) -> float:
    hours = config.trainer.max_hours
    if hours is None:
        hours = _UNLIMITED_HOURS
    return device.equivalent_cores(int(config.world_size)) * float(hours)
