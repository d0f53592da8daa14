"""speechtrain-transcribe: transcribe audio files with a run."""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from pathlib import Path

from speechtrain.commands._cli import Parser, console, json_text
from speechtrain.errors import SPELLING, ConfigError, DataError, one_line, printable

_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    build = Parser(
        prog="speechtrain-transcribe",
        description="Transcribe audio files (WAV, FLAC and others of libsndfile; any rate, any channels). "
        "Prints FILE<tab>TEXT in the order given.",
        epilog="KEY=VALUE among the files sets a key of the run's config, such as device.threads=1, "
        "precision=bf16 or device=cpu. A file that cannot be read is one line on stderr; the others are "
        "transcribed, and the exit code is 3. Other codes: 0 done, 2 usage, 4 machine, 5 no run or no "
        "usable checkpoint.",
    )
    build.add_argument("run", type=Path, help="run directory")
    build.add_argument("audio", nargs="+", metavar="AUDIO", help="audio files")
    build.add_argument("--config-dir", metavar="DIR", help="a folder of your own choices for KEY=CHOICE")
    build.add_argument("--checkpoint", default="best", help="best (default), last or a folder's name")
    build.add_argument("--batch", type=int, default=8, metavar="N", help="files decoded together (default 8)")
    build.add_argument("--json", action="store_true", help="print a JSON object per file, not FILE<tab>TEXT")
    return build


def run(argv: list[str]) -> int:
    """Transcribe and print, in the order given; returns the exit code. Raises a SpeechtrainError."""
    arguments = parser().parse_intermixed_args(argv)
    overrides = [name for name in arguments.audio if _OVERRIDE.match(name) and not Path(name).exists()]
    files = [name for name in arguments.audio if name not in overrides]
    if arguments.batch < 1:
        raise ConfigError(f"--batch {arguments.batch}: it must be at least 1")
    if not files:
        raise ConfigError("name one or more audio files; speechtrain-transcribe --help shows the usage")
    import torch
    from omegaconf import OmegaConf

    from speechtrain.commands._load_run import open_run
    from speechtrain.data.batches import audio_row, collate
    from speechtrain.task import Task

    opened = open_run(arguments.run, arguments.checkpoint, overrides, arguments.config_dir)
    if type(opened.task).transcribe is Task.transcribe:
        raise ConfigError(f"{arguments.run}: {type(opened.task).__name__} does not transcribe speech")
    rate = int(OmegaConf.select(opened.config, "data.sample_rate") or 16_000)
    longest = OmegaConf.select(opened.config, "data.max_decoded_seconds")
    read = partial(audio_row, sample_rate=rate, normalise=opened.task.normalise_audio)
    if longest is not None:  # newer than the run
        read = partial(read, most_seconds=float(longest))
    failed = False
    for begin in range(0, len(files), arguments.batch):
        rows = []
        for name in files[begin : begin + arguments.batch]:
            try:
                rows.append(read(name))
            except DataError as error:
                failed = True
                print(f"speechtrain: error: {one_line(str(error))}", file=sys.stderr, flush=True)
        if not rows:
            continue
        batch = collate(rows, rate)
        with torch.no_grad(), opened.policy.autocast(opened.device.name):
            texts = opened.task.transcribe(opened.device.move(batch))
        for name, text in zip(batch.ids, texts, strict=True):
            plain = f"{printable(name)}\t{printable(text, SPELLING)}"
            print(json_text({"audio": name, "text": text}) if arguments.json else plain, flush=True)
    return DataError.exit_code if failed else 0


main = console(run)

if __name__ == "__main__":
    main()
