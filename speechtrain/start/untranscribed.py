"""Recordings without transcripts, ``data.untranscribed``: a first run writes texts for them.

The first run, the teacher, learns from the transcripts in a share of ``trainer.max_hours``. It transcribes
the other recordings, and the most probable texts are listed in ``RUN/untranscribed.jsonl``. Then the run
itself begins with the weights of the teacher, and trains on the transcripts and on these texts for the rest
of the time. If more than MOST_WRONG of the teacher's characters are wrong on the held-out recordings, the
texts are not used. The measurements are in docs/benchmarks/little-speech.md.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechtrain.data.audio import files_of
from speechtrain.data.module import SpeechData
from speechtrain.data.pieces import Recording
from speechtrain.errors import ConfigError, DataError, SpeechtrainError, print_notice
from speechtrain.files import atomic, json_text, print_line
from speechtrain.overrides import key_of_override, quoted
from speechtrain.run_directory import LEDGER, RESULT, TEACHER, RunResult, metric_text, read_result
from speechtrain.start.command_line import Command
from speechtrain.start.run_config import part_of
from speechtrain.start.stored import read_config
from speechtrain.text.vocabulary import NoText

MOST_WRONG = 0.45
"""The largest CER of a teacher whose texts are used. With 0.35 the CER fell, and with 0.49 it did not."""
# The teacher's share of the time. Of 0.4 h of transcripts it learns little after 10 minutes of a core.
_TEACHER_SHARE = 0.25
_KEPT_SHARE = 0.75  # of the texts, in the order of the score for each label
_OF_THE_RUN = ("data.untranscribed", "trainer.max_hours", "run_dir")
"""The keys of a command that differ for its teacher."""
_OF_THE_TEACHER = ("model", "encoder", "tokenizer")
"""Groups of the run that must fit the weights of the teacher."""

Train = Callable[[Command], RunResult]


@dataclass(frozen=True)
class _Text:
    """A text that the teacher has written for a part of a recording."""

    audio: str  # the path of the file
    start: float  # in seconds of the file
    seconds: float
    text: str
    score: float  # the log-probability for each label

    def line(self) -> str:
        """Return the line of a NeMo manifest."""
        return json_text(
            {
                "audio_filepath": self.audio,
                "offset": round(self.start, 3),
                "duration": round(self.seconds, 3),
                "text": self.text,
                "score": round(self.score, 4),
            }
        )


def add_texts(job: Command, config: DictConfig, train: Train) -> set[str]:
    """Train the teacher of a new run, write its texts, and set the keys of ``config`` that follow.

    Return these keys, and the groups that are those of the teacher. ``train`` starts or continues the run of
    a command. Raises ConfigError for a config that cannot have a teacher, and the SpeechtrainError that
    stopped the teacher.
    """
    spec = config.data.untranscribed
    _check(job, config)
    config.data.untranscribed = None
    if config.dry_run:
        print_notice("data.untranscribed: a first run would write the texts. The plan is of the transcripts")
        return set()
    run_dir = Path(config.run_dir)
    teacher_dir = run_dir / TEACHER
    print_line(f"teacher: {teacher_dir} learns from the transcripts")
    result = train(_teacher(job, config, teacher_dir))
    hours = float(config.trainer.max_hours) - (result.wall_s or 0.0) / 3600
    cer = (result.metrics or {}).get("cer")
    stored = read_config(teacher_dir)
    config.init_from = str(teacher_dir)
    config.data.hold_out = stored.data.hold_out
    for group in _OF_THE_TEACHER:
        config[group] = stored[group]
    if cer is None or cer > MOST_WRONG:
        found = metric_text("cer", cer)
        print_line(f"teacher: {found} is too high for its texts. The run goes on with the transcripts alone")
    else:
        hours -= _seconds_to_write(spec, run_dir) / 3600
        config.data.train = _with_texts(config, run_dir / LEDGER)
    if hours <= 0:
        raise ConfigError(
            f"trainer.max_hours={config.trainer.max_hours}: the teacher took all of it. Raise it"
        )
    config.trainer.max_hours = round(hours, 4)
    return {"init_from", "data.train", "data.hold_out", "trainer.max_hours", *_OF_THE_TEACHER}


def print_gain(run_dir: Path) -> None:
    """Print the error rates of a run next to those of its teacher, if it has one and both are complete."""
    teacher, own = read_result(run_dir / TEACHER), read_result(run_dir)
    if teacher is None or own is None or not teacher.metrics or not own.metrics:
        return
    texts = []
    for name in ("cer", "wer"):
        after = metric_text(name, own.metrics.get(name)).removeprefix(f"{name} ")
        texts.append(f"{metric_text(name, teacher.metrics.get(name))} of the teacher, {after} of the run")
    print_line(f"untranscribed: {', '.join(texts)}")
    teacher_cer, own_cer = teacher.metrics.get("cer"), own.metrics.get("cer")
    if teacher_cer is not None and own_cer is not None and teacher_cer < own_cer:
        print_line(f"untranscribed: the teacher is better. Use {run_dir / TEACHER}")


def _check(job: Command, config: DictConfig) -> None:
    """Raise ConfigError for a config that cannot have a teacher."""
    if config.from_data not in ("scratch", "streaming"):
        raise ConfigError("data.untranscribed is of recipe=scratch and recipe=streaming. Add one of them")
    if config.trainer.max_hours is None:
        raise ConfigError("data.untranscribed divides trainer.max_hours. Set it, as trainer.max_hours=1")
    if config.init_from:
        raise ConfigError("data.untranscribed begins with the weights of its teacher. Remove init_from")
    if job.external_launch or not part_of(config, "launcher").build().is_here:
        raise ConfigError("data.untranscribed trains two runs, one after the other. Use launcher=auto")
    if "_target_" in config.data.train:
        raise ConfigError("data.untranscribed: data.train is a corpus of its own. Name files: data=manifest")


def _teacher(job: Command, config: DictConfig, run_dir: Path) -> Command:
    """Return the command that trains the teacher of a run with ``config``, in ``run_dir``."""
    overrides = [text for text in job.overrides if key_of_override(text) not in _OF_THE_RUN]
    hours = round(_TEACHER_SHARE * float(config.trainer.max_hours), 4)
    overrides += [f"trainer.max_hours={hours}", f"run_dir={quoted(str(run_dir))}"]
    return replace(job, overrides=overrides, run_dir=run_dir)


def _seconds_to_write(spec: Any, run_dir: Path) -> float:
    """Write the ledger of the recordings of ``spec``, and return the seconds that this takes.

    An earlier start may have written the texts of this teacher. Another process transcribes, because a
    command that loads a run may start itself again, and because its memory is then free for the ranks.
    Raises DataError if no text remains.
    """
    ledger, result = run_dir / LEDGER, run_dir / TEACHER / RESULT
    if ledger.exists() and ledger.stat().st_mtime > result.stat().st_mtime:
        return 0.0
    begin = time.monotonic()
    command = [sys.executable, "-P", "-m", "speechtrain.start.untranscribed", str(run_dir), *_paths(spec)]
    if subprocess.run(command).returncode:
        raise DataError("data.untranscribed: the teacher has written no text. The line above has the reason")
    return time.monotonic() - begin


def write_ledger(run_dir: Path, paths: Sequence[str]) -> None:
    """Write the most probable texts of the recordings in ``paths``, and print their number.

    Recordings that the teacher has trained on or holds out are left out. Raises DataError if no text remains.
    """
    import speechtrain  # The import of torch's modules takes a second.

    ledger = run_dir / LEDGER
    known = _known_files(read_config(run_dir / TEACHER))
    run = speechtrain.load(run_dir / TEACHER)
    recordings = _unknown_recordings(run.recordings(paths), known)
    texts = list[_Text]()
    for transcript in run.transcripts(recordings):
        if isinstance(transcript, DataError):
            print_notice(f"warning: {transcript}")
            continue
        for segment in transcript.segments:
            labels = len(segment.hypothesis.labels)
            if labels:
                score = segment.hypothesis.score / labels
                start = transcript.start + segment.start
                seconds = segment.end - segment.start
                texts.append(_Text(transcript.audio, start, seconds, segment.hypothesis.text, score))
    if not texts:
        raise DataError("data.untranscribed: nobody speaks in recordings that data.train does not have")
    texts.sort(key=lambda text: text.score, reverse=True)
    kept = texts[: max(1, round(_KEPT_SHARE * len(texts)))]
    with atomic(ledger) as temporary:
        temporary.write_text("".join(f"{text.line()}\n" for text in kept))
    hours = sum(text.seconds for text in kept) / 3600
    print_line(f"teacher: {len(kept):,} of {len(texts):,} texts are used, {hours:.2f} h ({ledger})")


def _paths(spec: Any) -> list[str]:
    """Return the paths of ``data.untranscribed``: a text, in which commas may separate paths, or a list."""
    if isinstance(spec, str):
        return [spec] if Path(spec).exists() else spec.split(",")
    return [path for text in spec for path in _paths(text)]


def _known_files(teacher: DictConfig) -> set[str]:
    """Return the audio files that a teacher trains on, holds out, or has in a set of ``data.valid``.

    Recordings of ``data.train`` without a transcript are not among them.
    """
    data: SpeechData = part_of(teacher, "data").build(tokenizer=NoText())
    training_set = data.training_set
    sets = [(training_set.index, training_set.usable)]
    for evaluation_set in data.valid_sets.values():
        recordings = evaluation_set.recordings
        sets.append((recordings.index, recordings.rows))
    files = set[str]()
    for index, rows in sets:
        for row in rows.tolist():
            files.update(files_of(index.cut(row)))
    data.close()
    return files


def _unknown_recordings(
    recordings: Iterator[Recording | DataError], known: Collection[str]
) -> Iterator[Recording | DataError]:
    """Yield the recordings whose file is not in ``known``. A mixture of several files has no line."""
    for recording in recordings:
        if isinstance(recording, DataError) or (recording.audio and recording.audio not in known):
            yield recording


def _with_texts(config: DictConfig, ledger: Path) -> DictConfig:
    """Return the source of the transcripts and of the texts in ``ledger``, of which none is held out."""
    train: Any = config.data.train
    if OmegaConf.is_config(train):
        train = OmegaConf.to_container(train)
    has_named_sets = isinstance(train, dict) and "path" not in train
    sets = train if has_named_sets else {"transcribed": train}
    sets["untranscribed"] = {"path": str(ledger), "hold_out": False}
    return OmegaConf.create(sets)


if __name__ == "__main__":
    try:
        write_ledger(Path(sys.argv[1]), sys.argv[2:])
    except SpeechtrainError as error:
        print_notice(f"speechtrain: error: {error}")
        sys.exit(error.exit_code)
