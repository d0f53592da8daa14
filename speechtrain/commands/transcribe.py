"""speechtrain-transcribe: a run and audio files in, text out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from speechtrain.commands.common import guarded


def parser() -> argparse.ArgumentParser:
    """The command line."""
    build = argparse.ArgumentParser(
        prog="speechtrain-transcribe",
        description="Transcribe audio files (WAV, FLAC and what libsndfile reads; any rate, any channels).",
    )
    build.add_argument("run", type=Path, help="run directory")
    build.add_argument("audio", type=Path, nargs="+", help="audio files")
    build.add_argument("--checkpoint", default="best", help="best, last or a folder's name (default: best)")
    build.add_argument("--batch", type=int, default=8, metavar="N", help="files decoded together (default: 8)")
    build.add_argument("--json", action="store_true", help="one JSON object a file instead of FILE<tab>TEXT")
    return build


def main() -> None:
    """Console entry point."""
    sys.exit(guarded(lambda: run(parser().parse_args())))


def run(arguments: argparse.Namespace) -> int:
    """Transcribe and print, in the order given; returns the exit code."""
    import torch

    from speechtrain.commands.opening import open_run
    from speechtrain.data.batches import audio_batch
    from speechtrain.errors import ConfigError, DataError

    if arguments.batch < 1:
        raise ConfigError(f"--batch {arguments.batch}: it must be at least 1")
    missing = [path for path in arguments.audio if not path.is_file()]
    if missing:
        raise DataError(f"{missing[0]} does not exist ({len(missing)} of {len(arguments.audio)} files missing)")
    opened = open_run(arguments.run, arguments.checkpoint, [])
    rate = int(opened.config.data.sample_rate)
    for begin in range(0, len(arguments.audio), arguments.batch):
        files = arguments.audio[begin : begin + arguments.batch]
        batch = opened.device.move(audio_batch([str(path) for path in files], rate))
        with torch.no_grad(), opened.precision.autocast(opened.device.name):
            texts = opened.task.transcribe(batch)
        for path, text in zip(files, texts, strict=True):
            print(json.dumps({"audio": str(path), "text": text}) if arguments.json else f"{path}\t{text}", flush=True)
    return 0


if __name__ == "__main__":
    main()
