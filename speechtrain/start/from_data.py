"""The config keys that follow from a run's training data: the labels, and the keys of a recipe's table.

The labels follow from the data with ``tokenizer=auto``. The tables of the recipes ``scratch``, ``streaming``
and ``finetune`` are in ``sizing.py``. The data is read once, when a new run starts. The values are stored in
the run's config.yaml, so ranks, restarts and other commands do not read the data again.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from speechtrain.batch import Footprint
from speechtrain.data.base import DataModule
from speechtrain.data.cache import cache_folder
from speechtrain.data.formats.manifests import digest
from speechtrain.data.prepare.stats_table import LONG
from speechtrain.data.skips import most_bad
from speechtrain.devices import host
from speechtrain.devices.base import Device
from speechtrain.errors import ConfigError, DataError, SpeechtrainError, print_notice
from speechtrain.files import print_line, writing
from speechtrain.launch.launcher import Job
from speechtrain.overrides import key_of_override
from speechtrain.start.build import network_without_values
from speechtrain.start.check_keys import check
from speechtrain.start.resume import BATCH_KEYS, drop_recipe_hours
from speechtrain.start.run_config import part_of, run_config
from speechtrain.start.sizing import TABLES, Speech, pieces
from speechtrain.start.user_yaml import values_of
from speechtrain.text.vocabulary import NoText, Tokenizer, train_sentencepiece

# A character is rare if it occurs in fewer utterances, or if it is a smaller fraction of all characters.
_MIN_UTTERANCES, _MIN_FRACTION = 3, 1e-5
_RARE_SHARE = 0.001
"""The largest share of the recordings that may be skipped because of rare characters."""
_MAX_EXAMPLES = 10
"""Rare characters that the notice lists."""
_MAX_PIECE_TEXTS = 200_000
"""Transcripts from which SentencePiece is trained. A larger set is subsampled."""
_ASSUMED_DEVICE_BYTES = 16 * 2**30
"""Assumed free memory of an accelerator, whose memory this host cannot read before the ranks start."""
_DEFAULT_HOURS = 24.0
"""Assumed training time of a run without ``trainer.max_hours``."""
_BATCH_FRACTION = 0.5
"""Fraction of the free memory that a batch of the longest recordings may use."""
_FAST_PERCENTILE = 95
"""Percentile of the label rates of all recordings that counts as fast speech."""
_KEYS_OF_RANKS = (*BATCH_KEYS, "data.batch", "device.threads")
"""The number of ranks is not chosen if the user sets one of these keys."""
_SENTENCEPIECE = "speechtrain.text.vocabulary.SentencePiece"


def explicit_keys(overrides: Sequence[str], user_files: Mapping[str, str]) -> set[str]:
    """Return the keys and groups that the user sets by overrides or in own YAML files.

    ``user_files`` holds the texts of these files by ``group/choice``.
    """
    keys = {key_of_override(text) for text in overrides}
    for name, text in user_files.items():
        keys |= values_of(name, text).keys()
    return keys - {"data"}  # ``data=NAME`` only says which data is read. It fixes no key below ``data``.


def follow_data(config: DictConfig, explicit_keys: Collection[str]) -> None:
    """Set the keys of ``config`` that its training data decides, except ``explicit_keys``.

    ``config.from_data`` becomes a text with the size of the data and these keys, for the start line of the
    log. An explicit number of steps or epochs first removes a recipe's ``max_hours``.

    Raises ConfigError if the data set does not list its recordings, DataError if it has no transcript or
    cannot be read on this host.
    """
    drop_recipe_hours(config, explicit_keys)
    if config.from_data is None and not _has_open_alphabet(config):
        return
    check(config)  # Reading the data may take minutes, so the errors of the config come first.
    _check_table_name(config)
    default_max_seconds = _open_max_seconds(config, explicit_keys)
    tokenizer: Tokenizer = part_of(config, "tokenizer").build()
    transcripts = _read_transcripts(config, tokenizer.normalise)
    settings: dict[str, Any] = {}
    if _has_open_alphabet(config):
        settings["tokenizer"] = _choose_tokenizer(config, transcripts)
        tokenizer = part_of(config, "tokenizer").build()
    if config.from_data is not None:
        device = part_of(config, "device").build()
        speech = Speech(
            recordings=len(transcripts.seconds),
            hours=transcripts.hours,
            labels_per_second=_fast_label_rate(transcripts, tokenizer),
            core_hours=_core_hours(config, device),
            width=int(config.encoder.get("width") or 0),
            rank_cores=_rank_cores(config, device, explicit_keys),
        )
        settings |= _apply_table(config, speech, explicit_keys)
        longest_seconds = math.ceil(max(transcripts.seconds))
        if default_max_seconds is not None:
            config.data.max_seconds = default_max_seconds
        if _is_explicit("data.max_seconds", explicit_keys):
            memory_share = _memory_share(config, device, tokenizer, speech.labels_per_second)
            _warn_of_long_recordings(longest_seconds, memory_share)
        elif default_max_seconds is not None and longest_seconds > default_max_seconds:
            memory_share = _memory_share(config, device, tokenizer, speech.labels_per_second)
            settings |= _raise_max_seconds(config, longest_seconds, memory_share)
    assignments = " ".join(f"{key}={value}" for key, value in settings.items())
    config.from_data = f"{len(transcripts.seconds):,} recordings, {transcripts.hours:.2f} h: {assignments}"


def _is_explicit(key: str, explicit_keys: Collection[str]) -> bool:
    """Return whether the user has set ``key``, a key below it or a group above it."""
    for explicit_key in explicit_keys:
        is_key_or_group = f"{key}.".startswith(f"{explicit_key}.")
        is_below_key = explicit_key.startswith(f"{key}.")
        if is_key_or_group or is_below_key:
            return True
    return False


def _apply_table(config: DictConfig, speech: Speech, explicit_keys: Collection[str]) -> dict[str, Any]:
    """Set the keys of the recipe's table, except explicit keys. Return the values for the start line."""
    settings = {}
    for key, value in TABLES[config.from_data](speech).items():
        exists = OmegaConf.select(config, key, default="") != ""  # Another encoder may lack the key.
        if exists and not _is_explicit(key, explicit_keys):
            OmegaConf.update(config, key, value, merge=False)
            # The node of a mask is abbreviated to its probability.
            settings[key] = value["probability"] if isinstance(value, dict) else value
    return settings


def _open_max_seconds(config: DictConfig, explicit_keys: Collection[str]) -> float | None:
    """Raise ``data.max_seconds`` to the upper limit, so that long recordings are read.

    Return the default of the data, from which ``_raise_max_seconds`` begins. Return None if
    ``data.max_seconds`` stays: if it is explicit or high enough, or if the recipe is ``finetune``.
    """
    max_seconds = float(config.data.get("max_seconds") or math.inf)
    is_explicit = _is_explicit("data.max_seconds", explicit_keys)
    if config.from_data == "finetune" or max_seconds >= LONG or is_explicit:
        return None
    config.data.max_seconds = LONG
    return max_seconds


def _raise_max_seconds(
    config: DictConfig, longest_seconds: int, memory_share: Callable[[float], float]
) -> dict[str, Any]:
    """Raise ``data.max_seconds`` so far that a batch of the longest recordings fits into the free memory.

    The highest value is ``longest_seconds``. Return the key and the value for the start line.
    """
    for seconds in range(longest_seconds, int(config.data.max_seconds), -1):
        if memory_share(seconds) <= _BATCH_FRACTION:
            config.data.max_seconds = float(seconds)
            return {"data.max_seconds": float(seconds)}
    return {}


def _warn_of_long_recordings(seconds: float, memory_share: Callable[[float], float]) -> None:
    """Print a warning if a batch of the longest recordings, of ``seconds``, takes too much memory."""
    if _BATCH_FRACTION < memory_share(seconds) < math.inf:
        needs = f"needs about {memory_share(seconds):.0%} of the free memory"
        cure = "Lower data.max_seconds. Long texts need timestamps: name segments with start and end"
        print_notice(f"warning: a batch of the longest recordings ({seconds:.0f} s) {needs}. {cure}")


def _memory_share(
    config: DictConfig, device: Device, tokenizer: Tokenizer, labels_per_second: float
) -> Callable[[float], float]:
    """Return the predicted share of the free memory that a batch needs, as a function of its seconds.

    It is infinite for a network that cannot be built on the meta device.
    """
    network = network_without_values(run_config(config), tokenizer)
    footprint = network[1].footprint() if network else Footprint(math.inf)
    batch_size = int(config.data.batch.count or 1)
    free_bytes = host.free_memory() / int(config.world_size) if device.on_host else _ASSUMED_DEVICE_BYTES

    def share(seconds: float) -> float:
        return footprint.bytes(batch_size, seconds, math.ceil(labels_per_second * seconds)) / free_bytes

    return share


def _check_table_name(config: DictConfig) -> None:
    """Raise ConfigError if ``from_data`` is not the name of a table.

    Also raise ConfigError if ``recipe=finetune`` has no ``init_from``, and DataError if that does not exist.
    """
    if config.from_data is not None and config.from_data not in TABLES:
        raise ConfigError(f"from_data={config.from_data}: choose {' or '.join(TABLES)}, or null")
    if config.from_data != "finetune":
        return
    if not config.init_from:
        raise ConfigError("recipe=finetune starts from the weights of a run, add init_from=RUN or hf:NAME")
    if not config.init_from.startswith("hf:") and not Path(config.init_from).exists():
        raise DataError(f"init_from={config.init_from} does not exist. Name a run or a folder of weights")


def _has_open_alphabet(config: DictConfig) -> bool:
    """Return whether the labels follow from the data, as with ``tokenizer=auto``."""
    return "alphabet" in config.tokenizer and config.tokenizer.alphabet is None


@dataclass
class _Transcripts:
    """The duration and the normalised transcript of each recording that has a transcript."""

    seconds: list[float] = field(default_factory=list)  # durations, in the same order as ``texts``
    texts: list[str] = field(default_factory=list)

    @property
    def hours(self) -> float:
        return sum(self.seconds) / 3600


def _read_transcripts(config: DictConfig, normalise: Callable[[str], str]) -> _Transcripts:
    """Read the transcripts of the training data, normalised by ``normalise``.

    Raises ConfigError if the data set does not list its recordings, and DataError if no recording has a
    transcript or the data cannot be read.
    """
    # The setting that needs the transcripts, for messages.
    setting = "tokenizer=auto" if _has_open_alphabet(config) else f"recipe={config.from_data}"
    data: DataModule = part_of(config, "data").build(tokenizer=NoText())
    transcripts = _Transcripts()
    is_empty = True
    try:
        for seconds, text in data.recordings(normalise):
            is_empty = False
            if text:
                transcripts.seconds.append(seconds)
                transcripts.texts.append(text)
    except DataError as error:
        if part_of(config, "launcher").build().is_here:
            raise
        reason = f"{setting} reads data.train on this host, before the ranks start"
        raise DataError(f"{error} ({reason})") from None
    finally:
        data.close()
    if is_empty:
        raise ConfigError(f"{setting}: {type(data).__name__} does not list its recordings. Set each key")
    if not transcripts.texts:
        raise _error_without_transcripts(data, config.tokenizer.normaliser)
    return transcripts


def _error_without_transcripts(data: DataModule, normaliser: str) -> DataError:
    """Return the error of data without transcripts, or whose transcripts the normaliser leaves empty."""
    for _, text in data.recordings(str):
        if text.strip():
            example = f"{text[:40]!r}"
            cause = f"tokenizer.normaliser={normaliser} leaves nothing of any transcript, such as {example}"
            return DataError(f"data.train: {cause}. Choose another one, such as none")
    fix = "Put a.txt beside a.wav, or name it in a manifest"
    return DataError(f"data.train: no recording has a transcript. {fix}")


def _choose_tokenizer(config: DictConfig, transcripts: _Transcripts) -> str:
    """Set the labels of ``tokenizer=auto``. Return their kind and number for the start line.

    The labels are pieces of SentencePiece if ``sizing.pieces`` gives a number of them, else characters.
    """
    occurrences: Counter[str] = Counter()  # of each character in all transcripts
    utterances: Counter[str] = Counter()  # transcripts that contain the character
    for text in transcripts.texts:
        occurrences.update(text)
        utterances.update(set(text))
    total = len(transcripts.texts)
    max_bad = most_bad(config.data.get("max_bad"), config.data.get("max_bad_share"), total)
    max_skipped = min(max_bad, _RARE_SHARE * total)
    rare = rare_characters(occurrences, utterances, max_skipped)
    alphabet = "".join(sorted(occurrences.keys() - rare))
    usable_texts = [text for text in transcripts.texts if set(rare).isdisjoint(text)]
    if rare:
        _report_rare(rare, occurrences, total - len(usable_texts))
    piece_count = pieces(transcripts.hours, len(alphabet))
    if piece_count:
        with contextlib.suppress(DataError):  # The texts have too few different words for this number.
            config.tokenizer = _train_pieces(usable_texts, piece_count, config.tokenizer.normaliser)
            return f"sentencepiece({piece_count})"
    config.tokenizer.alphabet = alphabet
    return f"characters({len(alphabet)})"


def _report_rare(rare: Sequence[str], occurrences: Counter[str], skipped: int) -> None:
    """Print the rarest characters with their numbers of occurrences.

    ``skipped`` is the number of recordings whose transcripts contain rare characters.
    """
    examples = [f"{character!r} ({occurrences[character]})" for character in rare[:_MAX_EXAMPLES]]
    if len(rare) > _MAX_EXAMPLES:
        examples.append("…")
    line = f"{len(rare)} rare characters have no label, {skipped} recordings are skipped"
    print_line(f"tokenizer: {line}: {', '.join(examples)}")


def _train_pieces(texts: Sequence[str], size: int, normaliser: str) -> DictConfig:
    """Return the node of a SentencePiece tokenizer of ``size`` pieces. Its model is in the cache.

    Raises DataError if the texts have too few different words.
    """
    stride = len(texts) // _MAX_PIECE_TEXTS + 1
    texts = texts[::stride]
    path = cache_folder() / "tokenizers" / f"{digest('identity', size, normaliser, *texts)}.model"
    if not path.exists():
        with writing(path, "set SPEECHTRAIN_CACHE to another folder"):
            path.parent.mkdir(parents=True, exist_ok=True)
            train_sentencepiece(texts, path, size=size)
    return OmegaConf.create({"_target_": _SENTENCEPIECE, "model": str(path), "normaliser": normaliser})


def rare_characters(occurrences: Counter[str], utterances: Counter[str], max_skipped: float) -> list[str]:
    """Return the rare characters that get no label, the rarest first.

    ``occurrences`` has the number of occurrences of each character, and ``utterances`` the number of
    utterances that contain it. Utterances with a character of the list are skipped. The list ends before more
    than ``max_skipped`` utterances would be skipped.
    """
    min_occurrences = _MIN_FRACTION * occurrences.total()

    def rarity(character: str) -> tuple[int, int, str]:
        return utterances[character], occurrences[character], character

    rare = []
    skipped = 0
    for character in sorted(occurrences, key=rarity):
        skipped += utterances[character]
        is_rare = utterances[character] < _MIN_UTTERANCES or occurrences[character] < min_occurrences
        if not is_rare or skipped > max_skipped:
            break
        rare.append(character)
    return rare


def _fast_label_rate(transcripts: _Transcripts, tokenizer: Tokenizer) -> float:
    """Return the labels per second of fast speech, or 0 if no transcript can be encoded.

    Between two equal labels, CTC needs a frame for a blank, so such a pair counts as three labels.
    """
    rates = []
    for seconds, text in zip(transcripts.seconds, transcripts.texts, strict=True):
        if seconds > 0 and not tokenizer.unknown(text):
            labels = tokenizer.encode(text)
            blanks = sum(first == second for first, second in pairwise(labels))
            rates.append((len(labels) + blanks) / seconds)
    return float(np.percentile(rates, _FAST_PERCENTILE)) if rates else 0.0


def _core_hours(config: DictConfig, device: Device) -> float:
    """Return the training time in hours, times the CPU cores that are as fast as all ranks together."""
    hours = config.trainer.max_hours
    if hours is None:
        hours = _DEFAULT_HOURS
    return device.equivalent_cores(int(config.world_size)) * float(hours)


def _rank_cores(config: DictConfig, device: Device, explicit_keys: Collection[str]) -> int:
    """Return the cores of this host that ranks may divide, or 1 if the recipe must not choose the ranks."""
    for explicit_key in explicit_keys:
        # ``device=cpu`` does not set ``device.threads``, so a group above a key does not count.
        if any(f"{explicit_key}.".startswith(f"{key}.") for key in _KEYS_OF_RANKS):
            return 1
    launcher = part_of(config, "launcher").build()
    job = Job(Path(), Path(), world_size=2)  # Only the number of ranks matters here.
    try:
        launcher.check(job)
    except SpeechtrainError:  # The launcher starts one rank only.
        return 1
    return device.rank_cores() if launcher.is_here else 1
