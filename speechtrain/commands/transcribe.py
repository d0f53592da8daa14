"""speechtrain transcribe: transcribe recordings with a run."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console
from speechtrain.errors import ConfigError, DataError, escape_controls, print_notice
from speechtrain.files import atomic, writing
from speechtrain.inference.transcript import FORMATS, ONE_RECORDING, Transcript, format_transcript

if TYPE_CHECKING:
    from speechtrain.data.formats.lhotse_cuts import Samples
    from speechtrain.data.pieces import Recording

_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=")
_OUT_FIX = "name a folder that can be written by --out DIR"
_MMAP_THRESHOLD = -3
"""A parameter of glibc's mallopt: a block above this size returns to the system when it is freed."""
Output = Callable[[Transcript, str], None]
"""A function that writes a transcript in a format of ``FORMATS``."""
_SUFFIXES = {"text": ".txt"}
"""Suffixes of files by format. For a format that is not listed, the suffix is the name of the format."""


def parser() -> Parser:
    parser = Parser(
        prog="speechtrain transcribe",
        description="Transcribe recordings (WAV, FLAC, MP3 and others of libsndfile; any rate, any channels, "
        "any length), folders of recordings, and manifests. Prints NAME<tab>TEXT in the order of the "
        "arguments. NAME is the file, or the id in a manifest.",
        examples=[
            "speechtrain transcribe RUN talk.mp3 FOLDER",
            "speechtrain transcribe run_dir=RUN talk.mp3 --format srt",
            "speechtrain transcribe RUN talk.mp3 decoder=beam device.threads=1",
        ],
        exit_codes="0 done, 2 usage, 3 some recordings cannot be read and the others are transcribed, "
        "4 machine, 5 no run or no usable checkpoint",
    )
    parser.add_run()
    parser.add_argument(
        "audio",
        nargs="+",
        metavar="AUDIO",
        help="a file of audio, a folder or a manifest. KEY=VALUE sets a key of the run's config",
    )
    parser.add_argument(
        "--batch", type=int, default=4, metavar="N", help="pieces decoded together (default 4)"
    )
    parser.add_argument(
        "--piece-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="a longer recording is cut at pauses into pieces of at most S seconds (default 20)",
    )
    parser.add_argument(
        "--channel",
        type=int,
        metavar="N",
        help="read only channel N, from 0, as for two voices on two channels (default: the mean of all)",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="text (default), json (an object per line, with the times and confidence of each word), srt or "
        "vtt (captions, of several recordings in a file beside each), ctm (a line per word)",
    )
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="the same as --format json"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a file for each recording to DIR")
    return parser


def run(argv: list[str]) -> int:
    """Transcribe recordings, write the transcripts in the order of the arguments and return the exit code."""
    arguments = parser().parse_with_run(argv)
    overrides = [text for text in arguments.audio if _OVERRIDE.match(text) and not Path(text).exists()]
    sources = [text for text in arguments.audio if text not in overrides]
    _check_arguments(arguments, sources)
    from speechtrain.inference.loaded_run import load

    _return_freed_memory()
    loaded = load(arguments.run, *overrides, checkpoint=arguments.checkpoint, config_dir=arguments.config_dir)
    recordings: Iterable[Recording | DataError] = loaded.recordings(sources, arguments.channel)
    if arguments.out is not None:
        output = _folder_output(arguments.out)
    elif arguments.format in ONE_RECORDING:
        recordings = list(recordings)
        output = _captions_output(recordings, sources, arguments.format)
    else:
        output = _print_transcript
    with _progress() as count_audio:
        recordings = map(count_audio, recordings)
        outcomes = loaded.transcripts(recordings, arguments.batch, arguments.piece_seconds)
        return _write_outcomes(outcomes, output, arguments.format)


def _write_outcomes(outcomes: Iterable[Transcript | DataError], output: Output, form: str) -> int:
    """Write each transcript in the format ``form``, and print each error.

    Return the exit code, which is 3 if a recording has an error.
    """
    exit_code = 0
    for outcome in outcomes:
        if isinstance(outcome, DataError):
            exit_code = outcome.exit_code
            print_notice(f"error: {outcome}")
        else:
            output(outcome, form)
    return exit_code


def _return_freed_memory() -> None:
    """Let the C library return freed blocks to the system. After an hour, this saves 16 % of the memory."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)


def _check_arguments(arguments: argparse.Namespace, sources: list[str]) -> None:
    """Raise ConfigError or MachineError for wrong arguments, before the model is loaded.

    ``sources`` are the arguments AUDIO that are not overrides.
    """
    if arguments.batch < 1:
        raise ConfigError(f"--batch {arguments.batch}: it must be at least 1")
    if not arguments.piece_seconds >= 1:
        raise ConfigError(f"--piece-seconds {arguments.piece_seconds:g}: it must be at least 1")
    if arguments.channel is not None and arguments.channel < 0:
        raise ConfigError(f"--channel {arguments.channel}: it must be a number from 0 on")
    if not sources:
        raise ConfigError("name one or more recordings. speechtrain transcribe --help shows the usage")
    if arguments.out:
        with writing(f"--out {arguments.out}", _OUT_FIX):
            arguments.out.mkdir(parents=True, exist_ok=True)
            if not os.access(arguments.out, os.W_OK):
                raise PermissionError("no permission")


def _print_transcript(transcript: Transcript, form: str) -> None:
    print(format_transcript(transcript, form), end="", flush=True)


def _folder_output(folder: Path) -> Output:
    """Return an output that writes a file for each recording into ``folder``.

    The file has the name of the recording. If several names are equal, a number is added.
    """
    used_stems: set[str] = set()

    def output(transcript: Transcript, form: str) -> None:
        name = transcript.name
        if name == transcript.audio:  # The name is a path, and not the id in a manifest.
            name = os.path.basename(name)
        safe_name = re.sub(r"[^\w.-]+", "_", os.path.splitext(name)[0])
        safe_name = safe_name.lstrip(".")[:200] or "recording"
        stem = safe_name
        number = 1
        while stem in used_stems:
            number += 1
            stem = f"{safe_name}-{number}"
        used_stems.add(stem)
        suffix = _SUFFIXES.get(form, f".{form}")
        _write(transcript, folder / (stem + suffix), form)

    return output


def _captions_output(recordings: list[Recording | DataError], sources: list[str], form: str) -> Output:
    """Return an output that writes a file of captions beside each recording.

    The captions of a single recording are printed instead, unless ``sources`` names a folder. Raises
    ConfigError if a file exists already, if two recordings have the same file, or if a recording is from a
    manifest, because it may begin in the middle of its file.
    """
    if len(recordings) <= 1 and not os.path.isdir(sources[0]):
        return _print_transcript
    paths: dict[str, Path] = {}
    for recording in recordings:
        if isinstance(recording, DataError):
            continue
        path = Path(recording.audio).with_suffix(f".{form}")
        problem = ""
        if recording.name != recording.audio:
            problem = f"{recording.name} is part of a manifest"
        elif path in paths.values():
            problem = f"two recordings would write {path}"
        elif os.path.lexists(path):
            problem = f"{path} exists"
        if problem:
            fix = "Name a folder for the captions by --out DIR"
            raise ConfigError(f"--format {form}: {escape_controls(problem)}. {fix}")
        paths[recording.audio] = path

    def output(transcript: Transcript, form: str) -> None:
        path = paths[transcript.audio]
        _write(transcript, path, form)
        print(escape_controls(str(path)), flush=True)

    return output


def _write(transcript: Transcript, path: Path, form: str) -> None:
    with writing(str(path), _OUT_FIX), atomic(path) as temporary:
        temporary.write_text(format_transcript(transcript, form), encoding="utf-8")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Recording | DataError], Recording | DataError]]:
    """Return a context with a progress bar on stderr, which shows the seconds of audio that have been read.

    The context yields a function. It adds a recording to the total, and returns the recording with a ``read``
    that moves the bar. If stderr is not a terminal, no bar is shown.
    """
    if not sys.stderr.isatty():
        yield lambda recording: recording
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} s of audio"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        # A transcript is printed above the bar only if both streams are on the terminal.
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        task = bar.add_task("", total=0.0)
        total = 0.0

        def count_audio(recording: Recording | DataError) -> Recording | DataError:
            nonlocal total
            if isinstance(recording, DataError):
                return recording
            earlier_seconds = total
            total += recording.seconds
            bar.update(task, total=total)

            def read(start: float, seconds: float) -> Samples:
                bar.update(task, completed=earlier_seconds + start)
                return recording.read(start, seconds)

            return replace(recording, read=read)

        yield count_audio


main = console(run)

if __name__ == "__main__":
    main()
