"""``make demo``: train the small RNN-T on the embedded corpus, score it, transcribe a file, write a report.

Each line that starts with ``$`` is a command that a user can type. This program only runs these commands.
Arguments, such as ``seed=2``, go to the training command. Each set of arguments has its own run directory.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import soundfile

from speechtrain.data.corpora.connected import SAMPLE_RATE
from speechtrain.data.corpora.digits import Digits

BIN = Path(sys.executable).parent
RUN = Path("runs/demo")


def run_step(command: list[str], separator: str = "\n") -> None:
    """Print a command after ``separator``, and run it. If the command fails, exit with its code."""
    print(f"{separator}$ {shlex.join(command)}", flush=True)
    program = BIN / command[0]
    try:
        code = subprocess.run([str(program), *command[1:]], check=False).returncode
    except KeyboardInterrupt:  # The command has received the signal as well, and has reported its end.
        code = 130
    except OSError as error:
        sys.exit(f"demo: {program}: {error.strerror}. `make setup` installs it")
    if code:
        print(f"\ndemo: {command[0]} ended with code {code} (docs/runs.md#exit-codes)", file=sys.stderr)
        if code < 0:  # A signal ended the command.
            code = 1
        sys.exit(code)


def write_sample(path: Path) -> None:
    """Write a WAV file of a voice that is not in the training set, and print its transcript."""
    source = Digits("valid", 1)
    utterance = source.all_utterances()[0]
    soundfile.write(path, utterance.audio(source.clips), SAMPLE_RATE, subtype="PCM_16")
    print(f"\n{path}: voice {utterance.speaker} says: {utterance.text}", flush=True)


def run_dir_and_overrides(arguments: list[str]) -> tuple[Path, list[str]]:
    """Return the run directory and the arguments for the training command.

    The default name of the run directory contains the arguments.
    """
    words = [RUN.name]
    for argument in arguments:
        words.append(re.sub(r"[^\w.]+", "-", argument))
    run_dir = RUN.with_name("-".join(words)[:120])
    overrides = []
    for argument in arguments:
        if argument.startswith("run_dir="):
            run_dir = Path(argument.partition("=")[2])
        else:
            overrides.append(argument)
    return run_dir, overrides


def main() -> None:
    start = time.perf_counter()
    run_dir, overrides = run_dir_and_overrides(sys.argv[1:])
    run_step(["speechtrain", "train", "recipe=demo", f"run_dir={run_dir}", *overrides], separator="")
    result_file = run_dir / "result.json"
    try:
        result = json.loads(result_file.read_text())
        wer = float(result["metrics"]["wer"])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"demo: {result_file} has no word error rate ({type(error).__name__}: {error})")
    sample = run_dir / "sample.wav"
    write_sample(sample)
    run_step(["speechtrain", "transcribe", str(run_dir), str(sample)])
    run_step(["speechtrain", "report", str(run_dir)])
    total_seconds = time.perf_counter() - start
    print(
        f"\nWER on voices that are not in the training set: {100 * wer:.2f} % "
        f"({result['steps']} steps, {result['wall_s']:.0f} s of training, "
        f"{total_seconds:.0f} s in all)\nreport: {run_dir / 'report.html'}"
    )


if __name__ == "__main__":
    main()
