"""speechtrain-transcribe: transcribe recordings with a run."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console
from speechtrain.commands._transcripts import FORMATS, ONE_RECORDING, Transcript, written
from speechtrain.errors import ConfigError, DataError, MachineError, one_line
from speechtrain.files import atomic, writing

if TYPE_CHECKING:
    from speechtrain.data.lhotse_cuts import Samples
    from speechtrain.data.pieces import Recording

_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=")
_FIX = "name a folder that can be written"  # for --out
_MMAP_THRESHOLD = -3  # of glibc's mallopt: larger blocks are the system's own again when they are freed
_SUFFIXES = {"text": ".txt"}  # where it is not the format's name


def parser() -> argparse.ArgumentParser:
    """The command line."""
    build = Parser(
        prog="speechtrain-transcribe",
        description="Transcribe recordings (WAV, FLAC, MP3 and others of libsndfile; any rate, any channels, "
        "any length), folders of them and manifests. Prints NAME<tab>TEXT in the order given; NAME is the "
        "file, or the id in a manifest.",
        epilog="KEY=VALUE among the recordings sets a key of the run's config, such as device.threads=1, "
        "precision=bf16, device=cpu or decoder=beam. What cannot be read is one line on stderr; the rest is "
        "transcribed, and the exit code is 3. Other codes: 0 done, 2 usage, 4 machine, 5 no run or no "
        "usable checkpoint.",
    )
    build.add_argument("run", type=Path, help="run directory")
    build.add_argument("audio", nargs="+", metavar="AUDIO", help="files of audio, folders, manifests")
    build.add_argument("--config-dir", metavar="DIR", help="a folder of your own choices for KEY=CHOICE")
    build.add_argument("--checkpoint", default="best", help="best (default), last or a folder's name")
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
        "captions; ctm: a line per word",
    )
    build.add_argument(
        "--json", action="store_const", const="json", dest="format", help="the same as --format json"
    )
    build.add_argument("--out", type=Path, metavar="DIR", help="write a file for each recording to DIR")
    return build


def run(argv: list[str]) -> int:
    """Transcribe and print, in the order given; returns the exit code. Raises a SpeechtrainError."""
    arguments = parser().parse_intermixed_args(argv)
    overrides = [name for name in arguments.audio if _OVERRIDE.match(name) and not Path(name).exists()]
    names = [name for name in arguments.audio if name not in overrides]
    _check(arguments, names)
    from speechtrain.commands._loaded_run import load

    with contextlib.suppress(AttributeError, OSError):  # freed blocks of every size: 16 % more after an hour
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)
    loaded = load(arguments.run, *overrides, checkpoint=arguments.checkpoint, config_dir=arguments.config_dir)
    failed, used, printed = False, set[str](), 0
    with _progress() as show:
        found = map(show, loaded.recordings(names))
        for one in loaded.transcripts(found, arguments.batch, arguments.piece_seconds):
            if isinstance(one, DataError):
                failed = True
                print(f"speechtrain: error: {one_line(str(one))}", file=sys.stderr, flush=True)
            elif arguments.out:
                _write(one, arguments.out, arguments.format, used)
            else:
                printed += 1
                if printed > 1:
                    _check_several(arguments.format)
                print(written(one, arguments.format), end="", flush=True)
    return DataError.exit_code if failed else 0


def _check(arguments: argparse.Namespace, names: list[str]) -> None:
    """Raise ConfigError or MachineError before a model is loaded."""
    if arguments.batch < 1:
        raise ConfigError(f"--batch {arguments.batch}: it must be at least 1")
    if not arguments.piece_seconds >= 1:
        raise ConfigError(f"--piece-seconds {arguments.piece_seconds:g}: it must be at least 1")
    if not names:
        raise ConfigError("name one or more recordings; speechtrain-transcribe --help shows the usage")
    if arguments.out:
        with writing(f"--out {arguments.out}", _FIX):
            arguments.out.mkdir(parents=True, exist_ok=True)
        if not os.access(arguments.out, os.W_OK):
            raise MachineError(f"--out {arguments.out} cannot be written; {_FIX}")
    elif len(names) > 1:
        _check_several(arguments.format)


def _check_several(form: str) -> None:
    """Raise ConfigError for a format that holds one recording only."""
    if form in ONE_RECORDING:
        raise ConfigError(f"--format {form} has a file for each recording; name their folder by --out DIR")


def _write(transcript: Transcript, folder: Path, form: str, used: set[str]) -> None:
    """Write a file named after the recording, without its folders; equal names are numbered."""
    name = transcript.name
    stem = os.path.splitext(os.path.basename(name) if name == transcript.audio else name)[0]
    stem = re.sub(r"[^\w.-]+", "_", stem).lstrip(".")[:200] or "recording"
    numbered = (f"{stem}-{number}" for number in count(2))
    name = next(name for name in chain([stem], numbered) if name not in used)
    used.add(name)
    path = folder / (name + _SUFFIXES.get(form, f".{form}"))
    with writing(f"--out {path}", _FIX), atomic(path) as temporary:
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
