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
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console
from speechtrain.errors import ConfigError, DataError, MachineError, print_notice, printable
from speechtrain.files import atomic, writing
from speechtrain.inference.transcript import FORMATS, ONE_RECORDING, Transcript, written

if TYPE_CHECKING:
    from speechtrain.data.formats.lhotse_cuts import Samples
    from speechtrain.data.pieces import Recording

_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=")
_FIX = "name a folder that can be written by --out DIR"
_MMAP_THRESHOLD = -3  # of glibc's mallopt: larger blocks are the system's own again when they are freed
Output = Callable[[Transcript, str], None]
"""Writes a transcript in a format."""
_SUFFIXES = {"text": ".txt"}  # The other formats are their own suffixes.


def parser() -> Parser:
    """The command line."""
    build = Parser(
        prog="speechtrain transcribe",
        description="Transcribe recordings (WAV, FLAC, MP3 and others of libsndfile; any rate, any channels, "
        "any length), folders of them and manifests. Prints NAME<tab>TEXT in the order given; NAME is the "
        "file, or the id in a manifest.",
        examples=[
            "speechtrain transcribe RUN talk.mp3 FOLDER",
            "speechtrain transcribe run_dir=RUN talk.mp3 --format srt",
            "speechtrain transcribe RUN talk.mp3 decoder=beam device.threads=1",
        ],
        exit_codes="0 done, 2 usage, 3 some recordings cannot be read and the others are transcribed, "
        "4 machine, 5 no run or no usable checkpoint",
    )
    build.add_run()
    build.add_argument(
        "audio",
        nargs="+",
        metavar="AUDIO",
        help="a file of audio, a folder or a manifest; KEY=VALUE sets a key of the run's config",
    )
    build.add_argument(
        "--batch", type=int, default=4, metavar="N", help="pieces decoded together (default 4)"
    )
    build.add_argument(
        "--piece-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="a longer recording is cut at pauses into pieces of at most S seconds (default 20)",
    )
    build.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="text (default); json: an object per line, with each word's times and confidence; srt, vtt: "
        "captions (of several recordings, in a file beside each); ctm: a line per word",
    )
    build.add_argument(
        "--json", action="store_const", const="json", dest="format", help="the same as --format json"
    )
    build.add_argument("--out", type=Path, metavar="DIR", help="write a file for each recording to DIR")
    return build


def run(argv: list[str]) -> int:
    """Transcribe and print, in the order given. Returns the exit code. Raises a SpeechtrainError."""
    arguments = parser().parse_with_run(argv)
    overrides = [name for name in arguments.audio if _OVERRIDE.match(name) and not Path(name).exists()]
    names = [name for name in arguments.audio if name not in overrides]
    _check(arguments, names)
    from speechtrain.inference.loaded_run import load

    _return_freed_memory()
    loaded = load(arguments.run, *overrides, checkpoint=arguments.checkpoint, config_dir=arguments.config_dir)
    recordings: Iterable[Recording | DataError] = loaded.recordings(names)
    output = _to_console if arguments.out is None else _to_folder(arguments.out, set())
    if arguments.format in ONE_RECORDING and arguments.out is None:
        recordings = list(recordings)
        if len(recordings) > 1 or os.path.isdir(names[0]):
            output = _to_files_beside(recordings, arguments.format)
    exit_code = 0
    with _progress() as show:
        for result in loaded.transcripts(map(show, recordings), arguments.batch, arguments.piece_seconds):
            if isinstance(result, DataError):
                exit_code = result.exit_code
                print_notice(f"error: {result}")
            else:
                output(result, arguments.format)
    return exit_code


def _return_freed_memory() -> None:
    """Give freed blocks back to the system, which saves 16 % of the memory after an hour."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)


def _check(arguments: argparse.Namespace, names: list[str]) -> None:
    """Raise ConfigError or MachineError before a model is loaded."""
    if arguments.batch < 1:
        raise ConfigError(f"--batch {arguments.batch}: it must be at least 1")
    if not arguments.piece_seconds >= 1:
        raise ConfigError(f"--piece-seconds {arguments.piece_seconds:g}: it must be at least 1")
    if not names:
        raise ConfigError("name one or more recordings; speechtrain transcribe --help shows the usage")
    if arguments.out:
        with writing(f"--out {arguments.out}", _FIX):
            arguments.out.mkdir(parents=True, exist_ok=True)
        if not os.access(arguments.out, os.W_OK):
            raise MachineError(f"--out {arguments.out} cannot be written; {_FIX}")


def _to_console(transcript: Transcript, form: str) -> None:
    print(written(transcript, form), end="", flush=True)


def _to_folder(folder: Path, used: set[str]) -> Output:
    """Return an output to files in ``folder``, named after the recordings. Equal names are numbered."""

    def output(transcript: Transcript, form: str) -> None:
        name = transcript.name
        stem = os.path.splitext(os.path.basename(name) if name == transcript.audio else name)[0]
        stem = re.sub(r"[^\w.-]+", "_", stem).lstrip(".")[:200] or "recording"
        numbered = (f"{stem}-{number}" for number in count(2))
        name = next(name for name in chain([stem], numbered) if name not in used)
        used.add(name)
        _write(transcript, folder / (name + _SUFFIXES.get(form, f".{form}")), form)

    return output


def _to_files_beside(recordings: Iterable[Recording | DataError], form: str) -> Output:
    """Return an output to a file beside each recording.

    Raises ConfigError for a file that exists or would have the captions of two recordings, and for a
    recording of a manifest, which may begin within its file.
    """
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
            fix = "name a folder for the captions by --out DIR"
            raise ConfigError(f"--format {form}: {printable(problem)}; {fix}")
        paths[recording.audio] = path

    def output(transcript: Transcript, form: str) -> None:
        path = paths[transcript.audio]
        _write(transcript, path, form)
        print(printable(str(path)), flush=True)

    return output


def _write(transcript: Transcript, path: Path, form: str) -> None:
    with writing(str(path), _FIX), atomic(path) as temporary:
        temporary.write_text(written(transcript, form), encoding="utf-8")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Recording | DataError], Recording | DataError]]:
    """On a terminal, a bar with the audio read so far; what it is given, it counts."""
    if not sys.stderr.isatty():
        yield lambda found: found
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    told = TextColumn("{task.completed:.0f} of {task.total:.0f} s of audio")
    # what is printed passes above the bar only where both go to the terminal
    shares = sys.stdout.isatty()
    with Progress(
        BarColumn(),
        told,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=shares,
    ) as bar:
        task, total = bar.add_task("", total=0.0), 0.0

        def counted(found: Recording | DataError) -> Recording | DataError:
            nonlocal total
            if isinstance(found, DataError):
                return found
            before, total = total, total + found.seconds
            bar.update(task, total=total)

            def read(start: float, seconds: float) -> Samples:
                bar.update(task, completed=before + start)
                return found.read(start, seconds)

            return replace(found, read=read)

        yield counted


main = console(run)

if __name__ == "__main__":
    main()
