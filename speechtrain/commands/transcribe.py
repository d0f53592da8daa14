"""speechtrain transcribe: transcribe recordings with a run."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from speechtrain import __version__
from speechtrain.commands._cli import Parser, console, parse_context
from speechtrain.commands._results import OUT_FIX, Input, Outcome, ResultFolder, print_outcome
from speechtrain.errors import ConfigError, DataError, RecordingError, escape_controls, print_notice
from speechtrain.files import writing
from speechtrain.inference.transcript import FORMATS, ONE_RECORDING, Transcript, ctm_name

if TYPE_CHECKING:
    from speechtrain.data.formats.lhotse_cuts import Samples
    from speechtrain.data.pieces import Recording
    from speechtrain.inference.loaded_run import LoadedRun

_Item = TypeVar("_Item", bound="Recording | DataError")

_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=")
_MMAP_THRESHOLD = -3
"""A parameter of glibc's mallopt: a block above this size returns to the system when it is freed."""
Output = Callable[[Outcome, str], None]
"""A function that writes a transcript or an error in a format of ``FORMATS``."""


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
            "arecord -q -t raw -f S16_LE -r 16000 | speechtrain transcribe RUN --stream",
        ],
        exit_codes="0 done, 2 usage, 3 some recordings cannot be read and the others are transcribed, "
        "4 machine, 5 no run or no usable checkpoint",
    )
    parser.add_run()
    parser.add_argument(
        "audio",
        nargs="*",
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
        help="read only channel N, from 0, as for two voices on two channels (default: the run's)",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="text (default), json (an object per line, with the times and confidence of each word), srt or "
        "vtt (captions, of several recordings with --out), ctm (a line per word)",
    )
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="the same as --format json"
    )
    parser.add_argument(
        "--list",
        type=Path,
        metavar="FILE",
        help="also transcribe each line of FILE, a path (-: standard input)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write a file for each recording to DIR, with the folders below the common folder of all "
        "recordings. The same command continues: it leaves out what is written",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="print the text while it is spoken: of one recording, or of 16-bit PCM on standard input. On a "
        "terminal the last line is rewritten, elsewhere each event is an object of JSON",
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="with --stream and a recording: read it as slowly as it was spoken, and print delays of words",
    )
    parser.add_argument(
        "--context",
        type=parse_context,
        metavar="L,C,R",
        help="with --stream: frames before a chunk, in it and after it (default: the run's)",
    )
    return parser


def run(argv: list[str]) -> int:
    """Transcribe recordings, and write the transcripts in the order of the arguments.

    Return the exit code, which is 3 if a recording has an error.
    """
    arguments = parser().parse_with_run(argv)
    overrides = [text for text in arguments.audio if _OVERRIDE.match(text) and not Path(text).exists()]
    sources = [text for text in arguments.audio if text not in overrides]
    if arguments.list is not None:
        sources += _lines_of(arguments.list)
    if arguments.stream:
        return _stream(arguments, overrides, sources)
    _check_arguments(arguments, sources)
    from speechtrain.inference.loaded_run import load

    # The C library returns freed blocks to the system. After an hour, this saves 16 % of the memory.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)
    loaded = load(arguments.run, *overrides, checkpoint=arguments.checkpoint, config_dir=arguments.config_dir)
    recordings: Iterable[Recording | DataError] = loaded.recordings(sources, arguments.channel)
    inputs = list[Input]()
    if arguments.out is not None or arguments.format == "ctm" or sys.stderr.isatty():
        inputs = _inputs(loaded, sources)
        if arguments.format == "ctm":
            _check_ctm_names(inputs)
    folder = None
    output: Output = print_outcome
    if arguments.out is not None:
        weights = loaded.checkpoint / "model.safetensors"
        checkpoint_version = str(weights), weights.stat().st_mtime_ns
        command = (
            __version__,
            checkpoint_version,
            overrides,
            arguments.channel,
            arguments.piece_seconds,
        )
        folder = ResultFolder(arguments.out, arguments.format, command, inputs)
        output = folder.write
    elif arguments.format in ONE_RECORDING:
        recordings = list(recordings)
        if len(recordings) > 1:
            fix = "Name a folder for them by --out DIR. It may be the folder of the recordings"
            raise ConfigError(f"--format {arguments.format}: there are {len(recordings)} recordings. {fix}")
    with _progress(inputs) as count_recording:
        recordings = map(count_recording, recordings)
        if folder is not None:
            recordings = filter(folder.lacks, recordings)
        failures = count = 0
        for outcome in loaded.transcripts(recordings, arguments.batch, arguments.piece_seconds):
            count += 1
            if isinstance(outcome, DataError):
                failures += 1
                print_notice(f"error: {outcome}")
            if isinstance(outcome, Transcript | RecordingError):
                output(outcome, arguments.format)
        if failures and count > 1:
            print_notice(f"{failures} of {count} recordings failed")
    return DataError.exit_code if failures else 0


def _stream(arguments: argparse.Namespace, overrides: list[str], sources: list[str]) -> int:
    """Print the text of one recording while it arrives."""
    if len(sources) > 1 or arguments.out is not None or arguments.format not in ("text", "json"):
        raise ConfigError("--stream reads one recording or standard input, and prints text or JSON")
    source = sources[0] if sources else "-"
    if arguments.realtime and source == "-":
        raise ConfigError("--realtime needs a recording. Standard input has its own speed")
    if arguments.channel is not None and (source == "-" or arguments.channel < 0):
        raise ConfigError(f"--channel {arguments.channel}: name a channel of a recording, from 0 on")
    from speechtrain.commands._stream import transcribe_stream
    from speechtrain.inference.loaded_run import load

    loaded = load(arguments.run, *overrides, checkpoint=arguments.checkpoint, config_dir=arguments.config_dir)
    as_json = arguments.format == "json"
    transcribe_stream(loaded, source, arguments.context, arguments.channel, arguments.realtime, as_json)
    return 0


def _lines_of(path: Path) -> list[str]:
    """Return the lines of ``--list``, without empty ones. Names of files need not be UTF-8."""
    if str(path) == "-":
        content = sys.stdin.buffer.read()
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"--list {path}: {error.strerror}") from None
    return [os.fsdecode(line) for line in content.splitlines() if line]


def _inputs(loaded: LoadedRun, sources: list[str]) -> list[Input]:
    """Return the recordings of ``sources``. Only their headers are read."""
    inputs = []
    for source in sources:
        for recording in loaded.recordings(source):
            if not isinstance(recording, DataError) or isinstance(recording, RecordingError):
                inputs.append(Input(source, recording.name, recording.audio))
    return inputs


def _check_ctm_names(inputs: Iterable[Input]) -> None:
    """Raise ConfigError if two recordings have the same name in a CTM file."""
    inputs_by_name = dict[str, Input]()
    for recording in inputs:
        name = ctm_name(recording.name, recording.audio)
        former = inputs_by_name.setdefault(name, recording)
        if former.key != recording.key:
            both = f"{escape_controls(former.name)} and {escape_controls(recording.name)}"
            raise ConfigError(
                f"--format ctm: {both} would both be {name}. Use --format json, or a manifest with other ids"
            )


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
        with writing(f"--out {arguments.out}", OUT_FIX):
            arguments.out.mkdir(parents=True, exist_ok=True)
            if not os.access(arguments.out, os.W_OK):
                raise PermissionError("no permission")


@contextlib.contextmanager
def _progress(inputs: Sequence[Input]) -> Iterator[Callable[[_Item], _Item]]:
    """Return a context with a progress bar on stderr, which counts the recordings and the seconds of audio.

    The context yields a function that counts a recording, and returns it with a ``read`` that counts the
    seconds. If stderr is not a terminal, no bar is shown.
    """
    if not inputs or not sys.stderr.isatty():
        yield lambda recording: recording
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("recordings, {task.fields[seconds]:.0f} s of audio"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        # A transcript is printed above the bar only if both streams are on the terminal.
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        task = bar.add_task("", total=len(inputs), seconds=0.0)
        earlier_seconds = 0.0

        def count_recording(recording: _Item) -> _Item:
            nonlocal earlier_seconds
            bar.update(task, advance=1)
            if isinstance(recording, DataError):
                return recording
            start_of_recording = earlier_seconds
            earlier_seconds += recording.seconds

            def read(start: float, seconds: float) -> Samples:
                bar.update(task, seconds=start_of_recording + start + seconds)
                return recording.read(start, seconds)

            return replace(recording, read=read)

        yield count_recording


main = console(run)

if __name__ == "__main__":
    main()
